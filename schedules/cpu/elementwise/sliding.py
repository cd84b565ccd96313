"""Windows that slide over channels-last data: depthwise convolutions, and pools.

Vectors run along channels, which are the inner loop. A register tile has several output positions along the last
spatial axis. Weights, and the data that their windows share, are loaded once.

    for each chunk of a row of windows                              among threads
        for each vector of channels
            positions whose windows reach into the padding         one by one
            the other positions, `width` at a time
                registers[width] = identity
                for each element of the window that is in the data
                    registers = combine(registers, element)
                following stages of the registers -> output

Elements outside of the data are ignored, so loops run over the elements inside, and contain no conditions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, flatten_index, substitute
from lowering.tensorir.facts import Facts

from ...reading.stages import Axis, Stage, count_points, read_stages, unravel
from ...reading.values import Evaluator, flat_view
from ...tiles import Space
from ...variant import Variant
from ..primitives.cycles import LATENCY, TYPICAL
from ..primitives.fast_math import expand
from ..primitives.vector import CpuFeatures, let, read_cpu_features
from .loop_body import emit_program, hoist_before_loop
from .loops import LoopTiles, split_among_threads
from .window import WindowReduction, read_windows

_UNROLLED = 16  # elements of a window's row up to which the loop is unrolled


@dataclass(frozen=True, kw_only=True)
class WindowTiles(LoopTiles):
    """Tiles of sliding windows."""

    version: ClassVar[int] = 2

    width: int = 4
    """Windows side by side, each with an accumulator."""
    chunk: int = 64
    """The maximum number of output positions of one work item of a thread. The data that their windows read for a
    vector of channels should fit L1."""

    @classmethod
    def default(cls, problem: WindowReduction, cpu: CpuFeatures) -> WindowTiles:
        """Return the default: the width with the fewest blocks and single positions, as each costs start-up time."""
        count = problem.interior_positions
        widths = range(2, min(8, cpu.registers // 2) + 1) if count else (cls.width,)
        return WindowTiles(width=min(widths, key=lambda width: _count_starts(count or 0, width)))

    @classmethod
    def space(cls, problem: Any, cpu: CpuFeatures) -> Space:
        return super().space(problem, cpu) | {"width": tuple(range(1, 9)), "chunk": (16, 32, 64, 128, 256)}

    def rules(self, problem: Any, cpu: CpuFeatures) -> dict[str, bool]:
        fits = 1 <= self.width <= cpu.registers // 2
        return super().rules(problem, cpu) | {
            f"width = {self.width} must fit the registers": fits,
            f"chunk = {self.chunk} must be at least width = {self.width}": self.chunk >= self.width,
        }

    def estimate(self, problem: WindowReduction, cpu: CpuFeatures) -> float:
        """Estimate the log of the cycles: elements of windows, and the latency of each block and single position."""
        count = problem.interior_positions or TYPICAL
        elements = math.prod(axis.extent.value for axis in problem.stage.reduce)
        return math.log(count * elements + LATENCY * _count_starts(count, self.width))


def _count_starts(count: int, width: int) -> int:
    """Return the number of blocks of `width` positions plus that of the remaining positions."""
    return count // width + count % width


def windows(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Schedule a reduction over windows with element-wise stages after it, by vectors along channels.

    Return None for anything else.
    """
    stages = read_stages(func)
    problem = read_windows(stages, set(func.params)) if stages else None
    if problem is None or stages is None:
        return None
    cpu = read_cpu_features(target)
    tiles = {"windows": WindowTiles.default(problem, cpu)}
    return [Variant("windows", problem, cpu, tiles, lambda t: _Kernel(func, stages, problem, cpu, t["windows"]).emit())]


