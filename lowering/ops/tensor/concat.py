"""Concat and Split: tensors put together, or cut, along an axis.

Concatenated values agree in the sizes of other axes, and lengths of a split add up to the size of its axis. What is not
static is asserted at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Size, Value, is_empty
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_nonnegative, assert_shape, require
from ..helpers.channels import unify_layouts
from ..helpers.compute import combine_in_groups
from ..helpers.contents import can_fold_contents, fits_contents, fold_contents, normalize_axis, read_sizes
from ..helpers.kernels import emit_blocks, grid
from ..helpers.requirements import require_rank
from ..helpers.run_time import bind_sizes
from .slice import emit_slice


@op("Concat", since=4)
def concat(node: Node, *inputs: Value) -> Value:
    return concatenate_values(node, inputs, normalize_axis(node, node.attr("axis"), inputs[0].rank))


def concatenate_values(node: Node, values: Sequence[Value], axis: int) -> Value:
    """Concatenate the values along an axis; other dimensions are proved or asserted to be equal.

    Raises:
        NodeError: Ranks differ, or static sizes of other axes.
    """
    if any(value.rank != values[0].rank for value in values):
        raise node.error("node.rank_mismatch", f"inputs have different ranks: {[value.rank for value in values]}.")
    if can_fold_contents(*values):
        joined = np.concatenate([value.contents for value in values if value.contents is not None], axis=axis)
        if fits_contents(joined.shape):
            return fold_contents(
                node,
                values[0] if all(symbolic.has_contents(value) for value in values) else node.constant(joined),
                joined,
            )
    values = tuple(_align_shape(node, value, values[0].shape, axis) for value in values)
    values = tuple(value for value in values if not is_empty((value.shape[axis],))) or values[:1]
    stored, order, back = unify_layouts(node, *values)
    return back(combine_in_groups(lambda group: emit_concat(node, group, order.index(axis)), stored))


def emit_concat(node: Node, values: Sequence[Value], axis: int) -> Value:
    """Emit a kernel that copies the values, whose shapes agree, one after the other."""
    if len(values) == 1:
        return values[0]
    total = node.simplify(sum(value.shape[axis] for value in values))
    shape = (*values[0].shape[:axis], total, *values[0].shape[axis + 1 :])

    def statements(*buffers: Any) -> None:
        *sources, out = buffers
        start: Any = tirx.IntImm("int64", 0)
        for source in sources:
            with grid(source.shape) as loop, T.sblock(f"part_{source.name}"):
                index = [T.axis.spatial(n, i) for n, i in zip(source.shape, loop)]
                target = [i + start if k == axis else i for k, i in enumerate(index)]
                T.reads(source[tuple(index)])
                T.writes(out[tuple(target)])
                T.buffer_store(out, source[tuple(index)], target)
            start = start + source.shape[axis]

    return emit_blocks(node, "concat", statements, values, (shape, values[0].dtype))


def _align_shape(node: Node, value: Value, like: Shape, axis: int) -> Value:
    """Return the value, asserted to have the dimensions of `like` in all axes but one."""
    shape = (*like[:axis], value.shape[axis], *like[axis + 1 :])
    if any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(value.shape, shape)):
        raise node.error(
            "node.shape_mismatch", f"shapes {list(value.shape)} and {list(like)} differ outside of axis {axis}."
        )
    return assert_shape(node, value, shape)


@op("Split", since=2)
def split(node: Node, data: Value, lengths: Value | None = None) -> tuple[Value, ...]:
    axis, count = normalize_axis(node, node.attr("axis", 0), data.rank), len(node.outputs)
    dim = data.shape[axis]
    sizes_of_outputs: list[Size] | None = node.attr("split", None)
    if lengths is not None:
        require_rank(node, "split", lengths, "[outputs]", code="node.vector_required")
        lengths = assert_shape(node, lengths, (count,))
        static_sizes = read_sizes(lengths)
        sizes_of_outputs = bind_sizes(node, lengths) if static_sizes is None else static_sizes
    elif sizes_of_outputs is None:
        sizes_of_outputs = _split_evenly(node, dim, count)
        text = f"dimension {axis} is {{}} and cannot be split into {count} parts: the last one would be negative."
        data = require(
            node,
            data,
            symbolic.less_or_equal(sizes_of_outputs[0] * (count - 1), dim),
            "split.too_many_parts",
            text,
            dim,
        )
    if len(sizes_of_outputs) != count:
        raise node.error("split.count_mismatch", f"there are {count} outputs but {len(sizes_of_outputs)} lengths.")
    return tuple(split_axis(node, data, axis, sizes_of_outputs))


def split_axis(node: Node, data: Value, axis: int, lengths: Sequence[Size]) -> list[Value]:
    """Return slices of these lengths along an axis; their sum is proved or asserted to be its size.

    Raises:
        NodeError: Static lengths add up to another size, or one is negative.
    """
    dim = data.shape[axis]
    total = node.simplify(sum(lengths))
    if isinstance(total, int) and isinstance(dim, int) and total != dim:
        raise node.error(
            "split.lengths_mismatch", f"the lengths {lengths} do not add up to dimension {axis}, which is {dim}."
        )
    data = assert_nonnegative(node, data, lengths, "the split")
    data = assert_shape(node, data, (*data.shape[:axis], total, *data.shape[axis + 1 :]))
    results, start = [], 0
    for length in lengths:
        begins: list[Size] = [0] * data.rank
        begins[axis] = node.simplify(start)
        shape = (*data.shape[:axis], length, *data.shape[axis + 1 :])
        results.append(emit_slice(node, data, begins, [1] * data.rank, shape))
        start = start + length
    return results


def _split_evenly(node: Node, dim: Size, count: int) -> list[Size]:
    """Return equal lengths; from version 18 on, with num_outputs, the last ones may be smaller."""
    if isinstance(dim, int):
        if dim % count and node.version < 18:
            raise node.error(
                "split.size_not_divisible",
                f"a dimension of {dim} cannot be split into {count} equal parts.",
                "Give the lengths.",
            )
        size = -(-dim // count)
        if (count - 1) * size > dim:
            raise node.error(
                "split.too_many_parts",
                f"a dimension of {dim} cannot be split into {count} parts of {size}, of which only the last may be "
                "smaller.",
            )
        return [max(min(dim - k * size, size), 0) for k in range(count)]
    size = node.simplify(tirx.floordiv(dim + (count - 1), tirx.IntImm("int64", count)))
    if node.version < 18 or node.symbols.equal(size * count, dim):
        return [size] * count
    return [node.simplify(symbolic.maximum(symbolic.minimum(dim - k * size, size), 0)) for k in range(count)]
