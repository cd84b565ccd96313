"""The narrow float types that compiled code holds as bit patterns: their codes from and to ordinary floats.

FP8 after Micikevicius et al. (arXiv:2209.05433); the rules for values out of range and for float8_e8m0fnu are those of
ONNX Cast-24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx


@dataclass(frozen=True)
class Format:
    """Sign, exponent and mantissa in this order. max, nan and over are codes without sign: the largest number, NaN, and
    what lies beyond the range when values do not saturate, the next code. unsigned_zero: the code of -0 means NaN."""

    bits: int
    mantissa: int
    bias: int
    max: int
    nan: int
    over: int
    unsigned_zero: bool = False


FORMATS = {
    "float8_e4m3fn": Format(8, 3, 7, 0x7E, 0x7F, 0x7F),
    "float8_e4m3fnuz": Format(8, 3, 8, 0x7F, 0x80, 0x80, unsigned_zero=True),
    "float8_e5m2": Format(8, 2, 15, 0x7B, 0x7E, 0x7C),
    "float8_e5m2fnuz": Format(8, 2, 16, 0x7F, 0x80, 0x80, unsigned_zero=True),
    # No NaN and no infinity: all that is too large becomes the largest number, and NaN becomes 0.
    "float4_e2m1fn": Format(4, 1, 1, 0x7, 0x0, 0x7),
}
SCALE = "float8_e8m0fnu"  # powers of two: no sign, no mantissa

_E8M0_NAN, _E8M0_MAX = 255, 254


def decode(code: Any, dtype: str) -> Any:
    """The float32 number that a uint8 code stands for."""
    code = code.astype("uint32")
    if dtype == SCALE:
        smallest = _u32(0x00400000)  # 2**-127 is subnormal in float32
        number = _float(tirx.Select(code == 0, smallest, code << 23))
        return tirx.Select(code == _E8M0_NAN, _float(_u32(0x7FC00000)), number)
    form = FORMATS[dtype]
    magnitude = code & _u32(2 ** (form.bits - 1) - 1)
    # The bits where float32 has them, then the exponent's bias corrected: right for subnormals too.
    number = _float(magnitude << (23 - form.mantissa)) * tirx.const(2.0 ** (127 - form.bias), "float32")
    if dtype == "float8_e5m2":
        number = tirx.Select(magnitude == form.over, _float(_u32(0x7F800000)), number)
    signed = tirx.Select((code >> (form.bits - 1)) != 0, -number, number)
    if form.nan == 0:
        return signed
    compared = code if form.unsigned_zero else magnitude
    is_nan = compared > form.over if dtype == "float8_e5m2" else compared == form.nan
    return tirx.Select(is_nan, _float(_u32(0x7FC00000)), signed)


def encode(x: Any, dtype: str, saturate: bool) -> Any:
    """The uint8 code of a float64 number, rounded to nearest, ties to even."""
    form = FORMATS[dtype]
    fraction, bias = 52, 1023  # of float64

    def const(number: int) -> Any:
        return tirx.const(number, "int64")

    bits = tirx.reinterpret("int64", x)
    magnitude = bits & const(2**63 - 1)
    shift = fraction - form.mantissa
    half = const(2 ** (shift - 1) - 1) + ((magnitude >> const(shift)) & const(1))
    normal = ((magnitude + half) >> const(shift)) - const((bias - form.bias) << form.mantissa)
    small = magnitude < const((bias + 1 - form.bias) << fraction)  # below the smallest normal number
    scaled = tirx.reinterpret("float64", tirx.Select(small, magnitude, const(0)))
    scaled = scaled * tirx.const(2.0 ** (form.bias - 1 + form.mantissa), "float64")
    code = tirx.Select(small, tirx.nearbyint(scaled).astype("int64"), normal)
    # What is too large rounds to a code above max, of which over is the first.
    code = tirx.min(code, const(form.max if saturate else form.over))
    code = tirx.Select(magnitude > const(0x7FF << fraction), const(form.nan), code)
    signed = bits < 0
    if form.unsigned_zero:
        half_of_smallest = const((bias - form.bias - form.mantissa) << fraction)
        signed = tirx.And(signed, magnitude > half_of_smallest)
    return (code | tirx.Select(signed, const(2 ** (form.bits - 1)), const(0))).astype("uint8")


def encode_scale(x: Any, saturate: bool, mode: str) -> Any:
    """The float8_e8m0fnu code of a float32 number, whose sign is ignored; mode is up, down or nearest (ties up)."""
    bits = tirx.reinterpret("uint32", x) & _u32(0x7FFFFFFF)
    exponent, fraction = bits >> 23, bits & _u32(0x7FFFFF)
    # Where the next power of two begins to be the answer; float32 is subnormal, and so spaced evenly, below 2**-126.
    least = {
        "up": tirx.Select(exponent == 0, _u32(0x400001), _u32(1)),
        "nearest": tirx.Select(exponent == 0, _u32(0x600000), _u32(0x400000)),
        "down": _u32(0x800000),
    }[mode]
    code = tirx.Select(fraction >= least, exponent + _u32(1), exponent)
    code = tirx.Select(code > _E8M0_MAX, _u32(_E8M0_MAX if saturate else _E8M0_NAN), code)
    if not saturate:
        code = tirx.Select(bits < 0x400000, _u32(_E8M0_NAN), code)
    return tirx.Select(bits > 0x7F800000, _u32(_E8M0_NAN), code).astype("uint8")


def _u32(number: int) -> Any:
    return tirx.const(number, "uint32")


def _float(bits: Any) -> Any:
    return tirx.reinterpret("float32", bits)
