"""Elementary functions of float32 as polynomials, so that loops over them can be vectorized; also of vectors.

LLVM turns exp, tanh or erf of a vector into one libm call per lane, some 3 ns each. The functions below are branch-free
code, correct to 4 units in the last place, also for infinities, NaN and arguments of any size. Results of exp below
2^-125 become 0; so do subnormal results of the others.

The coefficients are minimax fits (Lawson's iteratively reweighted least squares) in the error that the comments name.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ...reading.values import Bind

# e^r = 1 + r + r^2 (c0 + c1 r + ...) for |r| <= ln(2) / 2, relative error 3e-9.
_EXP = (
    0.4999999341248519,
    0.1666652010778304,
    0.0416683942142981,
    0.008368780414547097,
    0.0013814466888454715,
)
# 2^r = 1 + r (c0 + c1 r + ...) for |r| <= 1/2, relative error 2e-9.
_EXP2 = (
    0.6931472029849398,
    0.2402264789688812,
    0.05550332163014519,
    0.00961843860087413,
    0.0013399003431958957,
    0.0001535325796142195,
)
# ln(1 + f) = f - f^2 / 2 + f^3 (c0 + c1 f + ...) for sqrt(1/2) <= 1 + f <= sqrt(2), relative error 6e-9.
_LOG = (
    0.33333331707663455,
    -0.2500082103394018,
    0.20001226880215403,
    -0.166233573597114,
    0.1420175791702174,
    -0.1316018216204032,
    0.12761577535261184,
    -0.076344977557992,
)
# -ln(1 - erf(a)) = a (c0 + c1 a + ...) for 0 <= a <= 4, relative error of erf 4e-9.
_ERF = (
    1.1283791716116567,
    0.6366193819574983,
    0.1027778305755535,
    -0.019153064128767865,
    -0.00016039567907224003,
    0.0016670270976569359,
    -0.0006328366668697472,
    0.0001176412210645154,
    -9.256259782207052e-06,
)
_ERF_LIMIT = 4.0  # erf rounds to 1 from here on

# ln(2) as high + low; the high term has 15 trailing zeros, so that multiplying it by a small integer is exact.
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.428606765330187e-06

_MAGIC = 1.5 * 2.0**23  # adding it leaves the nearest integer in the low bits of the result
_SIGN = 0x80000000


def exp(x: Expr, bind: Bind) -> Expr:
    """Return e^x = 2^n e^r, with n the integer nearest to x / ln(2)."""
    x = _clamp(x, -87.6, 89.0, bind)
    n, n_bits = _nearest(x * _f32(math.log2(math.e), x), bind)
    r = bind((x - n * _f32(_LN2_HIGH, x)) - n * _f32(_LN2_LOW, x))
    return _scale(_polynomial(r, (1.0, 1.0, *_EXP)), n_bits, bind)


def exp2(x: Expr, bind: Bind) -> Expr:
    x = _clamp(x, -126.0, 129.0, bind)
    n, n_bits = _nearest(x, bind)
    return _scale(_polynomial(bind(x - n), (1.0, *_EXP2)), n_bits, bind)


def sigmoid(x: Expr, bind: Bind) -> Expr:
    return _f32(1.0, x) / (_f32(1.0, x) + exp(_f32(0.0, x) - x, bind))


def tanh(x: Expr, bind: Bind) -> Expr:
    """Return tanh x by tanh |x| = -e / (e + 2), with e = e^(-2 |x|) - 1, which is precise near 0."""
    x = bind(x)
    e = bind(_expm1(_magnitude(x, 10.0, bind) * _f32(-2.0, x), bind))
    return _with_sign(bind((_f32(0.0, x) - e) / (e + _f32(2.0, x))), x)


def erf(x: Expr, bind: Bind) -> Expr:
    """Return erf x by erf |x| = 1 - e^g, where g = ln(erfc |x|) is smooth."""
    x = bind(x)
    a = _magnitude(x, _ERF_LIMIT, bind)
    g = bind((_f32(0.0, x) - a) * _polynomial(a, _ERF))
    return _with_sign(bind(_f32(0.0, x) - _expm1(g, bind)), x)


def log(x: Expr, bind: Bind) -> Expr:
    """Return ln x = e ln(2) + ln(1 + f), where x = 2^e (1 + f)."""
    x = bind(x)
    subnormal = bind(x < _f32(2.0**-126, x))
    bits = bind(_bits(tirx.Select(subnormal, x * _f32(2.0**23, x), x)))
    exponent = bind((bits - _i32(0x3F3504F3, x)) >> _i32(23, x))  # minus the bits of sqrt(1/2)
    f = bind(_float(bits - (exponent << _i32(23, x))) - _f32(1.0, x))
    e = bind(exponent.astype(_as(x, "float32")) - tirx.Select(subnormal, _f32(23.0, x), _f32(0.0, x)))
    square = bind(f * f)
    correction = bind(f * square * _polynomial(f, _LOG) - _f32(0.5, x) * square + e * _f32(_LN2_LOW, x))
    result = bind(f + correction + e * _f32(_LN2_HIGH, x))
    outside = tirx.Select(x < _f32(0.0, x), _f32(math.nan, x), _f32(-math.inf, x))
    result = tirx.Select(x > _f32(0.0, x), result, outside)
    return bind(tirx.Select(x < _f32(math.inf, x), result, x))  # infinity and NaN are their own logarithms


def log1p(x: Expr, bind: Bind) -> Expr:
    """Return ln(1 + x) = ln u + (x - (u - 1)) / u, where u is 1 + x, rounded."""
    x, zero = bind(x), _f32(0.0, x)
    u = bind(_float(bind(_bits(x + _f32(1.0, x)))))  # by way of an integer: TVM simplifies (x + 1) - 1 to x
    correction = bind((x - (u - _f32(1.0, x))) / u)
    correction = tirx.Select(u > zero, correction, zero)
    return bind(log(u, bind) + tirx.Select(x < _f32(2.0**25, x), correction, zero))


def rsqrt(x: Expr, bind: Bind) -> Expr:
    """Return 1 / sqrt(x), of which TVM has no vector form; square root and division are machine instructions."""
    return _f32(1.0, x) / tirx.sqrt(x)


def isnan(x: Expr, bind: Bind) -> Expr:
    """Return whether x is NaN, by its bits: TVM simplifies x != x to false."""
    return (_bits(x) & _i32(0x7FFFFFFF, x)) > _i32(0x7F800000, x)


def nearbyint(x: Expr, bind: Bind) -> Expr:
    """Return the nearest integer by a machine instruction; TVM vectorizes it only under its LLVM name."""
    return T.call_llvm_pure_intrin(x.ty, "llvm.nearbyint", x)


_FUNCTIONS: dict[str, Callable[[Expr, Bind], Expr]] = {
    f"tirx.{function.__name__}": function
    for function in (exp, exp2, sigmoid, tanh, erf, log, log1p, rsqrt, isnan, nearbyint)
}


_MACHINE = ("tirx.sqrt", "tirx.fabs", "tirx.floor", "tirx.trunc", "tirx.nearbyint", "prim.ceil")
"""Functions with a vector instruction."""


def expand(op: ir.Op, operands: list[Expr], bind: Bind) -> Expr | None:
    """Expand op(*operands), or return None if the function is not in this file or the type is not float32."""
    if op.name not in _FUNCTIONS or str(operands[0].ty.dtype.with_lanes(1)) != "float32":
        return None
    return _FUNCTIONS[op.name](operands[0], bind)


def expand_vector_function(name: str, operands: list[Expr], bind: Bind) -> Expr | None:
    """Return the function of that name for all lanes at once, or None if it is evaluated lane by lane.

    bind receives no booleans, which TVM cannot bind to a variable.
    """

    def named(x: Expr) -> Expr:
        return x if x.ty.dtype.is_bool else bind(x)

    if name in _MACHINE:
        return ir.Call(ir.Op.get(name), operands, ret_ty=operands[0].ty)
    return expand(ir.Op.get(name), operands, named)


def _const(value: float, dtype: str, like: Expr) -> Expr:
    """Return a constant with as many lanes as another value."""
    lanes = like.ty.dtype.lanes
    number = tirx.const(value, dtype)
    return number if lanes == 1 else T.broadcast(number, lanes)


def _f32(value: float, like: Expr) -> Expr:
    return _const(value, "float32", like)


def _i32(value: int, like: Expr) -> Expr:
    return _const(value, "int32", like)


def _as(x: Expr, dtype: str) -> str:
    """Return the type with as many lanes as x."""
    return dtype if x.ty.dtype.lanes == 1 else f"{dtype}x{x.ty.dtype.lanes}"


def _bits(x: Expr) -> Expr:
    return tirx.reinterpret(_as(x, "int32"), x)


def _float(bits: Expr) -> Expr:
    return tirx.reinterpret(_as(bits, "float32"), bits)


def _clamp(x: Expr, low: float, high: float, bind: Bind) -> Expr:
    """Clamp x to [low, high]; NaN stays NaN, which TVM's min and max do not promise."""
    x = bind(x)
    x = bind(tirx.Select(x < _f32(low, x), _f32(low, x), x))
    return bind(tirx.Select(x > _f32(high, x), _f32(high, x), x))


