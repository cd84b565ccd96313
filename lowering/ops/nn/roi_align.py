"""ONNX RoiAlign (https://onnx.ai/onnx/operators/onnx__RoiAlign.html): regions of X, sampled between its elements.

The number of samples of a region may depend on its size. The kernel loops over the samples, and computes the channels,
which come last, side by side.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Value
from ...tensorir.independent_loops import independent_loops
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_in_bounds, assert_shape, require
from ..helpers.channels import channels_last, channels_second
from ..helpers.compute import is_float, widen_dtype
from ..helpers.kernels import emit_loops, let, serial
from ..helpers.requirements import require_choice
from ..math.matmul import round_to

_MAX_SAMPLES = 1 << 12  # samples along a side of one element of the result
_MAX_SIDE = 1 << 16  # of a side of the result


@op("RoiAlign", since=10)
def roi_align_10(node: Node, x: Value, rois: Value, batches: Value) -> Value:
    return _roi_align(node, x, rois, batches, "output_half_pixel")


@op("RoiAlign", since=16)
def roi_align(node: Node, x: Value, rois: Value, batches: Value) -> Value:
    return _roi_align(node, x, rois, batches, node.attr("coordinate_transformation_mode", "half_pixel"))


def _roi_align(node: Node, x: Value, rois: Value, batches: Value, coordinates: str) -> Value:
    """Emit [R, C, output_height, output_width] of X [N, C, H, W].

    rois is [R, 4], and batches [R] the batch of each.
    """
    mode, ratio, scale = node.attr("mode", "avg"), node.attr("sampling_ratio", 0), node.attr("spatial_scale", 1.0)
    out_sizes = [node.attr(f"output_{side}", 1) for side in ("height", "width")]
    _check_attributes(node, mode, coordinates, ratio, out_sizes)
    _check_types(node, x, rois, batches)
    count, acc, half = rois.shape[0], widen_dtype(x.dtype), coordinates == "half_pixel"
    rois = assert_shape(node, rois, (count, 4))
    batches = assert_in_bounds(
        node, assert_shape(node, batches, (count,)), x.shape[0], bound_name="dimension 0 of X", from_the_back=False
    )
    batches = node.emit(relax.op.astype(node.tensor(batches), "int64"))
    for axis in (2, 3):
        is_legal = symbolic.logical_or(symbolic.less(0, x.shape[axis]), symbolic.equal(count, 0))
        x = require(node, x, is_legal, "roi_align.input_empty", f"dimension {axis} of X is empty.")
    last, rois = round_to(node, channels_last(node, x), acc), round_to(node, rois, acc)
    height, width, channels = last.shape[1:]

    def number(value: float) -> Any:
        return tirx.const(float(value), acc)

    def statements(x: Any, rois: Any, batch: Any, y: Any) -> None:
        with independent_loops(count, *out_sizes) as (r, ph, pw):
            sides = [
                _compute_side(rois[r, 1 - k], rois[r, 3 - k], out_sizes[k], scale, half, ratio, number) for k in (0, 1)
            ]
            _assert_few_samples(node, [samples for _, _, samples in sides], number)
            first = T.bind(batch[r])
            grids = [let(tirx.min(sample_count, number(_MAX_SAMPLES)).astype("int64")) for _, _, sample_count in sides]
            with serial(channels) as c:
                T.buffer_store(y, number(0), [r, ph, pw, c])
            with serial(grids[0]) as iy, serial(grids[1]) as ix:
                locations = [
                    _locate_sample(start, size, p, i, sample_count, extent, number)
                    for (start, size, sample_count), p, i, extent in zip(sides, (ph, pw), (iy, ix), (height, width))
                ]
                is_inside = let(tirx.all(locations[0][0], locations[1][0]))
                weights = [let(tirx.Select(is_inside, w, number(0))) for w in _compute_weights(locations)]
                corners = [(locations[0][1 + a], locations[1][1 + b]) for a in (0, 1) for b in (0, 1)]
                with serial(channels) as c:
                    terms = [w * x[first, h, v, c] for w, (h, v) in zip(weights, corners)]
                    value = _accumulate_sample(mode, y[r, ph, pw, c], terms, tirx.all(iy == 0, ix == 0))
                    T.buffer_store(y, value, [r, ph, pw, c])
            if mode == "avg":
                samples = let(tirx.max(grids[0] * grids[1], tirx.const(1, "int64")).astype(acc))
                with serial(channels) as c:
                    T.buffer_store(y, y[r, ph, pw, c] / samples, [r, ph, pw, c])

    shape = (count, out_sizes[0], out_sizes[1], channels)
    (y,) = emit_loops(node, "roi_align", statements, [last, rois, batches], [(shape, acc)], x.shape)
    return channels_second(node, round_to(node, y, x.dtype))


def _check_attributes(node: Node, mode: str, coordinates: str, ratio: int, out_sizes: list[int]) -> None:
    """Raise NodeError for unknown modes, and for numbers of elements or samples that are out of range."""
    for name, attribute, legal in (
        ("mode", mode, ("avg", "max")),
        ("coordinate_transformation_mode", coordinates, ("half_pixel", "output_half_pixel")),
    ):
        require_choice(node, name, attribute, legal, code="roi_align.attribute_unsupported")
    if not all(1 <= n <= _MAX_SIDE for n in out_sizes) or not 0 <= ratio <= _MAX_SAMPLES:
        raise node.error(
            "roi_align.size_out_of_range",
            f"a result of {out_sizes} with sampling_ratio {ratio} is not supported.",
            f"Use sizes of 1 to {_MAX_SIDE}, and a sampling_ratio of 0 to {_MAX_SAMPLES}.",
        )


def _check_types(node: Node, x: Value, rois: Value, batches: Value) -> None:
    """Raise NodeError for other ranks and types than those of the operator."""
    if (x.rank, rois.rank, batches.rank) != (4, 2, 1) or not is_float(x.dtype) or rois.dtype != x.dtype:
        raise node.error(
            "roi_align.input_unsupported",
            f"X is {x.dtype} of rank {x.rank}, rois {rois.dtype} of rank {rois.rank}, batch_indices of rank "
            f"{batches.rank}.",
            "Give X the shape [N, C, H, W] and a float type, rois [R, 4] and the type of X, and batch_indices [R].",
        )


def _compute_side(
    low: Any, high: Any, out_size: int, scale: float, half: bool, ratio: int, number: Any
) -> tuple[Any, Any, Any]:
    """Return the start of a region along an axis, its extent per element, and its number of samples."""
    start, end = (v * number(scale) - number(0.5 if half else 0.0) for v in (low, high))
    size = let((end - start if half else tirx.max(end - start, number(1))) / number(out_size))
    # A NaN gives 0 samples.
    samples = number(ratio) if ratio else tirx.Select(size > number(0), tirx.ceil(size), number(0))
    return let(start), size, let(samples)


def _assert_few_samples(node: Node, counts: list[Any], number: Any) -> None:
    """Assert at run time that no side of an element of the result has too many samples."""
    text = (
        f"[roi_align.too_many_samples] {node.where}: a region of input 'rois' needs more than {_MAX_SAMPLES} "
        "samples along a side of an output element."
    )
    for samples in counts:
        with T.Assert(samples <= number(_MAX_SAMPLES), text, "ValueError"):
            pass


def _locate_sample(
    start: Any, size: Any, p: Any, i: Any, samples: Any, extent: Any, number: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """Return whether a sample is in X, its neighbors along an axis, and their weights."""
    dtype = number(0).ty
    position = let(start + p.astype(dtype) * size + (i.astype(dtype) + number(0.5)) * size / samples)
    wide = extent.astype(dtype) if isinstance(extent, tirx.Var) else number(extent)
    is_inside = let(tirx.all(position >= number(-1), position <= wide))
    position = let(tirx.Select(is_inside, tirx.max(position, number(0)), number(0)))
    last = extent - tirx.const(1, "int64")
    low = let(tirx.min(position.astype("int64"), last))
    fraction = let(tirx.Select(low >= last, number(0), position - low.astype(dtype)))
    return is_inside, low, let(tirx.min(low + 1, last)), number(1) - fraction, fraction


def _compute_weights(locations: list[tuple[Any, ...]]) -> list[Any]:
    return [locations[0][3 + a] * locations[1][3 + b] for a in (0, 1) for b in (0, 1)]


def _accumulate_sample(mode: str, before: Any, terms: list[Any], is_first: Any) -> Any:
    """Return the sum of samples, or their maximum, with the sample of these weighted elements."""
    if mode == "avg":
        return before + (terms[0] + terms[1] + terms[2] + terms[3])
    # As in the standard's reference: the largest of the weighted elements.
    best = tirx.max(tirx.max(terms[0], terms[1]), tirx.max(terms[2], terms[3]))
    return tirx.Select(is_first, best, tirx.max(before, best))
