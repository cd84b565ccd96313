"""Formula: a mask as an expression over (b, h, i, j) that a kernel evaluates where it needs it.

The masks of real models are computed from positions, lengths and ids. As a tensor such a mask has S * T elements for
every head that differs; as an expression it reads a few small tables: the padding of each batch, a bias by distance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import Expr, prim
from tvm.script.ir_builder import tirx as T

from ..expressions import rewrite, substitute, walk
from .interval import Interval, extremes, interval

INDICES = ("b", "h", "i", "j")


@dataclass(frozen=True)
class Formula:
    """The mask's element for batch b, query head h, query row i and key j.

    code is a PrimFunc as TVM's JSON: its parameters are b, h, i, j, then `sizes` int64 scalars, then the tables, which
    are vectors; its body evaluates the element. dtype is bool (True is visible) or a floating-point type that is added
    to the score. short says that the first size is a number of keys: those behind are invisible, and the element is
    not asked for. `tables` holds their element types, `over` the names of the indices that the element depends on.
    """

    code: str
    dtype: str
    sizes: int
    tables: tuple[str, ...]
    over: tuple[str, ...]
    short: bool

    @staticmethod
    def of(
        value: Expr,
        indices: Sequence[tirx.Var],
        sizes: Sequence[tirx.Var],
        tables: Sequence[tirx.Buffer],
        short: bool,
    ) -> Formula:
        """The formula for `value`: an expression of the indices (b, h, i, j), the sizes and loads from the tables."""
        func = tirx.PrimFunc([*indices, *sizes, *tables], tirx.Evaluate(value))
        used = tirx.analysis.undefined_vars(value)
        over = tuple(name for name, var in zip(INDICES, indices) if any(var.same_as(u) for u in used))
        return Formula(ir.save_json(func), str(value.ty), len(sizes), tuple(str(t.dtype) for t in tables), over, short)

    def names(self) -> tuple[str, ...]:
        """Names of the kernel's parameters for the tables and the sizes, in their order."""
        return (*(f"table_{k}" for k in range(len(self.tables))), *(f"size_{k}" for k in range(self.sizes)))


@functools.lru_cache(maxsize=256)
def _function(code: str) -> tirx.PrimFunc:
    return ir.load_json(code)


