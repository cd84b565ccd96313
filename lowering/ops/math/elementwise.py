"""Elementwise arithmetic: ONNX Add, Div, Pow, Max, Exp, Clip, BitShift and similar (opset 7 and later).

Integers wrap. Division and remainder follow ONNX and NumPy where C leaves them undefined (divisor 0 gives 0). NaN
propagates through everything. Contents that are shapes are computed symbolically.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import numpy as np
from tvm import relax, te, tirx

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_shape
from ..helpers.compute import (
    PRODUCT,
    Element,
    broadcast_shape,
    combine_in_groups,
    dtype_of,
    is_float,
    maximum,
    minimum,
    pointwise,
    read_element,
    relax_call,
    require_numbers,
    widen_dtype,
)
from ..helpers.relax_operators import register_relax_operator
from ..helpers.requirements import require_choice, require_rank

# -- the four operations ----------------------------------------------------------------------------------------------


add = register_relax_operator("Add", 7, relax.op.add, symbolic.add)
sub = register_relax_operator("Sub", 7, relax.op.subtract, symbolic.subtract)
mul = register_relax_operator("Mul", 7, relax.op.multiply, symbolic.multiply)


@op("Div", since=7)
def div(node: Node, a: Value, b: Value) -> Value:
    folded = symbolic.elementwise(node, functools.partial(symbolic.divide, node.symbols), a, b)
    if folded is not None and not symbolic.divides_by_zero(node.symbols, folded):
        return folded
    if is_float(a.dtype):
        return relax_call(node, relax.op.divide, a, b)
    return pointwise(node, _divide_integers, a, b, name="divide")


def _make_libm_call(name: str) -> Callable[..., Element]:
    """Return a function of C's math library that TVM lacks, or wrongly treats as a vector function."""

    def call(*operands: Element) -> Element:
        dtype = dtype_of(operands[0])
        return tirx.call_pure_extern(dtype, f"{name}f" if dtype == "float32" else name, *operands)

    return call


_FMOD = _make_libm_call("fmod")


@op("Mod", since=10)
def mod(node: Node, a: Value, b: Value) -> Value:
    """Emit the remainder with the sign of the divisor (fmod = 0) or of the dividend (fmod = 1)."""
    truncated = node.attr("fmod", 0)
    folded = symbolic.elementwise(node, symbolic.trunc_mod if truncated else symbolic.floor_mod, a, b)
    if folded is not None and not symbolic.divides_by_zero(node.symbols, folded):
        return folded
    if not is_float(a.dtype):
        return pointwise(node, _truncate_remainder if truncated else _floor_remainder, a, b, name="mod")
    if truncated:
        return pointwise(node, _FMOD, a, b, name="mod")
    remainder = pointwise(node, _FMOD, a, b, dtype=widen_dtype(a.dtype), name="mod")
    return pointwise(node, _move_to_divisor_sign, remainder, b, dtype=a.dtype, name="mod_sign")


def _move_to_divisor_sign(remainder: Element, b: Element) -> Element:
    """Move the truncated remainder into the interval between 0 and b.

    A remainder of 0 takes the sign of b.
    """
    zero = tirx.const(0.0, dtype_of(b))
    opposite = tirx.any(tirx.all(remainder < 0.0, b > 0.0), tirx.all(remainder > 0.0, b < 0.0))
    moved = tirx.Select(opposite, remainder + b, remainder)
    return tirx.Select(remainder == 0.0, tirx.Select(b < 0.0, -zero, zero), moved)


def _is_signed(element: Element) -> bool:
    return dtype_of(element).startswith("int")


def _make_safe_divisor(b: Element) -> Element:
    """Return b, or 1 where b is 0 or -1.

    A processor traps on x / 0, and on the smallest integer / -1.
    """
    unsafe = tirx.any(b == 0, b == -1) if _is_signed(b) else b == 0
    return tirx.Select(unsafe, tirx.const(1, dtype_of(b)), b)


def _divide_integers(a: Element, b: Element) -> Element:
    quotient = tirx.truncdiv(a, _make_safe_divisor(b))
    if _is_signed(b):
        quotient = tirx.Select(b == -1, -a, quotient)
    return tirx.Select(b == 0, tirx.const(0, dtype_of(a)), quotient)


def _truncate_remainder(a: Element, b: Element) -> Element:
    return tirx.Select(b == 0, tirx.const(0, dtype_of(a)), tirx.truncmod(a, _make_safe_divisor(b)))


def _floor_remainder(a: Element, b: Element) -> Element:
    return tirx.Select(b == 0, tirx.const(0, dtype_of(a)), tirx.floormod(a, _make_safe_divisor(b)))


# -- powers -----------------------------------------------------------------------------------------------------------

# Small exponents become multiplications: models use them often, and they would otherwise call libm.
_UNROLLED_EXPONENTS = (1, 2, 3)


