"""Element-wise functions on GPUs: casts, residual additions, activations, masks, gathers, rotary embeddings.

A thread has a chunk of a row (chunks.py): memory is read and written by vectors of 16 bytes wherever elements are
successive. Stages that are not outputs are computed where they are read.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import BLOCK_ATTRIBUTE
from lowering.tensorir.expressions import Expr, flatten_index, is_int, substitute
from lowering.tensorir.facts import Facts

from ...reading.stages import Axis, Stage, count_points, has_same_axes, read_stages, unravel
from ...reading.values import Evaluator, flat_view
from ...variant import Variant
from ..primitives.device import device
from ..primitives.host import bind_on_host
from ..primitives.ptx import let, store_element
from ..primitives.threads import ThreadTiles, launch_threads
from .chunks import ChunkedRow, alloc_result_registers, evaluate_chunk, store_values


def elementwise(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return a variant for functions of stages without reductions; None for anything else."""
    stages = read_stages(func)
    if not stages or any(stage.reduce for stage in stages):
        return None
    gpu, tiles = device(target), {"chunks": ThreadTiles()}
    return [Variant("chunks", None, gpu, tiles, lambda tiles: _kernels(func, stages, tiles["chunks"]))]


def _kernels(func: tirx.PrimFunc, stages: list[Stage], tiles: ThreadTiles) -> tirx.PrimFunc:
    """Return the function: a launch for outputs with the same axes, in the order of the first of each."""
    outputs: list[list[Stage]] = []
    for stage in (stage for stage in stages if stage.output in set(func.params)):
        group = next((group for group in outputs if has_same_axes(group[0], stage)), None)
        outputs.append([stage]) if group is None else group.append(stage)
    with IRBuilder() as builder, T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}

        def store_chunk(stage: Stage, at: Expr, chunk: tirx.Buffer) -> None:
            store_values(memory[stage.output], at, chunk)

        for group in outputs:
            launch(func, stages, group, memory, tiles, store_chunk)
    return func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)


def launch(
    func: tirx.PrimFunc,
    stages: list[Stage],
    outputs: list[Stage],
    memory: dict[tirx.Buffer, tirx.Buffer],
    tiles: ThreadTiles,
    store_chunk: Callable[[Stage, Expr, tirx.Buffer], None],
) -> None:
    """Launch a thread for each chunk of outputs with the same axes (Chunks)."""
    chunks = Chunks(func, stages, outputs, memory)
    with launch_threads(chunks.count, tiles) as number:
        chunks.emit(number, store_chunk)


class Chunks:
    """The chunks of outputs with the same axes.

    `count` is int64, computed by the host at the position of the IRBuilder. `memory` maps the tensors that the function
    reads to flat views.
    """

    def __init__(
        self, func: tirx.PrimFunc, stages: list[Stage], outputs: list[Stage], memory: dict[tirx.Buffer, tirx.Buffer]
    ) -> None:
        axes = outputs[0].axes
        long = [n for n, axis in enumerate(axes) if not is_int(axis.extent, 1)]
        along = long[-1] if long else len(axes) - 1
        outer = [axis for n, axis in enumerate(axes) if n != along and n in long]
        last = axes[along] if axes else Axis(tirx.Var("unit", "int64"), tirx.const(1, "int64"))
        facts = Facts.of(func)
        self.m = tirx.Var("m", "int64")
        rows = count_points(outer)
        for axis in (Axis(self.m, rows), last):
            facts.bind(axis.var, 0, axis.extent)
        bindings = dict(zip((axis.var for axis in outer), unravel(self.m, outer)))
        zero = tirx.const(0, "int64")
        point = [axis.var if n == along else bindings.get(axis.var, zero) for n, axis in enumerate(axes)]
        self.outputs, self.row = outputs, ChunkedRow(facts, last.var, last.extent)
        loads = [tirx.BufferLoad(stage.output, point) for stage in outputs]
        stored = [stage.output.dtype for stage in outputs]
        self.program = Evaluator.of(stages, memory).program(loads, facts, stored=stored, rounds=False)
        self.targets = [facts.simplify(flatten_index(stage.output.shape, point)) for stage in outputs]
        self.width = self.row.width(self.targets)
        self.in_row = bind_on_host(tirx.truncdiv(last.extent, T.int64(self.width)))
        self.count = bind_on_host(rows * self.in_row)

    def emit(self, number: Expr, store_chunk: Callable[[Stage, Expr, tirx.Buffer], None]) -> None:
        """Emit the code for a chunk: store_chunk(output, offset of its first element, registers) for each output."""
        bindings = {self.m: let(tirx.truncdiv(number, self.in_row))}
        first = let(tirx.truncmod(number, self.in_row) * self.width)
        results = alloc_result_registers(self.program, len(self.outputs), self.width)

        def store_results(x: Expr, values: list[Expr]) -> None:
            for register, result in zip(results, values):
                store_element(register, x, result)

        evaluate_chunk(self.row, self.program, self.width, bindings, first, store_results)
        for stage, target, register in zip(self.outputs, self.targets, results):
            store_chunk(stage, let(substitute(target, {**bindings, self.row.j: first})), register)
