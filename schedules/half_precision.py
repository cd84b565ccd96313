"""Half precision inside kernels.

Elements are widened when they are loaded, computed with in float32, and rounded once when they are stored. bfloat16
uses integer arithmetic: TVM 0.27 legalizes its casts only in some statements, and crashes on others.
"""

from __future__ import annotations

from tvm import tirx

from lowering.tensorir.expressions import Expr
from lowering.tensorir.moves import HALF as HALF


def is_half(dtype: object) -> bool:
    return str(dtype) in HALF


def widen(element: Expr) -> Expr:
    """Widen a float16 or bfloat16 element to float32."""
    if element.ty == "float16":
        return element.astype("float32")
    return _from_bits(tirx.reinterpret("uint16", element).astype("uint32") << _u32(16))


def narrow(x: Expr, dtype: str) -> Expr:
    """Round float32 to nearest even, before it is stored. x occurs several times: pass a variable."""
    if dtype == "float16":
        return x.astype(dtype)
    return tirx.reinterpret(dtype, (_bfloat16_bits(x) >> _u32(16)).astype("uint16"))


def round_to_half(x: Expr, dtype: str) -> Expr:
    """Round float32 to the precision of `dtype`. x occurs several times: pass a variable."""
    if dtype == "float16":
        return x.astype(dtype).astype("float32")
    return _from_bits(_bfloat16_bits(x) & _u32(0xFFFF0000))


def _bfloat16_bits(x: Expr) -> Expr:
    """Return bits of x whose upper half is x rounded.

    Half an ulp of bfloat16 is added, minus one if its last bit is even.
    """
    bits = tirx.reinterpret("uint32", x)
    up = bits + (_u32(0x7FFF) + ((bits >> _u32(16)) & _u32(1)))
    is_nan = (bits & _u32(0x7FFFFFFF)) > _u32(0x7F800000)  # must not be rounded to infinity
    return tirx.Select(is_nan, bits | _u32(0x400000), up)


def _from_bits(bits: Expr) -> Expr:
    return tirx.reinterpret("float32", bits)


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")
