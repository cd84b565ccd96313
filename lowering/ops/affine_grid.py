"""ONNX AffineGrid (https://onnx.ai/onnx/operators/onnx__AffineGrid.html): places for GridSample by affine maps."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ..importing import symbolic
from ..importing.compute import is_float, widened
from ..importing.node import Node
from ..importing.values import Value
from . import op
from .asserted import asserted, no_negative, required
from .contents import sizes as contents_of
from .kernels import compute
from .run_time import bind


@op("AffineGrid", since=20)
def affine_grid(node: Node, theta: Value, size: Value) -> Value:
    """[N, D1, ..., n] of theta [N, n, n + 1] and the size [N, C, D1, ...] of what is sampled: n = 2 or 3 axes."""
    if size.shape not in ((4,), (5,)) or theta.rank != 3 or not is_float(theta.dtype):
        raise node.error(
            f"theta is {theta.dtype} of rank {theta.rank}, and size {list(size.shape)}.",
            "Make theta floats [N, n, n + 1], and size [N, C, D1, ...] for n = 2 or 3 axes.",
        )
    n, batch = int(size.shape[0]) - 2, theta.shape[0]
    theta = asserted(node, theta, (batch, n, n + 1))
    asked = contents_of(size)
    if asked is None:
        asked = bind(node, size)
    theta = no_negative(node, theta, asked, "input size")
    text = "input size asks for {} grids, and theta has {} maps."
    theta = required(node, theta, symbolic.equal(asked[0], batch), text, asked[0], batch)
    spatial, acc = asked[2:], widened(theta.dtype)
    corners = bool(node.attr("align_corners", 0))

    def number(value: Any) -> Any:
        return tirx.const(float(value), acc) if isinstance(value, int | float) else value.astype(acc)

    def coordinate(place: Any, extent: Any) -> Any:
        """From -1 to 1: of the middle of an element, or of the first and the last one."""
        if not corners:
            return (number(place) * number(2) + number(1)) / number(extent) - number(1)
        steps = tirx.max(extent - tirx.const(1, "int64"), tirx.const(1, "int64"))
        return number(place) * number(2) / number(steps) - number(1)

    def element(index: Any, theta: Any, *extents: Any) -> Any:
        row = index[-1]
        total = theta(index[0], row, tirx.const(n, "int64")).astype(acc)
        for axis in range(n):
            column = tirx.const(n - 1 - axis, "int64")  # the last axis is the first coordinate
            total = total + theta(index[0], row, column).astype(acc) * coordinate(index[1 + axis], extents[axis])
        return total.astype(theta_dtype)

    theta_dtype = theta.dtype
    return compute(node, "affine_grid", element, [theta], (batch, *spatial, n), sizes=spatial)