@op("Pow", since=7)
def pow_(node: Node, a: Value, b: Value) -> Value:
    """Emit a^b in the type of a.

    Integer powers wrap modulo the integer width. An integer to a float power is rounded to zero.
    """
    exponent = b.constant
    if exponent is not None and exponent.size == 1 and exponent.item() in _UNROLLED_EXPONENTS and b.rank <= a.rank:
        factors = int(exponent.item())
        return pointwise(node, lambda x: functools.reduce(lambda p, _: p * x, range(factors - 1), x), a, name="power")
    if is_float(a.dtype):
        return pointwise(node, lambda x, y: tirx.power(x, y.astype(dtype_of(x))), a, b, name="power")
    if is_float(b.dtype):
        return pointwise(node, lambda x, y: tirx.power(x.astype("float64"), y.astype("float64")), a, b, name="power")
    return _emit_integer_power(node, a, b)


def _emit_integer_power(node: Node, base: Value, exponent: Value) -> Value:
    """Emit powers by repeated multiplication, modulo the integer width.

    A negative exponent gives 1 / base, rounded to zero. Exponents above 63 give the result of 62 or 63 of the same
    parity. This is right for 0, 1 and -1, and the powers of no other base stay within the integer width that long.
    """
    require_numbers(node, base, exponent)
    rank = max(base.rank, exponent.rank)

    def compute(base: te.Tensor, exponent: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, 63), "k")

        def power(*index: Element) -> Element:
            b, e = read_element(base, index), read_element(exponent, index).astype("int64")
            size = tirx.Select(e < 0, -e, e)
            count = tirx.Select(size > 63, tirx.floormod(size, tirx.const(2, "int64")) + 62, size)
            one = tirx.const(1, base.dtype)
            unit = tirx.any(b == 1, b == -1) if _is_signed(b) else b == 1
            factor = tirx.Select(tirx.any(e >= 0, unit), b, tirx.const(0, base.dtype))
            return PRODUCT.combine(tirx.Select(k.var.astype("int64") < count, factor, one), axis=k)

        return te.compute(broadcast_shape((base, exponent), rank), power, name="power")

    base, exponent = node.unify(base, exponent)
    return node.emit_te(compute, node.tensor(base), node.tensor(exponent), primfunc_name_hint="power")


# -- minimum, maximum, sum, mean --------------------------------------------------------------------------------------


def _make_fold(function: Callable[[Element, Element], Element]) -> Callable[..., Element]:
    return lambda *elements: functools.reduce(function, elements)


def _emit_pairwise(node: Node, function: Callable[[Element, Element], Element], values: Sequence[Value]) -> Value:
    """Emit one kernel per pair: nested calls of a function that repeats its operands would grow with each."""
    return functools.reduce(lambda a, b: pointwise(node, function, a, b), values)


@op("Max", since=8)
def max_(node: Node, *values: Value) -> Value:
    folded = symbolic.elementwise(node, _make_fold(symbolic.maximum), *values)
    return folded or _emit_pairwise(node, maximum, values)


@op("Min", since=8)
def min_(node: Node, *values: Value) -> Value:
    folded = symbolic.elementwise(node, _make_fold(symbolic.minimum), *values)
    return folded or _emit_pairwise(node, minimum, values)


@op("Sum", since=8)
def sum_(node: Node, *values: Value) -> Value:
    return _emit_sum(node, values, values[0].dtype)


@op("Mean", since=8)
def mean(node: Node, *values: Value) -> Value:
    count = float(len(values))
    total = _emit_sum(node, values, widen_dtype(values[0].dtype))
    return pointwise(node, lambda x: x / count, total, dtype=values[0].dtype, name="mean")


def _emit_sum(node: Node, values: Sequence[Value], dtype: str) -> Value:
    """Emit the sum, rounded to dtype once."""
    wide = combine_in_groups(
        lambda group: pointwise(node, _make_fold(operator.add), *group, dtype=widen_dtype(dtype), name="sum"), values
    )
    return wide if wide.dtype == dtype else pointwise(node, lambda x: x, wide, dtype=dtype, name="rounded")


