"""States of a fixed size that a decoder reads and returns: of convolutions, recurrences and state space models."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from ..rewriting.matching import Size, dims

Kind = tuple[str, tuple[Size, ...]]


@dataclass(frozen=True)
class DecoderStates:
    """The states of a decoder, by name.

    by_input: the output that is the next value of an input. is_single_token: whether the pairs are valid only for calls
    with one token, as for convolutions that return all positions that they have read.
    """

    by_input: dict[str, str]
    is_single_token: bool = False


def find_states(model: ir.Model, used: Collection[str], batch: Size, tokens: Size) -> DecoderStates:
    """Return the states of a model, by names.

    A state is float [B, ...] with no other symbolic size than the batch. Inputs and outputs of one type and shape are
    paired in their order, as exporters list both layer by layer; if their numbers differ, none is paired.

    Args:
        model: A model whose sizes are inferred.
        used: Names of inputs and outputs that have another use: caches, tokens, logits.
        batch: The first size of every state.
        tokens: The number of tokens of a call.
    """
    graph_inputs = set(model.graph.inputs)
    inputs_by_kind, outputs_by_kind = (
        _group_by_kind([value for value in values if value.name not in used and dims(value)[:1] == (batch,)], tokens)
        for values in (model.graph.inputs, [value for value in model.graph.outputs[1:] if value not in graph_inputs])
    )
    sizes = {value.name: dims(value)[1:] for value in model.graph.outputs}
    pairs: dict[str, str] = {}
    for kind, inputs in inputs_by_kind.items():
        outputs = outputs_by_kind.get(kind, [])
        if len(inputs) == len(outputs):
            pairs |= dict(zip(inputs, outputs))
    return DecoderStates(pairs, any(not isinstance(size, int) for name in pairs.values() for size in sizes[name]))


def _group_by_kind(values: Collection[ir.Value], tokens: Size) -> dict[Kind, list[str]]:
    """Return the names of floats by type and by their sizes after the batch, in a call of one token."""
    groups: dict[Kind, list[str]] = {}
    for value in values:
        is_float = value.dtype is not None and value.dtype.is_floating_point()
        sizes = tuple(_size_for_one_token(size, tokens) for size in dims(value)[1:])
        if is_float and sizes and all(isinstance(size, int) for size in sizes) and value.name is not None:
            groups.setdefault((str(value.dtype), sizes), []).append(value.name)
    return groups


def _size_for_one_token(size: Size, tokens: Size) -> Size:
    """Return the size in a call of one token."""
    if isinstance(size, int) or isinstance(tokens, int) or size == tokens or not tokens.value:
        return size
    return size.evaluate({tokens.value: 1})
