"""The tokens that `verify` feeds to a decoder: ids, embeddings, or several values of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ..errors import InputError
from ..manifest import TensorSpec
from .synthetic_inputs import generate_inputs

Tokens: TypeAlias = dict[str, np.ndarray]
"""Arrays [batch, tokens] or [batch, tokens, width] by input name; ids or embeddings come first."""


def generate_tokens(
    graph: ir.Graph, specs: Sequence[TensorSpec], shape: tuple[int, int], rng: np.random.Generator
) -> Tokens:
    """Return random tokens [batch, tokens]."""
    sized = [TensorSpec(spec.name, spec.dtype, spec.storage, (*shape, *spec.dims[2:])) for spec in specs]
    return generate_inputs(graph, sized, {}, rng)


def select_tokens(specs: Sequence[TensorSpec], given: Mapping[str, Any]) -> Tokens:
    """Return the user's arrays for these inputs.

    Raises:
        InputError: An array has another type or shape than its input, or other [batch, tokens] than another array.
    """
    tokens = {spec.name: _check_token_array(given[spec.name], spec) for spec in specs if spec.name in given}
    shapes = {array.shape[:2] for array in tokens.values()}
    if len(shapes) > 1:
        raise InputError(
            "verify.token_shapes_differ",
            f"{', '.join(tokens)} must have the same [batch, tokens], not {sorted(shapes)}.",
        )
    return tokens


def slice_tokens(tokens: Tokens, index: Any) -> Tokens:
    """Return the tokens at an index."""
    return {name: array[index] for name, array in tokens.items()}


def to_decoder_argument(tokens: Tokens) -> Any:
    """Return tokens as decoders take them: the array of one input, a mapping for several."""
    return tokens if len(tokens) > 1 else next(iter(tokens.values()))


def read_token_shape(tokens: Tokens) -> tuple[int, int]:
    """Return the batch size and the number of tokens."""
    batch, count = next(iter(tokens.values())).shape[:2]
    return batch, count


def _check_token_array(value: Any, spec: TensorSpec) -> np.ndarray:
    array, width = np.asarray(value), spec.dims[2:]
    is_id = not width and not spec.dtype.startswith(("float", "bfloat"))
    if array.ndim != len(spec.dims) or array.shape[2:] != width or not array.size:
        fits = False
    else:
        fits = array.dtype.kind in "iu" if is_id else array.dtype.kind in "fiuV"
    if not fits:
        form = ", ".join(map(str, ("batch", "tokens", *width)))
        kind = "integers" if is_id else "numbers"
        raise InputError(
            "verify.array_mismatch", f"'{spec.name}' must be {kind} [{form}], not {array.dtype}{list(array.shape)}."
        )
    return array
