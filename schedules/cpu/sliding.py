"""Windows that slide over channels-last data: convolutions of one channel at a time, and pools.

Vectors run along channels. Several places of the window along the last spatial axis are computed side by side, for all
channels before the next ones: weights, and the data that their windows share, are loaded once.

    for each part of a row of windows                               among threads
        for each vector of channels
            places at either end whose windows leave the data       one by one
            others, `width` at a time
                registers[width] = identity
                for each element of the window that is in the data
                    registers = combine(registers, element)
                what the stages behind make of them -> output

What is outside of the data counts for nothing, so loops run over the elements inside, and no condition is left in them.
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

from lowering.tensorir.expressions import Expr, offset, substitute
from lowering.tensorir.facts import Facts

from ..reading.stages import Axis, Stage, read_stages, unravel, volume
from ..reading.values import Evaluator, flat_view
from ..tiles import Space
from ..variant import Variant
from .cycles import LATENCY, TYPICAL
from .fast_math import expand
from .loop_body import before_loop, emit
from .loops import LoopTiles, split_among_threads
from .vector import Machine, let, machine
from .window import Windows, read_windows

_UNROLLED = 16  # elements of a window's row whose code is written out


@dataclass(frozen=True, kw_only=True)
class WindowTiles(LoopTiles):
    """Tiles of windows."""

    version: ClassVar[int] = 2

    width: int = 4
    """Windows side by side, each with a register of sums."""
    chunk: int = 64
    """The most places of a task: what their windows cover of a vector of channels should fit the nearest cache."""

    @classmethod
    def default(cls, problem: Windows, machine: Machine) -> WindowTiles:
        """The width that leaves the fewest blocks and places alone: each takes a while to begin."""
        count = problem.whole_places
        widths = range(2, min(8, machine.registers // 2) + 1) if count else (cls.width,)
        return WindowTiles(width=min(widths, key=lambda width: _begun(count or 0, width)))

    @classmethod
    def space(cls, problem: Any, machine: Machine) -> Space:
        return super().space(problem, machine) | {"width": tuple(range(1, 9)), "chunk": (16, 32, 64, 128, 256)}

    def rules(self, problem: Any, machine: Machine) -> dict[str, bool]:
        fits = 1 <= self.width <= machine.registers // 2
        return super().rules(problem, machine) | {
            f"width = {self.width} must fit the registers": fits,
            f"chunk = {self.chunk} must be at least width = {self.width}": self.chunk >= self.width,
        }

    def estimate(self, problem: Windows, machine: Machine) -> float:
        """Elements of the windows, and a wait for the first sums of each block and of each place that is alone."""
        count = problem.whole_places or TYPICAL
        elements = math.prod(axis.extent.value for axis in problem.stage.reduce)
        return math.log(count * elements + LATENCY * _begun(count, self.width))


def _begun(count: int, width: int) -> int:
    """Blocks of so many places, and the places that are left."""
    return count // width + count % width


def windows(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Vectors along channels for a reduction over windows with element-wise stages behind it; None for anything
    else."""
    stages = read_stages(func)
    found = read_windows(stages, set(func.params)) if stages else None
    if found is None or stages is None:
        return None
    cpu = machine(target)
    tiles = {"windows": WindowTiles.default(found, cpu)}
    return [Variant("windows", found, cpu, tiles, lambda t: _Kernel(func, stages, found, cpu, t["windows"]).write())]


