"""Functions with reductions along rows on GPUs: norms, softmax, means.

The leading axes that all stages share are the rows. A warp, or for long rows a block, reads a row once for each
reduction and once to store the outputs, by chunks (chunks.py); repeated reads hit the nearest cache. Partial results of
threads are reduced by shuffles, and those of warps in shared memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import prim
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import BLOCK_ATTRIBUTE
from lowering.tensorir.expressions import Expr, flatten_index, is_int, substitute
from lowering.tensorir.facts import Facts

from ...reading.matmul import read_matmul
from ...reading.reducers import Combine, read_term
from ...reading.shared_axes import count_shared_axes, has_many_elements
from ...reading.stages import Axis, Stage, count_points, read_stages, unravel
from ...reading.values import ComputedValues, Evaluator, Program, flat_view
from ...tiles import Space, Tiles
from ...variant import Variant
from ..primitives.cost_model import BARRIER, LATENCY, TYPICAL_SIZE
from ..primitives.device import Device, device
from ..primitives.host import bind_on_host
from ..primitives.ptx import WARP, alloc_registers, let, reduce_warp, store_element, synchronize
from .chunks import CHUNK, ChunkedRow, alloc_result_registers, evaluate_chunk, store_values


@dataclass(frozen=True)
class RowReductionTiles(Tiles):
    """Tiles of reductions along rows; the problem is the length of the longest row, None where that is symbolic."""

    warps: int
    """Warps per row; with one, each warp of a block has a row of its own."""
    block: int = 4
    """Warps per block where each has a row."""

    @property
    def threads(self) -> int:
        """Threads per block."""
        return WARP * (self.block if self.warps == 1 else self.warps)

    @classmethod
    def default(cls, problem: int | None, machine: Device) -> RowReductionTiles:
        """Return a single warp where its threads have few chunks each."""
        if problem is not None and problem <= 1024:
            return cls(1)
        return cls(4 if problem is None or problem < 8192 else 16)

    @classmethod
    def space(cls, problem: int | None, machine: Device) -> Space:
        return {"warps": (1, 2, 4, 8, 16, 32), "block": (1, 2, 4, 8, 16)}

    def rules(self, problem: int | None, machine: Device) -> dict[str, bool]:
        return {
            f"warps = {self.warps} must be 1 to 32": 1 <= self.warps <= WARP,
            f"block = {self.block} must be 1 to 32": 1 <= self.block <= WARP,
        }

    def estimate(self, problem: int | None, machine: Device) -> float:
        """Estimate the time by the iterations of a thread along a row, and barriers."""
        iterations = -(-(problem or TYPICAL_SIZE) // (WARP * self.warps * CHUNK))
        return math.log(iterations * LATENCY + BARRIER * self.warps + BARRIER / self.block)


def reduction(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return a variant for functions whose reductions give one number per row, except matmuls; None for anything
    else.
    """
    stages = read_stages(func)
    rows = None if stages is None else read_reduced_rows(func, stages)
    if rows is None:
        return None
    gpu = device(target)
    tiles = {"rows": RowReductionTiles.default(rows.longest, gpu)}
    return [Variant("rows", rows.longest, gpu, tiles, lambda tiles: _kernel(rows, tiles["rows"]))]


