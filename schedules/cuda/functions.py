"""Functions of float32 numbers that CUDA has as calls of subroutines, which cost more than what they compute."""

from __future__ import annotations

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..reading.stages import Stage
from ..reading.values import Bind, Evaluator, View

_DIVIDE = """
__forceinline__ __device__ float divide_float32(float a, float b) {
  float r;
  asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(b));
  float q = a * r, better = fmaf(fmaf(-q, b, a), r, q);
  return better == better ? better : q;
}
"""


def divide(a: Expr, b: Expr) -> Expr:
    """a / b, one unit in the last place off at most, where the quotient and 1 / b are normal numbers.

    A step of Newton's method mends the approximate reciprocal; where that meets infinity, and gives NaN, the first
    quotient stands.
    """
    return T.cuda.func_call("divide_float32", a, b, source_code=_DIVIDE, return_type="float32")


def expand(op: ir.Op, operands: list[Expr], bind: Bind) -> Expr | None:
    """The logistic function by that division, which TVM would write by its own."""
    if op.name != "tirx.sigmoid" or str(operands[0].ty) != "float32":
        return None
    one = tirx.const(1, "float32")
    return divide(one, one + tirx.exp(-operands[0]))


def evaluator(stages: list[Stage], memory: dict[tirx.Buffer, tirx.Buffer]) -> Evaluator:
    """Of stages over the function's tensors as vectors of their elements, on a GPU."""
    made = {stage.output for stage in stages}
    return Evaluator(stages, {b: View(flat) for b, flat in memory.items() if b not in made}, expand, divide)
