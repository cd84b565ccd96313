"""Element-wise functions on GPUs that read along another axis than they write: transpositions, and what is done on the
way.

A block has a tile of 32 x 32 elements. Threads compute it along the axis of which successive elements are successive in
memory where they are read, and store it from shared memory along the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import Expr, is_int, loads, offset, substitute
from lowering.tensorir.facts import Facts

from ..reading.stages import Axis, Stage, read_stages, unravel, volume
from ..reading.values import Evaluator, Program, flat_view
from ..variant import Variant
from .chunks import Row, evaluate, result_registers, store
from .host import on_host
from .ptx import let, put, synchronize, unrolled

SIDE = 32
_PITCH = SIDE + 1  # by which a column of the tile meets each bank once
_ROWS = 8  # that the threads of a block have at a time
_FEW = 16  # elements of an axis along which neighboring threads need not lie


def transposition(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Functions of one output without reductions, whose reads run along another axis of it; None for anything else."""
    stages = read_stages(func)
    if not stages or any(stage.reduce for stage in stages):
        return None
    outputs = [stage for stage in stages if stage.output in set(func.params)]
    across = _across(func, stages, outputs[0]) if len(outputs) == 1 else None
    if across is None:
        return None
    kernel = _Kernel(func, stages, outputs[0], across)
    return [Variant("tiles", None, None, {}, lambda tiles: kernel.emit())]


def _across(func: tirx.PrimFunc, stages: list[Stage], output: Stage) -> int | None:
    """The axis along which all reads are successive that do not run along the last one; None where that is none."""
    if len(output.axes) < 2 or not _is_long(output.axes[-1]):
        return None
    facts = Facts.of(func)
    for axis in output.axes:
        facts.bind(axis.var, 0, axis.extent)
    point = [tirx.const(0, "int64") if is_int(axis.extent, 1) else axis.var for axis in output.axes]
    with IRBuilder(), T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}
        program = _program(stages, memory, output, point, facts)

    def step(place: Expr, axis: Axis) -> Expr:
        return facts.simplify(substitute(place, {axis.var: axis.var + 1}) - place)

    *others, last = output.axes
    found: set[int] = set()
    for place in (load.indices[0] for expr in program.expressions for load in loads(expr)):
        if loads(place) or is_int(step(place, last), 0) or is_int(step(place, last), 1):
            continue
        found.add(next((n for n, a in enumerate(others) if _is_long(a) and is_int(step(place, a), 1)), -1))
    return found.pop() if len(found) == 1 and -1 not in found else None


def _program(
    stages: list[Stage], memory: dict[tirx.Buffer, tirx.Buffer], output: Stage, point: list[Expr], facts: Facts
) -> Program:
    """What is stored at a point of the output."""
    wanted, stored = [tirx.BufferLoad(output.output, point)], [output.output.dtype]
    return Evaluator.of(stages, memory).program(wanted, facts, stored=stored, rounds=False)


def _is_long(axis: Axis) -> bool:
    return not isinstance(axis.extent, tirx.IntImm) or axis.extent.value >= _FEW


@dataclass(frozen=True, eq=False)
class _Kernel:
    """The output's elements by tiles over the axis with the number `across`, and the last one."""

    func: tirx.PrimFunc
    stages: list[Stage]
    output: Stage
    across: int

    def emit(self) -> tirx.PrimFunc:
        axes = self.output.axes
        read, last = axes[self.across], axes[-1]
        outer = [a for n, a in enumerate(axes[:-1]) if n != self.across and not is_int(a.extent, 1)]
        facts, m = Facts.of(self.func), tirx.Var("m", "int64")
        for axis in (Axis(m, volume(outer)), read, last):
            facts.bind(axis.var, 0, axis.extent)
        where = dict(zip((axis.var for axis in outer), unravel(m, outer)))
        zero = tirx.const(0, "int64")
        point = [where.get(a.var, a.var if a in (read, last) else zero) for a in axes]
        with IRBuilder() as builder, T.prim_func():
            memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, self.func.params)}
            program = _program(self.stages, memory, self.output, point, facts)
            place = facts.simplify(offset(self.output.output.shape, point))
            along = [on_host(tirx.ceildiv(axis.extent, SIDE)) for axis in (read, last)]
            blocks = on_host(volume(outer) * along[0] * along[1])
            with (
                T.If(blocks > 0),
                T.Then(),
                T.launch_thread("blockIdx.x", blocks.astype("int32")) as block,
                T.launch_thread("threadIdx.x", SIDE * _ROWS) as thread,
            ):
                tile = T.alloc_buffer((SIDE * _PITCH,), str(self.output.output.dtype), scope="shared")
                across, down = let(tirx.truncmod(thread, SIDE)), let(tirx.truncdiv(thread, SIDE))
                number = let(block.astype("int64"))
                first = let(tirx.truncmod(number, along[1]) * SIDE)
                number = let(tirx.truncdiv(number, along[1]))
                start = let(tirx.truncmod(number, along[0]) * SIDE)
                values = {m: let(tirx.truncdiv(number, along[0]))}

                def at(one: Expr, other: Expr) -> tuple[Expr, Expr, Expr]:
                    """The element of a thread in the tile, and whether it is there."""
                    a, b = let(start + one), let(first + other)
                    return a, b, tirx.all(a < read.extent, b < last.extent)

                with unrolled(SIDE // _ROWS) as n:
                    row = let(n * _ROWS + down)
                    a, b, there = at(across, row)
                    with T.If(there), T.Then():
                        (result,) = result_registers(program, 1, 1)
                        line = Row(facts, last.var, last.extent)
                        here = {**values, read.var: a}
                        evaluate(line, program, 1, here, b, lambda x, found: put(result, x, found[0]))
                        store(tile, row * _PITCH + across, result)
                synchronize()
                with unrolled(SIDE // _ROWS) as n:
                    row = let(n * _ROWS + down)
                    a, b, there = at(row, across)
                    with T.If(there), T.Then():
                        to = let(substitute(place, {**values, read.var: a, last.var: b}))
                        put(memory[self.output.output], to, tile[across * _PITCH + row])
        return self.func.with_body(builder.get().body).without_attr(FORM)
