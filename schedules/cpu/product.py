"""Reading a product of matrices from a function's stages."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import prim

from lowering.expressions import Expr, loads, uses

from .codes import Codes, read_codes
from .half import HALF
from .stages import Axis, Stage

_FLOATS = ("float32", *HALF)


@dataclass(frozen=True)
class Product:
    """C[batch, rows, j] = sum over k of A[batch, rows, k] * B[batch, k, j].

    A and B are loads at those axes; `rows` are the axes that B does not depend on, taken together as M rows. Where the
    elements of B are `codes`, b loads the integers.
    """

    stage: Stage
    a: ir.TensorLoad
    b: ir.TensorLoad
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    j: Axis
    k: Axis
    codes: Codes | None = None


def read_product(stage: Stage) -> Product | None:
    """The stage as a product of matrices, or None."""
    value = stage.value
    if len(stage.reduce) != 1 or len(stage.axes) < 1 or not isinstance(value, prim.Add):
        return None
    total, term = (value.a, value.b) if isinstance(value.b, prim.Mul) else (value.b, value.a)
    if not isinstance(term, prim.Mul) or not isinstance(total, ir.TensorLoad):
        return None
    if not total.source.same_as(stage.output) or stage.output.dtype not in _FLOATS:
        return None
    k, j, outer = stage.reduce[0], stage.axes[-1], stage.axes[:-1]
    left, right = sorted((term.a, term.b), key=lambda operand: uses(operand, {j.var}))
    codes = read_codes(right, j, k)
    a, b = _operand(left), codes.load if codes is not None else _operand(right)
    if a is None or b is None:
        return None
    if uses(a, {j.var}) or not all(uses(b, {axis.var}) for axis in (j, k)) or not uses(a, {k.var}):
        return None
    batch = tuple(axis for axis in outer if uses(b, {axis.var}))
    rows = tuple(axis for axis in outer if not uses(b, {axis.var}))
    return Product(stage, a, b, batch, rows, j, k, codes)


def follow(product: Stage, others: list[Stage], kept: set[tirx.Buffer]) -> bool:
    """Whether the others are element-wise, and read the product and what is made of it only at their own point.

    Those that read nothing of it may have axes of their own: they are computed where they are read, such as a bias in
    another type. kept are the buffers that must be written, which those cannot be.
    """
    made = {product.output}
    for stage in others:
        if stage.reduce:
            return False
        own = [node for node in loads(stage.value) if node.source in made]
        if not own and stage.output not in kept:
            continue
        made.add(stage.output)
        if len(stage.axes) != len(product.axes) or not all(
            prim.expr_deep_equal(a.extent, b.extent) for a, b in zip(product.axes, stage.axes)
        ):
            return False
        if not all(all(map(prim.expr_deep_equal, node.indices, stage.indices)) for node in own):
            return False
    return True


def _operand(expr: Expr) -> ir.TensorLoad | None:
    """A load, possibly widened to float32."""
    if isinstance(expr, prim.Cast) and expr.ty == "float32":
        expr = expr.value
    if not isinstance(expr, ir.TensorLoad) or str(expr.ty) not in _FLOATS or len(loads(expr)) > 1:
        return None
    return expr
