"""Outputs of a model: the tensors of those that are lists, and whether all are what the model declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ..graph.list_inputs import element_names
from ..graph.model import dtype_name
from ..manifest import ListSpec
from .imported import Port
from .values import AbsentValue, SequenceValue, Shape, Value, described, flatten_values


def output_ports(
    outputs: Sequence[ir.Value], results: Sequence[Value], as_port: Callable[[str, str, Shape], Port]
) -> tuple[list[Port], list[ListSpec]]:
    """Return a port for each tensor of the outputs, and which of them are the elements of a list."""
    ports: list[Port] = []
    lists: list[ListSpec] = []
    taken = {output.name or "" for output in outputs}
    for output, value in zip(outputs, results):
        name = output.name or ""
        if not isinstance(value, SequenceValue):
            ports.append(as_port(name, value.dtype, value.shape))
            continue
        lists.append(ListSpec(name, len(ports), None if isinstance(value, AbsentValue) else len(value.items)))
        names = element_names(name, len(value.items), taken)
        ports += [as_port(n, item.dtype, item.shape) for n, item in zip(names, value.items)]
    return ports, lists


def type_problem(declared: ir.Value, computed: Value) -> tuple[str, str] | None:
    """Return what is wrong with the type that a model declares of an output, and a remedy; None where it is right."""
    remedy = "Correct the declaration, or the nodes that give it."
    if not _is_of_kind(declared.type, computed):
        return f"it is declared {declared.type}, but the nodes compute {described(computed)}.", remedy
    if isinstance(computed, AbsentValue) or declared.dtype is None or dtype_name(declared.dtype) == computed.dtype:
        return None
    return f"its element type is declared {dtype_name(declared.dtype)}, but the nodes compute {computed.dtype}.", remedy


def shape_contradiction(declared: ir.Value, computed: Value) -> str:
    """Return how the shape that a model declares of an output differs from a computed one; "" where both can be true.

    That of a sequence is the shape of each of its tensors.
    """
    found = (_contradicts(declared, tensor) for tensor in flatten_values([computed]))
    return next(filter(None, found), "")


def _is_of_kind(declared: ir.TypeProtocol | None, computed: Value) -> bool:
    """Whether a sequence, an optional value without an element, or a tensor is computed where it is declared."""
    if declared is None:
        return True
    if isinstance(declared, ir.OptionalType):
        if isinstance(computed, AbsentValue):
            return True
        declared = declared.elem_type  # type: ignore[assignment]
    if isinstance(computed, AbsentValue):
        return False
    return isinstance(declared, ir.SequenceType) == isinstance(computed, SequenceValue)


def _contradicts(declared: ir.Value, computed: Value) -> str:
    if declared.shape is None:
        return ""
    if len(declared.shape) != computed.rank:
        return f"is declared with {len(declared.shape)} dimensions, but the nodes compute {computed.rank}"
    for axis, (says, is_) in enumerate(zip(declared.shape, computed.shape)):
        if isinstance(says, int) and isinstance(is_, int) and says != is_:
            return f"is declared {says} along axis {axis}, but the nodes compute {is_}"
    return ""
