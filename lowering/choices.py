"""Options of a compilation that have names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

Scheme: TypeAlias = Literal["int8", "int4", "f16"]
"""The storage of constant matrices (importing/quantized_matrix.py)."""

Schemes: TypeAlias = Mapping[str, Scheme | None]
"""The storage of each constant matrix by patterns of names, None as it is (graph/options/weight_schemes.py)."""

Precision: TypeAlias = Literal["float32", "float16", "bfloat16", "fast", "tf32", "3xtf32"]
"""The precision of float matmuls (graph/options/precision.py).

float32 also applies to values that a model quantizes at run time (graph/options/float_activations.py). TF32 is not a
tensor type: it leaves the model unchanged, and selects kernels (passes/graph/mark_tf32_matmuls.py).
"""

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
BITS: dict[Scheme, int] = {"f16": 16, "int8": 8, "int4": 4}
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TF32 = ("tf32", "3xtf32")

ACCURACY_LEVELS = (0, 1, 2, 3, 4)
INT8_ROWS = ACCURACY_LEVELS[-1]
"""The accuracy level, as com.microsoft MatMulNBits counts them, that permits to quantize the rows of a matmul to int8.
"""
