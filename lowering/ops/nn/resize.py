"""ONNX Resize (https://onnx.ai/onnx/operators/onnx__Resize.html) and Upsample: one axis after the other.

Small tables are computed first for each axis, in float64 as in the standard's formulas. For every position of the
result they contain the first neighbor in X, and the weights. Then an element is a sum of a few elements of X, or one of
them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import require
from ..helpers.channels import unify_layouts
from ..helpers.compute import is_float, widen_dtype
from ..helpers.contents import normalize_axis, read_sizes
from ..helpers.kernels import compute, emit_loops, let
from ..helpers.requirements import read_choice, require_choice, require_dtype
from ..helpers.run_time import bind_sizes, compute_sizes
from ..tensor.slice import emit_slice
from .resized_axis import (
    AxisParameters,
    ResizedAxis,
    ResizeSettings,
    clamp_index,
    compute_weight,
    count_neighbors,
    map_coordinate,
    to_float64,
    to_index,
)

_COORDINATES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
)  # fmt: skip
_ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_POLICIES = ("stretch", "not_larger", "not_smaller")
_MAX_OUT_SIZE = 2.0**40  # elements along an axis of a result
_UNROLLED = 8  # neighbors whose sum is unrolled


@op("Upsample", since=7)
def upsample_7(node: Node, x: Value) -> Value:
    scales = node.constant(np.asarray(node.attr("scales"), np.float32))
    return _emit_resize(
        node, x, ResizeSettings(_read_mode(node, "asymmetric"), "asymmetric"), range(x.rank), scales, None
    )


@op("Upsample", since=9)
@op("Resize", since=10)
def resize_10(node: Node, x: Value, scales: Value) -> Value:
    return _emit_resize(
        node, x, ResizeSettings(_read_mode(node, "asymmetric"), "asymmetric"), range(x.rank), scales, None
    )


@op("Resize", since=11)
def resize(
    node: Node, x: Value, roi: Value | None = None, scales: Value | None = None, sizes: Value | None = None
) -> Value:
    coordinates = node.attr("coordinate_transformation_mode", "half_pixel")
    settings = ResizeSettings(
        mode=_read_mode(node, coordinates),
        coordinates=coordinates,
        rounding=_read_choice(node, "nearest_mode", "round_prefer_floor", _ROUNDINGS),
        cubic=node.attr("cubic_coeff_a", -0.75),
        exclude_outside=bool(node.attr("exclude_outside", 0)),
        antialias=bool(node.attr("antialias", 0)),
        extrapolation=node.attr("extrapolation_value", 0.0),
    )
    if settings.antialias and settings.mode == "nearest":
        raise node.error(
            "resize.antialias_unsupported", "attribute antialias is 1 in mode 'nearest'.", "Use 'linear' or 'cubic'."
        )
    axes = [normalize_axis(node, axis, x.rank) for axis in node.attr("axes", None) or range(x.rank)]
    scales, sizes = (None if v is None or v.shape == (0,) else v for v in (scales, sizes))
    if (scales is None) == (sizes is None):
        raise node.error(
            "resize.size_ambiguous",
            "exactly one of the inputs scales and sizes is required.",
            "Give one of them, and leave the other empty.",
        )
    return _emit_resize(node, x, settings, axes, scales, sizes, roi)


def _read_choice(node: Node, name: str, default: str, legal: Sequence[str]) -> str:
    return str(read_choice(node, name, default, legal, code="resize.attribute_unsupported"))


def _read_mode(node: Node, coordinates: str) -> str:
    require_choice(
        node, "coordinate_transformation_mode", coordinates, _COORDINATES, code="resize.attribute_unsupported"
    )
    mode = _read_choice(node, "mode", "nearest", ("nearest", "linear", "bilinear", "trilinear", "cubic"))
    return "linear" if mode.endswith("linear") else mode


def _emit_resize(
    node: Node,
    x: Value,
    settings: ResizeSettings,
    axes: Sequence[int],
    scales: Value | None,
    sizes: Value | None,
    roi: Value | None = None,
) -> Value:
    if len(set(axes)) != len(axes):
        raise node.error("resize.axes_repeated", f"attribute axes names an axis twice: {list(axes)}.")
    count = len(axes)
    for name, value, length in (("scales", scales, count), ("sizes", sizes, count)):
        if value is not None and value.shape != (length,):
            raise node.error(
                "resize.shape_mismatch",
                f"input {name} has the shape {list(value.shape)}, for {length} axes.",
                f"Give it the shape [{length}].",
            )
    if settings.mode == "nearest" or is_float(x.dtype) or x.dtype in ("uint8", "int8", "int32"):
        changes = _apply_scales(node, x, axes, scales) if scales is not None else _apply_sizes(node, x, axes, sizes)
    else:
        raise node.error(
            "resize.dtype_unsupported", f"mode '{settings.mode}' of {x.dtype} is not supported.", "Cast X to float32."
        )
    if settings.coordinates == "tf_crop_and_resize":
        changes = _apply_roi(node, changes, roi)
    dtype = x.dtype
    # Elements of the last axis are gathered: before other axes grow, and after axes that shrink.
    for change in sorted(changes, key=lambda c: (c.grows, -c.axis if c.grows else c.axis)):
        is_unscaled = change.scale is None or change.scale == 1.0
        if is_unscaled and change.roi is None and node.symbols.equal(change.in_size, change.out_size):
            continue
        legal = symbolic.logical_or(symbolic.less(0, change.in_size), symbolic.equal(change.out_size, 0))
        x = require(
            node,
            x,
            legal,
            "resize.input_empty",
            f"dimension {change.axis} of X is empty, and the output has {{}} elements along it.",
            change.out_size,
        )
        x = (_emit_nearest if settings.mode == "nearest" else _emit_interpolated)(node, x, settings, change, dtype)
    return x if x.dtype == dtype else node.emit(relax.op.astype(node.tensor(x), dtype))


# Sizes.


def _apply_scales(node: Node, x: Value, axes: Sequence[int], scales: Value) -> list[ResizedAxis]:
    require_dtype(node, "scales", scales, "float32", code="resize.scales_dtype_unsupported")
    in_sizes = [x.shape[axis] for axis in axes]
    if scales.constant is None:
        return _apply_runtime_scales(node, x, axes, scales)
    resized_axes = []
    for axis, size, scale in zip(axes, in_sizes, scales.constant.tolist()):
        if not 0 < scale < 2**20:
            raise node.error("resize.scale_out_of_range", f"input scales holds {scale}.", "Use positive numbers.")
        ratio = Fraction(scale)
        if isinstance(size, int):
            out_size: Size = math.floor(size * ratio)
        else:
            if ratio.denominator > 2**16:  # not a short binary fraction; the multiplication would exceed 64 bits
                ratio = ratio.limit_denominator(2**12)
            out_size = node.simplify(symbolic.floor_divide(symbolic.multiply(size, ratio.numerator), ratio.denominator))
        resized_axes.append(ResizedAxis(axis, size, out_size, scale))
    return resized_axes


def _apply_runtime_scales(node: Node, x: Value, axes: Sequence[int], scales: Value) -> list[ResizedAxis]:
    in_sizes = [x.shape[axis] for axis in axes]

    def compute_out_sizes(buffer: Any) -> list[Any]:
        scaled = [to_float64(size) * buffer[k].astype("float64") for k, size in enumerate(in_sizes)]
        legal = [
            tirx.all(buffer[k] > tirx.const(0.0, "float32"), p < to_float64(_MAX_OUT_SIZE))
            for k, p in enumerate(scaled)
        ]
        return [tirx.if_then_else(ok, to_index(tirx.floor(p)), tirx.const(-1, "int64")) for ok, p in zip(legal, scaled)]

    out_sizes = compute_sizes(node, "resized", len(axes), compute_out_sizes, [scales], in_sizes)
    other_dims = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    numbers = node.emit(relax.op.astype(node.tensor(scales), "float64"))
    return [
        ResizedAxis(axis, size, new, emit_slice(node, numbers, [k], [1], (1,)))
        for k, (axis, size, new) in enumerate(
            zip(axes, in_sizes, bind_sizes(node, out_sizes, (other_dims, x.dtype), source=scales))
        )
    ]


def _apply_sizes(node: Node, x: Value, axes: Sequence[int], sizes: Value | None) -> list[ResizedAxis]:
    assert sizes is not None
    require_dtype(node, "sizes", sizes, "int64", code="resize.sizes_dtype_unsupported")
    out_sizes = read_sizes(sizes)
    if out_sizes is None:
        other_dims = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
        out_sizes = bind_sizes(node, sizes, (other_dims, x.dtype))
    if any(isinstance(size, int) and size < 0 for size in out_sizes):
        raise node.error(
            "node.negative_size",
            f"input sizes holds {min(size for size in out_sizes if isinstance(size, int))}.",
            "Use sizes of 0 or more.",
        )
    policy = _read_choice(node, "keep_aspect_ratio_policy", "stretch", _POLICIES)
    if policy == "stretch":
        return [ResizedAxis(axis, x.shape[axis], out_size, None) for axis, out_size in zip(axes, out_sizes)]
    in_sizes = [x.shape[axis] for axis in axes]
    if 0 in in_sizes or 0 in out_sizes:
        raise node.error("resize.aspect_ratio_undefined", f"keep_aspect_ratio_policy '{policy}' needs positive sizes.")
    if not all(isinstance(size, int) for size in (*in_sizes, *out_sizes)):
        return _apply_runtime_ratios(node, x, axes, out_sizes, policy)
    scale = (min if policy == "not_larger" else max)(out_size / size for size, out_size in zip(in_sizes, out_sizes))
    return [ResizedAxis(axis, size, int(scale * size + 0.5), scale) for axis, size in zip(axes, in_sizes)]


def _apply_runtime_ratios(
    node: Node, x: Value, axes: Sequence[int], out_sizes: Sequence[Size], policy: str
) -> list[ResizedAxis]:
    """Apply the aspect-ratio policy to dynamic sizes.

    It takes the smallest or largest of all scales, in run-time arithmetic.
    """
    in_sizes, choose = [x.shape[axis] for axis in axes], tirx.min if policy == "not_larger" else tirx.max

    def scale() -> Any:
        return functools.reduce(
            choose, (to_float64(out_size) / to_float64(size) for size, out_size in zip(in_sizes, out_sizes))
        )

    def compute_out_sizes() -> list[Any]:
        legal = tirx.all(*(to_float64(size) > to_float64(0.0) for size in (*in_sizes, *out_sizes)))
        scaled = [tirx.floor(let(scale()) * to_float64(size) + to_float64(0.5)) for size in in_sizes]
        return [
            tirx.if_then_else(tirx.all(legal, p < to_float64(_MAX_OUT_SIZE)), to_index(p), tirx.const(-1, "int64"))
            for p in scaled
        ]

    sizes = [*in_sizes, *out_sizes]
    (ratio,) = emit_loops(node, "ratio", lambda out: T.buffer_store(out, scale(), [0]), [], [((1,), "float64")], sizes)
    other_dims = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    results = bind_sizes(
        node, compute_sizes(node, "resized", len(axes), compute_out_sizes, [], sizes), (other_dims, x.dtype)
    )
    return [ResizedAxis(axis, size, result, ratio) for axis, size, result in zip(axes, in_sizes, results)]


def _apply_roi(node: Node, changes: list[ResizedAxis], roi: Value | None) -> list[ResizedAxis]:
    count = len(changes)
    if roi is None or roi.shape != (2 * count,):
        raise node.error(
            "resize.roi_missing", "tf_crop_and_resize needs the input roi.", f"Give it the shape [{2 * count}]."
        )
    roi_values = node.emit(relax.op.astype(node.tensor(roi), "float64"))

    def emit_ends(k: int) -> Value:
        return compute(
            node, "roi", lambda i, r, offset: r(offset + i[0] * count), [roi_values], (2,), sizes=[k], dtype="float64"
        )  # its beginning, and after all beginnings its end

    return [replace(change, roi=emit_ends(k)) for k, change in enumerate(changes)]


# Kernels.


def _emit_nearest(node: Node, x: Value, settings: ResizeSettings, change: ResizedAxis, dtype: str) -> Value:
    def nearest(index: Any, parameters: AxisParameters) -> Any:
        position, half = map_coordinate(settings, index[0], parameters), to_float64(0.5)
        rounded = {
            "floor": lambda: tirx.floor(position),
            "ceil": lambda: tirx.ceil(position),
            "round_prefer_floor": lambda: tirx.ceil(position - half),
            "round_prefer_ceil": lambda: tirx.floor(position + half),
        }[settings.rounding]()
        return clamp_index(to_index(rounded), parameters.in_size)

    (stored,), order, back = unify_layouts(node, x)
    axis = order.index(change.axis)
    shape = (*stored.shape[:axis], change.out_size, *stored.shape[axis + 1 :])
    tables = [change.table(node, "nearest", nearest, "int64"), *_emit_outside_tables(node, settings, change)]

    def element(index: tuple[Any, ...], x: Any, neighbor: Any, *outside: Any) -> Any:
        value = x(*index[:axis], neighbor(index[axis]), *index[axis + 1 :])
        return _replace_outside(outside, index[axis], value, settings)

    return back(compute(node, "resize", element, [stored, *tables], shape))


def _emit_interpolated(node: Node, x: Value, settings: ResizeSettings, change: ResizedAxis, dtype: str) -> Value:
    """Emit the interpolation along one axis, in the accumulator type."""
    count, first = count_neighbors(node, settings, change)

    def base(position: Any) -> Any:
        return tirx.ceil(position) - to_float64(1.0)  # an element is the second of two, as in the standard

    def neighbor(index: Any, parameters: AxisParameters) -> Any:
        return clamp_index(
            to_index(base(map_coordinate(settings, index[0], parameters))) + first + index[1], parameters.in_size
        )

    def weight(index: Any, parameters: AxisParameters) -> Any:
        position = let(map_coordinate(settings, index[0], parameters))
        before = let(base(position))
        number = index[1] + first
        value = compute_weight(settings, parameters.scale, number.astype("float64") - (position - before))
        if settings.exclude_outside:
            neighbor_index = let(to_index(before) + number)
            value = tirx.Select(
                tirx.all(neighbor_index >= 0, neighbor_index < parameters.in_size), value, to_float64(0.0)
            )
        return value

    acc = widen_dtype(x.dtype) if is_float(x.dtype) else "float32"
    (stored,), order, back = unify_layouts(node, x)
    axis = order.index(change.axis)
    weights = change.table(node, "weights", weight, "float64", count)
    if settings.exclude_outside or settings.antialias:
        weights = _normalize_weights(node, weights)
    weights = node.emit(relax.op.astype(node.tensor(weights), acc))
    tables = [change.table(node, "neighbors", neighbor, "int64", count), weights]
    outside = _emit_outside_tables(node, settings, change)
    shape = (*stored.shape[:axis], change.out_size, *stored.shape[axis + 1 :])

    def term(index: tuple[Any, ...], k: Any, x: Any, count_neighbors: Any, weights: Any) -> Any:
        return x(*index[:axis], count_neighbors(index[axis], k), *index[axis + 1 :]).astype(acc) * weights(
            index[axis], k
        )

    def sum_unrolled(index: tuple[Any, ...], *reads: Any) -> Any:
        terms = (term(index, tirx.const(k, "int64"), *reads[:3]) for k in range(count))
        return _replace_outside(reads[3:], index[axis], functools.reduce(operator.add, terms), settings)

    def sum_reduced(index: tuple[Any, ...], *reads: Any) -> Any:
        *tensors, extent = reads
        k = te.reduce_axis((0, extent), name="k")
        return te.sum(term(index, k.var.astype("int64"), *tensors), axis=[k])

    def select_inside(index: tuple[Any, ...], value: Any, *outside: Any) -> Any:
        return _replace_outside(outside, index[axis], value(*index), settings)

    if isinstance(count, int) and count <= _UNROLLED:
        return back(compute(node, "resize", sum_unrolled, [stored, *tables, *outside], shape, dtype=acc))
    y = compute(node, "resize", sum_reduced, [stored, *tables], shape, sizes=[count], dtype=acc)
    return back(compute(node, "inside", select_inside, [y, *outside], shape, dtype=acc) if outside else y)


def _normalize_weights(node: Node, weights: Value) -> Value:
    total = node.emit(relax.op.sum(node.tensor(weights), axis=[1], keepdims=True))

    def share(index: Any, weight: Any, total: Any) -> Any:
        row_sum = total(index[0], tirx.const(0, "int64"))
        return weight(*index) / tirx.Select(row_sum == to_float64(0.0), to_float64(1.0), row_sum)

    return compute(node, "normalized", share, [weights, total], weights.shape)


def _emit_outside_tables(node: Node, settings: ResizeSettings, change: ResizedAxis) -> list[Value]:
    """Return for tf_crop_and_resize a table of the positions of the result that lie outside X."""
    if settings.coordinates != "tf_crop_and_resize":
        return []

    def outside(index: Any, parameters: AxisParameters) -> Any:
        position = map_coordinate(settings, index[0], parameters)
        return tirx.any(position < to_float64(0.0), position > to_float64(parameters.in_size - 1))

    return [change.table(node, "outside", outside, "bool")]


def _replace_outside(outside: Sequence[Any], o: Any, value: Any, settings: ResizeSettings) -> Any:
    if not outside:
        return value
    return tirx.Select(outside[0](o), tirx.const(settings.extrapolation, value.ty), value)
