"""ONNX RoiAlign (https://onnx.ai/onnx/operators/onnx__RoiAlign.html): regions of X, sampled between its elements.

How many places of a region are sampled may depend on its size: a loop over them, in which channels, which come last,
are computed side by side.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ..importing import symbolic
from ..importing.channels import channels_last, channels_second
from ..importing.compute import is_float, widened
from ..importing.node import Node
from ..importing.values import Value
from ..tensorir.independent import independent
from . import op
from .asserted import asserted, inside, required
from .kernels import let, loops, serial
from .matmul import rounded

_MOST = 1 << 12  # places that are sampled along a side of one element of the result
_LARGEST = 1 << 16  # of a side of the result


@op("RoiAlign", since=10)
def roi_align_10(node: Node, x: Value, rois: Value, batches: Value) -> Value:
    return _roi_align(node, x, rois, batches, "output_half_pixel")


@op("RoiAlign", since=16)
def roi_align(node: Node, x: Value, rois: Value, batches: Value) -> Value:
    return _roi_align(node, x, rois, batches, node.attr("coordinate_transformation_mode", "half_pixel"))


def _roi_align(node: Node, x: Value, rois: Value, batches: Value, coordinates: str) -> Value:
    """[R, C, output_height, output_width] of X [N, C, H, W], rois [R, 4] and the batch [R] that each is of."""
    mode, ratio, scale = node.attr("mode", "avg"), node.attr("sampling_ratio", 0), node.attr("spatial_scale", 1.0)
    for name, given, legal in (
        ("mode", mode, ("avg", "max")),
        ("coordinate_transformation_mode", coordinates, ("half_pixel", "output_half_pixel")),
    ):
        if given not in legal:
            raise node.error(f"attribute {name} is '{given}'.", f"Use one of {', '.join(legal)}.")
    made = [node.attr(f"output_{side}", 1) for side in ("height", "width")]
    if not all(1 <= n <= _LARGEST for n in made) or not 0 <= ratio <= _MOST:
        raise node.error(f"a result of {made} with sampling_ratio {ratio} is not supported.")
    if (x.rank, rois.rank, batches.rank) != (4, 2, 1) or not is_float(x.dtype) or rois.dtype != x.dtype:
        raise node.error(
            f"X is {x.dtype} of rank {x.rank}, rois {rois.dtype} of rank {rois.rank}, batch_indices of rank "
            f"{batches.rank}.",
            "X is [N, C, H, W], rois [R, 4] of its type, and batch_indices [R].",
        )
    count, acc, half = rois.shape[0], widened(x.dtype), coordinates == "half_pixel"
    rois = asserted(node, rois, (count, 4))
    batches = inside(node, asserted(node, batches, (count,)), x.shape[0], of="dimension 0 of X", from_the_back=False)
    batches = node.emit(relax.op.astype(node.tensor(batches), "int64"))
    for axis in (2, 3):
        some = symbolic.logical_or(symbolic.less(0, x.shape[axis]), symbolic.equal(count, 0))
        x = required(node, x, some, f"dimension {axis} of X is empty.")
    last, rois = rounded(node, channels_last(node, x), acc), rounded(node, rois, acc)
    height, width, channels = last.shape[1:]

    def number(value: float) -> Any:
        return tirx.const(float(value), acc)

    def statements(x: Any, rois: Any, batch: Any, y: Any) -> None:
        with independent(count, *made) as (r, ph, pw):
            sides = [_side(rois[r, 1 - k], rois[r, 3 - k], made[k], scale, half, ratio, number) for k in (0, 1)]
            text = (
                f"{node.where}: input 'rois' has a region of which more than {_MOST} places would be sampled at once."
            )
            for _, _, samples in sides:
                with T.Assert(samples <= number(_MOST), text, "ValueError"):
                    pass
            first = T.bind(batch[r])
            grids = [let(tirx.min(n, number(_MOST)).astype("int64")) for _, _, n in sides]
            with serial(channels) as c:
                T.buffer_store(y, number(0), [r, ph, pw, c])
            with serial(grids[0]) as iy, serial(grids[1]) as ix:
                places = [
                    _place(start, size, p, i, n, extent, number)
                    for (start, size, n), p, i, extent in zip(sides, (ph, pw), (iy, ix), (height, width))
                ]
                there = let(tirx.all(places[0][0], places[1][0]))
                weights = [let(tirx.Select(there, w, number(0))) for w in _weights(places)]
                corners = [(places[0][1 + a], places[1][1 + b]) for a in (0, 1) for b in (0, 1)]
                with serial(channels) as c:
                    terms = [w * x[first, h, v, c] for w, (h, v) in zip(weights, corners)]
                    before = y[r, ph, pw, c]
                    if mode == "avg":
                        value = before + (terms[0] + terms[1] + terms[2] + terms[3])
                    else:  # as the standard's reference has it: the largest of the weighed elements
                        best = tirx.max(tirx.max(terms[0], terms[1]), tirx.max(terms[2], terms[3]))
                        value = tirx.Select(tirx.all(iy == 0, ix == 0), best, tirx.max(before, best))
                    T.buffer_store(y, value, [r, ph, pw, c])
            if mode == "avg":
                samples = let(tirx.max(grids[0] * grids[1], tirx.const(1, "int64")).astype(acc))
                with serial(channels) as c:
                    T.buffer_store(y, y[r, ph, pw, c] / samples, [r, ph, pw, c])

    shape = (count, made[0], made[1], channels)
    (y,) = loops(node, "roi_align", statements, [last, rois, batches], [(shape, acc)], x.shape)
    return channels_second(node, rounded(node, y, x.dtype))


def _side(low: Any, high: Any, made: int, scale: float, half: bool, ratio: int, number: Any) -> tuple[Any, Any, Any]:
    """Of a region along an axis: where it starts, how much of it is one element's, and how many places are sampled."""
    start, end = (v * number(scale) - number(0.5 if half else 0.0) for v in (low, high))
    size = let((end - start if half else tirx.max(end - start, number(1))) / number(made))
    # What is no number has no places.
    samples = number(ratio) if ratio else tirx.Select(size > number(0), tirx.ceil(size), number(0))
    return let(start), size, let(samples)


def _place(
    start: Any, size: Any, p: Any, i: Any, samples: Any, extent: Any, number: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """Whether a sample is in X, its neighbors along an axis, and their weights."""
    dtype = number(0).ty
    at = let(start + p.astype(dtype) * size + (i.astype(dtype) + number(0.5)) * size / samples)
    wide = extent.astype(dtype) if isinstance(extent, tirx.Var) else number(extent)
    there = let(tirx.all(at >= number(-1), at <= wide))
    at = let(tirx.Select(there, tirx.max(at, number(0)), number(0)))
    last = extent - tirx.const(1, "int64")
    low = let(tirx.min(at.astype("int64"), last))
    fraction = let(tirx.Select(low >= last, number(0), at - low.astype(dtype)))
    return there, low, let(tirx.min(low + 1, last)), number(1) - fraction, fraction


def _weights(places: list[tuple[Any, ...]]) -> list[Any]:
    return [places[0][3 + a] * places[1][3 + b] for a in (0, 1) for b in (0, 1)]
