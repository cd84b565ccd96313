"""From expressions to TensorIR, for scalars or for vectors of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tvm import ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from .node import Expr, terms

_CLASSES: dict[str, type] = {
    "add": prim.Add, "sub": prim.Sub, "mul": prim.Mul, "div": prim.Div, "mod": prim.Mod, "floordiv": prim.FloorDiv,
    "floormod": prim.FloorMod, "min": prim.Min, "max": prim.Max, "eq": prim.EQ, "ne": prim.NE, "lt": prim.LT,
    "le": prim.LE, "and": prim.And, "or": prim.Or, "not": prim.Not, "select": prim.Select, "bit_and": prim.BitwiseAnd,
    "bit_or": prim.BitwiseOr, "bit_xor": prim.BitwiseXor, "shift_left": prim.LShift, "shift_right": prim.RShift,
}  # fmt: skip

Load = Callable[[str, Sequence[ir.Expr]], ir.Expr]
"""The element of a table at these indices, or a vector of elements."""

OfVectors = Callable[[str, list[ir.Expr]], ir.Expr | None]
"""A function by its name of vectors, or None for what has no form for all lanes at once."""

Keep = Callable[[ir.Expr], ir.Expr]
"""The value, computed once."""


def emit(
    expr: Expr,
    point: Mapping[str, ir.Expr],
    scalars: Mapping[str, ir.Expr],
    load: Load,
    keep: Keep,
    of_vectors: OfVectors | None = None,
) -> ir.Expr:
    """TensorIR for the expression where its indices have these values, of which one may be a vector.

    What occurs in it more than once is kept, and so is what is divided, which TVM's lowering of divisions repeats: with
    copies of copies TVM is busy for minutes. Sums are cheap, and as indices they say which elements are neighbors.
    """
    counts = Counter(node for node in expr.walk() if node.args and node.op != "sum")
    repeated = {node for node, count in counts.items() if count > 1}
    repeated |= {
        arg for node in expr.walk() if node.op in ("floordiv", "floormod") for arg in node.args if _is_long(arg)
    }
    return _Emission(point, scalars, load, keep, of_vectors, repeated).of(expr)


def _is_long(expr: Expr) -> bool:
    """Whether it is more than a sum of indices and sizes."""
    return any(node.args and node.op not in ("sum", "mul", "cast") for node in expr.walk())


class _Emission:
    def __init__(
        self,
        point: Mapping[str, ir.Expr],
        scalars: Mapping[str, ir.Expr],
        load: Load,
        keep: Keep,
        of_vectors: OfVectors | None,
        repeated: set[Expr],
    ) -> None:
        self.values, self.load, self.keep = {"index": point, "scalar": scalars}, load, keep
        self.of_vectors, self.repeated, self.kept = of_vectors, repeated, dict[Expr, ir.Expr]()

    def of(self, expr: Expr) -> ir.Expr:
        if expr not in self.repeated:
            return self.computed(expr)
        if expr not in self.kept:
            self.kept[expr] = self.keep(self.computed(expr))
        return self.kept[expr]

    def computed(self, expr: Expr) -> ir.Expr:
        if expr.op == "number":
            return tirx.const(expr.number, expr.dtype)
        if expr.op in self.values:
            value = self.values[expr.op][expr.name]
            return value if scalar_type(value) == expr.dtype else cast(value, expr.dtype)
        if expr.op == "sum":
            return _sum([(factor, self.of(term)) for factor, term in terms(expr)], expr.dtype)
        args = [self.of(arg) for arg in expr.args]
        if expr.op == "load":
            return self.load(expr.name, args)
        if "." in expr.op and max(map(lanes, args)) > 1:
            found = self.of_vectors(expr.op, list(_together(*args))) if self.of_vectors is not None else None
            if found is not None:
                return found
            args = list(map(self.keep, args))  # lane by lane
        result = _combined(expr, args)
        if expr.op == "cast" and "int" in expr.args[0].dtype and "float" in expr.dtype:
            return self.keep(result)  # TVM's analysis takes products of such numbers for integers, and stumbles
        return result


def _combined(expr: Expr, args: list[ir.Expr]) -> ir.Expr:
    """The expression's operation on these values of its arguments."""
    if expr.op == "cast" and expr.args[0].dtype == "bool" and expr.dtype != "bool":
        # TVM's analysis of a bound vector stumbles over a comparison in it.
        one, zero = (tirx.const(x, expr.dtype) for x in (1, 0))
        return prim.Select(*_together(args[0], one, zero))
    if expr.op == "cast":
        return cast(args[0], expr.dtype)
    args = list(_together(*args))
    if expr.op in _CLASSES:
        return _CLASSES[expr.op](*args)
    return _call(expr, args)


def _sum(parts: list[tuple[int, ir.Expr]], dtype: str) -> ir.Expr:
    """Scalars first, which are then computed once, and what is added before what is taken away."""
    total: ir.Expr | None = None
    for factor, value in sorted(parts, key=lambda part: (lanes(part[1]), part[0] < 0)):
        scaled = value if abs(factor) == 1 else prim.Mul(*_together(value, tirx.const(abs(factor), dtype)))
        if total is None:
            total = scaled if factor > 0 else prim.Sub(*_together(tirx.const(0, dtype), scaled))
        else:
            total = (prim.Add if factor > 0 else prim.Sub)(*_together(total, scaled))
    assert total is not None
    return total


def _call(expr: Expr, args: list[ir.Expr]) -> ir.Expr:
    """A function of scalars, for each lane where it has no vector form."""
    op = ir.Op.get(expr.op)
    count = lanes(args[0])
    if count == 1:
        return ir.Call(op, args, ret_ty=expr.dtype)
    each = [ir.Call(op, [tirx.Shuffle([arg], [lane]) for arg in args], ret_ty=expr.dtype) for lane in range(count)]
    return tirx.Shuffle(each, list(range(count)))


def _together(*operands: ir.Expr) -> tuple[ir.Expr, ...]:
    """The operands with equally many lanes."""
    count = max(map(lanes, operands))
    return tuple(x if lanes(x) == count else T.broadcast(x, count) for x in operands)


def combined(operation: type, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """The operation on scalars or vectors, whichever they are."""
    return operation(*_together(a, b))


def cast(value: ir.Expr, dtype: str) -> ir.Expr:
    """value with element type dtype, whatever its lanes."""
    count = lanes(value)
    return value.astype(dtype if count == 1 else f"{dtype}x{count}")


def broadcast(value: ir.Expr, count: int) -> ir.Expr:
    return value if lanes(value) == count else T.broadcast(value, count)


def lanes(value: int | ir.Expr) -> int:
    return 1 if isinstance(value, int) else value.ty.dtype.lanes


def scalar_type(value: int | ir.Expr) -> str:
    return "int64" if isinstance(value, int) else str(value.ty.dtype.with_lanes(1))


def widened(value: ir.Expr, dtype: str) -> ir.Expr:
    """value in the wider floating-point type dtype.

    bfloat16 is widened by hand: TVM 0.27 forgets to do so in a T.bind and then takes the bits for an integer
    (ComputeLegalizer::VisitStmt_(BindNode)).
    """
    if scalar_type(value) == "bfloat16":
        bits = cast(T.reinterpret(value.ty.dtype.replace("bfloat", "uint"), value), "uint32")
        value = T.reinterpret(bits.ty.dtype.replace("uint", "float"), bits << 16)
    return cast(value, dtype)
