"""Functions with reductions: softmax, normalizations, means, and matmuls that no blocked kernel takes.

The leading axes that all stages share are the rows. A thread takes a row through all stages before it goes on to the
next one. A value that exists once per row stays in a register, an element of the row in the nearest cache.
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

from lowering.tensorir.expressions import Expr, flatten_index, is_int, loads, substitute
from lowering.tensorir.facts import Facts

from ...half_precision import is_half
from ...reading.reducers import Combine, read_term
from ...reading.shared_axes import count_shared_axes, has_many_elements, is_contiguous_across
from ...reading.stages import Axis, Stage, count_points, read_stages
from ...reading.values import (
    ComputedValues,
    Evaluator,
    Program,
    View,
    choose_scratch_dtype,
    find_moved_outputs,
    flat_view,
)
from ...tiles import Space
from ...variant import Variant
from ..matmul.results import Memory
from ..primitives.cycles import LATENCY
from ..primitives.fast_math import expand
from ..primitives.vector import CpuFeatures, Register, convert, let, read_cpu_features, reduce_lanes, splat
from .elementwise import find_expensive_outputs, find_recomputed
from .loop_body import emit_program, hoist_before_loop, is_vectorizable
from .loops import LoopTiles, emit_nest, split_rows
from .sweep import Segment, plan_sweep

# Operations per element of a stage that calls functions or divides.
_COSTLY = 8


@dataclass(frozen=True, kw_only=True)
class ReductionTiles(LoopTiles):
    """Tiles of reductions."""

    accumulators: int = 4
    """Independent partial results: an addition takes several cycles, and one can start in each cycle."""

    @classmethod
    def space(cls, problem: Any, cpu: CpuFeatures) -> Space:
        return super().space(problem, cpu) | {"accumulators": (1, 2, 4, 8)}

    def rules(self, problem: Any, cpu: CpuFeatures) -> dict[str, bool]:
        fits = 1 <= self.accumulators <= cpu.registers // 2
        return super().rules(problem, cpu) | {f"accumulators = {self.accumulators} must fit the registers": fits}

    def estimate(self, problem: Any, cpu: CpuFeatures) -> float:
        """Estimate the log of the relative time of accumulators that wait for one another."""
        return math.log(max(LATENCY / 2 / self.accumulators, 1.0))


def reduction(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Schedule functions with reductions: rows among threads, vectors along rows; return None for anything else."""
    stages = read_stages(func)
    if not stages or not any(stage.reduce for stage in stages):
        return None
    cpu = read_cpu_features(target)
    tiles = {"rows": ReductionTiles.default(stages, cpu)}
    return [Variant("rows", stages, cpu, tiles, lambda tiles: _write(RowKernel(func, stages, cpu, tiles["rows"])))]


def _write(kernel: RowKernel) -> tirx.PrimFunc:
    """Return the function with the kernel as its body."""
    func = kernel.func
    with IRBuilder() as builder, T.prim_func():
        kernel.bind_memory({buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)})
        axes = kernel.axes
        long = [axis for axis in axes if not is_int(axis.extent, 1)]

        def rows(outer: list[Expr], last: Axis) -> None:
            scratch = kernel.allocate()
            with T.serial(last.extent) as i:
                point = iter([*outer, let(last.var + i)])
                kernel.emit_row([next(point) if axis in long else _ZERO for axis in axes], scratch)

        if long:
            split_rows(long, kernel.work(), kernel.tiles, rows)
        else:
            kernel.emit_row([_ZERO for _ in axes], kernel.allocate())
    return func.with_body(builder.get().body)


