"""Gather, GatherElements and GatherND. Negative indices count from the back."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

from .. import symbolic
from ..node import Node
from ..values import Size, Value
from . import op
from .contents import few, movable, moved, sizes, static_axis
from .kernels import compute


def wrapped(index: Any, size: Any) -> Any:
    """An index in [-size, size) counted from the front. Others are illegal; clamping them keeps reads inside."""
    index = index.astype("int64") if not isinstance(index, int) else tirx.IntImm("int64", index)
    index = tirx.Select(index < 0, index + size, index)
    return tirx.max(tirx.min(index, size - 1), tirx.IntImm("int64", 0))


@op("Gather", since=1)
def gather(node: Node, data: Value, indices: Value) -> Value:
    axis = static_axis(node, node.attr("axis", 0), data.rank)
    places = sizes(indices)
    _check(node, places, data.shape[axis])
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    if movable(data) and indices.constant is not None and few(shape):
        assert data.contents is not None
        return moved(node, data, np.take(data.contents, indices.constant.astype("int64"), axis=axis))
    dim = data.shape[axis]
    if indices.rank == 0 and places is not None:  # one place that is known: no tensor of indices is needed
        place = _place(node, places[0], dim)
        return compute(node, "gather", lambda i, x, at: x(*i[:axis], at, *i[axis:]), [data], shape, [place])
    end = axis + indices.rank

    def element(i: Any, x: Any, at: Any, size: Any) -> Any:
        return x(*i[:axis], wrapped(at(*i[axis:end]), size), *i[end:])

    return compute(node, "gather", element, [data, indices], shape, [dim])


@op("GatherElements", since=11)
def gather_elements(node: Node, data: Value, indices: Value) -> Value:
    axis = static_axis(node, node.attr("axis", 0), data.rank)
    _check(node, sizes(indices), data.shape[axis])

    def element(i: Any, x: Any, at: Any, size: Any) -> Any:
        return x(*i[:axis], wrapped(at(*i), size), *i[axis + 1 :])

    return compute(node, "gather_elements", element, [data, indices], indices.shape, [data.shape[axis]])


@op("GatherND", since=11)
def gather_nd(node: Node, data: Value, indices: Value) -> Value:
    batch, depth = node.attr("batch_dims", 0), indices.shape[-1]
    if not isinstance(depth, int):
        raise node.error("the last dimension of input indices is symbolic, so the rank of the result is unknown.")
    if not batch + depth <= data.rank or batch >= indices.rank:
        raise node.error(f"indices of shape {list(indices.shape)} do not fit data of rank {data.rank}.")
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


def _check(node: Node, places: list[Size] | None, dim: Size) -> None:
    """Refuses indices that are known to lie outside."""
    for place in places or ():
        if isinstance(place, int) and isinstance(dim, int) and not -dim <= place < dim:
            raise node.error(f"index {place} is outside a dimension of size {dim}.")
