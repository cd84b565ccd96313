"""Elements of caches as expressions: float32 values rounded to a type, or quantized.

All round ties to even. Quantized values are saturated, so that no element overflows its type.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .expr.emit import cast

MAX_GROUP_VALUE = 127
MIN_SCALE = 1e-5
MAX_E4M3 = 448.0


def round_to_dtype(value: Expr, dtype: str) -> Expr:
    """Round a float32 value to the precision of dtype, ties to even.

    Rounding to bfloat16 uses integers: TVM removes a cast to bfloat16 and back (BF16ComputeLegalize).
    """
    if dtype == "float32":
        return value
    if dtype != "bfloat16":
        return cast(cast(value, dtype), "float32")
    bits = T.reinterpret("uint32", value)
    last = (bits >> tirx.const(16, "uint32")) & tirx.const(1, "uint32")
    upper = (bits + tirx.const(0x7FFF, "uint32") + last) & tirx.const(0xFFFF0000, "uint32")
    return tirx.Select(tirx.isnan(value), value, T.reinterpret("float32", upper))


def compute_group_scale(largest: Expr, dtype: str) -> Expr:
    """Return the scale of a quantization group of this largest magnitude, a float32 rounded to `dtype`."""
    smallest = float(np.array(MIN_SCALE).astype(getattr(ml_dtypes, dtype, dtype)))  # TVM does not round constants
    scale = round_to_dtype(largest / tirx.const(float(MAX_GROUP_VALUE), "float32"), dtype)
    return tirx.max(scale, tirx.const(smallest, "float32"))


def quantize_in_group(value: Expr) -> Expr:
    """Round an element, divided by its scale before, to int8 and clamp it to -127 .. 127."""
    end = tirx.const(float(MAX_GROUP_VALUE), "float32")
    return cast(tirx.max(tirx.min(tirx.nearbyint(value), end), -end), "int8")


def quantize_value(value: Expr, dtype: str) -> Expr:
    """Quantize a float32 value to this type, rounded to even and saturated; int4 becomes uint8 with offset 8."""
    if dtype == "int4":
        low, high, zero = (tirx.const(x, "float32") for x in (-8.0, 7.0, 8.0))
        return cast(tirx.max(tirx.min(tirx.nearbyint(value), high), low) + zero, "uint8")
    if dtype == "int8":
        low, high = (tirx.const(x, "float32") for x in (-128.0, 127.0))
        return cast(tirx.max(tirx.min(tirx.nearbyint(value), high), low), "int8")
    return encode_e4m3(value)


def encode_e4m3(value: Expr) -> Expr:
    """Return the bits of the float8_e4m3fn nearest to a float32 value, ties to even, saturated at 448; NaN gives 448.

    Above 2^-6 the three bits of its mantissa are the first of float32's. Below, numbers are multiples of 2^-9: adding
    and subtracting a number whose last place is 2^-9 rounds to them.
    """
    limit = tirx.const(MAX_E4M3, "float32")
    clamped = tirx.abs(value)
    clamped = tirx.Select(clamped < limit, clamped, limit)
    bits = T.reinterpret("uint32", clamped)
    one = tirx.const(1, "uint32")
    last = (bits >> tirx.const(20, "uint32")) & one
    normal = (bits + tirx.const((1 << 19) - 1, "uint32") + last) >> tirx.const(20, "uint32")
    normal = normal - tirx.const(120 << 3, "uint32")
    step = tirx.const(2.0**14, "float32")  # its last place is 2^-9
    small = T.reinterpret("uint32", clamped + step) - tirx.const(0x46800000, "uint32")
    magnitude = tirx.Select(clamped < tirx.const(2.0**-6, "float32"), small, normal)
    sign = (T.reinterpret("uint32", value) >> tirx.const(24, "uint32")) & tirx.const(0x80, "uint32")
    return cast(magnitude | sign, "uint8")
