"""Functions with reductions: softmax, normalizations, means, and matmuls that are no blocked matmul.

The leading axes that all stages share are the rows. A thread takes a row through all stages before it goes on to the
next: what is one number per row stays in a register, what is an element of the row in the nearest cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, is_int, loads, offset, substitute
from lowering.tensorir.facts import Facts

from ..half_precision import is_half
from ..reading.reducers import Combine, read_term
from ..reading.shared_axes import runs_across, several, shared_rank
from ..reading.stages import Axis, Stage, read_stages, volume
from ..reading.values import Evaluator, Known, Program, View, flat_view, moved_outputs, scratch_type
from ..tiles import Space
from ..variant import Variant
from .cycles import LATENCY
from .elementwise import expensive_outputs, recomputed
from .fast_math import expand
from .loop_body import before_loop, emit, is_vectorizable
from .loops import LoopTiles, nest, split_rows
from .results import Memory
from .sweep import Piece, plan_sweep
from .vector import Machine, Register, convert, let, machine, reduce_lanes, splat

# Operations per element of a stage that calls functions or divides.
_COSTLY = 8


@dataclass(frozen=True, kw_only=True)
class ReductionTiles(LoopTiles):
    """Tiles of reductions."""

    accumulators: int = 4
    """Independent partial results: an addition takes several cycles, and one can start in each."""

    @classmethod
    def space(cls, problem: Any, machine: Machine) -> Space:
        return super().space(problem, machine) | {"accumulators": (1, 2, 4, 8)}

    def rules(self, problem: Any, machine: Machine) -> dict[str, bool]:
        fits = 1 <= self.accumulators <= machine.registers // 2
        return super().rules(problem, machine) | {f"accumulators = {self.accumulators} must fit the registers": fits}

    def estimate(self, problem: Any, machine: Machine) -> float:
        """Sums that wait for one another."""
        return math.log(max(LATENCY / 2 / self.accumulators, 1.0))


def reduction(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Rows among threads, vectors along them, for functions with reductions; None for anything else."""
    stages = read_stages(func)
    if not stages or not any(stage.reduce for stage in stages):
        return None
    cpu = machine(target)
    tiles = {"rows": ReductionTiles.default(stages, cpu)}
    return [Variant("rows", stages, cpu, tiles, lambda tiles: _write(RowKernel(func, stages, cpu, tiles["rows"])))]


def _write(kernel: RowKernel) -> tirx.PrimFunc:
    """The function with the kernel as its body."""
    func = kernel.func
    with IRBuilder() as builder, T.prim_func():
        kernel.open({buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)})
        axes = kernel.axes
        long = [axis for axis in axes if not is_int(axis.extent, 1)]

        def rows(outer: list[Expr], last: Axis) -> None:
            scratch = kernel.allocate()
            with T.serial(last.extent) as i:
                point = iter([*outer, let(last.var + i)])
                kernel.row([next(point) if axis in long else _ZERO for axis in axes], scratch)

        if long:
            split_rows(long, kernel.work(), kernel.tiles, rows)
        else:
            kernel.row([_ZERO for _ in axes], kernel.allocate())
    return func.with_body(builder.get().body)


