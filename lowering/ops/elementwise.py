"""Arithmetic, element by element: ONNX Add, Div, Pow, Max, Exp, Clip, BitShift and their kin (opset 7 and later).

Integers wrap; division and remainder follow ONNX and NumPy where C leaves them undefined (divisor 0 gives 0). NaN goes
through everything. Contents of shapes are computed symbolically.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import numpy as np
from tvm import relax, te, tirx

from ..importing import symbolic
from ..importing.compute import (
    Element,
    broadcast_shape,
    dtype_of,
    in_groups,
    is_float,
    maximum,
    minimum,
    pointwise,
    prod,
    read,
    relax_call,
    require_numbers,
    widened,
)
from ..importing.node import Node
from ..importing.values import Value
from . import op
from .asserted import asserted

# -- the four operations ----------------------------------------------------------------------------------------------


@op("Add", since=7)
def add(node: Node, a: Value, b: Value) -> Value:
    return symbolic.elementwise(node, symbolic.add, a, b) or relax_call(node, relax.op.add, a, b)


@op("Sub", since=7)
def sub(node: Node, a: Value, b: Value) -> Value:
    return symbolic.elementwise(node, symbolic.subtract, a, b) or relax_call(node, relax.op.subtract, a, b)


@op("Mul", since=7)
def mul(node: Node, a: Value, b: Value) -> Value:
    return symbolic.elementwise(node, symbolic.multiply, a, b) or relax_call(node, relax.op.multiply, a, b)


@op("Div", since=7)
def div(node: Node, a: Value, b: Value) -> Value:
    known = symbolic.elementwise(node, functools.partial(symbolic.divide, node.symbols), a, b)
    if known is not None and not symbolic.divides_by_zero(node.symbols, known):
        return known
    if is_float(a.dtype):
        return relax_call(node, relax.op.divide, a, b)
    return pointwise(node, _divide_integers, a, b, name="divide")


def _libm(name: str) -> Callable[..., Element]:
    """A function of C's mathematical library, which TVM does not know or wrongly takes for one of vectors."""

    def call(*operands: Element) -> Element:
        dtype = dtype_of(operands[0])
        return tirx.call_pure_extern(dtype, f"{name}f" if dtype == "float32" else name, *operands)

    return call


_FMOD = _libm("fmod")


@op("Mod", since=10)
def mod(node: Node, a: Value, b: Value) -> Value:
    """The remainder with the sign of the divisor (fmod = 0) or of the dividend (fmod = 1)."""
    truncated = node.attr("fmod", 0)
    known = symbolic.elementwise(node, symbolic.trunc_mod if truncated else symbolic.floor_mod, a, b)
    if known is not None and not symbolic.divides_by_zero(node.symbols, known):
        return known
    if not is_float(a.dtype):
        return pointwise(node, _truncated_remainder if truncated else _floored_remainder, a, b, name="mod")
    if truncated:
        return pointwise(node, _FMOD, a, b, name="mod")
    remainder = pointwise(node, _FMOD, a, b, dtype=widened(a.dtype), name="mod")
    return pointwise(node, _with_sign_of_divisor, remainder, b, dtype=a.dtype, name="mod_sign")


def _with_sign_of_divisor(remainder: Element, b: Element) -> Element:
    """The truncated remainder, moved into the interval between 0 and b; a remainder of 0 takes the sign of b."""
    zero = tirx.const(0.0, dtype_of(b))
    opposite = tirx.any(tirx.all(remainder < 0.0, b > 0.0), tirx.all(remainder > 0.0, b < 0.0))
    moved = tirx.Select(opposite, remainder + b, remainder)
    return tirx.Select(remainder == 0.0, tirx.Select(b < 0.0, -zero, zero), moved)


def _signed(element: Element) -> bool:
    return dtype_of(element).startswith("int")


def _safe_divisor(b: Element) -> Element:
    """b, or 1 where b is 0 or -1: a processor traps on x / 0, and on the smallest integer / -1."""
    unsafe = tirx.any(b == 0, b == -1) if _signed(b) else b == 0
    return tirx.Select(unsafe, tirx.const(1, dtype_of(b)), b)


def _divide_integers(a: Element, b: Element) -> Element:
    quotient = tirx.truncdiv(a, _safe_divisor(b))
    if _signed(b):
        quotient = tirx.Select(b == -1, -a, quotient)
    return tirx.Select(b == 0, tirx.const(0, dtype_of(a)), quotient)


def _truncated_remainder(a: Element, b: Element) -> Element:
    return tirx.Select(b == 0, tirx.const(0, dtype_of(a)), tirx.truncmod(a, _safe_divisor(b)))