class RowKernel:
    """All stages of a function, or some of them, for one row.

    `parameters` are the tensors that other stages write or read, by default those of the function. `materialized` are
    the stages whose values are stored; other stages are computed where they are read.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        stages: list[Stage],
        cpu: CpuFeatures,
        tiles: ReductionTiles,
        parameters: set[tirx.Buffer] | None = None,
    ) -> None:
        self.func, self.stages, self.cpu, self.tiles = func, stages, cpu, tiles
        self.lanes = cpu.lanes("float32")
        parameters = set(func.params) if parameters is None else parameters
        self.stored = parameters & {stage.output for stage in stages}
        self.moved = find_moved_outputs(stages, parameters - self.stored)
        needed = [stage for stage in stages if stage.reduce or stage.output in self.stored]
        self.rank = count_shared_axes(needed, stages)
        while self.rank and any(stage.reduce and is_contiguous_across(stage, self.rank) for stage in stages):
            self.rank -= 1
        self.costly = find_expensive_outputs(stages)
        reused = find_recomputed(stages) | {
            s.output for s in stages if s.output in self.costly and _readers(s, stages) > 1
        }
        self.materialized = []
        for stage in stages:
            is_materialized = stage.output in reused and count_shared_axes([*needed, stage], stages) >= self.rank
            if stage in needed or is_materialized:
                self.materialized.append(stage)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that enumerate the rows."""
        return self.materialized[0].axes[: self.rank]

    def bind_memory(self, memory: Memory) -> None:
        """Bind the parameters to flat buffers of their elements."""
        self.inputs = {buffer: View(flat) for buffer, flat in memory.items() if buffer not in self.stored}
        self.outputs = {buffer: memory[buffer] for buffer in self.stored}

    def work(self) -> Expr:
        """Return roughly the number of simple operations per row."""
        total: Expr = tirx.const(0, "int64")
        for stage in self.materialized:
            elements = count_points((*stage.axes[self.rank :], *stage.reduce))
            total = total + elements * (_COSTLY if stage.output in self.costly else 1)
        return Analyzer().simplify(total)

    def allocate(self) -> dict[tirx.Buffer, tirx.Buffer]:
        """Allocate memory for `scratch_rows`."""
        return {output: T.alloc_buffer((size,), dtype) for output, (size, dtype) in self.scratch_rows().items()}

    def scratch_rows(self) -> dict[tirx.Buffer, tuple[Expr, str]]:
        """Return the number and type of the elements of each stage's scratch row.

        Rows of half precision are stored in float32.
        """
        rows = {}
        for stage in self.materialized:
            output, half = stage.output, is_half(stage.output.dtype)
            in_memory = has_many_elements(stage, self.rank) or (stage.reduce and read_term(stage) is None)
            if in_memory and (output not in self.stored or (half and stage.reduce)):
                rows[output] = count_points(stage.axes[self.rank :]), choose_scratch_dtype(output, self.moved)
        return rows

    def emit_row(self, point: list[Expr], scratch: dict[tirx.Buffer, tirx.Buffer]) -> None:
        """Emit all stages at one point of the leading axes."""
        self.point, self.scratch = point, scratch
        self.evaluator = Evaluator(self.stages, dict(self.inputs), expand)
        self.bindings: ComputedValues = {}
        self.facts = Facts.of(self.func)
        for axis, index in zip(self.materialized[0].axes, point):
            self.facts.bind(index, 0, axis.extent)
        for stage in self.materialized:
            term = read_term(stage)
            if has_many_elements(stage, self.rank) or (stage.reduce and term is None):
                (self.accumulate if stage.reduce else self.map)(stage)
            elif term is None:
                self.bind_value(stage, self.evaluate(stage.at(self.only_point(stage))))
            else:
                self.bind_value(stage, self.reduce(stage, *term))

    def only_point(self, stage: Stage) -> list[Expr]:
        """Return the point of the stage's only element in the row."""
        return [*self.point, *(_ZERO for _ in stage.axes[self.rank :])]

    def evaluate(self, expr: Expr, stored: str = "") -> Expr:
        return emit_program(self.evaluator.program([expr], self.facts, self.bindings, [stored]), {})[0]

    def bind_value(self, stage: Stage, value: Expr) -> None:
        """Bind the only value of the row, and store it if it is an output."""
        point, value = self.only_point(stage), let(value)
        self.bindings[stage.output] = [(point, value)]
        if stage.output in self.outputs:
            position = self.facts.simplify(flatten_index(stage.output.shape, point))
            if stage.output in self.moved:
                value = self.evaluate(stage.at(point), stage.output.dtype)
            elif is_half(stage.output.dtype):
                value = convert(value, stage.output.dtype, self.cpu)
            T.buffer_store(self.outputs[stage.output], value, [position])

    def map(self, stage: Stage) -> None:
        """Emit an element-wise stage along the row."""
        view = self.view(stage)
        self.sweep(stage, view, stage.at)
        self.evaluator.views[stage.output] = view

    def accumulate(self, stage: Stage) -> None:
        """Emit a reduction whose results are updated in memory."""
        view = self.view(stage)
        self.sweep(stage, view, lambda point: stage.init)
        self.evaluator.views[stage.output] = view

        def update(at: dict[tirx.Var, Expr]) -> None:
            for axis in stage.reduce:
                self.facts.bind(at[axis.var], 0, axis.extent)
            self.sweep(stage, view, lambda point: substitute(stage.at(point), at))

        emit_nest(stage.reduce, update)
        if stage.output in self.outputs and stage.output in self.scratch:
            output = View(self.outputs[stage.output])
            self.sweep(stage, output, lambda point: tirx.BufferLoad(stage.output, point))

    def view(self, stage: Stage) -> View:
        """Return the memory of the stage's row."""
        row = self.scratch.get(stage.output)
        return View(self.outputs[stage.output]) if row is None else View(row, self.rank)

    def sweep(self, stage: Stage, view: View, value: Callable[[list[Expr]], Expr]) -> None:
        """Store value(point) at each point of the stage's row."""

        def write(along: list[Expr], facts: Facts) -> Program:
            point = [*self.point, *along]
            position = flatten_index(stage.output.shape[view.leading :], point[view.leading :])
            expressions = [value(point), facts.simplify(position)]
            return self.evaluator.program(expressions, facts, self.bindings, [view.memory.dtype])

        sweep = plan_sweep(stage.axes[self.rank :], write, self.facts)
        sweep.emit_all(
            self.lanes,
            lambda results: T.buffer_store(view.memory, results[0], [results[1]]),
        )

    def reduce(self, stage: Stage, combine: Combine, term: Expr) -> Expr:
        """Emit a reduction to one value, by way of independent partial results."""
        whole = dict(zip(stage.indices, self.only_point(stage)))

        def write(along: list[Expr], facts: Facts) -> Program:
            at = {**whole, **dict(zip((axis.var for axis in stage.reduce), along))}
            return self.evaluator.program([substitute(term, at)], facts, self.bindings)

        sweep = plan_sweep(stage.reduce, write, self.facts)
        initial = self.evaluate(stage.init)
        lanes = self.lanes
        if isinstance(sweep.extent, tirx.IntImm):
            lanes = min(lanes, 1 << max(sweep.extent.value.bit_length() - 1, 0))
        result = Register(initial)
        count = self.tiles.accumulators if lanes > 1 else 0
        partial = [Register(splat(initial, lanes, str(initial.ty))) for _ in range(count)]

        def fold(outer: dict[tirx.Var, Expr]) -> None:
            for segment in sweep.segments:
                _fold(segment, outer, combine, result, partial, lanes)

        emit_nest(sweep.outer, fold)
        for register in partial[1:]:
            partial[0].value = combine(partial[0].value, register.value)
        if partial:
            result.value = combine(result.value, reduce_lanes(partial[0].value, combine))
        return result.value


