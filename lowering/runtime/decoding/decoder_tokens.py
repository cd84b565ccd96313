"""Values of tokens that a decoder reads: an id or an embedding, and further per-token inputs of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import InputError
from ...manifest import TensorSpec
from ..arrays.elements import ElementType
from ..arrays.inputs import to_numpy_array


@dataclass(frozen=True)
class TokenInputs:
    """The inputs with a value for each token, [B, S] or [B, S, H]. Ids or embeddings come first."""

    specs: tuple[TensorSpec, ...]

    def read_prompt(self, tokens: Any) -> dict[str, np.ndarray]:
        """Return the array of each input, all with the same [B, S].

        Args:
            tokens: An array [B, S, ...] or ids [S]; a mapping of names to arrays if there are several inputs.

        Raises:
            InputError: Names, shapes or types do not fit.
        """
        arrays = {spec.name: _read_token_array(array, spec) for spec, array in self._match_arrays(tokens)}
        shapes = {name: list(array.shape[:2]) for name, array in arrays.items()}
        if any(shape != shapes[self.specs[0].name] for shape in shapes.values()):
            texts = ", ".join(f"'{name}' {shape}" for name, shape in shapes.items())
            raise InputError(
                "decoder.token_shape_mismatch", f"inputs of tokens must have the same [batch, tokens], not {texts}."
            )
        return arrays

    def read_step(self, tokens: Any) -> dict[str, np.ndarray]:
        """Return the arrays for one token of each sequence, [B], [B, H] or an id."""
        arrays = {}
        for spec, array in self._match_arrays(tokens):
            token = np.atleast_1d(to_numpy_array(array, f"'{spec.name}'"))
            arrays[spec.name] = token[:, None] if token.ndim == len(spec.dims) - 1 else token.reshape(-1, 1)
        return self.read_prompt(arrays)

    def _match_arrays(self, tokens: Any) -> list[tuple[TensorSpec, Any]]:
        names = [spec.name for spec in self.specs]
        if not isinstance(tokens, Mapping):
            if len(names) > 1:
                raise InputError(
                    "decoder.token_mapping_required",
                    f"each token has a value of {', '.join(names)}: pass a mapping of names to arrays.",
                )
            tokens = {names[0]: tokens}
        if tokens.keys() != set(names):
            mapping_names = ", ".join(map(str, tokens)) or "nothing"
            raise InputError(
                "decoder.token_names_mismatch",
                f"each token has a value of {', '.join(names)}, and the mapping has {mapping_names}. "
                "Give a value of each.",
            )
        return [(spec, tokens[spec.name]) for spec in self.specs]


def _read_token_array(array: Any, spec: TensorSpec) -> np.ndarray:
    tokens, element = (
        np.atleast_2d(to_numpy_array(array, f"'{spec.name}'")),
        ElementType(spec.dtype, spec.storage).numpy,
    )
    if len(spec.dims) == 3:
        if tokens.ndim != 3:
            raise InputError(
                "decoder.token_array_invalid",
                f"'{spec.name}' must be [batch, tokens, width], not {list(tokens.shape)}.",
            )
    elif tokens.ndim != 2 or (element.kind in "iu" and tokens.dtype.kind not in "iu"):
        requirement = "token ids must be integers" if element.kind in "iu" else f"'{spec.name}' must be numbers"
        raise InputError(
            "decoder.token_array_invalid", f"{requirement} [batch, tokens], not {tokens.dtype} {list(tokens.shape)}."
        )
    return tokens.astype(element)
