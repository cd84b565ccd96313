"""ai.onnx TensorScatter-24 (https://onnx.ai/onnx/operators/onnx__TensorScatter.html): the cache update."""

from __future__ import annotations

from ...importing.node import Node
from ...importing.values import Size, Value, static, storage_dtype, storage_shape
from ...tensorir.scatter import CacheUpdate, make_copying_update
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_shape, require
from ..helpers.requirements import read_choice, require_same_dtype


@op("TensorScatter", since=24)
def tensor_scatter(node: Node, past_cache: Value, update: Value, write_indices: Value | None = None) -> Value:
    """Emit present_cache.

    Rows with a write index outside a linear cache are dropped. Circular indices wrap.
    """
    rank = past_cache.rank
    _check_types(node, past_cache, update)
    axis_attribute = node.attr("axis", -2)
    axis = axis_attribute + rank if axis_attribute < 0 else axis_attribute
    if not 1 <= axis < rank:
        raise node.error(
            "tensor_scatter.axis_out_of_range",
            f"attribute axis is {axis_attribute}, for inputs of rank {rank}.",
            f"Use 1 to {rank - 1}; axis 0 is the batch.",
        )
    mode = read_choice(node, "mode", "linear", ("linear", "circular"), code="tensor_scatter.mode_unsupported")
    max_len, length = past_cache.shape[axis], update.shape[axis]
    if isinstance(max_len, int) and isinstance(length, int) and length > max_len:
        raise node.error(
            "tensor_scatter.update_too_long",
            f"input update has {length} rows, for a cache of {max_len}.",
            "Write fewer rows, or enlarge the cache.",
        )
    text = "input update has {} rows, for a cache of {}."
    update = require(
        node, update, symbolic.less_or_equal(length, max_len), "tensor_scatter.update_too_long", text, length, max_len
    )
    for k, (size, other) in enumerate(zip(past_cache.shape, update.shape)):
        if k != axis and isinstance(size, int) and isinstance(other, int) and size != other:
            raise node.error(
                "tensor_scatter.shape_mismatch",
                f"dimension {k} of past_cache is {size}, and of update {other}.",
                "Make them equal.",
            )
    update = assert_shape(node, update, (*past_cache.shape[:axis], length, *past_cache.shape[axis + 1 :]))
    if write_indices is not None:
        _check_write_indices(node, write_indices, past_cache.shape[0])
        write_indices = assert_shape(node, write_indices, past_cache.shape[:1])
    stored = CacheUpdate(
        dtype=storage_dtype(past_cache.dtype),
        dims=tuple(static(d) for d in storage_shape(past_cache.dtype, past_cache.shape)),
        length=static(length),
        axis=axis,
        circular=mode == "circular",
        indices=write_indices is not None,
    )
    arguments = [node.tensor(value) for value in (past_cache, update, write_indices) if value is not None]
    outputs = [(past_cache.shape, past_cache.dtype)]
    return node.call_tir(make_copying_update(stored), arguments, outputs, "update_cache")[0]


def _check_types(node: Node, past_cache: Value, update: Value) -> None:
    """Raise NodeError if the inputs differ in rank or in type."""
    rank = past_cache.rank
    if rank < 2 or update.rank != rank:
        raise node.error(
            "tensor_scatter.rank_mismatch",
            f"inputs past_cache and update have ranks {rank} and {update.rank}.",
            "Give both the same rank of 2 or more.",
        )
    require_same_dtype(node, "update", update, "past_cache", past_cache, code="tensor_scatter.dtype_mismatch")


def _check_write_indices(node: Node, write_indices: Value, batch: Size) -> None:
    """Check the type and the shape of write_indices: int64 [batch]."""
    if write_indices.dtype != "int64" or write_indices.rank != 1:
        actual = f"{write_indices.dtype} of rank {write_indices.rank}"
        raise node.error(
            "tensor_scatter.write_indices_unsupported",
            f"input write_indices is {actual}.",
            "Use int64 of shape [batch].",
        )
    count = write_indices.shape[0]
    if isinstance(count, int) and isinstance(batch, int) and count != batch:
        raise node.error(
            "tensor_scatter.write_indices_mismatch",
            f"input write_indices has {count} elements, for a batch of {batch}.",
            "Give it the shape [batch].",
        )