class _Kernel:
    def __init__(
        self, func: tirx.PrimFunc, stages: list[Stage], problem: Windows, cpu: Machine, tiles: WindowTiles
    ) -> None:
        self.func, self.stages, self.problem, self.tiles = func, stages, problem, tiles
        self.lanes = cpu.lanes("float32")
        self.facts = Facts.of(func)
        for axis in (*problem.stage.axes, *problem.stage.reduce):
            self.facts.bind(axis.var, 0, axis.extent)

    def write(self) -> tirx.PrimFunc:
        with IRBuilder() as builder, T.prim_func():
            self.memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, self.func.params)}
            self.evaluator = Evaluator.of(self.stages, self.memory, expand)
            self.rows()
        return self.func.with_body(builder.get().body)

    def rows(self) -> None:
        """All windows, in parts of rows of about equal length."""
        problem, width, most = self.problem, self.tiles.width, self.tiles.chunk
        outer, places = problem.stage.axes[:-2], problem.places.extent
        parts = let(tirx.max((places + (most - 1)) // most, 1))
        each = let((places + (parts * width - 1)) // (parts * width) * width)

        def task(index: Expr) -> None:
            values = {axis.var: let(value) for axis, value in zip(outer, unravel(index // parts, outer))}
            first = let(tirx.min(index % parts * each, places))
            end = let(tirx.min(first + each, places))
            self.vectors(lambda channel, lanes: self.part(values, first, end, channel, lanes))

        elements = math.prod(axis.extent.value for axis in problem.stage.reduce)
        work = volume(problem.stage.axes) * elements
        split_among_threads(volume(outer) * parts, work, self.tiles.parallel_work, task)

    def vectors(self, body: Callable[[Expr, int], None]) -> None:
        """body(channel, lanes) for vectors from a channel on. What remains is halved where its length is known."""
        start: Expr = tirx.const(0, "int64")
        lanes = self.lanes
        while lanes:
            count = Analyzer().simplify(self.problem.channels.extent - start)
            if not isinstance(count, tirx.IntImm) or count.value >= lanes:
                with T.serial(count // lanes) as n:
                    body(let(start + n * lanes), lanes)
                start = Analyzer().simplify(start + count // lanes * lanes)
            lanes = lanes // 2 if isinstance(count, tirx.IntImm) or lanes == 1 else 1

    def part(self, point: dict[tirx.Var, Expr], first: Expr, end: Expr, channel: Expr, lanes: int) -> None:
        """The windows at places [first, end) of one row, for one vector of channels."""
        problem, width = self.problem, self.tiles.width
        low, high = first, end
        for guard in problem.guards:
            if guard.axis is problem.places:
                above, below = guard.range_of_places()
                low = low if above is None else tirx.max(low, above)
                high = high if below is None else tirx.min(high, below)
        low = let(tirx.min(self.facts.simplify(low), end))
        high = let(tirx.max(self.facts.simplify(high), low))
        blocks = let((high - low) // width)

        def loop(start: Expr, count: Expr, step: int, whole: bool) -> None:
            with T.serial(count) as n:
                place = let(start + n * step)
                points = [{**point, problem.places.var: place + k if k else place} for k in range(step)]
                self.block(points, channel, lanes, whole)

        leaving = any(guard.axis is problem.places for guard in problem.guards)
        if leaving:
            loop(first, low - first, 1, False)
        loop(low, blocks, width, True)
        if width > 1:
            loop(low + blocks * width, high - (low + blocks * width), 1, True)
        if leaving:
            loop(high, end - high, 1, False)

    def block(self, points: list[dict[tirx.Var, Expr]], channel: Expr, lanes: int, whole: bool) -> None:
        """Windows side by side, for one vector of channels. whole: with all of their elements along the row."""
        problem, stage = self.problem, self.problem.stage
        lane = tirx.Var("lane", "int64")
        facts = self.facts.copy()
        facts.bind(lane, 0, tirx.const(lanes, "int64"))
        here = {problem.channels.var: channel + lane}
        sums = [T.alloc_buffer((lanes,), stage.output.dtype) for _ in points]
        (initial,) = emit(self.evaluator.program([stage.init], facts), {})
        for total in sums:
            with T.vectorized(tirx.const(lanes, "int64")) as n:
                T.buffer_store(total, initial, [n])

        with self.elements(points[0], whole) as values:
            term = self.evaluator.program([substitute(problem.term, here)], facts)
            for at, total in ((p, s) for v in values for p, s in zip(({**p, **v} for p in points), sums)):
                write = before_loop(term, lane, at)(lanes)
                with T.vectorized(tirx.const(lanes, "int64")) as n:
                    (value,) = write(n, n)
                    T.buffer_store(total, problem.combine(total[n], value), [n])
        self.store(points, sums, lane, here, facts)

    def store(
        self,
        points: list[dict[tirx.Var, Expr]],
        sums: list[tirx.Buffer],
        lane: tirx.Var,
        here: dict[tirx.Var, Expr],
        facts: Facts,
    ) -> None:
        """What the stages make of the sums at these points, stored; the channels of a vector are in terms of `lane`."""
        outputs, stage = self.problem.outputs, self.problem.stage
        index = [facts.simplify(substitute(axis.var, here)) for axis in stage.axes]
        positions = [facts.simplify(offset(output.shape, index)) for output in outputs]
        wanted = [*(tirx.BufferLoad(output, index) for output in outputs), *positions]
        dtypes = [self.memory[output].dtype for output in outputs]
        for at, total in zip(points, sums):
            program = self.evaluator.program(wanted, facts, {stage.output: [(index, total[lane])]}, dtypes)
            lanes = total.shape[0].value
            write = before_loop(program, lane, at)(lanes)
            with T.vectorized(tirx.const(lanes, "int64")) as n:
                found = write(n, n)
                for output, value, position in zip(outputs, found, found[len(outputs) :]):
                    T.buffer_store(self.memory[output], value, [position])

    @contextmanager
    def elements(self, point: dict[tirx.Var, Expr], whole: bool) -> Iterator[Sequence[dict[tirx.Var, Expr]]]:
        """Inside loops over the elements of a window that are in the data: the variables' values for which code is
        written out, one after the other."""
        problem = self.problem
        *outer, last = problem.stage.reduce
        slides = any(guard.k is last and guard.axis is not problem.places for guard in problem.guards)
        unrolled = whole and not slides and last.extent.value <= _UNROLLED
        values: dict[tirx.Var, Expr] = {}

        def loops(axes: list[Axis]) -> Iterator[Sequence[dict[tirx.Var, Expr]]]:
            if not axes:
                ks = range(last.extent.value) if unrolled else ()
                yield [{**values, last.var: tirx.const(k, "int64")} for k in ks] or [values]
                return
            low, high = self.inside(axes[0], point, whole)
            with T.serial(high - low) as n:
                values[axes[0].var] = let(low + n)
                yield from loops(axes[1:])

        yield from loops([*outer, *([] if unrolled else [last])])

    def inside(self, k: Axis, point: dict[tirx.Var, Expr], whole: bool) -> tuple[Expr, Expr]:
        """The range of a variable of the window within which its elements are in the data."""
        low: Expr = tirx.const(0, "int64")
        high: Expr = k.extent
        for guard in self.problem.guards:
            if guard.k is k and not (whole and guard.axis is self.problem.places):
                above, below = guard.range_of_k(point[guard.axis.var])
                low = low if above is None else tirx.max(low, above)
                high = high if below is None else tirx.min(high, below)
        low, high = let(low), let(high)
        return low, let(tirx.max(high, low))