_ZERO = tirx.const(0, "int64")


def _fold(
    segment: Segment,
    outer: dict[tirx.Var, Expr],
    combine: Combine,
    result: Register,
    partial: list[Register],
    lanes: int,
) -> None:
    """Reduce the elements of a segment into vector registers, and those that fill no vector into `result`."""
    count: Expr = Analyzer().simplify(segment.high - segment.low)
    start: Expr = _ZERO

    inside = hoist_before_loop(segment.program, segment.index, outer)

    def into(register: Register, element: Expr, lane: Expr) -> None:
        T.buffer_store(register.buffer, combine(register.buffer[lane], element), [lane])

    if is_vectorizable(segment.program, segment.index):
        for registers in filter(None, (partial, partial[:1])):
            step = lanes * len(registers)
            write = inside(lanes)
            with T.serial(count // step) as i:
                for n, register in enumerate(registers):
                    with T.vectorized(tirx.const(lanes, "int64")) as lane:
                        into(
                            register,
                            write(segment.low + start + i * step + (n * lanes + lane), lane)[0],
                            lane,
                        )
            start, count = start + count // step * step, count % step
    write = inside(1)
    with T.serial(count) as i:
        into(result, write(segment.low + start + i, _ZERO)[0], _ZERO)


def _readers(stage: Stage, stages: list[Stage]) -> int:
    """Return the number of other stages that read this stage's output."""
    return sum(any(node.source.same_as(stage.output) for node in loads(s.value)) for s in stages if s is not stage)