def _floored_remainder(a: Element, b: Element) -> Element:
    return tirx.Select(b == 0, tirx.const(0, dtype_of(a)), tirx.floormod(a, _safe_divisor(b)))


# -- powers -----------------------------------------------------------------------------------------------------------

# Small exponents become products: they are what models write, and cost a call of libm otherwise.
_PRODUCT_EXPONENTS = (1, 2, 3)


@op("Pow", since=7)
def pow_(node: Node, a: Value, b: Value) -> Value:
    """a^b in the type of a: between integers modulo the word; an integer to a float power is rounded to zero."""
    exponent = b.constant
    if exponent is not None and exponent.size == 1 and exponent.item() in _PRODUCT_EXPONENTS and b.rank <= a.rank:
        factors = int(exponent.item())
        return pointwise(node, lambda x: functools.reduce(lambda p, _: p * x, range(factors - 1), x), a, name="power")
    if is_float(a.dtype):
        return pointwise(node, lambda x, y: tirx.power(x, y.astype(dtype_of(x))), a, b, name="power")
    if is_float(b.dtype):
        return pointwise(node, lambda x, y: tirx.power(x.astype("float64"), y.astype("float64")), a, b, name="power")
    return _integer_power(node, a, b)


def _integer_power(node: Node, base: Value, exponent: Value) -> Value:
    """By repeated multiplication, modulo the word; for negative exponents 1 / base, rounded to zero.

    Exponents beyond 63 give what 62 or 63 of the same parity gives: right for 0, 1 and -1, and the powers of no other
    base stay within a word that long.
    """
    require_numbers(node, base, exponent)
    rank = max(base.rank, exponent.rank)

    def compute(base: te.Tensor, exponent: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, 63), "k")

        def power(*index: Element) -> Element:
            b, e = read(base, index), read(exponent, index).astype("int64")
            size = tirx.Select(e < 0, -e, e)
            count = tirx.Select(size > 63, tirx.floormod(size, tirx.const(2, "int64")) + 62, size)
            one = tirx.const(1, base.dtype)
            unit = tirx.any(b == 1, b == -1) if _signed(b) else b == 1
            factor = tirx.Select(tirx.any(e >= 0, unit), b, tirx.const(0, base.dtype))
            return prod.combine(tirx.Select(k.var.astype("int64") < count, factor, one), axis=k)

        return te.compute(broadcast_shape((base, exponent), rank), power, name="power")

    base, exponent = node.unify(base, exponent)
    return node.emit_te(compute, node.tensor(base), node.tensor(exponent), primfunc_name_hint="power")


# -- minimum, maximum, sum, mean --------------------------------------------------------------------------------------


def _fold(function: Callable[[Element, Element], Element]) -> Callable[..., Element]:
    return lambda *elements: functools.reduce(function, elements)


def _pairwise(node: Node, function: Callable[[Element, Element], Element], values: Sequence[Value]) -> Value:
    """One kernel per pair: a function that names its operands several times would grow with each further one."""
    return functools.reduce(lambda a, b: pointwise(node, function, a, b), values)


@op("Max", since=8)
def max_(node: Node, *values: Value) -> Value:
    known = symbolic.elementwise(node, _fold(symbolic.maximum), *values)
    return known or _pairwise(node, maximum, values)


@op("Min", since=8)
def min_(node: Node, *values: Value) -> Value:
    known = symbolic.elementwise(node, _fold(symbolic.minimum), *values)
    return known or _pairwise(node, minimum, values)


@op("Sum", since=8)
def sum_(node: Node, *values: Value) -> Value:
    return _summed(node, values, values[0].dtype)


@op("Mean", since=8)
def mean(node: Node, *values: Value) -> Value:
    count = float(len(values))
    total = _summed(node, values, widened(values[0].dtype))
    return pointwise(node, lambda x: x / count, total, dtype=values[0].dtype, name="mean")


def _summed(node: Node, values: Sequence[Value], dtype: str) -> Value:
    """The sum, rounded to dtype once."""
    wide = in_groups(
        lambda group: pointwise(node, _fold(operator.add), *group, dtype=widened(dtype), name="sum"), values
    )
    return wide if wide.dtype == dtype else pointwise(node, lambda x: x, wide, dtype=dtype, name="rounded")


