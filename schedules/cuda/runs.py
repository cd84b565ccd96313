"""Runs: successive rows that choose the same matrix by a table."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..reading.selection import Selection
from .ptx import let, put, registers

_AT_ONCE = 8  # numbers that a thread asks for together

Run = Callable[[Expr, Expr, Expr], None]
"""What is emitted for a run: its first row and the one behind its last, int32, and the number of its matrix."""


def each_run(table: tirx.Buffer, selection: Selection, first: Expr, behind: Expr, run: Run) -> None:
    """Emit a loop over the runs from row `first` to the one before `behind`, int32; runs end there.

    Args:
        table: That of the selection, in memory.
        selection: How rows choose their matrices.
        first: The first row.
        behind: The row behind the last one.
        run: Emits what is done for each run.
    """
    at = registers(1, "int32")
    put(at, 0, first)
    with T.While(at[0] < behind):
        start = let(at[0])
        number = let(table[start.astype("int64")])
        end = let(_end(table, number, start, behind))
        run(start, end, let(selection.nearest(number)))
        put(at, 0, end)


def _end(table: tirx.Buffer, number: Expr, start: Expr, behind: Expr) -> Expr:
    """The first row behind `start` that chooses another matrix, or the last possible."""
    end, at, following = registers(1, "int32"), registers(1, "int32"), registers(_AT_ONCE, "int64")
    put(end, 0, behind)
    put(at, 0, start + 1)
    with T.While(at[0] < end[0]):
        here = let(at[0])
        for n in range(_AT_ONCE):
            put(following, n, table[tirx.min(here + n, behind - 1).astype("int64")])
        for n in reversed(range(_AT_ONCE)):
            with T.If(tirx.all(following[n] != number, here + n < behind)), T.Then():
                put(end, 0, here + n)
        put(at, 0, here + _AT_ONCE)
    return end[0]
