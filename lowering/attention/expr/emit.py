"""Conversion of expressions to TensorIR, for scalars or for vectors of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tvm import ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from .node import Expr, split_terms

CLASSES: dict[str, type] = {
    "add": prim.Add, "sub": prim.Sub, "mul": prim.Mul, "div": prim.Div, "mod": prim.Mod, "floordiv": prim.FloorDiv,
    "floormod": prim.FloorMod, "min": prim.Min, "max": prim.Max, "eq": prim.EQ, "ne": prim.NE, "lt": prim.LT,
    "le": prim.LE, "and": prim.And, "or": prim.Or, "not": prim.Not, "select": prim.Select, "bit_and": prim.BitwiseAnd,
    "bit_or": prim.BitwiseOr, "bit_xor": prim.BitwiseXor, "shift_left": prim.LShift, "shift_right": prim.RShift,
}  # fmt: skip

Load = Callable[[str, Sequence[ir.Expr]], ir.Expr]
"""Returns the element of a table at these indices, or a vector of elements."""

EmitVectorCall = Callable[[str, list[ir.Expr]], ir.Expr | None]
"""Emits a function of vectors by its name; returns None for one without a form for all lanes at once."""

Materialize = Callable[[ir.Expr], ir.Expr]
"""Returns the value, computed once."""


def emit_expr(
    expr: Expr,
    point: Mapping[str, ir.Expr],
    scalars: Mapping[str, ir.Expr],
    load: Load,
    materialize: Materialize,
    emit_vector_call: EmitVectorCall | None = None,
) -> ir.Expr:
    """Emit TensorIR for the expression where its indices have these values, of which one may be a vector.

    Subexpressions that occur more than once are materialized. So are operands of divisions, which TVM's lowering of
    divisions repeats: with copies of copies TVM is busy for minutes. Sums are cheap, and as indices they show which
    elements are neighbors.
    """
    counts = Counter(node for node in expr.walk() if node.args and node.op != "sum")
    repeated = {node for node, count in counts.items() if count > 1}
    repeated |= {
        arg for node in expr.walk() if node.op in ("floordiv", "floormod") for arg in node.args if _is_long(arg)
    }
    return _Emission(point, scalars, load, materialize, emit_vector_call, repeated).emit(expr)


def _is_long(expr: Expr) -> bool:
    """Return whether an expression is more than a sum of indices and sizes."""
    return any(node.args and node.op not in ("sum", "mul", "cast") for node in expr.walk())


class _Emission:
    def __init__(
        self,
        point: Mapping[str, ir.Expr],
        scalars: Mapping[str, ir.Expr],
        load: Load,
        materialize: Materialize,
        emit_vector_call: EmitVectorCall | None,
        repeated: set[Expr],
    ) -> None:
        self.values, self.load, self.materialize = {"index": point, "scalar": scalars}, load, materialize
        self.emit_vector_call, self.repeated, self.materialized = emit_vector_call, repeated, dict[Expr, ir.Expr]()

    def emit(self, expr: Expr) -> ir.Expr:
        if expr not in self.repeated:
            return self.compute(expr)
        if expr not in self.materialized:
            self.materialized[expr] = self.materialize(self.compute(expr))
        return self.materialized[expr]

    def compute(self, expr: Expr) -> ir.Expr:
        if expr.op == "number":
            return tirx.const(expr.number, expr.dtype)
        if expr.op in self.values:
            value = self.values[expr.op][expr.name]
            return value if scalar_type(value) == expr.dtype else cast(value, expr.dtype)
        if expr.op == "sum":
            return _emit_sum([(factor, self.emit(term)) for factor, term in split_terms(expr)], expr.dtype)
        args = [self.emit(arg) for arg in expr.args]
        if expr.op == "load":
            return self.load(expr.name, args)
        if "." in expr.op and max(map(lanes, args)) > 1:
            call = (
                self.emit_vector_call(expr.op, list(_match_lanes(*args))) if self.emit_vector_call is not None else None
            )
            if call is not None:
                return call
            args = list(map(self.materialize, args))  # lane by lane
        result = _apply_operation(expr, args)
        if expr.op == "cast" and "int" in expr.args[0].dtype and "float" in expr.dtype:
            return self.materialize(result)  # TVM's analysis takes such numbers, multiplied, for integers, and fails
        return result


def _apply_operation(expr: Expr, args: list[ir.Expr]) -> ir.Expr:
    """Apply the expression's operation to these values of its arguments."""
    if expr.op == "cast" and expr.args[0].dtype == "bool" and expr.dtype != "bool":
        # TVM's analysis of a bound vector fails on a comparison in it.
        one, zero = (tirx.const(x, expr.dtype) for x in (1, 0))
        return prim.Select(*_match_lanes(args[0], one, zero))
    if expr.op == "cast":
        return cast(args[0], expr.dtype)
    args = list(_match_lanes(*args))
    if expr.op in CLASSES:
        return CLASSES[expr.op](*args)
    return _emit_call(expr, args)