@op("Clip", since=11)
def clip(node: Node, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    """min(max(x, low), high): high where low > high, NaN where x is."""
    low, high = (None if bound is None else _scalar(node, bound) for bound in (low, high))
    if low is not None:
        x = symbolic.elementwise(node, symbolic.maximum, x, low) or pointwise(node, maximum, x, low)
    if high is not None:
        x = symbolic.elementwise(node, symbolic.minimum, x, high) or pointwise(node, minimum, x, high)
    return x


def _scalar(node: Node, bound: Value) -> Value:
    """The bound, which may be a vector of one element, as older exporters write it."""
    if bound.rank > 1:
        raise node.error(f"{node.name_of(bound, False)} has rank {bound.rank}.", "Make it a scalar.")
    return asserted(node, bound, (1,) * bound.rank)


@op("Clip", since=6)
def clip_to_attributes(node: Node, x: Value) -> Value:
    bounds = [node.attr(name, None) for name in ("min", "max")]
    return clip(node, x, *(None if b is None else node.constant(np.array(b, x.dtype)) for b in bounds))


# -- one operand ------------------------------------------------------------------------------------------------------


@op("Neg", since=6)
def neg(node: Node, x: Value) -> Value:
    return symbolic.elementwise(node, symbolic.negative, x) or relax_call(node, relax.op.negative, x)


@op("Abs", since=6)
def abs_(node: Node, x: Value) -> Value:
    known = symbolic.elementwise(node, symbolic.absolute, x)
    return known or (x if x.dtype.startswith("uint") else relax_call(node, relax.op.abs, x))


@op("Sign", since=9)
def sign(node: Node, x: Value) -> Value:
    return pointwise(node, _sign, x, name="sign")


def _sign(x: Element) -> Element:
    """-1, 0, 1, or NaN."""
    positive = tirx.Select(x > 0, tirx.const(1, dtype_of(x)), x)
    return tirx.Select(x < 0, tirx.const(-1, dtype_of(x)), positive) if not dtype_of(x).startswith("u") else positive


@op("IsInf", since=10)
def isinf(node: Node, x: Value) -> Value:
    positive, negative = node.attr("detect_positive", 1), node.attr("detect_negative", 1)

    def is_inf(x: Element) -> Element:
        found = [x == s * tirx.infinity(dtype_of(x)) for s, wanted in ((1, positive), (-1, negative)) if wanted]
        return tirx.any(*found) if found else tirx.const(False, "bool")

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
    "Cosh": (9, _libm("cosh")),
    "Erf": (9, tirx.erf),
    "Exp": (6, tirx.exp),
    "Floor": (6, tirx.floor),
    "Log": (6, tirx.log),
    "Reciprocal": (6, lambda x: 1.0 / x),
    "Round": (11, tirx.nearbyint),  # half to even
    "Sin": (7, tirx.sin),
    "Sinh": (9, _libm("sinh")),
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


@op("BitwiseAnd", since=18)
def bitwise_and(node: Node, a: Value, b: Value) -> Value:
    return relax_call(node, relax.op.bitwise_and, a, b)


@op("BitwiseOr", since=18)
def bitwise_or(node: Node, a: Value, b: Value) -> Value:
    return relax_call(node, relax.op.bitwise_or, a, b)


@op("BitwiseXor", since=18)
def bitwise_xor(node: Node, a: Value, b: Value) -> Value:
    return relax_call(node, relax.op.bitwise_xor, a, b)


@op("BitwiseNot", since=18)
def bitwise_not(node: Node, x: Value) -> Value:
    return relax_call(node, relax.op.bitwise_not, x)


@op("BitShift", since=11)
def bitshift(node: Node, x: Value, count: Value) -> Value:
    """x shifted by count bits, the sign copied in from the left; a count outside the word leaves only the sign."""
    direction = node.attr("direction")
    if direction not in ("LEFT", "RIGHT"):
        raise node.error(f"attribute direction is {direction!r}.", "Use LEFT or RIGHT.")
    return pointwise(node, _shift_left if direction == "LEFT" else _shift_right, x, count, name="bitshift")


def _within_word(x: Element, count: Element) -> tuple[Element, Element]:
    """Whether the count is less than the bits of x, and a count that always is."""
    bits = np.dtype(dtype_of(x)).itemsize * 8
    unsigned = count.astype(f"uint{bits}")
    return unsigned < tirx.const(bits, f"uint{bits}"), tirx.bitwise_and(count, tirx.const(bits - 1, dtype_of(x)))


def _shift_left(x: Element, count: Element) -> Element:
    inside, legal = _within_word(x, count)
    return tirx.Select(inside, tirx.shift_left(x, legal), tirx.const(0, dtype_of(x)))


def _shift_right(x: Element, count: Element) -> Element:
    inside, legal = _within_word(x, count)
    bits = np.dtype(dtype_of(x)).itemsize * 8
    outside = tirx.shift_right(x, tirx.const(bits - 1, dtype_of(x))) if _signed(x) else tirx.const(0, dtype_of(x))
    return tirx.Select(inside, tirx.shift_right(x, legal), outside)
