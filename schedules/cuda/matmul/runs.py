"""Runs: successive rows that choose the same matrix by a table."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ...reading.selection import Selection
from ..primitives.ptx import alloc_registers, let, store_element

_AT_ONCE = 8  # table entries that a thread loads at once

EmitRun = Callable[[Expr, Expr, Expr], None]
"""Emits the code for a run: its first row and the one after its last, int32, and the index of its matrix."""


def emit_run_loop(table: tirx.Buffer, selection: Selection, first: Expr, end_row: Expr, run: EmitRun) -> None:
    """Emit a loop over the runs from row `first` to the one before `end_row`, int32; runs end there.

    Args:
        table: The table of the selection, in memory.
        selection: How rows choose their matrices.
        first: The first row.
        end_row: The row after the last one.
        run: Emits the code for each run.
    """
    at = alloc_registers(1, "int32")
    store_element(at, 0, first)
    with T.While(at[0] < end_row):
        start = let(at[0])
        number = let(table[start.astype("int64")])
        end = let(_find_run_end(table, number, start, end_row))
        run(start, end, let(selection.clamp_group(number)))
        store_element(at, 0, end)


def _find_run_end(table: tirx.Buffer, number: Expr, start: Expr, end_row: Expr) -> Expr:
    """Return the first row after `start` that chooses another matrix, or `end_row`."""
    end, at, following = alloc_registers(1, "int32"), alloc_registers(1, "int32"), alloc_registers(_AT_ONCE, "int64")
    store_element(end, 0, end_row)
    store_element(at, 0, start + 1)
    with T.While(at[0] < end[0]):
        row = let(at[0])
        for n in range(_AT_ONCE):
            store_element(following, n, table[tirx.min(row + n, end_row - 1).astype("int64")])
        for n in reversed(range(_AT_ONCE)):
            with T.If(tirx.all(following[n] != number, row + n < end_row)), T.Then():
                store_element(end, 0, row + n)
        store_element(at, 0, row + _AT_ONCE)
    return end[0]
