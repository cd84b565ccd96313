"""ONNX Resize (https://onnx.ai/onnx/operators/onnx__Resize.html) and Upsample: one axis after the other.

Of each axis small tables are computed first, in float64 as the standard's formulas have it: for every place of the
result where its neighbors begin in X, and their weights. Then an element is a sum of a few, or one of X.
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

from ..importing import symbolic
from ..importing.channels import as_computed
from ..importing.compute import is_float, widened
from ..importing.node import Node
from ..importing.values import Size, Value
from . import op
from .asserted import required
from .contents import sizes as contents_of
from .contents import static_axis
from .kernels import compute, let, loops
from .resized_axis import Along, Place, Settings, as_index, clamped, coordinate, neighbors, weight_at, wide
from .run_time import bind, compute_sizes
from .slice import cut

_COORDINATES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
)  # fmt: skip
_ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_POLICIES = ("stretch", "not_larger", "not_smaller")
_MOST = 2.0**40  # places of a result
_UNROLLED = 8  # neighbors whose sum is written out


@op("Upsample", since=7)
def upsample_7(node: Node, x: Value) -> Value:
    scales = node.constant(np.asarray(node.attr("scales"), np.float32))
    return _resized(node, x, Settings(_mode(node, "asymmetric"), "asymmetric"), range(x.rank), scales, None)


@op("Upsample", since=9)
@op("Resize", since=10)
def resize_10(node: Node, x: Value, scales: Value) -> Value:
    return _resized(node, x, Settings(_mode(node, "asymmetric"), "asymmetric"), range(x.rank), scales, None)


@op("Resize", since=11)
def resize(
    node: Node, x: Value, roi: Value | None = None, scales: Value | None = None, sizes: Value | None = None
) -> Value:
    coordinates = node.attr("coordinate_transformation_mode", "half_pixel")
    settings = Settings(
        mode=_mode(node, coordinates),
        coordinates=coordinates,
        rounding=_one_of(node, "nearest_mode", "round_prefer_floor", _ROUNDINGS),
        cubic=node.attr("cubic_coeff_a", -0.75),
        exclude_outside=bool(node.attr("exclude_outside", 0)),
        antialias=bool(node.attr("antialias", 0)),
        extrapolation=node.attr("extrapolation_value", 0.0),
    )
    if settings.antialias and settings.mode == "nearest":
        raise node.error("attribute antialias is 1 in mode 'nearest'.", "Use 'linear' or 'cubic'.")
    axes = [static_axis(node, axis, x.rank) for axis in node.attr("axes", None) or range(x.rank)]
    scales, sizes = (None if v is None or v.shape == (0,) else v for v in (scales, sizes))
    if (scales is None) == (sizes is None):
        raise node.error("it needs one of the inputs scales and sizes.", "Give one of them, and leave the other empty.")
    return _resized(node, x, settings, axes, scales, sizes, roi)


def _one_of(node: Node, name: str, default: str, legal: Sequence[str]) -> str:
    given = node.attr(name, default)
    if given not in legal:
        raise node.error(f"attribute {name} is '{given}'.", f"Use one of {', '.join(legal)}.")
    return str(given)


def _mode(node: Node, coordinates: str) -> str:
    if coordinates not in _COORDINATES:
        raise node.error(
            f"attribute coordinate_transformation_mode is '{coordinates}'.", f"Use one of {', '.join(_COORDINATES)}."
        )
    mode = _one_of(node, "mode", "nearest", ("nearest", "linear", "bilinear", "trilinear", "cubic"))
    return "linear" if mode.endswith("linear") else mode


def _resized(
    node: Node,
    x: Value,
    settings: Settings,
    axes: Sequence[int],
    scales: Value | None,
    sizes: Value | None,
    roi: Value | None = None,
) -> Value:
    if len(set(axes)) != len(axes):
        raise node.error(f"attribute axes names an axis twice: {list(axes)}.")
    count = len(axes)
    for name, value, wanted in (("scales", scales, count), ("sizes", sizes, count)):
        if value is not None and value.shape != (wanted,):
            raise node.error(f"input {name} is {list(value.shape)}, for {wanted} axes.", f"Make it [{wanted}].")
    if settings.mode == "nearest" or is_float(x.dtype) or x.dtype in ("uint8", "int8", "int32"):
        changes = _by_scales(node, x, axes, scales) if scales is not None else _by_sizes(node, x, axes, sizes)
    else:
        raise node.error(f"mode '{settings.mode}' of {x.dtype} is not supported.", "Cast X to float32.")
    if settings.coordinates == "tf_crop_and_resize":
        changes = _cropped(node, changes, roi)
    dtype = x.dtype
    # Elements of the last axis are gathered: before others grow, and behind those that shrink.
    for change in sorted(changes, key=lambda c: (c.grows, -c.axis if c.grows else c.axis)):
        known = change.scale is None or change.scale == 1.0
        if known and change.roi is None and node.symbols.equal(change.given, change.made):
            continue
        legal = symbolic.logical_or(symbolic.less(0, change.given), symbolic.equal(change.made, 0))
        x = required(
            node, x, legal, f"dimension {change.axis} of X is empty, and {{}} places are asked for.", change.made
        )
        x = (_nearest if settings.mode == "nearest" else _interpolated)(node, x, settings, change, dtype)
    return x if x.dtype == dtype else node.emit(relax.op.astype(node.tensor(x), dtype))


# Sizes.


def _by_scales(node: Node, x: Value, axes: Sequence[int], scales: Value) -> list[Along]:
    if scales.dtype != "float32":
        raise node.error(f"input scales is {scales.dtype}.", "Make it float32.")
    given = [x.shape[axis] for axis in axes]
    if scales.constant is None:
        return _by_run_time_scales(node, x, axes, scales)
    found = []
    for axis, size, scale in zip(axes, given, scales.constant.tolist()):
        if not 0 < scale < 2**20:
            raise node.error(f"input scales holds {scale}.", "Use positive numbers.")
        ratio = Fraction(scale)
        if isinstance(size, int):
            made: Size = math.floor(size * ratio)
        else:
            if ratio.denominator > 2**16:  # of no short binary fraction; the product would leave 64 bits
                ratio = ratio.limit_denominator(2**12)
            made = node.simplify(symbolic.floor_divide(symbolic.multiply(size, ratio.numerator), ratio.denominator))
        found.append(Along(axis, size, made, scale))
    return found


def _by_run_time_scales(node: Node, x: Value, axes: Sequence[int], scales: Value) -> list[Along]:
    given = [x.shape[axis] for axis in axes]

    def made(buffer: Any) -> list[Any]:
        products = [wide(size) * buffer[k].astype("float64") for k, size in enumerate(given)]
        legal = [tirx.all(buffer[k] > tirx.const(0.0, "float32"), p < wide(_MOST)) for k, p in enumerate(products)]
        return [
            tirx.if_then_else(ok, as_index(tirx.floor(p)), tirx.const(-1, "int64")) for ok, p in zip(legal, products)
        ]

    places = compute_sizes(node, "resized", len(axes), made, [scales], given)
    others = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    numbers = node.emit(relax.op.astype(node.tensor(scales), "float64"))
    return [
        Along(axis, size, new, cut(node, numbers, [k], [1], (1,)))
        for k, (axis, size, new) in enumerate(zip(axes, given, bind(node, places, (others, x.dtype), of=scales)))
    ]


def _by_sizes(node: Node, x: Value, axes: Sequence[int], sizes: Value | None) -> list[Along]:
    assert sizes is not None
    if sizes.dtype != "int64":
        raise node.error(f"input sizes is {sizes.dtype}.", "Make it int64.")
    known = contents_of(sizes)
    if known is None:
        others = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
        known = bind(node, sizes, (others, x.dtype))
    if any(isinstance(size, int) and size < 0 for size in known):
        raise node.error(f"input sizes holds {min(size for size in known if isinstance(size, int))}.")
    policy = _one_of(node, "keep_aspect_ratio_policy", "stretch", _POLICIES)
    if policy == "stretch":
        return [Along(axis, x.shape[axis], made, None) for axis, made in zip(axes, known)]
    given = [x.shape[axis] for axis in axes]
    if 0 in given or 0 in known:
        raise node.error(f"keep_aspect_ratio_policy '{policy}' needs sizes that are positive.")
    if not all(isinstance(size, int) for size in (*given, *known)):
        return _by_ratios_of_run(node, x, axes, known, policy)
    scale = (min if policy == "not_larger" else max)(made / size for size, made in zip(given, known))
    return [Along(axis, size, int(scale * size + 0.5), scale) for axis, size in zip(axes, given)]


def _by_ratios_of_run(node: Node, x: Value, axes: Sequence[int], known: Sequence[Size], policy: str) -> list[Along]:
    """The same of sizes that the run tells: with the smallest or largest of all scales, in its arithmetic."""
    given, choose = [x.shape[axis] for axis in axes], tirx.min if policy == "not_larger" else tirx.max

    def scale() -> Any:
        return functools.reduce(choose, (wide(made) / wide(size) for size, made in zip(given, known)))

    def made() -> list[Any]:
        legal = tirx.all(*(wide(size) > wide(0.0) for size in (*given, *known)))
        products = [tirx.floor(let(scale()) * wide(size) + wide(0.5)) for size in given]
        return [
            tirx.if_then_else(tirx.all(legal, p < wide(_MOST)), as_index(p), tirx.const(-1, "int64")) for p in products
        ]

    sizes = [*given, *known]
    (ratio,) = loops(node, "ratio", lambda out: T.buffer_store(out, scale(), [0]), [], [((1,), "float64")], sizes)
    others = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    results = bind(node, compute_sizes(node, "resized", len(axes), made, [], sizes), (others, x.dtype))
    return [Along(axis, size, result, ratio) for axis, size, result in zip(axes, given, results)]


def _cropped(node: Node, changes: list[Along], roi: Value | None) -> list[Along]:
    count = len(changes)
    if roi is None or roi.shape != (2 * count,):
        raise node.error("tf_crop_and_resize needs the input roi.", f"Make it [{2 * count}].")
    wide = node.emit(relax.op.astype(node.tensor(roi), "float64"))

    def ends(k: int) -> Value:
        return compute(
            node, "roi", lambda i, r, at: r(at + i[0] * count), [wide], (2,), sizes=[k], dtype="float64"
        )  # its beginning, and behind all beginnings its end

    return [replace(change, roi=ends(k)) for k, change in enumerate(changes)]


# Kernels.


def _nearest(node: Node, x: Value, settings: Settings, change: Along, dtype: str) -> Value:
    def nearest(index: Any, place: Place) -> Any:
        at, half = coordinate(settings, index[0], place), wide(0.5)
        rounded = {
            "floor": lambda: tirx.floor(at),
            "ceil": lambda: tirx.ceil(at),
            "round_prefer_floor": lambda: tirx.ceil(at - half),
            "round_prefer_ceil": lambda: tirx.floor(at + half),
        }[settings.rounding]()
        return clamped(as_index(rounded), place.given)

    (stored,), order, back = as_computed(node, x)
    axis = order.index(change.axis)
    shape = (*stored.shape[:axis], change.made, *stored.shape[axis + 1 :])
    tables = [change.table(node, "nearest", nearest, "int64"), *_outside(node, settings, change)]

    def element(index: tuple[Any, ...], x: Any, at: Any, *outside: Any) -> Any:
        value = x(*index[:axis], at(index[axis]), *index[axis + 1 :])
        return _unless(outside, index[axis], value, settings)

    return back(compute(node, "resize", element, [stored, *tables], shape))


def _interpolated(node: Node, x: Value, settings: Settings, change: Along, dtype: str) -> Value:
    """In the type of the sums."""
    count, first = neighbors(node, settings, change)

    def base(at: Any) -> Any:
        return tirx.ceil(at) - wide(1.0)  # an element counts as the second of two, as in the standard

    def neighbor(index: Any, place: Place) -> Any:
        return clamped(as_index(base(coordinate(settings, index[0], place))) + first + index[1], place.given)

    def weight(index: Any, place: Place) -> Any:
        at = let(coordinate(settings, index[0], place))
        before = let(base(at))
        number = index[1] + first
        value = weight_at(settings, place.scale, number.astype("float64") - (at - before))
        if settings.exclude_outside:
            where = let(as_index(before) + number)
            value = tirx.Select(tirx.all(where >= 0, where < place.given), value, wide(0.0))
        return value

    acc = widened(x.dtype) if is_float(x.dtype) else "float32"
    (stored,), order, back = as_computed(node, x)
    axis = order.index(change.axis)
    weights = change.table(node, "weights", weight, "float64", count)
    if settings.exclude_outside or settings.antialias:
        weights = _normalized(node, weights)
    weights = node.emit(relax.op.astype(node.tensor(weights), acc))
    tables = [change.table(node, "neighbors", neighbor, "int64", count), weights]
    outside = _outside(node, settings, change)
    shape = (*stored.shape[:axis], change.made, *stored.shape[axis + 1 :])

    def term(index: tuple[Any, ...], k: Any, x: Any, neighbors: Any, weights: Any) -> Any:
        return x(*index[:axis], neighbors(index[axis], k), *index[axis + 1 :]).astype(acc) * weights(index[axis], k)

    def written_out(index: tuple[Any, ...], *reads: Any) -> Any:
        terms = (term(index, tirx.const(k, "int64"), *reads[:3]) for k in range(count))
        return _unless(reads[3:], index[axis], functools.reduce(operator.add, terms), settings)

    def summed(index: tuple[Any, ...], *reads: Any) -> Any:
        *tensors, extent = reads
        k = te.reduce_axis((0, extent), name="k")
        return te.sum(term(index, k.var.astype("int64"), *tensors), axis=[k])

    def inside(index: tuple[Any, ...], value: Any, *outside: Any) -> Any:
        return _unless(outside, index[axis], value(*index), settings)

    if isinstance(count, int) and count <= _UNROLLED:
        return back(compute(node, "resize", written_out, [stored, *tables, *outside], shape, dtype=acc))
    y = compute(node, "resize", summed, [stored, *tables], shape, sizes=[count], dtype=acc)
    return back(compute(node, "inside", inside, [y, *outside], shape, dtype=acc) if outside else y)


def _normalized(node: Node, weights: Value) -> Value:
    total = node.emit(relax.op.sum(node.tensor(weights), axis=[1], keepdims=True))

    def share(index: Any, weight: Any, total: Any) -> Any:
        sum_of = total(index[0], tirx.const(0, "int64"))
        return weight(*index) / tirx.Select(sum_of == wide(0.0), wide(1.0), sum_of)

    return compute(node, "normalized", share, [weights, total], weights.shape)


def _outside(node: Node, settings: Settings, change: Along) -> list[Value]:
    """For tf_crop_and_resize which places of the result lie outside of X."""
    if settings.coordinates != "tf_crop_and_resize":
        return []

    def outside(index: Any, place: Place) -> Any:
        at = coordinate(settings, index[0], place)
        return tirx.any(at < wide(0.0), at > wide(place.given - 1))

    return [change.table(node, "outside", outside, "bool")]


def _unless(outside: Sequence[Any], o: Any, value: Any, settings: Settings) -> Any:
    if not outside:
        return value
    return tirx.Select(outside[0](o), tirx.const(settings.extrapolation, value.ty), value)
