"""Element-wise functions on GPUs: casts, sums of residuals, activations, masks, gathers, rotary embeddings.

A thread has a chunk of a row (chunks.py), so that memory is read and written in pieces of 16 bytes wherever elements
are successive. Stages that are no output are computed where they are read.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import Expr, is_int, offset, substitute
from lowering.tensorir.facts import Facts

from ..reading.stages import Axis, Stage, read_stages, same_axes, unravel, volume
from ..reading.values import Evaluator, flat_view
from ..variant import Variant
from .chunks import Row, evaluate, result_registers, store
from .device import device
from .host import on_host
from .ptx import let, put
from .threads import ThreadTiles, each


def elementwise(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Functions of stages without reductions; None for anything else."""
    stages = read_stages(func)
    if not stages or any(stage.reduce for stage in stages):
        return None
    gpu, tiles = device(target), {"chunks": ThreadTiles()}
    return [Variant("chunks", None, gpu, tiles, lambda tiles: _kernels(func, stages, tiles["chunks"]))]


def _kernels(func: tirx.PrimFunc, stages: list[Stage], tiles: ThreadTiles) -> tirx.PrimFunc:
    """The function: a launch for outputs with the same axes, in the order of the first of each."""
    outputs: list[list[Stage]] = []
    for stage in (stage for stage in stages if stage.output in set(func.params)):
        group = next((group for group in outputs if same_axes(group[0], stage)), None)
        outputs.append([stage]) if group is None else group.append(stage)
    with IRBuilder() as builder, T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}

        def put(stage: Stage, at: Expr, chunk: tirx.Buffer) -> None:
            store(memory[stage.output], at, chunk)

        for group in outputs:
            launch(func, stages, group, memory, tiles, put)
    return func.with_body(builder.get().body).without_attr(FORM)


def launch(
    func: tirx.PrimFunc,
    stages: list[Stage],
    outputs: list[Stage],
    memory: dict[tirx.Buffer, tirx.Buffer],
    tiles: ThreadTiles,
    put_chunk: Callable[[Stage, Expr, tirx.Buffer], None],
) -> None:
    """A launch that computes outputs with the same axes, a chunk by each thread (Chunks)."""
    chunks = Chunks(func, stages, outputs, memory)
    with each(chunks.count, tiles) as number:
        chunks.emit(number, put_chunk)


class Chunks:
    """The chunks of outputs with the same axes, `count` of them (int64, computed by the host where the IRBuilder
    stands). memory is that of what the function reads."""

    def __init__(
        self, func: tirx.PrimFunc, stages: list[Stage], outputs: list[Stage], memory: dict[tirx.Buffer, tirx.Buffer]
    ) -> None:
        axes = outputs[0].axes
        several = [n for n, axis in enumerate(axes) if not is_int(axis.extent, 1)]
        along = several[-1] if several else len(axes) - 1
        outer = [axis for n, axis in enumerate(axes) if n != along and n in several]
        last = axes[along] if axes else Axis(tirx.Var("unit", "int64"), tirx.const(1, "int64"))
        facts = Facts.of(func)
        self.m = tirx.Var("m", "int64")
        rows = volume(outer)
        for axis in (Axis(self.m, rows), last):
            facts.bind(axis.var, 0, axis.extent)
        places = dict(zip((axis.var for axis in outer), unravel(self.m, outer)))
        zero = tirx.const(0, "int64")
        point = [axis.var if n == along else places.get(axis.var, zero) for n, axis in enumerate(axes)]
        self.outputs, self.row = outputs, Row(facts, last.var, last.extent)
        wanted = [tirx.BufferLoad(stage.output, point) for stage in outputs]
        stored = [stage.output.dtype for stage in outputs]
        self.program = Evaluator.of(stages, memory).program(wanted, facts, stored=stored, rounds=False)
        self.targets = [facts.simplify(offset(stage.output.shape, point)) for stage in outputs]
        self.width = self.row.width(self.targets)
        self.in_row = on_host(tirx.truncdiv(last.extent, T.int64(self.width)))
        self.count = on_host(rows * self.in_row)

    def emit(self, number: Expr, put_chunk: Callable[[Stage, Expr, tirx.Buffer], None]) -> None:
        """The code for a chunk: put_chunk(output, place of its first element, registers) for each output."""
        values = {self.m: let(tirx.truncdiv(number, self.in_row))}
        first = let(tirx.truncmod(number, self.in_row) * self.width)
        results = result_registers(self.program, len(self.outputs), self.width)

        def keep(x: Expr, found: list[Expr]) -> None:
            for register, result in zip(results, found):
                put(register, x, result)

        evaluate(self.row, self.program, self.width, values, first, keep)
        for stage, place, register in zip(self.outputs, self.targets, results):
            put_chunk(stage, let(substitute(place, {**values, self.row.j: first})), register)