class BoundFormula:
    """A formula with the tables and sizes that a kernel has for it, in the order of `Formula.names`.

    scope is the storage scope of its small variables, as in `Bound`.
    """

    def __init__(
        self, formula: Formula, tables: Sequence[tirx.Buffer], sizes: Sequence[Expr], scope: str = "global"
    ) -> None:
        func = _function(formula.code)
        params = list(func.params)
        self.dtype = formula.dtype
        self.indices, self.expr = params[:4], func.body.value
        self.values: dict[tirx.Var, Expr] = dict(zip(params[4:], sizes))
        self.scope = scope
        if scope == "global":  # else the IRBuilder stands in host code, which has no memory that a kernel can read
            self.expr = rewrite(self.expr, self._once)
        self.tables: dict[tirx.Var, tirx.Buffer] = dict(zip(params[4 + len(sizes) :], tables))

    def _once(self, node: Expr) -> Expr | None:
        """What depends on nothing but the sizes, computed here, where the IRBuilder stands; None for anything else."""
        read = [n for n in walk(node) if isinstance(n, tirx.Var | ir.TensorLoad)]
        if not read or isinstance(node, tirx.Var) or any(n not in self.values for n in read):
            return None
        # In memory, as TVM puts the definition of a plain binding wherever it is used.
        place = self.scratch(1, str(node.ty))
        T.buffer_store(place, substitute(node, self.values), [0])
        var = tirx.Var("once", node.ty)
        self.values[var] = T.bind(place[0])
        return var

    def __call__(self, b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        """The element; one of i and j may be a vector."""
        return evaluate(self.expr, {**self.values, **dict(zip(self.indices, (b, h, i, j)))}, self.load)

    def extremes(self, b: Expr, h: Expr, rows: Interval, keys: Interval) -> Interval | None:
        """The element's interval over rows and keys (ends included), for bool (surely, possibly); None if unknown.

        Emits code where the IRBuilder stands.
        """
        point = dict(zip(self.indices, ((b, b), (h, h), rows, keys)))
        bounds = {**{var: (size, size) for var, size in self.values.items()}, **point}

        def look(table: tirx.Buffer, places: Interval) -> Interval:
            size = self.tables[table].shape[0]
            return extremes(lambda position: self.load(table, position), size, places, self.scratch)

        return interval(self.expr, bounds, look)

    def scratch(self, size: int, dtype: str) -> tirx.Buffer:
        return T.alloc_buffer((size,), dtype, scope=self.scope)

    def load(self, table: tirx.Buffer, position: Expr) -> Expr:
        """An element, or a vector of them; half precision as float32."""
        value = self.tables[table][position]
        return widened(value, "float32") if str(self.tables[table].dtype) in ("float16", "bfloat16") else value


Load = Callable[[tirx.Buffer, Expr], Expr]


def evaluate(expr: Expr, values: Mapping[tirx.Var, Expr], load: Load) -> Expr:
    """expr with its variables replaced by scalars or vectors of equal length, and loads by what `load` gives."""

    def value(node: Expr) -> Expr:
        if isinstance(node, tirx.Var):
            return (
                values[node]
                if str(values[node].ty.dtype.with_lanes(1)) == str(node.ty)
                else _cast(values[node], node.ty)
            )
        if isinstance(node, ir.TensorLoad):
            return load(node.source, value(node.indices[0]))
        if isinstance(node, prim.BinaryOpExpr | prim.CmpExpr | prim.And | prim.Or):
            return type(node)(*_together(value(node.a), value(node.b)))
        if isinstance(node, prim.Not):
            return prim.Not(value(node.a))
        if isinstance(node, prim.Cast) and str(node.value.ty) == "bool" and str(node.ty) != "bool":
            # TVM's analysis of a bound vector stumbles over a comparison in it.
            one, zero = (tirx.const(x, str(node.ty)) for x in (1, 0))
            return prim.Select(*_together(value(node.value), one, zero))
        if isinstance(node, prim.Cast):
            return _cast(value(node.value), node.ty)
        if isinstance(node, prim.Select):
            return prim.Select(*_together(value(node.condition), value(node.true_value), value(node.false_value)))
        if isinstance(node, ir.Call):
            return _call(node, list(_together(*map(value, node.args))))
        return node

    return value(expr)


def _call(node: ir.Call, operands: list[Expr]) -> Expr:
    """A function of scalars, for each lane where it has no vector form."""
    lanes = _lanes(operands[0])
    if lanes == 1:
        return ir.Call(node.op, operands, node.attrs, node.ty_args, ret_ty=node.ty)
    each = []
    for lane in range(lanes):
        scalars = [tirx.Shuffle([operand], [lane]) for operand in operands]
        each.append(ir.Call(node.op, scalars, node.attrs, node.ty_args, ret_ty=node.ty))
    return tirx.Shuffle(each, list(range(lanes)))


def _together(*operands: Expr) -> tuple[Expr, ...]:
    """The operands with equally many lanes."""
    lanes = max(map(_lanes, operands))
    return tuple(x if _lanes(x) == lanes else T.broadcast(x, lanes) for x in operands)


def _cast(value: Expr, dtype: object) -> Expr:
    lanes = _lanes(value)
    return value.astype(str(dtype) if lanes == 1 else f"{dtype}x{lanes}")


def _lanes(value: Expr) -> int:
    return value.ty.dtype.lanes


def widened(value: Expr, dtype: str) -> Expr:
    """value in the wider floating-point type dtype.

    bfloat16 is widened by hand: TVM 0.27 forgets to do so in a T.bind and then takes the bits for an integer
    (ComputeLegalizer::VisitStmt_(BindNode)).
    """
    if str(value.ty.dtype.with_lanes(1)) == "bfloat16":
        bits = _cast(T.reinterpret(value.ty.dtype.replace("bfloat", "uint"), value), "uint32")
        value = T.reinterpret(bits.ty.dtype.replace("uint", "float"), bits << 16)
    return _cast(value, dtype)
