"""ScatterElements, ScatterND and the old Scatter: a copy of data with some elements replaced or combined.

Updates are applied in order, one after the other, since indices may repeat.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Value, storage_dtype
from ...tensorir.independent_loops import independent_loops
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.contents import normalize_axis
from ..helpers.kernels import emit_loops, grid
from ..helpers.requirements import read_choice
from .gather import assert_element_indices, assert_tuple_indices, wrap_index

_REDUCTIONS = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": tirx.max,
    "min": tirx.min,
}


@op("Scatter", since=9)
@op("ScatterElements", since=11)
def scatter_elements(node: Node, data: Value, indices: Value, updates: Value) -> Value:
    axis = normalize_axis(node, node.attr("axis", 0), data.rank)
    combine = _read_reduction(node, data)
    indices = assert_element_indices(node, data, indices, axis)
    updates = _assert_updates_shape(node, updates, indices.shape)

    def statements(x: Any, at: Any, new: Any, out: Any) -> None:
        _emit_copy(x, out)
        with grid(at.shape) as index:
            position = T.bind(wrap_index(at[index], x.shape[axis]))
            target = (*index[:axis], position, *index[axis + 1 :])
            T.buffer_store(out, combine(out[target], new[index]), list(target))

    return _emit_scatter(node, "scatter_elements", statements, data, indices, updates)


@op("ScatterND", since=11)
def scatter_nd(node: Node, data: Value, indices: Value, updates: Value) -> Value:
    if not indices.rank:
        raise node.error(
            "scatter_nd.indices_scalar",
            "input indices is a scalar.",
            "Give it a last dimension with one index for each dimension of data.",
        )
    depth, outer = indices.shape[-1], indices.rank - 1
    if not isinstance(depth, int):
        problem = f"the last dimension of input indices is the symbolic size {depth}."
        raise node.error(
            "node.static_size_required", problem, "Give it a static size, which determines the rank of the updates."
        )
    if depth > data.rank:
        raise node.error(
            "scatter_nd.shape_mismatch",
            f"the last dimension of input indices is {depth}, for data of rank {data.rank}.",
        )
    combine = _read_reduction(node, data)
    indices = assert_tuple_indices(node, data, indices)
    updates = _assert_updates_shape(node, updates, (*indices.shape[:-1], *data.shape[depth:]))

    def statements(x: Any, at: Any, new: Any, out: Any) -> None:
        _emit_copy(x, out)
        with grid(new.shape) as index:
            position = [T.bind(wrap_index(at[(*index[:outer], k)], x.shape[k])) for k in range(depth)]
            target = (*position, *index[outer:])
            T.buffer_store(out, combine(out[target], new[index]), list(target))

    return _emit_scatter(node, "scatter_nd", statements, data, indices, updates)


def _assert_updates_shape(node: Node, updates: Value, shape: Shape) -> Value:
    if updates.rank != len(shape):
        raise node.error(
            "node.rank_mismatch",
            f"input updates has rank {updates.rank}.",
            f"Use rank {len(shape)}, which data and indices determine.",
        )
    return assert_shape(node, updates, shape)


def _emit_scatter(node: Node, name: str, statements: Any, data: Value, indices: Value, updates: Value) -> Value:
    if data.dtype == "complex128":
        raise node.error("node.complex128_unsupported", "complex128 is not supported.", "Use complex64.")
    (result,) = emit_loops(node, name, statements, [data, indices, updates], [(data.shape, data.dtype)])
    return result


def _read_reduction(node: Node, data: Value) -> Any:
    name = read_choice(node, "reduction", "none", _REDUCTIONS, code="node.reduction_unsupported")
    if name != "none" and (storage_dtype(data.dtype) != data.dtype):
        raise node.error(
            "node.reduction_dtype_unsupported",
            f"elements of type {data.dtype} cannot be combined with reduction '{name}'.",
        )
    if data.dtype == "bool" and name != "none":
        return {"add": tirx.Or, "mul": tirx.And, "max": tirx.Or, "min": tirx.And}[name]
    return _REDUCTIONS[name]


def _emit_copy(source: Any, target: Any) -> None:
    with independent_loops(*source.shape) as index:
        T.buffer_store(target, source[index], list(index))
