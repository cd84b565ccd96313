"""Operators that make a tensor from sizes: Constant, Shape, Size, ConstantOfShape, EyeLike, Range; and Identity."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import ABSENT, Shape, Size, Value, prod, storage_dtype
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_nonnegative
from ..helpers.contents import fits_contents, read_sizes
from ..helpers.kernels import compute
from ..helpers.requirements import require_rank
from ..helpers.run_time import bind_sizes, compute_sizes
from .reshape import reshape_to

# Beyond any index: adding to it does not wrap.
_MAX_OFFSET = 2**48

# The limit of positions that are stored as numbers where recipes are recorded (Importer.body).
_MAX_RECIPE_POSITIONS = 32


@op("Identity", since=1)
def identity(node: Node, data: Value | None) -> Value:
    return ABSENT if data is None else data


@op("Constant", since=1)
def constant(node: Node) -> Value:
    for name in ("value", "value_float", "value_floats", "value_int", "value_ints", "value_string", "value_strings"):
        value = node.attr(name, None)
        if value is None:
            continue
        if name == "value":
            return node.constant(value)
        kind: Any = {"float": "float32", "int": "int64", "string": object}[
            name.removeprefix("value_").removesuffix("s")
        ]
        return node.constant(np.array(value, kind))
    raise node.error("constant.value_unsupported", "has no value, or one of type sparse_tensor.", "Use a dense tensor.")


@op("Shape", since=1)
def shape(node: Node, data: Value) -> Value:
    # start and end exist since version 15; Python's slices clamp and count from the back as ONNX does.
    start, end = node.attr("start", 0), node.attr("end", None)
    return node.sizes(list(data.shape[start:end]))


@op("Size", since=1)
def size(node: Node, data: Value) -> Value:
    return node.sizes(np.array(prod(data.shape), object))


@op("ConstantOfShape", since=9)
def constant_of_shape(node: Node, shape: Value) -> Value:
    value = np.ravel(node.attr("value", np.zeros(1, np.float32)))
    static_dims = read_sizes(shape)
    if shape.rank != 1 or not isinstance(shape.shape[0], int):
        unknown = ", so the rank of the result is unknown" if shape.rank == 1 else ""
        raise node.error(
            "constant_of_shape.shape_unsupported",
            f"input shape has dimensions {list(shape.shape)}{unknown}.",
            "Make it a vector of static length.",
        )
    dims = tuple(bind_sizes(node, shape, ((), value.dtype.name)) if static_dims is None else static_dims)
    scalar = node.constant(value.reshape(()))
    if static_dims is not None:
        scalar = assert_nonnegative(node, scalar, dims, node.describe(shape, False))
    if fits_contents(dims):
        return node.constant(np.full(dims, value[0], value.dtype))
    return emit_full(node, scalar, dims)


def emit_full(node: Node, scalar: Value, shape: Shape) -> Value:
    """Emit a tensor of that shape, each element the scalar (of shape [])."""
    return compute(node, "full", lambda index, x: x(), [scalar], shape)


@op("EyeLike", since=9)
def eye_like(node: Node, data: Value) -> Value:
    k = max(-_MAX_OFFSET, min(node.attr("k", 0), _MAX_OFFSET))
    require_rank(node, "input", data, "[rows, columns]", code="eye_like.rank_unsupported")
    onnx_type = node.attr("dtype", None)
    dtype = data.dtype if onnx_type is None else ir.DataType(onnx_type).numpy().name
    if storage_dtype(dtype) != dtype:
        raise node.error(
            "eye_like.dtype_unsupported",
            f"attribute dtype is {dtype}, which does not support arithmetic.",
            "Use a wider type.",
        )

    def element(index: Any, *_: Any) -> Any:
        return tirx.Select(index[1] == index[0] + k, tirx.const(1, dtype), tirx.const(0, dtype))

    return compute(node, "eye", element, [data], data.shape, dtype=dtype)


@op("Range", since=11)
def range_(node: Node, start: Value, limit: Value, delta: Value) -> Value:
    ends = [e[0] for e in (read_sizes(v) for v in (start, limit, delta)) if e is not None]
    if len(ends) == 3 and isinstance(ends[2], int):
        return _emit_range_of_sizes(node, ends[0], ends[1], ends[2], dtype=start.dtype)
    for value in (start, limit, delta):
        static_value = value.constant
        if (
            static_value is not None
            and "float" in value.dtype
            and not np.isfinite(static_value.astype(np.float64)).all()
        ):
            raise node.error("range.input_not_finite", f"{node.describe(value, False)} is not a finite number.")
    if delta.constant is not None and not delta.constant.any():
        raise node.error("range.delta_zero", "input delta is 0.", "Use another step.")
    scalars = [reshape_to(node, v, ()) for v in (start, limit, delta)]
    wide = "float64" if "float" in start.dtype else "int64"

    def length(first: Any, last: Any, step: Any) -> list[Any]:
        a, b, d = (x[()].astype(wide) for x in (first, last, step))
        with T.Assert(d != tirx.const(0, wide), f"[range.delta_zero] {node.where}: input delta is 0.", "ValueError"):
            pass
        # Float64 does not wrap, and legal lengths are counted exactly. Nothing is bound to variables: for bfloat16 x,
        # TVM generates wrong code for them.
        real = [x.astype("float64") for x in (a, b, d)]
        if wide == "float64":
            finite = tirx.all(*(tirx.abs(x) < tirx.const(float("inf"), wide) for x in real))
            with T.Assert(
                finite, f"[range.input_not_finite] {node.where}: an input is not a finite number.", "ValueError"
            ):
                pass
        estimate = tirx.ceil((real[1] - real[0]) / real[2])
        zero_length, limit_of_length = tirx.const(0.0, "float64"), tirx.const(float(2 * _MAX_OFFSET), "float64")
        far = tirx.Or(tirx.isnan(estimate), estimate > limit_of_length)
        if wide == "float64":
            exact = tirx.if_then_else(estimate > zero_length, estimate, zero_length).astype("int64")
        else:
            up, down = tirx.floordiv(b - a + d - 1, d), tirx.floordiv(a - b - d - 1, -d)
            zero = tirx.IntImm("int64", 0)
            exact = tirx.max(tirx.if_then_else(d > 0, up, tirx.if_then_else(d < 0, down, zero)), zero)
            exact = tirx.if_then_else(estimate > zero_length, exact, zero)
        return [tirx.if_then_else(far, tirx.IntImm("int64", 2 * _MAX_OFFSET), exact)]

    (count,) = bind_sizes(
        node, compute_sizes(node, "range_length", 1, length, scalars), ((), start.dtype), source=limit
    )

    def element(index: Any, first: Any, _: Any, step: Any) -> Any:
        return first() + index[0].astype(start.dtype) * step()

    return compute(node, "range", element, scalars, (count,), dtype=start.dtype)


def _emit_range_of_sizes(node: Node, start: Size, limit: Size, delta: int, dtype: str) -> Value:
    if delta == 0:
        raise node.error("range.delta_zero", "input delta is 0.")
    span = node.simplify(limit - start if delta > 0 else start - limit)
    count = node.simplify(ceil_divide(clamp_nonnegative(node, span), abs(delta)))
    if fits_contents((count,)) and (count <= _MAX_RECIPE_POSITIONS or not node.importer.recipes):
        return node.sizes([start + k * delta for k in range(count)], dtype)

    def element(index: Any, first: Any) -> Any:
        return (first + index[0] * delta).astype(dtype)

    return compute(node, "range", element, [], (count,), [start], dtype)


def clamp_nonnegative(node: Node, size: Size) -> Size:
    """Return max(size, 0), simplified by the bounds of the symbols."""
    if node.symbols.prove(size >= 0):
        return size
    return 0 if node.symbols.prove(size <= 0) else symbolic.maximum(size, 0)


def ceil_divide(a: Size, b: int) -> Size:
    """Return ceil(a / b) for b > 0."""
    if isinstance(a, int):
        return -(-a // b)
    return a if b == 1 else tirx.floordiv(a + (b - 1), b)