def _magnitude(x: Expr, limit: float, bind: Bind) -> Expr:
    a = bind(_float(_bits(x) & _i32(0x7FFFFFFF, x)))
    return bind(tirx.Select(a > _f32(limit, x), _f32(limit, x), a))


def _with_sign(magnitude: Expr, x: Expr) -> Expr:
    return _float(_bits(magnitude) | (_bits(x) & _i32(_SIGN - 2**32, x)))


def _nearest(x: Expr, bind: Bind) -> tuple[Expr, Expr]:
    """Return the nearest integer to x as a float, and an int32 whose low bits are that integer.

    TVM simplifies (x + magic) - magic to x, so the sum passes through an integer in between.
    """
    bits = bind(_bits(x + _f32(_MAGIC, x)))
    return bind(_float(bits) - _f32(_MAGIC, x)), bits


def _scale(p: Expr, n_bits: Expr, bind: Bind) -> Expr:
    """Return p 2^n for -126 <= n <= 129, as 2 p 2^(n - 1), because 2^128 exceeds float32; 0 for n = -126."""
    power = _float((n_bits << _i32(23, p)) + _i32(126 << 23, p))
    return bind((p + p) * power)


def _expm1(x: Expr, bind: Bind) -> Expr:
    """Return e^x - 1 for -100 < x <= 0, with a small relative error near 0.

    e^x - 1 = 2^n (e^r - 1) + (2^n - 1).
    """
    n, n_bits = _nearest(x * _f32(math.log2(math.e), x), bind)
    r = bind((x - n * _f32(_LN2_HIGH, x)) - n * _f32(_LN2_LOW, x))
    power = bind(_float((n_bits << _i32(23, x)) + _i32(127 << 23, x)))
    return power * _polynomial(r, (0.0, 1.0, *_EXP)) + (power - _f32(1.0, x))


def _polynomial(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """Evaluate a polynomial by Horner's scheme, lowest power first; x occurs several times."""
    p = _f32(coefficients[-1], x)
    for c in reversed(coefficients[:-1]):
        p = p * x + _f32(c, x)
    return p