def _emit_sum(terms: list[tuple[int, ir.Expr]], dtype: str) -> ir.Expr:
    """Emit a sum: scalars first, so that they are computed once, and additions before subtractions."""
    total: ir.Expr | None = None
    for factor, value in sorted(terms, key=lambda term: (lanes(term[1]), term[0] < 0)):
        scaled = value if abs(factor) == 1 else prim.Mul(*_match_lanes(value, tirx.const(abs(factor), dtype)))
        if total is None:
            total = scaled if factor > 0 else prim.Sub(*_match_lanes(tirx.const(0, dtype), scaled))
        else:
            total = (prim.Add if factor > 0 else prim.Sub)(*_match_lanes(total, scaled))
    assert total is not None
    return total


def _emit_call(expr: Expr, args: list[ir.Expr]) -> ir.Expr:
    """Emit a function of scalars, lane by lane if it has no vector form."""
    op = ir.Op.get(expr.op)
    count = lanes(args[0])
    if count == 1:
        return ir.Call(op, args, ret_ty=expr.dtype)
    calls = [ir.Call(op, [tirx.Shuffle([arg], [lane]) for arg in args], ret_ty=expr.dtype) for lane in range(count)]
    return tirx.Shuffle(calls, list(range(count)))


def _match_lanes(*operands: ir.Expr) -> tuple[ir.Expr, ...]:
    """Broadcast the operands to the same number of lanes."""
    count = max(map(lanes, operands))
    return tuple(x if lanes(x) == count else T.broadcast(x, count) for x in operands)


def combine(operation: type, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """Apply the operation to scalars or vectors."""
    return operation(*_match_lanes(a, b))


def cast(value: ir.Expr, dtype: str) -> ir.Expr:
    """Convert value to the element type dtype; its lanes stay."""
    count = lanes(value)
    return value.astype(dtype if count == 1 else f"{dtype}x{count}")


def broadcast(value: ir.Expr, count: int) -> ir.Expr:
    return value if lanes(value) == count else T.broadcast(value, count)


def lanes(value: int | ir.Expr) -> int:
    return 1 if isinstance(value, int) else value.ty.dtype.lanes


def scalar_type(value: int | ir.Expr) -> str:
    return "int64" if isinstance(value, int) else str(value.ty.dtype.with_lanes(1))


def widen_to(value: ir.Expr, dtype: str) -> ir.Expr:
    """Convert value to the wider floating-point type dtype.

    bfloat16 is widened by hand: TVM 0.27 does not legalize it in a T.bind and then takes the bits for an integer
    (ComputeLegalizer::VisitStmt_(BindNode)).
    """
    if scalar_type(value) == "bfloat16":
        bits = cast(T.reinterpret(value.ty.dtype.replace("bfloat", "uint"), value), "uint32")
        value = T.reinterpret(bits.ty.dtype.replace("uint", "float"), bits << 16)
    return cast(value, dtype)