class RowKernel:
    """All stages, or some of a function's, for a row. `parameters` are the tensors that others make or read, by default
    those of the function; `kept` are the stages with values of their own, the others are computed where they are read.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        stages: list[Stage],
        cpu: Machine,
        tiles: ReductionTiles,
        parameters: set[tirx.Buffer] | None = None,
    ) -> None:
        self.func, self.stages, self.cpu, self.tiles = func, stages, cpu, tiles
        self.lanes = cpu.lanes("float32")
        parameters = set(func.params) if parameters is None else parameters
        self.stored = parameters & {stage.output for stage in stages}
        self.moved = moved_outputs(stages, parameters - self.stored)
        needed = [stage for stage in stages if stage.reduce or stage.output in self.stored]
        self.rank = shared_rank(needed, stages)
        while self.rank and any(stage.reduce and runs_across(stage, self.rank) for stage in stages):
            self.rank -= 1
        self.costly = expensive_outputs(stages)
        often = recomputed(stages) | {s.output for s in stages if s.output in self.costly and _readers(s, stages) > 1}
        self.kept = []
        for stage in stages:
            extra = stage.output in often and shared_rank([*needed, stage], stages) >= self.rank
            if stage in needed or extra:
                self.kept.append(stage)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Those that number the rows."""
        return self.kept[0].axes[: self.rank]

    def open(self, memory: Memory) -> None:
        """Where the parameters are, as vectors of their elements."""
        self.inputs = {buffer: View(flat) for buffer, flat in memory.items() if buffer not in self.stored}
        self.outputs = {buffer: memory[buffer] for buffer in self.stored}

    def work(self) -> Expr:
        """Simple operations per row, roughly."""
        total: Expr = tirx.const(0, "int64")
        for stage in self.kept:
            elements = volume((*stage.axes[self.rank :], *stage.reduce))
            total = total + elements * (_COSTLY if stage.output in self.costly else 1)
        return Analyzer().simplify(total)

    def allocate(self) -> dict[tirx.Buffer, tirx.Buffer]:
        """Memory for `scratch_rows`."""
        return {output: T.alloc_buffer((size,), dtype) for output, (size, dtype) in self.scratch_rows().items()}

    def scratch_rows(self) -> dict[tirx.Buffer, tuple[Expr, str]]:
        """Elements and their type of a row of the stages that need one, in float32 where their own type is half
        precision."""
        rows = {}
        for stage in self.kept:
            output, half = stage.output, is_half(stage.output.dtype)
            in_memory = several(stage, self.rank) or (stage.reduce and read_term(stage) is None)
            if in_memory and (output not in self.stored or (half and stage.reduce)):
                rows[output] = volume(stage.axes[self.rank :]), scratch_type(output, self.moved)
        return rows

    def row(self, point: list[Expr], scratch: dict[tirx.Buffer, tirx.Buffer]) -> None:
        """All stages at one point of the leading axes."""
        self.point, self.scratch = point, scratch
        self.evaluator = Evaluator(self.stages, dict(self.inputs), expand)
        self.known: Known = {}
        self.facts = Facts.of(self.func)
        for axis, index in zip(self.kept[0].axes, point):
            self.facts.bind(index, 0, axis.extent)
        for stage in self.kept:
            term = read_term(stage)
            if several(stage, self.rank) or (stage.reduce and term is None):
                (self.accumulate if stage.reduce else self.map)(stage)
            elif term is None:
                self.keep(stage, self.evaluate(stage.at(self.whole(stage))))
            else:
                self.keep(stage, self.reduce(stage, *term))

    def whole(self, stage: Stage) -> list[Expr]:
        """The point of the stage's only element in the row."""
        return [*self.point, *(_ZERO for _ in stage.axes[self.rank :])]

    def evaluate(self, expr: Expr, stored: str = "") -> Expr:
        return emit(self.evaluator.program([expr], self.facts, self.known, [stored]), {})[0]

    def keep(self, stage: Stage, value: Expr) -> None:
        """Names the only value of the row, and stores it if it is an output."""
        point, value = self.whole(stage), let(value)
        self.known[stage.output] = [(point, value)]
        if stage.output in self.outputs:
            position = self.facts.simplify(offset(stage.output.shape, point))
            if stage.output in self.moved:
                value = self.evaluate(stage.at(point), stage.output.dtype)
            elif is_half(stage.output.dtype):
                value = convert(value, stage.output.dtype, self.cpu)
            T.buffer_store(self.outputs[stage.output], value, [position])

    def map(self, stage: Stage) -> None:
        """An element-wise stage along the row."""
        view = self.view(stage)
        self.sweep(stage, view, stage.at)
        self.evaluator.views[stage.output] = view

    def accumulate(self, stage: Stage) -> None:
        """A reduction whose results are updated in memory."""
        view = self.view(stage)
        self.sweep(stage, view, lambda point: stage.init)
        self.evaluator.views[stage.output] = view

        def update(at: dict[tirx.Var, Expr]) -> None:
            for axis in stage.reduce:
                self.facts.bind(at[axis.var], 0, axis.extent)
            self.sweep(stage, view, lambda point: substitute(stage.at(point), at))

        nest(stage.reduce, update)
        if stage.output in self.outputs and stage.output in self.scratch:
            output = View(self.outputs[stage.output])
            self.sweep(stage, output, lambda point: tirx.BufferLoad(stage.output, point))

    def view(self, stage: Stage) -> View:
        """Where the stage's row is stored."""
        row = self.scratch.get(stage.output)
        return View(self.outputs[stage.output]) if row is None else View(row, self.rank)

    def sweep(self, stage: Stage, view: View, value: Callable[[list[Expr]], Expr]) -> None:
        """Stores value(point) at each point of the stage's row."""

        def write(along: list[Expr], facts: Facts) -> Program:
            point = [*self.point, *along]
            position = offset(stage.output.shape[view.leading :], point[view.leading :])
            wanted = [value(point), facts.simplify(position)]
            return self.evaluator.program(wanted, facts, self.known, [view.memory.dtype])

        sweep = plan_sweep(stage.axes[self.rank :], write, self.facts)
        sweep.emit_all(
            self.lanes,
            lambda results: T.buffer_store(view.memory, results[0], [results[1]]),
        )

    def reduce(self, stage: Stage, combine: Combine, term: Expr) -> Expr:
        """A reduction to one value, by way of independent partial results."""
        whole = dict(zip(stage.indices, self.whole(stage)))

        def write(along: list[Expr], facts: Facts) -> Program:
            at = {**whole, **dict(zip((axis.var for axis in stage.reduce), along))}
            return self.evaluator.program([substitute(term, at)], facts, self.known)

        sweep = plan_sweep(stage.reduce, write, self.facts)
        initial = self.evaluate(stage.init)
        lanes = self.lanes
        if isinstance(sweep.extent, tirx.IntImm):
            lanes = min(lanes, 1 << max(sweep.extent.value.bit_length() - 1, 0))
        result = Register(initial)
        count = self.tiles.accumulators if lanes > 1 else 0
        partial = [Register(splat(initial, lanes, str(initial.ty))) for _ in range(count)]

        def fold(outer: dict[tirx.Var, Expr]) -> None:
            for piece in sweep.pieces:
                _fold(piece, outer, combine, result, partial, lanes)

        nest(sweep.outer, fold)
        for register in partial[1:]:
            partial[0].value = combine(partial[0].value, register.value)
        if partial:
            result.value = combine(result.value, reduce_lanes(partial[0].value, combine))
        return result.value


