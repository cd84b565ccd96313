"""States of a fixed size that a decoder takes and gives back: of convolutions, recurrences and state space models."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from ..fusion.matching import Size, dims

Kind = tuple[str, tuple[Size, ...]]


@dataclass(frozen=True)
class States:
    """by_input: the output that is the next value of an input. one_token: whether it is that of calls with one token
    alone, as of convolutions that give back all that they have read."""

    by_input: dict[str, str]
    one_token: bool = False


def find_states(model: ir.Model, kept: Collection[str], batch: Size, tokens: Size) -> States:
    """Return the states of a model, by names.

    A state is float [B, ...] with no other symbolic size than the batch. Inputs and outputs of one type and shape
    belong to each other in their order, as exporters list both layer by layer; where their numbers differ, none does.

    Args:
        model: One whose sizes are inferred.
        kept: Names of inputs and outputs that have another use: caches, tokens, logits.
        batch: The first size of every state.
        tokens: The number of tokens of a call.
    """
    passed = set(model.graph.inputs)
    before, after = (
        _by_kind([value for value in values if value.name not in kept and dims(value)[:1] == (batch,)], tokens)
        for values in (model.graph.inputs, [value for value in model.graph.outputs[1:] if value not in passed])
    )
    sizes = {value.name: dims(value)[1:] for value in model.graph.outputs}
    pairs: dict[str, str] = {}
    for kind, inputs in before.items():
        outputs = after.get(kind, [])
        if len(inputs) == len(outputs):
            pairs |= dict(zip(inputs, outputs))
    return States(pairs, any(not isinstance(size, int) for name in pairs.values() for size in sizes[name]))


def _by_kind(values: Collection[ir.Value], tokens: Size) -> dict[Kind, list[str]]:
    """The names of floats by type and by their sizes, in a call of one token, behind the batch."""
    found: dict[Kind, list[str]] = {}
    for value in values:
        is_float = value.dtype is not None and value.dtype.is_floating_point()
        sizes = tuple(_for_one(size, tokens) for size in dims(value)[1:])
        if is_float and sizes and all(isinstance(size, int) for size in sizes) and value.name is not None:
            found.setdefault((str(value.dtype), sizes), []).append(value.name)
    return found


def _for_one(size: Size, tokens: Size) -> Size:
    """The size in a call of one token."""
    if isinstance(size, int) or isinstance(tokens, int) or size == tokens or not tokens.value:
        return size
    return size.evaluate({tokens.value: 1})
