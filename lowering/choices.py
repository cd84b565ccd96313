"""What a compile can be asked for by name."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Scheme: TypeAlias = Literal["int8", "int4", "f16"]
"""How constant matrices are held (importing/quantized.py)."""

Precision: TypeAlias = Literal["float32", "float16", "bfloat16", "fast", "tf32", "3xtf32"]
"""How matmuls of floats are computed (graph/precision.py); float32 also what a model quantizes while it runs
(graph/float_activations.py). TF32 is no type of tensors: models stay as they are, and so
it is a matter of kernels (passes/mark_tf32_matmuls.py)."""

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TF32 = ("tf32", "3xtf32")