@dataclass(frozen=True, eq=False)
class ReducedRows:
    """Stages by rows: `materialized` are reductions and outputs, the first `rank` axes of which are the rows."""

    func: tirx.PrimFunc
    stages: list[Stage]
    materialized: list[Stage]
    rank: int

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the rows."""
        return self.materialized[0].axes[: self.rank]

    @property
    def longest(self) -> int | None:
        """Elements of the longest row, if all lengths are static."""
        sizes = [count_points(self.along(stage)) for stage in self.materialized]
        static = [size.value for size in sizes if isinstance(size, tirx.IntImm)]
        return max(static) if len(static) == len(sizes) else None

    def along(self, stage: Stage) -> tuple[Axis, ...]:
        """Return the axes along a row."""
        return stage.reduce or stage.axes[self.rank :]


def read_reduced_rows(func: tirx.PrimFunc, stages: list[Stage]) -> ReducedRows | None:
    """Return the stages of a function, or some of them, by rows; None where they have another form."""
    if not any(stage.reduce for stage in stages) or any(map(read_matmul, stages)):
        return None
    materialized = [stage for stage in stages if stage.reduce or stage.output in set(func.params)]
    rank = count_shared_axes(materialized, stages)
    for stage in materialized:
        if stage.reduce and (not _has_neutral_init(stage) or has_many_elements(stage, rank)):
            return None
    return ReducedRows(func, stages, materialized, rank)


def _has_neutral_init(stage: Stage) -> bool:
    """Return whether every thread may start from the reduction's initial value.

    That holds for 0 of an addition, 1 of a multiplication, and any initial value of a minimum or maximum.
    """
    neutral = {prim.Add: 0.0, prim.Mul: 1.0}.get(type(stage.value))
    initial = stage.init.value if isinstance(stage.init, prim.FloatImm | prim.IntImm) else None
    return read_term(stage) is not None and (neutral is None or neutral == initial)


def _kernel(rows: ReducedRows, tiles: RowReductionTiles) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func():
        emit_reduced_rows(rows, tiles)
    return rows.func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)


def emit_reduced_rows(rows: ReducedRows, tiles: RowReductionTiles) -> None:
    """Emit the kernel and its launch into the function being built."""
    memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, rows.func.params)}
    count = bind_on_host(count_points(rows.axes))
    rows_per_block = tiles.block if tiles.warps == 1 else 1
    blocks = tirx.ceildiv(count, rows_per_block)
    with (
        T.If(count > 0),
        T.Then(),
        T.launch_thread("blockIdx.x", blocks.astype("int32")) as b,
        T.launch_thread("threadIdx.x", tiles.threads) as thread,
    ):
        kernel = ReducedRow(rows, tiles.warps, memory, thread)
        if tiles.warps > 1:
            kernel.emit(b.astype("int64"))
        else:
            number = let(b.astype("int64") * rows_per_block + tirx.truncdiv(thread, WARP).astype("int64"))
            with T.If(number < count), T.Then():
                kernel.emit(number)


class ReducedRow:
    """The code for one row, which `warps` warps share. `memory` maps the function's tensors to flat views."""

    def __init__(self, rows: ReducedRows, warps: int, memory: dict[tirx.Buffer, tirx.Buffer], thread: Expr) -> None:
        self.rows, self.warps, self.memory, self.axes = rows, warps, memory, rows.axes
        axes = rows.axes
        self.lanes = WARP * warps
        self.thread, self.lane = thread, let(tirx.truncmod(thread, self.lanes))
        self.facts = Facts.of(rows.func)
        zero = tirx.const(0, "int64")
        self.point = [zero if is_int(axis.extent, 1) else tirx.Var(axis.var.name, "int64") for axis in axes]
        for index, axis in zip(self.point, axes):
            self.facts.bind(index, 0, axis.extent)
        self.evaluator = Evaluator.of(rows.stages, memory)
        self.row_bindings: ComputedValues = {}
        self.variables: dict[tirx.Var, Expr] = {}

    def emit(self, number: Expr) -> None:
        indices = zip(self.point, unravel(number, self.axes))
        self.variables |= {var: let(index) for var, index in indices if isinstance(var, tirx.Var)}
        for stage in self.rows.materialized:
            term = read_term(stage)
            if stage.reduce:
                assert term is not None
                self.bind_result(stage, self.reduce(stage, *term))
            elif has_many_elements(stage, self.rows.rank):
                self.store_stage(stage)
            else:
                self.bind_result(stage, self.evaluate_once(stage.at(self.full_index(stage))))

    def full_index(self, stage: Stage) -> list[Expr]:
        """Return the point of the row's only element of the stage."""
        return [*self.point, *(tirx.const(0, "int64") for _ in stage.axes[self.rows.rank :])]

    def evaluate_once(self, expr: Expr, stored: str = "") -> Expr:
        """Return an expression that is the same along the row; `stored` as for Evaluator.program."""
        program = self.evaluator.program([expr], self.facts, self.row_bindings, [stored], rounds=False)
        variables = dict(self.variables)
        for var, value in program.bindings:
            variables[var] = let(substitute(value, variables))
        return let(substitute(program.results[0], variables))

    def bind_result(self, stage: Stage, value: Expr) -> None:
        """Bind the row's only element to a variable, and store it if it is an output."""
        var = tirx.Var(stage.output.name, value.ty)
        self.variables[var] = value
        self.row_bindings[stage.output] = [(self.full_index(stage), var)]
        if stage.output in self.memory:
            offset_expr = self.facts.simplify(flatten_index(stage.output.shape, self.full_index(stage)))
            if stage.output in self.evaluator.moved:
                value = self.evaluate_once(stage.at(self.full_index(stage)), stage.output.dtype)
            register = alloc_registers(1, str(value.ty))
            store_element(register, 0, value)
            with T.If(tirx.EQ(self.lane, 0)), T.Then():
                store_values(self.memory[stage.output], let(substitute(offset_expr, self.variables)), register)

    def along(self, stage: Stage) -> tuple[ChunkedRow, list[Expr], Facts]:
        """Return the row of a stage, and the point of its element j along it."""
        axes = self.rows.along(stage)
        facts, j, length = self.facts.copy(), tirx.Var("j", "int64"), count_points(axes)
        facts.bind(j, 0, length)
        return ChunkedRow(facts, j, length), [facts.simplify(index) for index in unravel(j, axes)], facts

    def visit_chunks(self, row: ChunkedRow, program: Program, width: int, body: Any, end: Any = None) -> None:
        """Emit body(x, results) for the thread's elements of a row, and end(first) after each chunk."""
        chunks = let(tirx.truncdiv(substitute(row.length, self.variables), T.int64(width)))
        iterations = tirx.truncdiv(chunks + (self.lanes - 1), T.int64(self.lanes))
        with T.serial(iterations) as iteration:
            chunk = let(iteration * self.lanes + self.lane.astype("int64"))
            with T.If(chunk < chunks), T.Then():
                first = let(chunk * width)
                evaluate_chunk(row, program, width, self.variables, first, body)
                if end is not None:
                    end(first)

    def reduce(self, stage: Stage, combine: Combine, term: Expr) -> Expr:
        row, along, facts = self.along(stage)
        replacements = {
            **dict(zip(stage.indices, self.full_index(stage))),
            **dict(zip((a.var for a in stage.reduce), along)),
        }
        program = self.evaluator.program([substitute(term, replacements)], facts, self.row_bindings)
        initial = self.evaluate_once(stage.init)
        total = alloc_registers(1, str(initial.ty))
        store_element(total, 0, initial)
        width = CHUNK if row.divides else 1
        self.visit_chunks(row, program, width, lambda x, values: store_element(total, 0, combine(total[0], values[0])))
        return self.reduce_threads(total[0], initial, combine)

    def reduce_threads(self, value: Expr, initial: Expr, combine: Combine) -> Expr:
        """Return the value reduced over all threads of the row, each of which gets it."""
        value, warps, dtype = reduce_warp(value, combine), self.warps, str(value.ty)
        if warps == 1:
            return value
        (shared, first), total = self.exchange(dtype), alloc_registers(1, dtype)
        with T.If(tirx.EQ(tirx.truncmod(self.thread, WARP), 0)), T.Then():
            store_element(shared, first + tirx.truncdiv(self.thread, WARP), value)
        synchronize()
        store_element(total, 0, initial)
        with T.serial(warps) as n:
            store_element(total, 0, combine(total[0], shared[first + n]))
        return let(total[0])

    def exchange(self, dtype: str) -> tuple[tirx.Buffer, int]:
        """Return shared memory where each warp leaves a number, and the index of the first.

        Each call returns other memory, so that the next exchange need not wait until all threads have read.
        """
        return T.alloc_buffer((self.warps,), dtype, scope="shared"), 0

    def store_stage(self, stage: Stage) -> None:
        row, along, facts = self.along(stage)
        point = [*self.point, *along]
        address = facts.simplify(flatten_index(stage.output.shape, point))
        loads, stored = [tirx.BufferLoad(stage.output, point)], [stage.output.dtype]
        program = self.evaluator.program(loads, facts, self.row_bindings, stored, rounds=False)
        width = row.width([address])
        (results,) = alloc_result_registers(program, 1, width)
        self.visit_chunks(
            row,
            program,
            width,
            lambda x, values: store_element(results, x, values[0]),
            lambda first: self.store_row_chunk(
                stage, let(substitute(address, {**self.variables, row.j: first})), results
            ),
        )

    def store_row_chunk(self, stage: Stage, at: Expr, values: tirx.Buffer) -> None:
        """Store a chunk of the stage's output from registers, at offset `at`."""
        store_values(self.memory[stage.output], at, values)
