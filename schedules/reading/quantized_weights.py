"""Matrices of small integers with scales: how they are stored for the matrix kernels.

An element is (code - zero) * scale. Codes have 8 or 4 bits; scale and zero hold for a column and a block of successive
k. Like other weights, codes are stored in panels of nr columns:

    8 bits   codes  int8  [panels, K, nr]
    4 bits   codes  int32 [panels, K / 8, nr]       k in bits 4 (k mod 8) and up, two's complement
             scales float [panels, K / block, nr]
             zeros  int8 or float [panels, K / block, nr], or none: they are 0

`element` says this as an expression, which is all that a matmul needs; `read_quantization` finds it again there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import ir, tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, loads, substitute, walk

from ..half_precision import HALF
from .stages import Axis

NIBBLES = 8  # codes of 4 bits in an int32

Load = Callable[..., Expr]


def dequantize_element(
    codes: Load, scales: Load, zeros: Load | None, k: Expr, j: Expr, nr: int, block: int, nibbles: bool
) -> Expr:
    """The element in row k and column j, in float32; block: values of k that share a scale, 0 for all."""
    panel, column = j // nr, j % nr
    place = panel, (k // block if block else tirx.const(0, "int64")), column
    if nibbles:
        code = (codes(panel, k // NIBBLES, column) << (28 - 4 * (k % NIBBLES)).astype("int32")) >> tirx.const(
            28, "int32"
        )
    else:
        code = codes(panel, k, column)
    value = code.astype("float32")
    if zeros is not None:
        value = value - zeros(*place).astype("float32")
    return value * scales(*place).astype("float32")


@dataclass(frozen=True)
class WeightQuantization:
    """Loads of one element's code, scale and zero; block: values of k that share them, 0 for all."""

    load: ir.TensorLoad
    scale: ir.TensorLoad
    zero: ir.TensorLoad | None
    block: int

    @property
    def group(self) -> int:
        """Values of k in one stored integer."""
        return NIBBLES if self.load.ty == "int32" else 1

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8 if self.group == 1 else 32 // NIBBLES

    @property
    def depth(self) -> int:
        """Codes of a column."""
        return int(self.load.source.shape[1]) * self.group

    @property
    def nr(self) -> int:
        return int(self.load.source.shape[-1])

    def first_panel(self, j: tirx.Var) -> Expr:
        """The panel of column 0, before which others are of other matrices."""
        return _at_column_0(self.load.indices[0], j)


def read_quantization(expr: Expr, j: Axis, k: Axis) -> WeightQuantization | None:
    """The element of a matrix of codes at row k and column j that `expr` is, or None."""
    if not isinstance(expr, prim.Mul) or not isinstance(k.extent, tirx.IntImm):
        return None
    scale, zero, value = _load(expr.b), None, expr.a
    if isinstance(value, prim.Sub):
        value, zero = value.a, _load(value.b)
        if zero is None:
            return None
    found = [load for load in loads(value) if str(load.ty) != "int64"]  # but for what selects a matrix
    if scale is None or len(found) != 1 or str(found[0].ty) not in ("int8", "int32") or len(found[0].indices) != 3:
        return None
    codes = found[0]
    blocks = [node.b.value for node in walk(scale.indices[1]) if isinstance(node, prim.FloorDiv)]
    block, nr, nibbles = (blocks or [0])[0], codes.source.shape[-1], codes.ty == "int32"
    if not isinstance(nr, tirx.IntImm):
        return None

    def of(node: ir.TensorLoad) -> Load:
        return lambda *index: tirx.BufferLoad(node.source, list(index))

    zeros = of(zero) if zero is not None else None
    column = _at_column_0(codes.indices[0], j.var) * nr + j.var
    expected = dequantize_element(of(codes), of(scale), zeros, k.var, column, nr.value, block, nibbles)
    analyzer = Analyzer()
    for axis in (j, k):
        analyzer.bind(axis.var, ir.Range(0, axis.extent))
    same = prim.expr_deep_equal(analyzer.simplify(expected), analyzer.simplify(expr))
    return WeightQuantization(codes, scale, zero, block) if same else None


def _at_column_0(panel: Expr, j: tirx.Var) -> Expr:
    return Analyzer().simplify(substitute(panel, {j: tirx.const(0, "int64")}))


def _load(expr: Expr) -> ir.TensorLoad | None:
    """A load of a scale or a zero, possibly widened."""
    if isinstance(expr, prim.Cast):
        expr = expr.value
    legal = isinstance(expr, ir.TensorLoad) and str(expr.ty) in ("float32", "int8", *HALF) and len(expr.indices) == 3
    return expr if legal else None


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """int8 [K, N] in [-8, 8) as int32 [ceil(K / 8), N], lowest k in the lowest bits."""
    rows = -(-len(codes) // NIBBLES) * NIBBLES
    nibbles = np.zeros((rows, codes.shape[1]), np.uint32)
    nibbles[: len(codes)] = codes.astype(np.int32).view(np.uint32) & 15
    words = np.zeros((rows // NIBBLES, codes.shape[1]), np.uint32)
    for i in range(NIBBLES):
        words |= nibbles[i::NIBBLES] << np.uint32(4 * i)
    return words.view(np.int32)
