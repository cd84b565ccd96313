"""ONNX Col2Im (https://onnx.ai/onnx/operators/onnx__Col2Im.html): blocks of an image, added where they overlap.

Each element of the image computes which blocks contain it, and at which of their positions: nothing is written twice.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from tvm import relax, te, tirx

from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_nonnegative, assert_shape, require
from ..helpers.compute import require_numbers, widen_dtype
from ..helpers.contents import read_sizes
from ..helpers.kernels import compute
from ..helpers.requirements import read_length, require_rank
from ..helpers.run_time import bind_sizes
from .window import SpatialWindow


@op("Col2Im", since=18)
def col2im(node: Node, x: Value, image_shape: Value, block_shape: Value) -> Value:
    """Emit [N, C, *image_shape] of x [N, C * elements of a block, blocks]."""
    require_numbers(node, x)
    require_rank(node, "input", x, "[N, C * elements of a block, blocks]", code="col2im.rank_unsupported")
    image, block = (
        _read_vector(node, *argument) for argument in (("image_shape", image_shape), ("block_shape", block_shape))
    )
    n = len(image)
    if len(block) != n or not n:
        raise node.error(
            "col2im.axis_count_mismatch",
            f"image_shape has {n} axes, and block_shape has {len(block)}.",
            "Give both the same number of axes, 1 or more.",
        )
    for name, sizes in (("image_shape", image), ("block_shape", block)):
        x = assert_nonnegative(node, x, sizes, f"input {name}")
    window = replace(SpatialWindow.read(node, [1] * n), kernel=tuple(block))
    counts: list[Size] = []
    for axis, (size, k) in enumerate(zip(image, block)):
        padding, reach = window.pads[axis] + window.pads[n + axis], node.simplify(window.reach(axis))
        x = require(
            node, x, symbolic.less(0, k), "col2im.block_empty", f"block_shape is {{}} along axis {2 + axis}.", k
        )
        fits = symbolic.less_or_equal(symbolic.subtract(reach, padding), size)
        text = f"a block covers {{}} elements along axis {2 + axis}, where the image has {{}} and {padding} of padding."
        x = require(node, x, fits, "col2im.block_too_large", text, reach, size)
        counts.append(node.simplify(window.count(axis, size)))
    elements, blocks = (node.simplify(functools.reduce(symbolic.multiply, sizes)) for sizes in (block, counts))
    elements = symbolic.maximum(1, elements)  # sizes may be computed before the checks
    channels = node.simplify(symbolic.floor_divide(x.shape[1], elements))
    is_divisible = symbolic.equal(symbolic.multiply(channels, elements), x.shape[1])
    text = "dimension 1 of the input is {}, which is not a multiple of the {} elements of a block."
    x = require(node, x, is_divisible, "col2im.size_not_divisible", text, x.shape[1], elements)
    x = assert_shape(node, x, (*x.shape[:2], blocks))

    def element(index: tuple[Any, ...], x: Any, *sizes: Any) -> Any:
        batch, channel, *position = index
        kernel, counts = sizes[:n], sizes[n:]
        ks = [te.reduce_axis((0, k), name=f"k{axis}") for axis, k in enumerate(kernel)]
        row, block, conditions = channel, tirx.const(0, "int64"), list[Any]()
        for axis in range(n):
            stride = tirx.const(window.strides[axis], "int64")
            first = position[axis] + window.pads[axis] - ks[axis].var.astype("int64") * window.dilations[axis]
            window_index = tirx.floordiv(first, stride)
            conditions += [first >= 0, tirx.floormod(first, stride) == 0, window_index < counts[axis]]
            row = row * kernel[axis] + ks[axis].var
            block = block * counts[axis] + window_index
        value = tirx.if_then_else(tirx.all(*conditions), x(batch, row, block).astype(dtype), tirx.const(0, dtype))
        return te.sum(value, axis=ks)

    dtype, shape = widen_dtype(x.dtype), (x.shape[0], channels, *image)
    y = compute(node, "col2im", element, [x], shape, [*block, *counts], dtype)
    return y if dtype == x.dtype else node.emit(relax.op.astype(node.tensor(y), x.dtype))


def _read_vector(node: Node, name: str, value: Value) -> list[Size]:
    """Return the sizes in the input; those bound at run time are not negative."""
    require_rank(node, name, value, "[spatial axes]", code="col2im.vector_required")
    read_length(node, name, value)
    static_sizes = read_sizes(value)
    return bind_sizes(node, value) if static_sizes is None else static_sizes
