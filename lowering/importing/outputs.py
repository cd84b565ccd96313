"""Outputs of a model: the tensors of list outputs, and whether all match the model's declarations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ..graph.loading.list_inputs import choose_element_names
from ..graph.loading.model import dtype_name
from ..manifest import ListSpec
from .imported_model import Port
from .values import AbsentValue, SequenceValue, Shape, Value, describe_type, flatten_values


def make_output_ports(
    outputs: Sequence[ir.Value], results: Sequence[Value], as_port: Callable[[str, str, Shape], Port]
) -> tuple[list[Port], list[ListSpec]]:
    """Return a port for each tensor of the outputs, and the ports that are elements of lists."""
    ports: list[Port] = []
    lists: list[ListSpec] = []
    taken = {output.name or "" for output in outputs}
    for output, value in zip(outputs, results):
        name = output.name or ""
        if not isinstance(value, SequenceValue):
            ports.append(as_port(name, value.dtype, value.shape))
            continue
        lists.append(ListSpec(name, len(ports), None if isinstance(value, AbsentValue) else len(value.items)))
        names = choose_element_names(name, len(value.items), taken)
        ports += [as_port(n, item.dtype, item.shape) for n, item in zip(names, value.items)]
    return ports, lists


def find_type_problem(declared: ir.Value, computed: Value) -> tuple[str, str] | None:
    """Return the error and the remedy for a wrong declared type of an output; None if it is correct."""
    remedy = "Correct the declaration, or the nodes that compute it."
    if not _is_of_kind(declared.type, computed):
        return f"it is declared {declared.type}, but the nodes compute {describe_type(computed)}.", remedy
    if isinstance(computed, AbsentValue) or declared.dtype is None or dtype_name(declared.dtype) == computed.dtype:
        return None
    return f"its element type is declared {dtype_name(declared.dtype)}, but the nodes compute {computed.dtype}.", remedy


def find_shape_contradiction(declared: ir.Value, computed: Value) -> str:
    """Return how the declared shape of an output differs from the computed one; "" if they are consistent.

    The declared shape of a sequence is that of each of its tensors.
    """
    contradictions = (_describe_contradiction(declared, tensor) for tensor in flatten_values([computed]))
    return next(filter(None, contradictions), "")


def _is_of_kind(declared: ir.TypeProtocol | None, computed: Value) -> bool:
    """Return whether a sequence, an optional value without an element, or a tensor is computed as declared."""
    if declared is None:
        return True
    if isinstance(declared, ir.OptionalType):
        if isinstance(computed, AbsentValue):
            return True
        declared = declared.elem_type  # type: ignore[assignment]
    if isinstance(computed, AbsentValue):
        return False
    return isinstance(declared, ir.SequenceType) == isinstance(computed, SequenceValue)


def _describe_contradiction(declared: ir.Value, computed: Value) -> str:
    if declared.shape is None:
        return ""
    if len(declared.shape) != computed.rank:
        return f"is declared with {len(declared.shape)} dimensions, but the nodes compute {computed.rank}"
    for axis, (declared_size, size) in enumerate(zip(declared.shape, computed.shape)):
        if isinstance(declared_size, int) and isinstance(size, int) and declared_size != size:
            return f"is declared {declared_size} along axis {axis}, but the nodes compute {size}"
    return ""
