"""What is said of symbolic sizes: what a model declares without saying anything, and what its user knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import onnx_ir as ir

from ..errors import InputError
from ..runtime.checks import check_dimensions, check_integer
from .legality import graphs

Dims: TypeAlias = Mapping[str, int | tuple[int, int]]
"""By the name of a symbolic dimension the size that it always has, or the smallest and the largest one.

Equal bounds are a size that it always has."""

# How exporters write a size of which they know nothing. As a name it would say that all such sizes are equal.
_UNKNOWN = (-1, "", "?", "None")


def forget_unknown_sizes(model: ir.Model) -> None:
    """Takes the names off declared sizes that mean nothing, in place. Those of inputs get names, by which users can
    speak of them: of the input and the axis."""
    for value in _values(model):
        if value.shape is not None and any(_said(dim) in _UNKNOWN for dim in value.shape):
            value.shape = ir.Shape([None if _said(dim) in _UNKNOWN else dim for dim in value.shape])
    taken = {_said(dim) for value in _values(model) for dim in value.shape or ()}
    for value in model.graph.inputs:
        if value.shape is not None and isinstance(value.type, ir.TensorType):  # each tensor of a list has its own
            value.shape = ir.Shape(
                [_name(value, axis, taken) if _said(dim) is None else dim for axis, dim in enumerate(value.shape)]
            )


def _name(value: ir.Value, axis: int, taken: set[int | str | None]) -> str:
    """A name that is not taken, and then is."""
    name = f"{value.name}_{axis}"
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def with_sizes(model: ir.Model, dims: Dims) -> ir.Model:
    """The model, with numbers for the symbolic dimensions that always have one size.

    Raises InputError for a dimension that no input has, and for a range that holds no size.
    """
    sizes = {name: low for name, (low, high) in _bounds(dims).items() if low == high}
    if not sizes:
        return model
    check_dimensions(sizes, symbolic_dimensions(model))
    model = model.clone()
    for value in _values(model):
        if value.shape is not None and any(_said(dim) in sizes for dim in value.shape):
            value.shape = ir.Shape([sizes.get(str(_said(dim)), dim) for dim in value.shape])
    return model


def ranges(dims: Dims, model: ir.Model, setup: ir.Model | None = None) -> list[dict[str, tuple[int, int]]]:
    """The smallest and the largest size of dimensions, of which `with_sizes` has made numbers where both are equal.

    Those of the model, and those of its setup, if it has one: each has its own dimensions, and the model the numbers
    too. Raises InputError for a dimension that no input of either has.
    """
    legal = _bounds(dims)
    named = [symbolic_dimensions(part) for part in (model, setup) if part is not None]
    fixed = {name for name, (low, high) in legal.items() if low == high}
    check_dimensions((name for name in legal if name not in fixed), set().union(*named))
    named[0] |= fixed
    return [{name: bounds for name, bounds in legal.items() if name in names} for names in named]


def symbolic_dimensions(model: ir.Model) -> set[str]:
    """The names of the inputs' symbolic dimensions."""
    taken = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    return {dim for value in taken for dim in map(_said, value.shape or ()) if isinstance(dim, str)}


def _bounds(dims: Dims) -> dict[str, tuple[int, int]]:
    """The smallest and the largest size, by name. Raises InputError for what is none, and for a range that is empty."""
    found = {}
    for name, said in dims.items():
        if name in _UNKNOWN:
            raise InputError(
                f"dimension '{name}' says nothing of a size: such sizes are called by the input and the axis, for "
                "instance x_0."
            )
        bounds = said if isinstance(said, tuple) else (said, said)
        low, high = (check_integer(size, f"the size of dimension '{name}'", 0, 2**63 - 1) for size in bounds)
        if low > high:
            raise InputError(f"the range of dimension '{name}' is empty: {low} to {high}.")
        found[name] = (low, high)
    return found


def _said(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """Whatever has a declared shape."""
    for graph in graphs(model):
        yield from (*graph.inputs, *graph.outputs)
        for node in graph:
            yield from node.outputs
