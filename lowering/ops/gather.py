"""Gather, GatherElements and GatherND. Negative indices count from the back; others outside are errors.

Kernels clamp all the same: on a GPU nothing else keeps reads inside, and to the compiler it is a bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

from ..importing import symbolic
from ..importing.node import Node
from ..importing.values import Size, Value
from . import op
from .asserted import asserted, inside, required
from .contents import few, movable, moved, sizes, static_axis
from .kernels import compute


def wrapped(index: Any, size: Any) -> Any:
    """An index in [-size, size) counted from the front; others are clamped."""
    index = index.astype("int64") if not isinstance(index, int) else tirx.IntImm("int64", index)
    index = tirx.Select(index < 0, index + size, index)
    return tirx.max(tirx.min(index, size - 1), tirx.IntImm("int64", 0))


@op("Gather", since=1)
def gather(node: Node, data: Value, indices: Value) -> Value:
    return gather_along(node, data, indices, static_axis(node, node.attr("axis", 0), data.rank))


def gather_along(node: Node, data: Value, indices: Value, axis: int) -> Value:
    """Return the entries of data along an axis that the indices name; indices [I...] take the place of the axis.

    Raises:
        NodeError: An index is known to be outside.
    """
    places, dim = sizes(indices), data.shape[axis]
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    if indices.rank == 0 and places is not None:  # one place that is known: no tensor of indices is needed
        data = _required(node, data, places[0], axis)
    else:
        indices = inside(node, indices, dim, of=f"dimension {axis} of {node.name_of(data, False)}")
    if movable(data) and indices.constant is not None and few(shape):
        assert data.contents is not None
        return moved(node, data, np.take(data.contents, indices.constant.astype("int64"), axis=axis))
    if indices.rank == 0 and places is not None:
        place = _place(node, places[0], dim)
        return compute(node, "gather", lambda i, x, at: x(*i[:axis], at, *i[axis:]), [data], shape, [place])
    end = axis + indices.rank

    def element(i: Any, x: Any, at: Any, size: Any) -> Any:
        return x(*i[:axis], wrapped(at(*i[axis:end]), size), *i[end:])

    return compute(node, "gather", element, [data, indices], shape, [dim])


@op("GatherElements", since=11)
def gather_elements(node: Node, data: Value, indices: Value) -> Value:
    axis = static_axis(node, node.attr("axis", 0), data.rank)
    indices = element_indices(node, data, indices, axis)

    def element(i: Any, x: Any, at: Any, size: Any) -> Any:
        return x(*i[:axis], wrapped(at(*i), size), *i[axis + 1 :])

    return compute(node, "gather_elements", element, [data, indices], indices.shape, [data.shape[axis]])


@op("GatherND", since=11)
def gather_nd(node: Node, data: Value, indices: Value) -> Value:
    batch = node.attr("batch_dims", 0)
    if not indices.rank or not 0 <= batch < indices.rank:
        raise node.error(f"attribute batch_dims is {batch}, for indices of rank {indices.rank}.")
    depth = indices.shape[-1]
    if not isinstance(depth, int):
        raise node.error("the last dimension of input indices is symbolic, so the rank of the result is unknown.")
    if batch + depth > data.rank:
        raise node.error(f"indices of shape {list(indices.shape)} do not fit data of rank {data.rank}.")
    indices = asserted(node, indices, (*data.shape[:batch], *indices.shape[batch:]))
    indices = tuple_indices(node, data, indices, batch)
    shape = (*indices.shape[:-1], *data.shape[batch + depth :])
    outer = indices.rank - 1

    def element(i: Any, x: Any, at: Any, *dims: Any) -> Any:
        places = [wrapped(at(*i[:outer], tirx.IntImm("int64", k)), dims[k]) for k in range(depth)]
        return x(*i[:batch], *places, *i[outer:])

    return compute(node, "gather_nd", element, [data, indices], shape, data.shape[batch : batch + depth])


def _place(node: Node, index: Size, size: Size) -> Size:
    """`wrapped` for a known index."""
    if not isinstance(index, int):
        return wrapped(index, size)
    if index < 0:
        index = node.simplify(size + index)
        return index if node.symbols.prove(index >= 0) else symbolic.maximum(index, 0)
    return index if node.symbols.prove(index < size) else symbolic.minimum(index, node.simplify(size - 1))


def _required(node: Node, data: Value, place: Size, axis: int) -> Value:
    """The data, in whose dimension `axis` there is a known place."""
    size = data.shape[axis]
    there = symbolic.logical_and(symbolic.less_or_equal(0, size + place), symbolic.less(place, size))
    return required(node, data, there, f"index {{}} is outside dimension {axis}, which has size {{}}.", place, size)


def element_indices(node: Node, data: Value, indices: Value, axis: int) -> Value:
    """Indices along an axis of data, one for each element at their own place in the other dimensions."""
    if indices.rank != data.rank:
        raise node.error(f"input indices has rank {indices.rank}, and the data rank {data.rank}.", "Use one rank.")
    for k, (size, most) in enumerate(zip(indices.shape, data.shape)):
        if k != axis and not node.symbols.equal(size, most):
            text = f"dimension {k} of input indices is {{}}, and that of the data {{}}: it must not be larger."
            indices = required(node, indices, symbolic.less_or_equal(size, most), text, size, most)
    return inside(node, indices, data.shape[axis], of=f"dimension {axis} of {node.name_of(data, False)}")


def tuple_indices(node: Node, data: Value, indices: Value, batch: int = 0) -> Value:
    """Indices whose last dimension holds places in the dimensions of data from `batch` on."""
    depth = indices.shape[-1]
    name = node.name_of(data, False)
    of = [f"dimension {axis} of {name}" for axis in range(batch, batch + depth)]
    return inside(node, indices, *data.shape[batch : batch + depth], of=of)