_ZERO = tirx.const(0, "int64")


def _fold(
    piece: Piece,
    outer: dict[tirx.Var, Expr],
    combine: Combine,
    result: Register,
    partial: list[Register],
    lanes: int,
) -> None:
    """Combines the elements of a piece into vector registers, and those that fill no vector into `result`."""
    count: Expr = Analyzer().simplify(piece.high - piece.low)
    start: Expr = _ZERO

    inside = before_loop(piece.program, piece.index, outer)

    def into(register: Register, element: Expr, lane: Expr) -> None:
        T.buffer_store(register.buffer, combine(register.buffer[lane], element), [lane])

    if is_vectorizable(piece.program, piece.index):
        for registers in filter(None, (partial, partial[:1])):
            step = lanes * len(registers)
            write = inside(lanes)
            with T.serial(count // step) as i:
                for n, register in enumerate(registers):
                    with T.vectorized(tirx.const(lanes, "int64")) as lane:
                        into(
                            register,
                            write(piece.low + start + i * step + (n * lanes + lane), lane)[0],
                            lane,
                        )
            start, count = start + count // step * step, count % step
    write = inside(1)
    with T.serial(count) as i:
        into(result, write(piece.low + start + i, _ZERO)[0], _ZERO)


def _readers(stage: Stage, stages: list[Stage]) -> int:
    """Stages that read what this one writes."""
    return sum(any(node.source.same_as(stage.output) for node in loads(s.value)) for s in stages if s is not stage)
