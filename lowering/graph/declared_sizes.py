"""What is said of symbolic sizes: what a model declares without saying anything, and what its user knows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

import onnx_ir as ir

from ..errors import InputError
from ..runtime.checks import check_dimensions, whole_number
from .legality import graphs

Dims: TypeAlias = Mapping[str, int | tuple[int, int]]
"""By the name of a symbolic dimension the size that it always has, or the smallest and the largest one.

Equal bounds are a size that it always has."""

# How exporters write a size of which they know nothing. As a name it would say that all such sizes are equal.
_UNKNOWN = (-1, "", "?", "None")


def forget_unknown_sizes(model: ir.Model) -> None:
    """Takes the names off declared sizes that mean nothing, in place."""
    for value in _values(model):
        if value.shape is not None and any(_said(dim) in _UNKNOWN for dim in value.shape):
            value.shape = ir.Shape([None if _said(dim) in _UNKNOWN else dim for dim in value.shape])


def with_sizes(model: ir.Model, dims: Dims) -> ir.Model:
    """The model, with numbers for the symbolic dimensions that always have one size.

    Raises InputError for a dimension that no input has, and for a range that holds no size.
    """
    sizes = {name: low for name, (low, high) in _bounds(dims).items() if low == high}
    if not sizes:
        return model
    declared = {dim for value in model.graph.inputs for dim in map(_said, value.shape or ())}
    check_dimensions(sizes, (dim for dim in declared if isinstance(dim, str)))
    model = model.clone()
    for value in _values(model):
        if value.shape is not None and any(_said(dim) in sizes for dim in value.shape):
            value.shape = ir.Shape([sizes.get(str(_said(dim)), dim) for dim in value.shape])
    return model


def ranges(dims: Dims, names: Collection[int | str]) -> dict[str, tuple[int, int]]:
    """The smallest and the largest size of the dimensions that have more than one; names are those of all inputs.

    Raises InputError for a dimension that no input has.
    """
    legal = {name: (low, high) for name, (low, high) in _bounds(dims).items() if low != high}
    check_dimensions(legal, (name for name in names if isinstance(name, str)))
    return legal


def _bounds(dims: Dims) -> dict[str, tuple[int, int]]:
    """The smallest and the largest size, by name. Raises InputError for what is none, and for a range that is empty."""
    found = {}
    for name, said in dims.items():
        bounds = said if isinstance(said, tuple) else (said, said)
        low, high = (whole_number(size, f"the size of dimension '{name}'", 0, 2**63 - 1) for size in bounds)
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
