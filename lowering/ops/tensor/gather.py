"""Gather, GatherElements and GatherND. Negative indices count from the end; other indices out of bounds are errors.

Kernels clamp indices all the same: on a GPU nothing else limits reads, and the compiler uses it as a bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_in_bounds, assert_shape, require
from ..helpers.contents import can_fold_contents, fits_contents, fold_contents, normalize_axis, read_sizes
from ..helpers.kernels import compute


def wrap_index(index: Any, size: Any) -> Any:
    """Return an index in [-size, size) counted from the front; other indices are clamped."""
    index = index.astype("int64") if not isinstance(index, int) else tirx.IntImm("int64", index)
    index = tirx.Select(index < 0, index + size, index)
    return tirx.max(tirx.min(index, size - 1), tirx.IntImm("int64", 0))


@op("Gather", since=1)
def gather(node: Node, data: Value, indices: Value) -> Value:
    return gather_along(node, data, indices, normalize_axis(node, node.attr("axis", 0), data.rank))


def gather_along(node: Node, data: Value, indices: Value, axis: int) -> Value:
    """Emit the entries of data along an axis that the indices select; indices [I...] replace the axis.

    Raises:
        NodeError: An index is provably out of bounds.
    """
    static_indices, dim = read_sizes(indices), data.shape[axis]
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    if indices.rank == 0 and static_indices is not None:  # one static index: no tensor of indices is needed
        data = _require_index(node, data, static_indices[0], axis)
    else:
        indices = assert_in_bounds(node, indices, dim, bound_name=f"dimension {axis} of {node.describe(data, False)}")
    if can_fold_contents(data) and indices.constant is not None and fits_contents(shape):
        assert data.contents is not None
        return fold_contents(node, data, np.take(data.contents, indices.constant.astype("int64"), axis=axis))
    if indices.rank == 0 and static_indices is not None:
        index = _wrap_static_index(node, static_indices[0], dim)
        return compute(node, "gather", lambda i, x, at: x(*i[:axis], at, *i[axis:]), [data], shape, [index])
    end = axis + indices.rank

    def element(i: Any, x: Any, at: Any, size: Any) -> Any:
        return x(*i[:axis], wrap_index(at(*i[axis:end]), size), *i[end:])

    return compute(node, "gather", element, [data, indices], shape, [dim])


@op("GatherElements", since=11)
def gather_elements(node: Node, data: Value, indices: Value) -> Value:
    axis = normalize_axis(node, node.attr("axis", 0), data.rank)
    indices = assert_element_indices(node, data, indices, axis)

    def element(i: Any, x: Any, at: Any, size: Any) -> Any:
        return x(*i[:axis], wrap_index(at(*i), size), *i[axis + 1 :])

    return compute(node, "gather_elements", element, [data, indices], indices.shape, [data.shape[axis]])


@op("GatherND", since=11)
def gather_nd(node: Node, data: Value, indices: Value) -> Value:
    batch = node.attr("batch_dims", 0)
    if not indices.rank or not 0 <= batch < indices.rank:
        raise node.error(
            "gather_nd.batch_dims_out_of_range", f"attribute batch_dims is {batch}, for indices of rank {indices.rank}."
        )
    depth = indices.shape[-1]
    if not isinstance(depth, int):
        raise node.error(
            "node.static_size_required",
            "the last dimension of input indices is symbolic, so the rank of the result is unknown.",
            "Give it a static size.",
        )
    if batch + depth > data.rank:
        raise node.error(
            "gather_nd.shape_mismatch", f"indices of shape {list(indices.shape)} do not fit data of rank {data.rank}."
        )
    indices = assert_shape(node, indices, (*data.shape[:batch], *indices.shape[batch:]))
    indices = assert_tuple_indices(node, data, indices, batch)
    shape = (*indices.shape[:-1], *data.shape[batch + depth :])
    outer = indices.rank - 1

    def element(i: Any, x: Any, at: Any, *dims: Any) -> Any:
        position = [wrap_index(at(*i[:outer], tirx.IntImm("int64", k)), dims[k]) for k in range(depth)]
        return x(*i[:batch], *position, *i[outer:])

    return compute(node, "gather_nd", element, [data, indices], shape, data.shape[batch : batch + depth])


def _wrap_static_index(node: Node, index: Size, size: Size) -> Size:
    """Apply `wrap_index` to a static index."""
    if not isinstance(index, int):
        return wrap_index(index, size)
    if index < 0:
        index = node.simplify(size + index)
        return index if node.symbols.prove(index >= 0) else symbolic.maximum(index, 0)
    return index if node.symbols.prove(index < size) else symbolic.minimum(index, node.simplify(size - 1))


def _require_index(node: Node, data: Value, index: Size, axis: int) -> Value:
    """Return the data; report an error unless a static index is within its dimension `axis`."""
    size = data.shape[axis]
    is_in_bounds = symbolic.logical_and(symbolic.less_or_equal(0, size + index), symbolic.less(index, size))
    return require(
        node,
        data,
        is_in_bounds,
        "node.index_out_of_range",
        f"index {{}} is outside dimension {axis}, which has size {{}}.",
        index,
        size,
    )


def assert_element_indices(node: Node, data: Value, indices: Value, axis: int) -> Value:
    """Return indices along an axis of data, asserted to be in bounds.

    There is one index per element, at the element's own position in the other dimensions.
    """
    if indices.rank != data.rank:
        raise node.error(
            "node.rank_mismatch",
            f"input indices has rank {indices.rank}, and the data has rank {data.rank}.",
            "Give both the same rank.",
        )
    for k, (size, max_size) in enumerate(zip(indices.shape, data.shape)):
        if k != axis and not node.symbols.equal(size, max_size):
            text = f"dimension {k} of input indices is {{}}, and that of the data is {{}}: it must not be larger."
            indices = require(
                node, indices, symbolic.less_or_equal(size, max_size), "node.indices_too_large", text, size, max_size
            )
    return assert_in_bounds(
        node, indices, data.shape[axis], bound_name=f"dimension {axis} of {node.describe(data, False)}"
    )


def assert_tuple_indices(node: Node, data: Value, indices: Value, batch: int = 0) -> Value:
    """Return index tuples along the last dimension, asserted to be in bounds.

    They index the dimensions of data from `batch` on.
    """
    depth = indices.shape[-1]
    name = node.describe(data, False)
    names = [f"dimension {axis} of {name}" for axis in range(batch, batch + depth)]
    return assert_in_bounds(node, indices, *data.shape[batch : batch + depth], bound_name=names)
