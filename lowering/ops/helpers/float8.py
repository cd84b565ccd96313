"""Narrow float types that compiled code stores as bit patterns: conversion from and to ordinary floats.

FP8 is after Micikevicius et al. (arXiv:2209.05433). The rules for values out of range and for float8_e8m0fnu are those
of ONNX Cast-24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx


@dataclass(frozen=True)
class NarrowFloatFormat:
    """A format of sign, exponent and mantissa in this order.

    max, nan and over are bit patterns without sign: the largest number, NaN, and the result of overflow without
    saturation (the next pattern). unsigned_zero: the pattern of -0 means NaN.
    """

    bits: int
    mantissa: int
    bias: int
    max: int
    nan: int
    over: int
    unsigned_zero: bool = False


FORMATS = {
    "float8_e4m3fn": NarrowFloatFormat(8, 3, 7, 0x7E, 0x7F, 0x7F),
    "float8_e4m3fnuz": NarrowFloatFormat(8, 3, 8, 0x7F, 0x80, 0x80, unsigned_zero=True),
    "float8_e5m2": NarrowFloatFormat(8, 2, 15, 0x7B, 0x7E, 0x7C),
    "float8_e5m2fnuz": NarrowFloatFormat(8, 2, 16, 0x7F, 0x80, 0x80, unsigned_zero=True),
    # No NaN and no infinity: an overflow becomes the largest number, and NaN becomes 0.
    "float4_e2m1fn": NarrowFloatFormat(4, 1, 1, 0x7, 0x0, 0x7),
}
SCALE = "float8_e8m0fnu"  # powers of two: no sign, no mantissa

_E8M0_NAN, _E8M0_MAX = 255, 254


def decode(pattern: Any, dtype: str) -> Any:
    """Return the float32 number that a uint8 bit pattern represents."""
    pattern = pattern.astype("uint32")
    if dtype == SCALE:
        smallest = _u32(0x00400000)  # 2**-127 is subnormal in float32
        number = _to_float(tirx.Select(pattern == 0, smallest, pattern << 23))
        return tirx.Select(pattern == _E8M0_NAN, _to_float(_u32(0x7FC00000)), number)
    form = FORMATS[dtype]
    magnitude = pattern & _u32(2 ** (form.bits - 1) - 1)
    # The bits at their positions in float32, then a correction of the exponent's bias: also right for subnormals.
    number = _to_float(magnitude << (23 - form.mantissa)) * tirx.const(2.0 ** (127 - form.bias), "float32")
    if dtype == "float8_e5m2":
        number = tirx.Select(magnitude == form.over, _to_float(_u32(0x7F800000)), number)
    number_with_sign = tirx.Select((pattern >> (form.bits - 1)) != 0, -number, number)
    if form.nan == 0:
        return number_with_sign
    compared = pattern if form.unsigned_zero else magnitude
    is_nan = compared > form.over if dtype == "float8_e5m2" else compared == form.nan
    return tirx.Select(is_nan, _to_float(_u32(0x7FC00000)), number_with_sign)


def encode(x: Any, dtype: str, saturate: bool) -> Any:
    """Return the uint8 bit pattern of a float64 number, rounded to nearest, ties to even."""
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
    pattern = tirx.Select(small, tirx.nearbyint(scaled).astype("int64"), normal)
    # An overflow rounds to a pattern above max, of which over is the first.
    pattern = tirx.min(pattern, const(form.max if saturate else form.over))
    pattern = tirx.Select(magnitude > const(0x7FF << fraction), const(form.nan), pattern)
    is_negative = bits < 0
    if form.unsigned_zero:
        half_of_smallest = const((bias - form.bias - form.mantissa) << fraction)
        is_negative = tirx.And(is_negative, magnitude > half_of_smallest)
    return (pattern | tirx.Select(is_negative, const(2 ** (form.bits - 1)), const(0))).astype("uint8")


def encode_scale(x: Any, saturate: bool, mode: str) -> Any:
    """Return the float8_e8m0fnu bit pattern of a float32 number, whose sign is ignored.

    mode is up, down or nearest (ties up).
    """
    bits = tirx.reinterpret("uint32", x) & _u32(0x7FFFFFFF)
    exponent, fraction = bits >> 23, bits & _u32(0x7FFFFF)
    # The first fraction that rounds to the next power of two. Below 2**-126 float32 is subnormal, so evenly spaced.
    threshold = {
        "up": tirx.Select(exponent == 0, _u32(0x400001), _u32(1)),
        "nearest": tirx.Select(exponent == 0, _u32(0x600000), _u32(0x400000)),
        "down": _u32(0x800000),
    }[mode]
    pattern = tirx.Select(fraction >= threshold, exponent + _u32(1), exponent)
    pattern = tirx.Select(pattern > _E8M0_MAX, _u32(_E8M0_MAX if saturate else _E8M0_NAN), pattern)
    if not saturate:
        pattern = tirx.Select(bits < 0x400000, _u32(_E8M0_NAN), pattern)
    return tirx.Select(bits > 0x7F800000, _u32(_E8M0_NAN), pattern).astype("uint8")


def _u32(number: int) -> Any:
    return tirx.const(number, "uint32")


def _to_float(bits: Any) -> Any:
    return tirx.reinterpret("float32", bits)
