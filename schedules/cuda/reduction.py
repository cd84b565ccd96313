"""Functions with reductions along rows on GPUs: norms, softmax, means.

The leading axes that all stages share are the rows. A warp, or for long rows a block, goes over a row once for each
reduction and once to store what is made of them, by chunks (chunks.py): what it reads again is in the nearest cache.
Partial results of threads meet by shuffles, and those of warps in shared memory.
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

from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import Expr, is_int, offset, substitute
from lowering.tensorir.facts import Facts

from ..reading.matmul import read_matmul
from ..reading.reducers import Combine, read_term
from ..reading.shared_axes import several, shared_rank
from ..reading.stages import Axis, Stage, read_stages, unravel, volume
from ..reading.values import Evaluator, Known, Program, flat_view
from ..tiles import Space, Tiles
from ..variant import Variant
from .chunks import CHUNK, Row, evaluate, result_registers, store
from .cycles import BARRIER, LATENCY, TYPICAL
from .device import Device, device
from .host import on_host
from .ptx import WARP, let, put, reduce_warp, registers, synchronize


@dataclass(frozen=True)
class RowReductionTiles(Tiles):
    """Tiles of reductions along rows; the problem is the length of the longest row, None where that is symbolic."""

    warps: int
    """Warps of a row; with one, each warp of a block has a row of its own."""
    block: int = 4
    """Warps of a block where each has a row."""

    @property
    def threads(self) -> int:
        """Threads per block."""
        return WARP * (self.block if self.warps == 1 else self.warps)

    @classmethod
    def default(cls, problem: int | None, machine: Device) -> RowReductionTiles:
        """A warp where its threads have few chunks each."""
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
        """Turns of a thread along a row, and barriers."""
        turns = -(-(problem or TYPICAL) // (WARP * self.warps * CHUNK))
        return math.log(turns * LATENCY + BARRIER * self.warps + BARRIER / self.block)


def reduction(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Functions whose reductions give one number for each row, but for matmuls; None for anything else."""
    stages = read_stages(func)
    rows = None if stages is None else read_rows(func, stages)
    if rows is None:
        return None
    gpu = device(target)
    tiles = {"rows": RowReductionTiles.default(rows.longest, gpu)}
    return [Variant("rows", rows.longest, gpu, tiles, lambda tiles: _kernel(rows, tiles["rows"]))]


@dataclass(frozen=True, eq=False)
class Rows:
    """Stages by rows: `kept` are reductions and outputs, the first `rank` axes of which are the rows."""

    func: tirx.PrimFunc
    stages: list[Stage]
    kept: list[Stage]
    rank: int

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Those of the rows."""
        return self.kept[0].axes[: self.rank]

    @property
    def longest(self) -> int | None:
        """Elements of the longest row, if all are known."""
        sizes = [volume(self.along(stage)) for stage in self.kept]
        known = [size.value for size in sizes if isinstance(size, tirx.IntImm)]
        return max(known) if len(known) == len(sizes) else None

    def along(self, stage: Stage) -> tuple[Axis, ...]:
        """The axes along a row."""
        return stage.reduce or stage.axes[self.rank :]


def read_rows(func: tirx.PrimFunc, stages: list[Stage]) -> Rows | None:
    """The stages of a function, or some of them, by rows; None where they are anything else."""
    if not any(stage.reduce for stage in stages) or any(map(read_matmul, stages)):
        return None
    kept = [stage for stage in stages if stage.reduce or stage.output in set(func.params)]
    rank = shared_rank(kept, stages)
    for stage in kept:
        if stage.reduce and (not _starts_from_nothing(stage) or several(stage, rank)):
            return None
    return Rows(func, stages, kept, rank)


def _starts_from_nothing(stage: Stage) -> bool:
    """Whether the reduction's initial value may be counted by every thread: 0 of a sum, 1 of a matmul, any extreme."""
    neutral = {prim.Add: 0.0, prim.Mul: 1.0}.get(type(stage.value))
    initial = stage.init.value if isinstance(stage.init, prim.FloatImm | prim.IntImm) else None
    return read_term(stage) is not None and (neutral is None or neutral == initial)


def _kernel(rows: Rows, tiles: RowReductionTiles) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func():
        emit_rows(rows, tiles)
    return rows.func.with_body(builder.get().body).without_attr(FORM)


def emit_rows(rows: Rows, tiles: RowReductionTiles) -> None:
    """Emits the kernel and its launch into the function that is open."""
    memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, rows.func.params)}
    count = on_host(volume(rows.axes))
    together = tiles.block if tiles.warps == 1 else 1
    blocks = tirx.ceildiv(count, together)
    with (
        T.If(count > 0),
        T.Then(),
        T.launch_thread("blockIdx.x", blocks.astype("int32")) as b,
        T.launch_thread("threadIdx.x", tiles.threads) as thread,
    ):
        kernel = OneRow(rows, tiles.warps, memory, thread)
        if tiles.warps > 1:
            kernel.emit(b.astype("int64"))
        else:
            number = let(b.astype("int64") * together + tirx.truncdiv(thread, WARP).astype("int64"))
            with T.If(number < count), T.Then():
                kernel.emit(number)