@op("Clip", since=11)
def clip(node: Node, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    """Emit min(max(x, low), high): high where low > high, NaN where x is."""
    low, high = (None if bound is None else _require_scalar(node, bound) for bound in (low, high))
    if low is not None:
        x = symbolic.elementwise(node, symbolic.maximum, x, low) or pointwise(node, maximum, x, low)
    if high is not None:
        x = symbolic.elementwise(node, symbolic.minimum, x, high) or pointwise(node, minimum, x, high)
    return x


def _require_scalar(node: Node, bound: Value) -> Value:
    """Return the bound, which may be a vector of one element, as older exporters write it."""
    require_rank(node, "min or max", bound, "[] or [1]", code="clip.bound_not_scalar")
    return assert_shape(node, bound, (1,) * bound.rank)


@op("Clip", since=6)
def clip_to_attributes(node: Node, x: Value) -> Value:
    bounds = [node.attr(name, None) for name in ("min", "max")]
    return clip(node, x, *(None if b is None else node.constant(np.array(b, x.dtype)) for b in bounds))


# -- one operand ------------------------------------------------------------------------------------------------------


register_relax_operator("Neg", 6, relax.op.negative, symbolic.negative)


@op("Abs", since=6)
def abs_(node: Node, x: Value) -> Value:
    folded = symbolic.elementwise(node, symbolic.absolute, x)
    return folded or (x if x.dtype.startswith("uint") else relax_call(node, relax.op.abs, x))


@op("Sign", since=9)
def sign(node: Node, x: Value) -> Value:
    return pointwise(node, _sign, x, name="sign")


def _sign(x: Element) -> Element:
    """Return -1, 0, 1, or NaN."""
    positive = tirx.Select(x > 0, tirx.const(1, dtype_of(x)), x)
    return tirx.Select(x < 0, tirx.const(-1, dtype_of(x)), positive) if not dtype_of(x).startswith("u") else positive


@op("IsInf", since=10)
def isinf(node: Node, x: Value) -> Value:
    positive, negative = node.attr("detect_positive", 1), node.attr("detect_negative", 1)

    def is_inf(x: Element) -> Element:
        conditions = [
            x == s * tirx.infinity(dtype_of(x)) for s, is_detected in ((1, positive), (-1, negative)) if is_detected
        ]
        return tirx.any(*conditions) if conditions else tirx.const(False, "bool")

    return pointwise(node, is_inf, x, dtype="bool")


@op("IsNaN", since=9)
def isnan(node: Node, x: Value) -> Value:
    return pointwise(node, tirx.isnan, x, dtype="bool", name="isnan")


# Operator: (since, the scalar function).
_FUNCTIONS: dict[str, tuple[int, Callable[[Element], Element]]] = {
    "Acos": (7, tirx.acos),
    "Acosh": (9, tirx.acosh),
    "Asin": (7, tirx.asin),
    "Asinh": (9, tirx.asinh),
    "Atan": (7, tirx.atan),
    "Atanh": (9, lambda x: (tirx.log1p(x) - tirx.log1p(-x)) * 0.5),
    "Ceil": (6, tirx.ceil),
    "Cos": (7, tirx.cos),
    "Cosh": (9, _make_libm_call("cosh")),
    "Erf": (9, tirx.erf),
    "Exp": (6, tirx.exp),
    "Floor": (6, tirx.floor),
    "Log": (6, tirx.log),
    "Reciprocal": (6, lambda x: 1.0 / x),
    "Round": (11, tirx.nearbyint),  # half to even
    "Sin": (7, tirx.sin),
    "Sinh": (9, _make_libm_call("sinh")),
    "Sqrt": (6, tirx.sqrt),
    "Tan": (7, tirx.tan),
    "Tanh": (6, tirx.tanh),
}


def _register(name: str, since: int, function: Callable[[Element], Element]) -> None:
    @op(name, since=since)
    def lower(node: Node, x: Value) -> Value:
        return pointwise(node, function, x, name=name.lower())


for _name, (_since, _function) in _FUNCTIONS.items():
    _register(_name, _since, _function)


# -- bits -------------------------------------------------------------------------------------------------------------


for _name, _operator in (
    ("BitwiseAnd", relax.op.bitwise_and),
    ("BitwiseOr", relax.op.bitwise_or),
    ("BitwiseXor", relax.op.bitwise_xor),
    ("BitwiseNot", relax.op.bitwise_not),
):
    register_relax_operator(_name, 18, _operator)


@op("BitShift", since=11)
def bitshift(node: Node, x: Value, count: Value) -> Value:
    """Emit x shifted by count bits, the sign copied in from the left.

    A count of at least the integer width leaves only the sign.
    """
    direction = node.attr("direction")
    require_choice(node, "direction", direction, ("LEFT", "RIGHT"), code="bit_shift.direction_unsupported")
    return pointwise(node, _shift_left if direction == "LEFT" else _shift_right, x, count, name="bitshift")


def _limit_shift(x: Element, count: Element) -> tuple[Element, Element]:
    """Return whether the count is less than the bits of x, and a count that always is."""
    bits = np.dtype(dtype_of(x)).itemsize * 8
    unsigned = count.astype(f"uint{bits}")
    return unsigned < tirx.const(bits, f"uint{bits}"), tirx.bitwise_and(count, tirx.const(bits - 1, dtype_of(x)))


def _shift_left(x: Element, count: Element) -> Element:
    is_legal, safe_count = _limit_shift(x, count)
    return tirx.Select(is_legal, tirx.shift_left(x, safe_count), tirx.const(0, dtype_of(x)))


def _shift_right(x: Element, count: Element) -> Element:
    is_legal, safe_count = _limit_shift(x, count)
    bits = np.dtype(dtype_of(x)).itemsize * 8
    outside = tirx.shift_right(x, tirx.const(bits - 1, dtype_of(x))) if _is_signed(x) else tirx.const(0, dtype_of(x))
    return tirx.Select(is_legal, tirx.shift_right(x, safe_count), outside)
