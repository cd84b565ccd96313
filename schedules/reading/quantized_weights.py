"""Quantized weight matrices: small integers with scales and zero points, in the layout of the matrix kernels.

An element is (quantized value - zero) * scale. Quantized values have 8 or 4 bits; scale and zero point are shared by a
block of successive k of a column. Like other weights, they are stored in panels of nr columns:

    8 bits   values int8  [panels, K, nr]
    4 bits   values int32 [panels, K / 8, nr]       k in bits 4 (k mod 8) and up, two's complement
             scales float [panels, K / block, nr]
             zeros  int8 or float [panels, K / block, nr], or none: they are 0

Instructions that multiply four bytes by four bytes want quads, four successive k of a column together:

    8 bits   values int8  [panels, K / 4, nr, 4]
    4 bits   values int32 [panels, K / 8, nr]       plus 8; byte i has k = 8 n + i in its low nibble, k + 4 in its high

`dequantize_element` writes this as an expression, which is all that a matmul needs; `read_quantization` recognizes it.
Weights in quads permit kernels to quantize the other operand, too (schedules/cpu/matmul/int8_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, loads, substitute, walk

from ..half_precision import HALF
from .stages import Axis

NIBBLES = 8  # 4-bit values in an int32
QUAD = 4  # values of k of a column that an instruction takes at once

Load = Callable[..., Expr]


@dataclass(frozen=True)
class PanelFormat:
    """The format of panels of quantized values.

    Attributes:
        nr: Columns of a panel.
        block: Values of k that share a scale, 0 for all.
        nibbles: Whether values have 4 bits.
        quads: Whether four successive k of a column are stored together.
    """

    nr: int
    block: int
    nibbles: bool
    quads: bool


def dequantize_element(form: PanelFormat, values: Load, scales: Load, zeros: Load | None, k: Expr, j: Expr) -> Expr:
    """Return the element in row k and column j, in float32."""
    panel, column = j // form.nr, j % form.nr
    scale_indices = panel, (k // form.block if form.block else tirx.const(0, "int64")), column
    if form.nibbles and form.quads:
        shift = 8 * (k % QUAD) + 4 * (k // QUAD % 2)
        word = values(panel, k // NIBBLES, column) >> shift.astype("int32")
        quantized = (word & tirx.const(15, "int32")) - tirx.const(8, "int32")
    elif form.nibbles:
        shift = 28 - 4 * (k % NIBBLES)
        quantized = (values(panel, k // NIBBLES, column) << shift.astype("int32")) >> tirx.const(28, "int32")
    elif form.quads:
        quantized = values(panel, k // QUAD, column, k % QUAD)
    else:
        quantized = values(panel, k, column)
    value = quantized.astype("float32")
    if zeros is not None:
        value = value - zeros(*scale_indices).astype("float32")
    return value * scales(*scale_indices).astype("float32")


@dataclass(frozen=True)
class WeightQuantization:
    """Loads of one element's quantized value, scale and zero point, and the format of their panels."""

    load: ir.TensorLoad
    scale: ir.TensorLoad
    zero: ir.TensorLoad | None
    form: PanelFormat

    @property
    def bits(self) -> int:
        """Bits of a quantized value."""
        return 32 // NIBBLES if self.form.nibbles else 8

    @property
    def stored_steps(self) -> int:
        """Values of k in a stored row of a panel."""
        return NIBBLES if self.form.nibbles else QUAD if self.form.quads else 1

    @property
    def stored_width(self) -> int:
        """Elements of a stored row of a panel."""
        return self.form.nr * (QUAD if self.form.quads and not self.form.nibbles else 1)

    @property
    def depth(self) -> int:
        """Quantized values of a column."""
        return int(self.load.source.shape[1]) * self.stored_steps

    @property
    def nr(self) -> int:
        return self.form.nr

    @property
    def block(self) -> int:
        return self.form.block

    def first_panel(self, j: tirx.Var) -> Expr:
        """Return the panel of column 0; the panels before it belong to other matrices."""
        return _substitute_column_0(self.load.indices[0], j)


def read_quantization(expr: Expr, j: Axis, k: Axis) -> WeightQuantization | None:
    """Return the loads of the element of a quantized matrix at row k and column j that `expr` is, or None."""
    if not isinstance(expr, prim.Mul) or not isinstance(k.extent, tirx.IntImm):
        return None
    scale, zero, value = _read_load(expr.b), None, expr.a
    if isinstance(value, prim.Sub):
        value, zero = value.a, _read_load(value.b)
        if zero is None:
            return None
    value_loads = [load for load in loads(value) if str(load.ty) != "int64"]  # except the selector of a matrix
    if (
        scale is None
        or len(value_loads) != 1
        or str(value_loads[0].ty) not in ("int8", "int32")
        or len(value_loads[0].indices) not in (3, 4)
    ):
        return None
    quantized = value_loads[0]
    blocks = [node.b.value for node in walk(scale.indices[1]) if isinstance(node, prim.FloorDiv)]
    nr, nibbles = quantized.source.shape[2], quantized.ty == "int32"
    if not isinstance(nr, tirx.IntImm):
        return None
    has_masks = any(isinstance(node, prim.BitwiseAnd) for node in walk(value))
    quads = has_masks if nibbles else len(quantized.indices) == 4
    form = PanelFormat(nr.value, (blocks or [0])[0], nibbles, quads)

    def make_load(node: ir.TensorLoad) -> Load:
        return lambda *index: tirx.BufferLoad(node.source, list(index))

    zeros = make_load(zero) if zero is not None else None
    column = _substitute_column_0(quantized.indices[0], j.var) * nr + j.var
    expected = dequantize_element(form, make_load(quantized), make_load(scale), zeros, k.var, column)
    analyzer = Analyzer()
    for axis in (j, k):
        analyzer.bind(axis.var, ir.Range(0, axis.extent))
    is_equal = prim.expr_deep_equal(analyzer.simplify(expected), analyzer.simplify(expr))
    return WeightQuantization(quantized, scale, zero, form) if is_equal else None


def _substitute_column_0(panel: Expr, j: tirx.Var) -> Expr:
    return Analyzer().simplify(substitute(panel, {j: tirx.const(0, "int64")}))


def _read_load(expr: Expr) -> ir.TensorLoad | None:
    """Return a load of a scale or a zero point, possibly widened."""
    if isinstance(expr, prim.Cast):
        expr = expr.value
    legal = isinstance(expr, ir.TensorLoad) and str(expr.ty) in ("float32", "int8", *HALF) and len(expr.indices) == 3
    return expr if legal else None
