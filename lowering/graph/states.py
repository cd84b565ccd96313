"""States of a fixed size that a decoder takes and gives back: of convolutions, recurrences and state space models."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from ..fusion.matching import Size, dims

Kind = tuple[str, tuple[Size, ...]]


def find_states(model: ir.Model, kept: Collection[str], batch: Size) -> dict[str, str]:
    """Return which output is the next value of which input, by name.

    A state is float [B, ...] with no other symbolic size than the batch. Inputs and outputs of one type and shape
    belong to each other in their order, as exporters list both layer by layer; where their numbers differ, none does.

    Args:
        model: One whose sizes are inferred.
        kept: Names of inputs and outputs that have another use: caches, tokens, logits.
        batch: The first size of every state.
    """
    passed = set(model.graph.inputs)
    before, after = (
        _by_kind([value for value in values if value.name not in kept and dims(value)[:1] == (batch,)])
        for values in (model.graph.inputs, [value for value in model.graph.outputs[1:] if value not in passed])
    )
    pairs: dict[str, str] = {}
    for kind, inputs in before.items():
        outputs = after.get(kind, [])
        if len(inputs) == len(outputs):
            pairs |= dict(zip(inputs, outputs))
    return pairs


def _by_kind(values: Collection[ir.Value]) -> dict[Kind, list[str]]:
    found: dict[Kind, list[str]] = {}
    for value in values:
        is_float = value.dtype is not None and value.dtype.is_floating_point()
        sizes = dims(value)
        if is_float and len(sizes) > 1 and all(isinstance(size, int) for size in sizes[1:]) and value.name is not None:
            found.setdefault((str(value.dtype), sizes[1:]), []).append(value.name)
    return found
