"""Loops: split among threads where that pays off, and vectorized with an exact remainder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, is_int

from ...reading.stages import Axis, count_points, unravel
from ...tiles import Space, Tiles
from ..primitives.vector import CpuFeatures, let

PLAN_LAUNCH = "lowering_plan_launch"
"""From lowering/runtime/native/parallel.c: how threads share the following parallel loop, by its number of tasks."""

_ALONE, _EQUAL_SHARES = tirx.const(1, "int64"), tirx.const(0, "int64")

_LONG_WORK = 1 << 23
"""Simple operations from which on threads take tasks one after the other, instead of a fixed share of them. They take
a core 50 to 500 microseconds, in which other programs may use its CPU, or another core may be faster."""


@dataclass(frozen=True, kw_only=True)
class LoopTiles(Tiles):
    """The splitting of loops among threads."""

    parallel_work: int = 1 << 16
    """Simple operations from which on threads are woken. Waking them takes some microseconds, as long as one core
    needs for that work."""
    task_work: int = 1 << 13
    """Simple operations of a task: enough to hide the start of its loops."""

    @classmethod
    def space(cls, problem: Any, cpu: CpuFeatures) -> Space:
        return {
            "parallel_work": tuple(1 << n for n in range(12, 22, 2)),
            "task_work": tuple(1 << n for n in range(11, 18, 2)),
        }

    def rules(self, problem: Any, cpu: CpuFeatures) -> dict[str, bool]:
        return {"parallel_work and task_work must be positive": min(self.parallel_work, self.task_work) > 0}


def split_among_threads(tasks: Expr, work: Expr, parallel_work: int, body: Callable[[Expr], None]) -> None:
    """Emit body(task) for each task, in parallel if the work is at least `parallel_work`.

    work is the number of simple operations of all tasks. It is tested at run time if it is symbolic.
    """
    work, tasks = Analyzer().simplify(work), Analyzer().simplify(tasks)
    if is_int(tasks, 1) or (isinstance(work, tirx.IntImm) and work.value < parallel_work):
        with T.serial(tasks) as task:
            body(task)
        return
    plan = tirx.Select(work < _LONG_WORK, _EQUAL_SHARES, tasks.astype("int64"))
    plan = Analyzer().simplify(tirx.Select(work < parallel_work, _ALONE, plan))
    is_planned = not is_int(plan, 0)
    if is_planned:
        T.evaluate(T.call_extern("int32", PLAN_LAUNCH, plan))
    with T.parallel(tasks) as task:
        body(task)
    if is_planned and not isinstance(tasks, tirx.IntImm):  # a loop that TVM proves to have one task launches nothing
        T.evaluate(T.call_extern("int32", PLAN_LAUNCH, _EQUAL_SHARES))


def split_rows(
    axes: Sequence[Axis], row_work: Expr, tiles: LoopTiles, body: Callable[[list[Expr], Axis], None]
) -> None:
    """Split a rectangle of rows into tasks: body(outer, last) handles the rows outer x last.

    outer is the point of a task along all axes but the last one. `last` is a range of the last axis; its var is the
    start of the range. There must be an axis.
    """
    *outer, last = axes
    rows = let(tirx.max(tiles.task_work // tirx.max(row_work, 1), 1))
    blocks = let((last.extent + (rows - 1)) // rows)

    def task(index: Expr) -> None:
        point = unravel(let(index // blocks), outer, let)
        first = let(index % blocks * rows)
        body(point, Axis(first, let(tirx.min(rows, last.extent - first))))

    split_among_threads(count_points(outer) * blocks, count_points(axes) * row_work, tiles.parallel_work, task)


def emit_nest(axes: Sequence[Axis], body: Callable[[dict[tirx.Var, Expr]], None]) -> None:
    """Emit body(values of the axes' variables) at each point of a rectangle, in serial loops."""

    def loops(remaining: Sequence[Axis], point: dict[tirx.Var, Expr]) -> None:
        if not remaining:
            body(point)
            return
        with T.serial(remaining[0].extent) as i:
            loops(remaining[1:], {**point, remaining[0].var: i})

    loops(axes, {})


def emit_vector_loop(extent: Expr, lanes: int, body: Callable[[int], Callable[[Expr, Expr], None]]) -> None:
    """Emit body(w)(i, lane) for 0 <= i < extent, in vectors of w = `lanes` elements, of which i is number `lane`.

    The remainder uses halved vectors if its length is static, and scalars otherwise. body(w) is called before each
    loop.
    """
    extent = Analyzer().simplify(extent)
    start: Expr = tirx.const(0, "int64")
    while lanes > 1:
        whole = extent // lanes
        if not isinstance(extent, tirx.IntImm) or extent.value >= lanes:
            write = body(lanes)
            with T.serial(whole) as i, T.vectorized(tirx.const(lanes, "int64")) as lane:
                write(start + i * lanes + lane, lane)
            start, extent = start + whole * lanes, extent - whole * lanes
        if not isinstance(extent, tirx.IntImm):
            break
        lanes //= 2
    if not is_int(extent, 0):
        write = body(1)
        with T.serial(extent) as i:
            write(start + i, tirx.const(0, "int64"))