class _Kernel:
    def __init__(
        self, func: tirx.PrimFunc, stages: list[Stage], problem: WindowReduction, cpu: CpuFeatures, tiles: WindowTiles
    ) -> None:
        self.func, self.stages, self.problem, self.tiles = func, stages, problem, tiles
        self.lanes = cpu.lanes("float32")
        self.facts = Facts.of(func)
        for axis in (*problem.stage.axes, *problem.stage.reduce):
            self.facts.bind(axis.var, 0, axis.extent)

    def emit(self) -> tirx.PrimFunc:
        with IRBuilder() as builder, T.prim_func():
            self.memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, self.func.params)}
            self.evaluator = Evaluator.of(self.stages, self.memory, expand)
            self.emit_rows()
        return self.func.with_body(builder.get().body)

    def emit_rows(self) -> None:
        """Emit all windows, in chunks of rows of about equal length."""
        problem, width, max_positions = self.problem, self.tiles.width, self.tiles.chunk
        outer, positions = problem.stage.axes[:-2], problem.positions.extent
        chunks = let(tirx.max((positions + (max_positions - 1)) // max_positions, 1))
        chunk_length = let((positions + (chunks * width - 1)) // (chunks * width) * width)

        def task(index: Expr) -> None:
            values = {axis.var: let(value) for axis, value in zip(outer, unravel(index // chunks, outer))}
            first = let(tirx.min(index % chunks * chunk_length, positions))
            end = let(tirx.min(first + chunk_length, positions))
            self.emit_vectors(lambda channel, lanes: self.emit_chunk(values, first, end, channel, lanes))

        elements = math.prod(axis.extent.value for axis in problem.stage.reduce)
        work = count_points(problem.stage.axes) * elements
        split_among_threads(count_points(outer) * chunks, work, self.tiles.parallel_work, task)

    def emit_vectors(self, body: Callable[[Expr, int], None]) -> None:
        """Emit body(channel, lanes) for vectors of channels.

        A static remainder has vectors of lanes / 2, lanes / 4 and so on; a symbolic one has scalars.
        """
        start: Expr = tirx.const(0, "int64")
        lanes = self.lanes
        while lanes:
            count = Analyzer().simplify(self.problem.channels.extent - start)
            if not isinstance(count, tirx.IntImm) or count.value >= lanes:
                with T.serial(count // lanes) as n:
                    body(let(start + n * lanes), lanes)
                start = Analyzer().simplify(start + count // lanes * lanes)
            lanes = lanes // 2 if isinstance(count, tirx.IntImm) or lanes == 1 else 1

    def emit_chunk(self, point: dict[tirx.Var, Expr], first: Expr, end: Expr, channel: Expr, lanes: int) -> None:
        """Emit the windows at positions [first, end) of one row, for one vector of channels."""
        problem, width = self.problem, self.tiles.width
        low, high = first, end
        for guard in problem.guards:
            if guard.axis is problem.positions:
                above, below = guard.range_of_positions()
                low = low if above is None else tirx.max(low, above)
                high = high if below is None else tirx.min(high, below)
        low = let(tirx.min(self.facts.simplify(low), end))
        high = let(tirx.max(self.facts.simplify(high), low))
        blocks = let((high - low) // width)

        def loop(start: Expr, count: Expr, step: int, is_whole: bool) -> None:
            with T.serial(count) as n:
                position = let(start + n * step)
                points = [{**point, problem.positions.var: position + k if k else position} for k in range(step)]
                self.emit_block(points, channel, lanes, is_whole)

        can_leave = any(guard.axis is problem.positions for guard in problem.guards)
        if can_leave:
            loop(first, low - first, 1, False)
        loop(low, blocks, width, True)
        if width > 1:
            loop(low + blocks * width, high - (low + blocks * width), 1, True)
        if can_leave:
            loop(high, end - high, 1, False)

    def emit_block(self, points: list[dict[tirx.Var, Expr]], channel: Expr, lanes: int, whole: bool) -> None:
        """Emit windows side by side, for one vector of channels; whole: their elements along the row are all inside."""
        problem, stage = self.problem, self.problem.stage
        lane = tirx.Var("lane", "int64")
        facts = self.facts.copy()
        facts.bind(lane, 0, tirx.const(lanes, "int64"))
        channel_index = {problem.channels.var: channel + lane}
        accumulators = [T.alloc_buffer((lanes,), stage.output.dtype) for _ in points]
        (initial,) = emit_program(self.evaluator.program([stage.init], facts), {})
        for total in accumulators:
            with T.vectorized(tirx.const(lanes, "int64")) as n:
                T.buffer_store(total, initial, [n])

        with self.iterate_elements(points[0], whole) as values:
            term = self.evaluator.program([substitute(problem.term, channel_index)], facts)
            for point, total in ((p, s) for v in values for p, s in zip(({**p, **v} for p in points), accumulators)):
                write = hoist_before_loop(term, lane, point)(lanes)
                with T.vectorized(tirx.const(lanes, "int64")) as n:
                    (value,) = write(n, n)
                    T.buffer_store(total, problem.combine(total[n], value), [n])
        self.store(points, accumulators, lane, channel_index, facts)

    def store(
        self,
        points: list[dict[tirx.Var, Expr]],
        accumulators: list[tirx.Buffer],
        lane: tirx.Var,
        channel_index: dict[tirx.Var, Expr],
        facts: Facts,
    ) -> None:
        """Emit the following stages of the accumulators at these points, with channels in terms of `lane`, and store
        them."""
        outputs, stage = self.problem.outputs, self.problem.stage
        index = [facts.simplify(substitute(axis.var, channel_index)) for axis in stage.axes]
        positions = [facts.simplify(flatten_index(output.shape, index)) for output in outputs]
        expressions = [*(tirx.BufferLoad(output, index) for output in outputs), *positions]
        dtypes = [self.memory[output].dtype for output in outputs]
        for point, total in zip(points, accumulators):
            program = self.evaluator.program(expressions, facts, {stage.output: [(index, total[lane])]}, dtypes)
            lanes = total.shape[0].value
            write = hoist_before_loop(program, lane, point)(lanes)
            with T.vectorized(tirx.const(lanes, "int64")) as n:
                elements = write(n, n)
                for output, value, position in zip(outputs, elements, elements[len(outputs) :]):
                    T.buffer_store(self.memory[output], value, [position])

    @contextmanager
    def iterate_elements(self, point: dict[tirx.Var, Expr], whole: bool) -> Iterator[Sequence[dict[tirx.Var, Expr]]]:
        """Emit loops over the elements of a window that are in the data, and yield the unrolled variables' values."""
        problem = self.problem
        *outer, last = problem.stage.reduce
        slides = any(guard.k is last and guard.axis is not problem.positions for guard in problem.guards)
        unrolled = whole and not slides and last.extent.value <= _UNROLLED
        values: dict[tirx.Var, Expr] = {}

        def loops(axes: list[Axis]) -> Iterator[Sequence[dict[tirx.Var, Expr]]]:
            if not axes:
                ks = range(last.extent.value) if unrolled else ()
                yield [{**values, last.var: tirx.const(k, "int64")} for k in ks] or [values]
                return
            low, high = self.range_inside(axes[0], point, whole)
            with T.serial(high - low) as n:
                values[axes[0].var] = let(low + n)
                yield from loops(axes[1:])

        yield from loops([*outer, *([] if unrolled else [last])])

    def range_inside(self, k: Axis, point: dict[tirx.Var, Expr], whole: bool) -> tuple[Expr, Expr]:
        """Return the range of a window variable within which its elements are in the data."""
        low: Expr = tirx.const(0, "int64")
        high: Expr = k.extent
        for guard in self.problem.guards:
            if guard.k is k and not (whole and guard.axis is self.problem.positions):
                above, below = guard.range_of_k(point[guard.axis.var])
                low = low if above is None else tirx.max(low, above)
                high = high if below is None else tirx.min(high, below)
        low, high = let(low), let(high)
        return low, let(tirx.max(high, low))