class OneRow:
    """The code for one row, which so many warps share. memory: the function's tensors as vectors."""

    def __init__(self, rows: Rows, warps: int, memory: dict[tirx.Buffer, tirx.Buffer], thread: Expr) -> None:
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
        self.known: Known = {}
        self.values: dict[tirx.Var, Expr] = {}

    def emit(self, number: Expr) -> None:
        indices = zip(self.point, unravel(number, self.axes))
        self.values |= {var: let(index) for var, index in indices if isinstance(var, tirx.Var)}
        for stage in self.rows.kept:
            term = read_term(stage)
            if stage.reduce:
                assert term is not None
                self.keep(stage, self.reduce(stage, *term))
            elif several(stage, self.rows.rank):
                self.store(stage)
            else:
                self.keep(stage, self.once(stage.at(self.whole(stage))))

    def whole(self, stage: Stage) -> list[Expr]:
        """The point of the row's only element of the stage."""
        return [*self.point, *(tirx.const(0, "int64") for _ in stage.axes[self.rows.rank :])]

    def once(self, expr: Expr, stored: str = "") -> Expr:
        """What is the same along the row; `stored` as for Evaluator.program."""
        program = self.evaluator.program([expr], self.facts, self.known, [stored], rounds=False)
        here = dict(self.values)
        for var, value in program.bindings:
            here[var] = let(substitute(value, here))
        return let(substitute(program.results[0], here))

    def keep(self, stage: Stage, value: Expr) -> None:
        """Names the row's only element, and stores it if it is an output."""
        var = tirx.Var(stage.output.name, value.ty)
        self.values[var] = value
        self.known[stage.output] = [(self.whole(stage), var)]
        if stage.output in self.memory:
            place = self.facts.simplify(offset(stage.output.shape, self.whole(stage)))
            if stage.output in self.evaluator.moved:
                value = self.once(stage.at(self.whole(stage)), stage.output.dtype)
            one = registers(1, str(value.ty))
            put(one, 0, value)
            with T.If(tirx.EQ(self.lane, 0)), T.Then():
                store(self.memory[stage.output], let(substitute(place, self.values)), one)

    def along(self, stage: Stage) -> tuple[Row, list[Expr], Facts]:
        """The row of a stage, and the point of its element j along it."""
        axes = self.rows.along(stage)
        facts, j, length = self.facts.copy(), tirx.Var("j", "int64"), volume(axes)
        facts.bind(j, 0, length)
        return Row(facts, j, length), [facts.simplify(index) for index in unravel(j, axes)], facts

    def each_chunk(self, row: Row, program: Program, width: int, body: Any, end: Any = None) -> None:
        """body(x, results) for the thread's elements of a row, end(first) behind each chunk."""
        chunks = let(tirx.truncdiv(substitute(row.length, self.values), T.int64(width)))
        turns = tirx.truncdiv(chunks + (self.lanes - 1), T.int64(self.lanes))
        with T.serial(turns) as turn:
            chunk = let(turn * self.lanes + self.lane.astype("int64"))
            with T.If(chunk < chunks), T.Then():
                first = let(chunk * width)
                evaluate(row, program, width, self.values, first, body)
                if end is not None:
                    end(first)

    def reduce(self, stage: Stage, combine: Combine, term: Expr) -> Expr:
        row, along, facts = self.along(stage)
        at = {**dict(zip(stage.indices, self.whole(stage))), **dict(zip((a.var for a in stage.reduce), along))}
        program = self.evaluator.program([substitute(term, at)], facts, self.known)
        initial = self.once(stage.init)
        total = registers(1, str(initial.ty))
        put(total, 0, initial)
        width = CHUNK if row.divides else 1
        self.each_chunk(row, program, width, lambda x, found: put(total, 0, combine(total[0], found[0])))
        return self.across(total[0], initial, combine)

    def across(self, value: Expr, initial: Expr, combine: Combine) -> Expr:
        """The value of all threads of the row, each of which gets it."""
        value, warps, dtype = reduce_warp(value, combine), self.warps, str(value.ty)
        if warps == 1:
            return value
        (shared, first), total = self.meeting(dtype), registers(1, dtype)
        with T.If(tirx.EQ(tirx.truncmod(self.thread, WARP), 0)), T.Then():
            put(shared, first + tirx.truncdiv(self.thread, WARP), value)
        synchronize()
        put(total, 0, initial)
        with T.serial(warps) as n:
            put(total, 0, combine(total[0], shared[first + n]))
        return let(total[0])

    def meeting(self, dtype: str) -> tuple[tirx.Buffer, int]:
        """Where the warps leave a number each: shared memory, and the place of the first. Another one for each call, so
        that the next need not wait until all threads have read."""
        return T.alloc_buffer((self.warps,), dtype, scope="shared"), 0

    def store(self, stage: Stage) -> None:
        row, along, facts = self.along(stage)
        point = [*self.point, *along]
        place = facts.simplify(offset(stage.output.shape, point))
        wanted, stored = [tirx.BufferLoad(stage.output, point)], [stage.output.dtype]
        program = self.evaluator.program(wanted, facts, self.known, stored, rounds=False)
        width = row.width([place])
        (results,) = result_registers(program, 1, width)
        self.each_chunk(
            row,
            program,
            width,
            lambda x, found: put(results, x, found[0]),
            lambda first: self.keep_chunk(stage, let(substitute(place, {**self.values, row.j: first})), results),
        )

    def keep_chunk(self, stage: Stage, at: Expr, values: tirx.Buffer) -> None:
        """Stores a chunk of the stage's output, in registers, at that place."""
        store(self.memory[stage.output], at, values)
