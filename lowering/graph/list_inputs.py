"""Inputs that are sequences of tensors, or optional values, become tensors: how many is said when compiling.

With dims={"x": 2, "m": 0}

    inputs  x: sequence of float[N, 3], m: optional float[N]
    become  x[0]: float[n, 3], x[1]: float[m, 3]    and nodes    x = SequenceConstruct(x[0], x[1]), m = Optional()

An optional input with an element is that element. Tensors of a sequence have sizes of their own: what its type calls N
is another number in each, as in the node cases of ONNX, unless dims gives it. The manifest says which belong together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from ..errors import InputError, ModelError
from ..manifest import ListSpec
from ..runtime.checks import check_integer
from .declared_sizes import Dims, forget_unknown_sizes, symbolic_dimensions, with_sizes
from .legality import MOST_ELEMENTS, graphs

_TENSOR = ir.TensorType | None  # what says nothing is inferred, or refused, as a tensor


@dataclass(frozen=True)
class SplitInputs:
    """A model whose inputs are tensors, which of them are elements of a list, and what is said of its dimensions."""

    model: ir.Model
    lists: tuple[ListSpec, ...]
    dims: Dims


def split_list_inputs(model: ir.Model, dims: Dims) -> SplitInputs:
    """Return a model that takes the elements of its lists one by one, with the sizes that dims gives.

    Args:
        model: What `load_model` gives. It stays as it is.
        dims: What is said of symbolic dimensions, and by the name of an input that is a list the number of its
            elements. For an optional input 0 says that it is None, and another number that it is not.

    Raises:
        InputError: The number of elements of an input is not said, or cannot be, or as `with_sizes`.
        ModelError: An input is a list of something else than tensors, or its elements have no shape.
    """
    lists = {value.name for value in model.graph.inputs if not isinstance(value.type, _TENSOR)}
    if not lists:
        return SplitInputs(with_sizes(model, dims), (), dims)
    for name in lists & symbolic_dimensions(model) & dims.keys():
        raise InputError(f"dims: '{name}' is an input and a symbolic dimension. Rename one of them in the model.")
    rest = {name: said for name, said in dims.items() if name not in lists}
    model = with_sizes(model, rest).clone()
    taken = _names(model)
    inputs: list[ir.Value] = []
    specs: list[ListSpec] = []
    made: list[tuple[ir.Value, list[ir.Value]]] = []
    for value in model.graph.inputs:
        if isinstance(value.type, _TENSOR):
            inputs.append(value)
            continue
        count, is_optional = _count(value, dims), isinstance(value.type, ir.OptionalType)
        if is_optional and count and isinstance(value.type.elem_type, ir.TensorType):
            value.type = value.type.elem_type
            inputs.append(value)
            continue
        specs.append(ListSpec(value.name or "", len(inputs), None if is_optional and not count else count))
        elements = [_element(value, name) for name in element_names(value.name or "", count, taken)]
        inputs += elements
        made.append((value, elements))
    model.graph.inputs[:] = inputs
    nodes = [_node(value, elements) for value, elements in made]
    first = next(iter(model.graph), None)
    model.graph.extend(nodes) if first is None else model.graph.insert_before(first, nodes)
    forget_unknown_sizes(model)
    return SplitInputs(model, tuple(specs), rest)


def element_names(name: str, count: int, taken: set[str]) -> list[str]:
    """Return names for the elements of a list, which are then taken: x[0], x[1] and so on."""
    names = []
    for k in range(count):
        element = f"{name}[{k}]"
        while element in taken:
            element += "_"
        taken.add(element)
        names.append(element)
    return names


def _names(model: ir.Model) -> set[str]:
    """The names of all values."""
    found: set[str] = set()
    for graph in graphs(model):
        values: Iterable[ir.Value] = (
            *graph.inputs,
            *graph.initializers.values(),
            *(value for node in graph for value in node.outputs),
        )
        found |= {value.name or "" for value in values}
    return found


def _count(value: ir.Value, dims: Dims) -> int:
    """How many elements an input has. Raises InputError and ModelError as `split_list_inputs`."""
    kind, name = value.type, value.name or ""
    is_optional = isinstance(kind, ir.OptionalType)
    inner = kind.elem_type if isinstance(kind, ir.OptionalType) else kind
    is_sequence = isinstance(inner, ir.SequenceType)
    tensor = inner.elem_type if isinstance(inner, ir.SequenceType) else inner
    if not isinstance(tensor, ir.TensorType):
        raise ModelError(f"Input '{name}' is {kind}. Inputs are tensors, or sequences and optional values of tensors.")
    most = MOST_ELEMENTS if is_sequence else 1
    said = dims.get(name)
    if said is None:
        what = "a sequence, whose length" if not is_optional else "an optional value. Whether it is None"
        how = "NAME=K for K tensors" if is_sequence else "NAME=1 for a value"
        none = ", NAME=0 for None" if is_optional else ""
        raise InputError(
            f"input '{name}' is {what} must be known to compile the model. Say it with dims= (--dim): "
            f"{(how + none).replace('NAME', name)}."
        )
    low, high = said if isinstance(said, tuple) else (said, said)
    if low != high:
        raise InputError(f"dims: input '{name}' has one number of elements, not {low} to {high}. Give that number.")
    count = check_integer(low, f"dims: the number of elements of input '{name}'", 0, most)
    if count and value.shape is None:
        raise ModelError(
            f"Input '{name}' is {kind} of no declared shape. Declare it in the model, in the tensor_type of "
            "model.graph.input[...].type; dimensions may be symbolic names, whose sizes dims= (--dim) can give."
        )
    return count


def _element(value: ir.Value, name: str) -> ir.Value:
    """A tensor of a sequence."""
    assert value.dtype is not None and value.shape is not None
    sizes = [dim if isinstance(dim, int) else None for dim in value.shape]
    return ir.Value(name=name, type=ir.TensorType(value.dtype), shape=ir.Shape(sizes))


def _node(value: ir.Value, elements: list[ir.Value]) -> ir.Node:
    """The node that makes a list of its elements, which are none for None and for an empty sequence."""
    if elements:
        return ir.Node("", "SequenceConstruct", elements, outputs=[value])
    assert value.type is not None and value.dtype is not None
    if isinstance(value.type, ir.OptionalType):
        kind = ir.AttrTypeProto("type", ir.TypeAndShape(value.type.elem_type, None))
        return ir.Node("", "Optional", [], [kind], outputs=[value])
    return ir.Node("", "SequenceEmpty", [], [ir.AttrInt64("dtype", int(value.dtype))], outputs=[value])
