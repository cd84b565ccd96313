"""Element-wise functions on GPUs that read along another axis than they write: transpositions, and fused operations.

A block has a tile of 32 x 32 elements. Threads compute it along the axis of successive addresses of the reads, and
store it from shared memory along the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import BLOCK_ATTRIBUTE
from lowering.tensorir.expressions import Expr, flatten_index, is_int, loads, substitute
from lowering.tensorir.facts import Facts

from ...reading.stages import Axis, Stage, count_points, read_stages, unravel
from ...reading.values import Evaluator, Program, flat_view
from ...variant import Variant
from ..primitives.host import bind_on_host
from ..primitives.ptx import let, store_element, synchronize, unrolled
from .chunks import ChunkedRow, alloc_result_registers, evaluate_chunk, store_values

SIDE = 32
_PITCH = SIDE + 1  # by which a column of the tile accesses each bank once
_ROWS = 8  # of a tile that the threads of a block have at a time
_FEW = 16  # elements of an axis below which neighboring threads need not be contiguous


def transposition(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return a variant for functions of one output without reductions, whose reads run along another axis of it.

    None for anything else.
    """
    stages = read_stages(func)
    if not stages or any(stage.reduce for stage in stages):
        return None
    outputs = [stage for stage in stages if stage.output in set(func.params)]
    across = _find_read_axis(func, stages, outputs[0]) if len(outputs) == 1 else None
    if across is None:
        return None
    kernel = _Kernel(func, stages, outputs[0], across)
    return [Variant("tiles", None, None, {}, lambda tiles: kernel.emit())]


def _find_read_axis(func: tirx.PrimFunc, stages: list[Stage], output: Stage) -> int | None:
    """Return the axis along which all reads are successive that do not run along the last one; None without such an
    axis.
    """
    if len(output.axes) < 2 or not _is_long(output.axes[-1]):
        return None
    facts = Facts.of(func)
    for axis in output.axes:
        facts.bind(axis.var, 0, axis.extent)
    point = [tirx.const(0, "int64") if is_int(axis.extent, 1) else axis.var for axis in output.axes]
    with IRBuilder(), T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}
        program = _make_program(stages, memory, output, point, facts)

    def step(address: Expr, axis: Axis) -> Expr:
        return facts.simplify(substitute(address, {axis.var: axis.var + 1}) - address)

    *outer, last = output.axes
    read_axes: set[int] = set()
    for address in (load.indices[0] for expr in program.expressions for load in loads(expr)):
        if loads(address) or is_int(step(address, last), 0) or is_int(step(address, last), 1):
            continue
        read_axes.add(next((n for n, a in enumerate(outer) if _is_long(a) and is_int(step(address, a), 1)), -1))
    return read_axes.pop() if len(read_axes) == 1 and -1 not in read_axes else None


def _make_program(
    stages: list[Stage], memory: dict[tirx.Buffer, tirx.Buffer], output: Stage, point: list[Expr], facts: Facts
) -> Program:
    """Return the program of the value stored at a point of the output."""
    elements, stored = [tirx.BufferLoad(output.output, point)], [output.output.dtype]
    return Evaluator.of(stages, memory).program(elements, facts, stored=stored, rounds=False)


def _is_long(axis: Axis) -> bool:
    return not isinstance(axis.extent, tirx.IntImm) or axis.extent.value >= _FEW


@dataclass(frozen=True, eq=False)
class _Kernel:
    """The output's elements by tiles over the axis with index `across`, and the last one."""

    func: tirx.PrimFunc
    stages: list[Stage]
    output: Stage
    across: int

    def emit(self) -> tirx.PrimFunc:
        axes = self.output.axes
        read, last = axes[self.across], axes[-1]
        outer = [a for n, a in enumerate(axes[:-1]) if n != self.across and not is_int(a.extent, 1)]
        facts, m = Facts.of(self.func), tirx.Var("m", "int64")
        for axis in (Axis(m, count_points(outer)), read, last):
            facts.bind(axis.var, 0, axis.extent)
        where = dict(zip((axis.var for axis in outer), unravel(m, outer)))
        zero = tirx.const(0, "int64")
        point = [where.get(a.var, a.var if a in (read, last) else zero) for a in axes]
        with IRBuilder() as builder, T.prim_func():
            memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, self.func.params)}
            program = _make_program(self.stages, memory, self.output, point, facts)
            address = facts.simplify(flatten_index(self.output.output.shape, point))
            along = [bind_on_host(tirx.ceildiv(axis.extent, SIDE)) for axis in (read, last)]
            blocks = bind_on_host(count_points(outer) * along[0] * along[1])
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

                def at(row_index: Expr, column_index: Expr) -> tuple[Expr, Expr, Expr]:
                    """Return the element of a thread in the tile, and whether it exists."""
                    a, b = let(start + row_index), let(first + column_index)
                    return a, b, tirx.all(a < read.extent, b < last.extent)

                with unrolled(SIDE // _ROWS) as n:
                    row = let(n * _ROWS + down)
                    a, b, exists = at(across, row)
                    with T.If(exists), T.Then():
                        (result,) = alloc_result_registers(program, 1, 1)
                        line = ChunkedRow(facts, last.var, last.extent)
                        bindings = {**values, read.var: a}
                        evaluate_chunk(
                            line, program, 1, bindings, b, lambda x, results: store_element(result, x, results[0])
                        )
                        store_values(tile, row * _PITCH + across, result)
                synchronize()
                with unrolled(SIDE // _ROWS) as n:
                    row = let(n * _ROWS + down)
                    a, b, exists = at(row, across)
                    with T.If(exists), T.Then():
                        target = let(substitute(address, {**values, read.var: a, last.var: b}))
                        store_element(memory[self.output.output], target, tile[across * _PITCH + row])
        return self.func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)
