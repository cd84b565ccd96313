"""Conversion of inputs that are sequences or optional values to tensors, whose number is set at compile time.

With dims={"x": 2, "m": 0}

    inputs  x: sequence of float[N, 3], m: optional float[N]
    become  x[0]: float[n, 3], x[1]: float[m, 3]    and nodes    x = SequenceConstruct(x[0], x[1]), m = Optional()

An optional input with an element is that element. Tensors of a sequence have sizes of their own: N of its type is
another number in each, as in the node cases of ONNX, unless dims sets it. The manifest groups them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from ...errors import InputError, ModelError
from ...manifest import ListSpec
from ...runtime.artifact.checks import check_integer
from .declared_sizes import Dims, forget_unknown_sizes, list_symbolic_dimensions, set_sizes
from .legality import MAX_SEQUENCE_ELEMENTS, iterate_graphs

_TENSOR = ir.TensorType | None  # an undeclared type is inferred, or rejected, as a tensor


@dataclass(frozen=True)
class SplitInputs:
    """A model whose inputs are tensors, which of them are elements of a list, and its dimensions."""

    model: ir.Model
    lists: tuple[ListSpec, ...]
    dims: Dims


def split_list_inputs(model: ir.Model, dims: Dims) -> SplitInputs:
    """Return a model that takes the elements of its lists one by one, with the sizes in dims.

    Args:
        model: The result of `load_model`, which is not modified.
        dims: Sizes of symbolic dimensions, and by the name of an input that is a list the number of its
            elements. For an optional input 0 means that it is None, and another number that it is not.

    Raises:
        InputError: The number of elements of an input is missing or invalid, or as in `set_sizes`.
        ModelError: An input is a list of something else than tensors, or its elements have no shape.
    """
    lists = {value.name for value in model.graph.inputs if not isinstance(value.type, _TENSOR)}
    if not lists:
        return SplitInputs(set_sizes(model, dims), (), dims)
    for name in lists & list_symbolic_dimensions(model) & dims.keys():
        raise InputError(
            "dims.name_ambiguous",
            f"dims: '{name}' is both an input and a symbolic dimension. Rename one of them in the model.",
        )
    tensor_dims = {name: bounds for name, bounds in dims.items() if name not in lists}
    model = set_sizes(model, tensor_dims).clone()
    used_names = _list_names(model)
    inputs: list[ir.Value] = []
    specs: list[ListSpec] = []
    elements_by_list: list[tuple[ir.Value, list[ir.Value]]] = []
    for value in model.graph.inputs:
        if isinstance(value.type, _TENSOR):
            inputs.append(value)
            continue
        count, is_optional = _read_count(value, dims), isinstance(value.type, ir.OptionalType)
        if is_optional and count and isinstance(value.type.elem_type, ir.TensorType):
            value.type = value.type.elem_type
            inputs.append(value)
            continue
        specs.append(ListSpec(value.name or "", len(inputs), None if is_optional and not count else count))
        elements = [_make_element(value, name) for name in choose_element_names(value.name or "", count, used_names)]
        inputs += elements
        elements_by_list.append((value, elements))
    model.graph.inputs[:] = inputs
    nodes = [_make_list_node(value, elements) for value, elements in elements_by_list]
    first = next(iter(model.graph), None)
    model.graph.extend(nodes) if first is None else model.graph.insert_before(first, nodes)
    forget_unknown_sizes(model)
    return SplitInputs(model, tuple(specs), tensor_dims)


def choose_element_names(name: str, count: int, taken: set[str]) -> list[str]:
    """Return names for the elements of a list, x[0], x[1] and so on, and add them to `taken`."""
    names = []
    for k in range(count):
        element = f"{name}[{k}]"
        while element in taken:
            element += "_"
        taken.add(element)
        names.append(element)
    return names


def _list_names(model: ir.Model) -> set[str]:
    """Return the names of all values."""
    names: set[str] = set()
    for graph in iterate_graphs(model):
        values: Iterable[ir.Value] = (
            *graph.inputs,
            *graph.initializers.values(),
            *(value for node in graph for value in node.outputs),
        )
        names |= {value.name or "" for value in values}
    return names


def _read_count(value: ir.Value, dims: Dims) -> int:
    """Return the number of elements of an input; raise errors as `split_list_inputs`."""
    kind, name = value.type, value.name or ""
    is_optional = isinstance(kind, ir.OptionalType)
    inner = kind.elem_type if isinstance(kind, ir.OptionalType) else kind
    is_sequence = isinstance(inner, ir.SequenceType)
    tensor = inner.elem_type if isinstance(inner, ir.SequenceType) else inner
    if not isinstance(tensor, ir.TensorType):
        raise ModelError(
            "model.input_type_unsupported",
            f"Input '{name}' is {kind}. Inputs are tensors, or sequences and optional values of tensors.",
        )
    limit = MAX_SEQUENCE_ELEMENTS if is_sequence else 1
    bounds = dims.get(name)
    if bounds is None:
        what = "a sequence, whose length" if not is_optional else "an optional value. Whether it is None"
        how = "NAME=K for K tensors" if is_sequence else "NAME=1 for a value"
        none_hint = ", NAME=0 for None" if is_optional else ""
        raise InputError(
            "dims.element_count_missing",
            f"input '{name}' is {what} must be known to compile the model. Give it with dims= (--dim): "
            f"{(how + none_hint).replace('NAME', name)}.",
        )
    low, high = bounds if isinstance(bounds, tuple) else (bounds, bounds)
    if low != high:
        raise InputError(
            "dims.element_count_not_single",
            f"dims: input '{name}' must have one number of elements, not {low} to {high}. Give that number.",
        )
    count = check_integer(low, f"dims: the number of elements of input '{name}'", 0, limit)
    if count and value.shape is None:
        raise ModelError(
            "model.input_shape_missing",
            f"Input '{name}' is {kind} without a declared shape. Declare it in the model, in the tensor_type of "
            "model.graph.input[...].type; dimensions may be symbolic names, whose sizes dims= (--dim) can give.",
        )
    return count


def _make_element(value: ir.Value, name: str) -> ir.Value:
    """Return a tensor of a sequence."""
    assert value.dtype is not None and value.shape is not None
    sizes = [dim if isinstance(dim, int) else None for dim in value.shape]
    return ir.Value(name=name, type=ir.TensorType(value.dtype), shape=ir.Shape(sizes))


def _make_list_node(value: ir.Value, elements: list[ir.Value]) -> ir.Node:
    """Return the node that builds a list of its elements; None and an empty sequence have no elements."""
    if elements:
        return ir.Node("", "SequenceConstruct", elements, outputs=[value])
    assert value.type is not None and value.dtype is not None
    if isinstance(value.type, ir.OptionalType):
        kind = ir.AttrTypeProto("type", ir.TypeAndShape(value.type.elem_type, None))
        return ir.Node("", "Optional", [], [kind], outputs=[value])
    return ir.Node("", "SequenceEmpty", [], [ir.AttrInt64("dtype", int(value.dtype))], outputs=[value])
