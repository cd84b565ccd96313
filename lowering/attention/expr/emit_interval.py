"""Interval analysis as code for the kernel.

A mask that is provably -inf on a tile of queries and keys lets a kernel skip the tile; one that is provably 0 lets it
run without mask code. Bounds are computed at run time: the ends of an interval are expressions, evaluated once per
tile, and a table is searched between the first and the last element that the tile can read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from tvm import ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from .emit import CLASSES, Materialize, cast, scalar_type
from .interval import IntervalAnalysis
from .node import Expr

Interval = tuple[ir.Expr, ir.Expr]

ReadTableRange = Callable[[str, Sequence[Interval]], Interval]
"""Returns the range of values of a table between two positions on each axis, both included."""


def compute_interval(
    expr: Expr,
    bounds: Mapping[str, Interval],
    scalars: Mapping[str, ir.Expr],
    read_range: ReadTableRange,
    materialize: Materialize,
) -> Interval | None:
    """Return the interval of `expr` for indices within `bounds`, both ends included; None if it is unknown.

    Emits code at the insertion point of the IRBuilder.
    """
    return _EmittedAnalysis(bounds, scalars, read_range, materialize).analyze(expr)


class _EmittedAnalysis(IntervalAnalysis):
    ops: ClassVar[Mapping[str, Callable[..., Any]]] = CLASSES | {
        "all": tirx.all, "any": tirx.any, "min": tirx.min, "max": tirx.max, "eq": lambda a, b: a.equal(b),
        "floordiv": tirx.floordiv, "floormod": tirx.floormod,
    }  # fmt: skip

    def __init__(
        self,
        bounds: Mapping[str, Interval],
        scalars: Mapping[str, ir.Expr],
        read_range: ReadTableRange,
        materialize: Materialize,
    ) -> None:
        super().__init__()
        self.bounds, self.scalars, self.read_range, self.materialize = bounds, scalars, read_range, materialize

    def make_constant(self, value: float, dtype: str) -> ir.Expr:
        return tirx.const(value, dtype)

    def read_constant(self, end: ir.Expr) -> float | None:
        return end.value if isinstance(end, prim.IntImm | prim.FloatImm) else None

    def convert(self, end: ir.Expr, dtype: str) -> ir.Expr:
        return end if scalar_type(end) == dtype else cast(end, dtype)

    def replace_nan(self, end: ir.Expr, replacement: float) -> ir.Expr:
        dtype = scalar_type(end)
        return prim.Select(tirx.isnan(end), tirx.const(replacement, dtype), end) if "float" in dtype else end

    def read_leaf(self, expr: Expr) -> Interval:
        if expr.op == "scalar":
            value = self.convert(self.scalars[expr.name], expr.dtype)
            return value, value
        low, high = self.bounds[expr.name]
        return self.convert(low, expr.dtype), self.convert(high, expr.dtype)

    def read_table(self, expr: Expr, positions: Sequence[Interval]) -> Interval:
        return self.read_range(expr.name, positions)

    def bind(self, end: ir.Expr) -> ir.Expr:
        return end if isinstance(end, tirx.Var | prim.IntImm | prim.FloatImm) else T.bind(self.materialize(end))


def find_table_range(
    element: Callable[..., ir.Expr],
    shape: Sequence[ir.Expr],
    positions: Sequence[Interval],
    scratch: Callable[[int, str], tirx.Buffer],
) -> Interval:
    """Return the range of values of a table of that shape between two positions on each axis.

    NaN makes the interval infinite. scratch allocates memory for a number of elements of a type.
    """

    def store(buffer: tirx.Buffer, value: ir.Expr) -> None:
        T.buffer_store(buffer, value, [0])

    def clamp_position(position: ir.Expr, size: ir.Expr) -> ir.Expr:
        """Return the clamped position, in memory: TVM would simplify its definition in every access."""
        memory = scratch(1, scalar_type(position))
        store(memory, tirx.max(tirx.min(position, size - 1), 0))
        return T.bind(memory[0])

    ends = [[clamp_position(position, size) for position in pair] for size, pair in zip(shape, positions, strict=True)]
    first = [start for start, _ in ends]
    dtype = str(element(*first).ty)
    low, high, ordered = (scratch(1, kind) for kind in (dtype, dtype, "bool"))

    store(low, element(*first))
    store(high, element(*first))
    store(ordered, tirx.const(True, "bool"))
    is_float = dtype.startswith("float")
    with ExitStack() as loops:
        steps = [loops.enter_context(T.serial(end - start + 1)) for start, end in ends]
        x = T.bind(element(*(start + step for start, step in zip(first, steps))))
        if dtype == "bool":
            store(low, tirx.all(low[0], x))
            store(high, tirx.any(high[0], x))
        else:
            store(low, tirx.min(low[0], x))
            store(high, tirx.max(high[0], x))
        if is_float:
            store(ordered, tirx.all(ordered[0], x <= tirx.const(float("inf"), dtype)))
    if not is_float:
        return low[0], high[0]
    infinity = tirx.const(float("inf"), dtype)
    return prim.Select(ordered[0], low[0], -infinity), prim.Select(ordered[0], high[0], infinity)
