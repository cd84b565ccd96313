"""Formula: a mask as an expression over (b, h, i, j) that a kernel evaluates where it needs it.

The masks of real models are computed from positions, lengths and ids. As a tensor such a mask has S * T elements for
every head that differs; as an expression it reads a few small tables: the padding of each batch, a bias by distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from .expr.emit import emit, widened
from .expr.interval import Interval, extremes, interval
from .expr.node import INDICES, Expr, over, renumbered, rewritten
from .expr.read import read


@dataclass(frozen=True)
class Formula:
    """The mask's element for batch b, query head h, query row i and key j: `value`.

    dtype is bool (True is visible) or a floating-point type that is added to the score. The value reads so many
    `sizes`, int64 scalars, and `tables`, vectors of these element types. short says that there is one more scalar, a
    number of keys: those behind are invisible, and the element is not asked for.
    """

    value: Expr
    sizes: int
    tables: tuple[str, ...]
    short: bool

    @staticmethod
    def of(
        value: ir.Expr,
        indices: Sequence[tirx.Var],
        sizes: Sequence[tirx.Var],
        tables: Sequence[tirx.Buffer],
        short: bool,
    ) -> tuple[Formula, list[tirx.Var], list[tirx.Buffer]]:
        """The formula for `value`, an expression of the indices (b, h, i, j), the sizes and loads from the tables; and
        those of the sizes and tables that it reads, in its order.

        Raises ValueError for what no expression holds.
        """
        expr, size_order, table_order = renumbered(read(value, indices, sizes, tables))
        used = [tables[k] for k in table_order]
        formula = Formula(expr, len(size_order), tuple(str(table.dtype) for table in used), short)
        return formula, [sizes[k] for k in size_order], used

    @property
    def dtype(self) -> str:
        return self.value.dtype

    @property
    def over(self) -> tuple[str, ...]:
        """Names of the indices that the element depends on."""
        return over(self.value)

    def scalars(self) -> tuple[str, ...]:
        """Names of the kernel's int64 parameters for it."""
        return (*(f"size_{k}" for k in range(self.sizes)), *(("mask_keys",) if self.short else ()))

    def names(self) -> tuple[str, ...]:
        """Names of the kernel's parameters for it, in their order: the tables, then the scalars."""
        return (*(f"table_{k}" for k in range(len(self.tables))), *self.scalars())

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold."""
        about = {"sizes": self.sizes, "tables": list(self.tables), "short": self.short}
        return {"value": self.value.to_data(), **about}

    @staticmethod
    def from_data(data: dict[str, Any]) -> Formula:
        return Formula(Expr.from_data(data["value"]), data["sizes"], tuple(data["tables"]), data["short"])


class BoundFormula:
    """A formula with the tables and sizes that a kernel has for it, in its order.

    scope is the storage scope of its small variables, as in `Bound`.
    """

    def __init__(
        self, formula: Formula, tables: Sequence[tirx.Buffer], sizes: Sequence[ir.Expr], scope: str = "global"
    ) -> None:
        self.dtype, self.value, self.scope = formula.dtype, formula.value, scope
        self.tables, self.sizes = list(tables), list(sizes)
        if scope == "global":  # else the IRBuilder stands in host code, which has no memory that a kernel can read
            self.value = rewritten(self.value, self._once)

    def _once(self, node: Expr) -> Expr | None:
        """What depends on nothing but the sizes, computed here, where the IRBuilder stands; None for anything else."""
        leaves = [n.op for n in node.walk() if n.op in ("index", "load", "size")]
        if not node.args or not leaves or set(leaves) != {"size"}:
            return None
        # In memory, as TVM puts the definition of a plain binding wherever it is used.
        place = self.scratch(1, node.dtype)
        T.buffer_store(place, emit(node, [T.int64(0)] * len(INDICES), self.sizes, self.load), [0])
        self.sizes.append(T.bind(place[0]))
        return Expr("size", node.dtype, value=len(self.sizes) - 1)

    def __call__(self, b: ir.Expr, h: ir.Expr, i: ir.Expr, j: ir.Expr) -> ir.Expr:
        """The element; one of i and j may be a vector."""
        return emit(self.value, (b, h, i, j), self.sizes, self.load)

    def extremes(self, b: ir.Expr, h: ir.Expr, rows: Interval, keys: Interval) -> Interval | None:
        """The element's interval over rows and keys (ends included), for bool (surely, possibly); None if unknown.

        Emits code where the IRBuilder stands.
        """
        bounds = dict(zip(INDICES, ((b, b), (h, h), rows, keys)))

        def look(table: int, places: Interval) -> Interval:
            size = self.tables[table].shape[0]
            return extremes(lambda position: self.load(table, position), size, places, self.scratch)

        return interval(self.value, bounds, self.sizes, look)

    def scratch(self, size: int, dtype: str) -> tirx.Buffer:
        return T.alloc_buffer((size,), dtype, scope=self.scope)

    def load(self, table: int, position: ir.Expr) -> ir.Expr:
        """An element, or a vector of them; half precision as float32."""
        value = self.tables[table][position]
        return widened(value, "float32") if str(self.tables[table].dtype) in ("float16", "bfloat16") else value
