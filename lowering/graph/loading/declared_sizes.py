"""Symbolic sizes: declarations of a model without a meaning, and sizes that its user sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import onnx_ir as ir

from ...errors import InputError
from ...runtime.artifact.checks import check_dimensions, check_integer
from .legality import iterate_graphs

Dims: TypeAlias = Mapping[str, int | tuple[int, int]]
"""By the name of a symbolic dimension its static size, or its smallest and its largest one.

Equal bounds are a static size."""

# Unknown sizes, as exporters write them. As a name it would mean that all such sizes are equal.
_UNKNOWN = (-1, "", "?", "None")


def forget_unknown_sizes(model: ir.Model) -> None:
    """Remove meaningless names of declared sizes, in place.

    Those of inputs get names of the input and the axis, by which users can refer to them.
    """
    for value in _iterate_values(model):
        if value.shape is not None and any(_size_or_name(dim) in _UNKNOWN for dim in value.shape):
            value.shape = ir.Shape([None if _size_or_name(dim) in _UNKNOWN else dim for dim in value.shape])
    taken = {_size_or_name(dim) for value in _iterate_values(model) for dim in value.shape or ()}
    for value in model.graph.inputs:
        if value.shape is not None and isinstance(value.type, ir.TensorType):  # each tensor of a list has its own sizes
            value.shape = ir.Shape(
                [
                    _choose_name(value, axis, taken) if _size_or_name(dim) is None else dim
                    for axis, dim in enumerate(value.shape)
                ]
            )


def _choose_name(value: ir.Value, axis: int, taken: set[int | str | None]) -> str:
    """Return an unused name, and add it to `taken`."""
    name = f"{value.name}_{axis}"
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def set_sizes(model: ir.Model, dims: Dims) -> ir.Model:
    """Return the model with numbers for the symbolic dimensions that have one size.

    Raises:
        InputError: No input has a dimension, or a range contains no size.
    """
    sizes = {name: low for name, (low, high) in _read_bounds(dims).items() if low == high}
    if not sizes:
        return model
    check_dimensions(sizes, list_symbolic_dimensions(model))
    model = model.clone()
    for value in _iterate_values(model):
        if value.shape is not None and any(_size_or_name(dim) in sizes for dim in value.shape):
            value.shape = ir.Shape([sizes.get(str(_size_or_name(dim)), dim) for dim in value.shape])
    return model


def ranges(dims: Dims, model: ir.Model, setup: ir.Model | None = None) -> list[dict[str, tuple[int, int]]]:
    """Return the smallest and the largest size of dimensions, for the model and its setup, if it has one.

    `set_sizes` has replaced dimensions whose bounds are equal by numbers. Each model has its own dimensions, and
    `model` also has those of equal bounds.

    Raises:
        InputError: No input of either model has a dimension.
    """
    legal = _read_bounds(dims)
    named = [list_symbolic_dimensions(each_model) for each_model in (model, setup) if each_model is not None]
    static = {name for name, (low, high) in legal.items() if low == high}
    check_dimensions((name for name in legal if name not in static), set().union(*named))
    named[0] |= static
    return [{name: bounds for name, bounds in legal.items() if name in names} for names in named]


def list_symbolic_dimensions(model: ir.Model) -> set[str]:
    """Return the names of the inputs' symbolic dimensions."""
    inputs = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    return {dim for value in inputs for dim in map(_size_or_name, value.shape or ()) if isinstance(dim, str)}


def _read_bounds(dims: Dims) -> dict[str, tuple[int, int]]:
    """Return the smallest and the largest size, by name.

    Raises:
        InputError: A size is invalid, or a range is empty.
    """
    bounds_by_name = {}
    for name, size_or_bounds in dims.items():
        if name in _UNKNOWN:
            raise InputError(
                "dims.name_unspecific",
                f"dims: '{name}' does not identify a dimension. Name the dimension by its input and axis, for "
                "instance x_0.",
            )
        bounds = size_or_bounds if isinstance(size_or_bounds, tuple) else (size_or_bounds, size_or_bounds)
        low, high = (check_integer(size, f"the size of dimension '{name}'", 0, 2**63 - 1) for size in bounds)
        if low > high:
            raise InputError("dims.range_empty", f"the range of dimension '{name}' is empty: {low} to {high}.")
        bounds_by_name[name] = (low, high)
    return bounds_by_name


def _size_or_name(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value


def _iterate_values(model: ir.Model) -> Iterator[ir.Value]:
    """Yield all values with a declared shape."""
    for graph in iterate_graphs(model):
        yield from (*graph.inputs, *graph.outputs)
        for node in graph:
            yield from node.outputs
