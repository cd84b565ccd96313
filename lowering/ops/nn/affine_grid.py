"""ONNX AffineGrid (https://onnx.ai/onnx/operators/onnx__AffineGrid.html): sample positions for GridSample.

The positions are affine maps of a regular grid.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_nonnegative, assert_shape, require
from ..helpers.compute import is_float, widen_dtype
from ..helpers.contents import read_sizes
from ..helpers.kernels import compute
from ..helpers.run_time import bind_sizes


@op("AffineGrid", since=20)
def affine_grid(node: Node, theta: Value, size: Value) -> Value:
    """Emit [N, D1, ..., n] of theta [N, n, n + 1] and the size [N, C, D1, ...] of the sampled data.

    n is 2 or 3 axes.
    """
    if size.shape not in ((4,), (5,)) or theta.rank != 3 or not is_float(theta.dtype):
        raise node.error(
            "affine_grid.input_unsupported",
            f"theta is {theta.dtype} of rank {theta.rank}, and size {list(size.shape)}.",
            "Give theta a float type and the shape [N, n, n + 1], and size [N, C, D1, ...], for n = 2 or 3 axes.",
        )
    n, batch = int(size.shape[0]) - 2, theta.shape[0]
    theta = assert_shape(node, theta, (batch, n, n + 1))
    sizes = read_sizes(size)
    if sizes is None:
        sizes = bind_sizes(node, size)
    theta = assert_nonnegative(node, theta, sizes, "input size")
    text = "input size is for {} grids, and theta has {} matrices."
    theta = require(node, theta, symbolic.equal(sizes[0], batch), "affine_grid.batch_mismatch", text, sizes[0], batch)
    spatial, acc = sizes[2:], widen_dtype(theta.dtype)
    has_aligned_corners = bool(node.attr("align_corners", 0))

    def number(value: Any) -> Any:
        return tirx.const(float(value), acc) if isinstance(value, int | float) else value.astype(acc)

    def coordinate(position: Any, extent: Any) -> Any:
        """Return a coordinate from -1 to 1.

        The ends are outer edges of elements, or the centers of the first and the last one.
        """
        if not has_aligned_corners:
            return (number(position) * number(2) + number(1)) / number(extent) - number(1)
        steps = tirx.max(extent - tirx.const(1, "int64"), tirx.const(1, "int64"))
        return number(position) * number(2) / number(steps) - number(1)

    def element(index: Any, theta: Any, *extents: Any) -> Any:
        row = index[-1]
        total = theta(index[0], row, tirx.const(n, "int64")).astype(acc)
        for axis in range(n):
            column = tirx.const(n - 1 - axis, "int64")  # the last axis is the first coordinate
            total = total + theta(index[0], row, column).astype(acc) * coordinate(index[1 + axis], extents[axis])
        return total.astype(theta_dtype)

    theta_dtype = theta.dtype
    return compute(node, "affine_grid", element, [theta], (batch, *spatial, n), sizes=spatial)
