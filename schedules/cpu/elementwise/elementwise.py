"""Element-wise functions, with broadcasting, transposition, slicing, gathering and concatenation.

Each output is one loop nest, whatever the number of stages: intermediate values stay in registers. Only an expensive
stage whose values are needed several times is materialized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm
from tvm import ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, flatten_index, is_function, is_int, loads, uses, walk
from lowering.tensorir.facts import Facts

from ...reading.stages import Axis, Stage, count_points, read_stages
from ...reading.values import Evaluator, Program, View, choose_scratch_dtype, flat_view
from ...variant import Variant
from ..primitives.fast_math import expand
from ..primitives.vector import CpuFeatures, let, read_cpu_features
from .loops import split_among_threads, split_rows
from .sweep import Sweep, plan_sweep
from .transposition import SweepTiles, read_transposition


def elementwise(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Schedule a function without reductions as vector loops among threads; return None for anything else."""
    stages = read_stages(func)
    if not stages or any(stage.reduce for stage in stages):
        return None
    cpu = read_cpu_features(target)
    tiles = {"sweep": SweepTiles.default(stages, cpu)}
    return [Variant("sweeps", stages, cpu, tiles, lambda tiles: _emit(func, stages, cpu, tiles["sweep"]))]


def _emit(func: tirx.PrimFunc, stages: list[Stage], cpu: CpuFeatures, tiles: SweepTiles) -> tirx.PrimFunc:
    stored = set(func.params) | find_recomputed(stages)
    with IRBuilder() as builder, T.prim_func():
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, func.params)}
        evaluator = Evaluator.of(stages, memory, expand)
        for stage in stages:
            if stage.output in stored and stage.output not in memory:
                memory[stage.output] = T.alloc_buffer(
                    (count_points(stage.axes),), choose_scratch_dtype(stage.output, evaluator.moved)
                )
        for stage in stages:
            if stage.output in memory:
                _write(stage, evaluator, memory[stage.output], Facts.of(func), cpu, tiles)
                evaluator.views[stage.output] = View(memory[stage.output])
    return func.with_body(builder.get().body)


def find_recomputed(stages: list[Stage]) -> set[tirx.Buffer]:
    """Return the outputs of expensive stages that another stage reads at fewer points than it has itself."""
    expensive = find_expensive_outputs(stages)
    outputs = set()
    for stage in stages:
        several = {axis.var for axis in (*stage.axes, *stage.reduce) if not is_int(axis.extent, 1)}
        for node in loads(stage.value):
            used = {var for var in several if any(uses(index, {var}) for index in node.indices)}
            if node.source in expensive and not node.source.same_as(stage.output) and used != several:
                outputs.add(node.source)
    return outputs


def find_expensive_outputs(stages: list[Stage]) -> set[tirx.Buffer]:
    """Return the outputs of stages that call functions or divide, directly or through element-wise stages they read."""
    expensive: set[tirx.Buffer] = set()
    for stage in stages:
        for node in walk(stage.value):
            costly = isinstance(node, prim.Div) or is_function(node)
            inherited = isinstance(node, ir.TensorLoad) and node.source in expensive
            if costly or inherited:
                expensive.add(stage.output)
    return expensive


def _plan(stage: Stage, evaluator: Evaluator, memory: tirx.Buffer, base_facts: Facts) -> Sweep:
    """Plan a sweep over the output of a stage, whose programs give the value to store in `memory` and its index."""

    def write(point: list[Expr], facts: Facts) -> Program:
        position = facts.simplify(flatten_index(stage.output.shape, point))
        value = tirx.BufferLoad(stage.output, point)
        return evaluator.program([value, position], facts, stored=[memory.dtype])

    return plan_sweep(stage.axes, write, base_facts)


def _write(
    stage: Stage, evaluator: Evaluator, memory: tirx.Buffer, facts: Facts, cpu: CpuFeatures, tiles: SweepTiles
) -> None:
    sweep = _plan(stage, evaluator, memory, facts)
    transposition, lanes = read_transposition(sweep, facts, cpu, tiles), cpu.lanes("float32")

    def store(results: list[Expr]) -> None:
        T.buffer_store(memory, results[0], [results[1]])

    if transposition is not None and is_int(transposition.applies, 1):
        transposition.emit(store)
    elif transposition is not None:
        with T.If(transposition.applies):
            with T.Then():
                transposition.emit(store)
            with T.Else():
                _sweep_in_tasks(sweep, lanes, store, tiles)
    else:
        _sweep_in_tasks(sweep, lanes, store, tiles)


def _sweep_in_tasks(sweep: Sweep, lanes: int, store: Callable[[list[Expr]], None], tiles: SweepTiles) -> None:
    """Emit the sweep at each point of its outer axes. Long sweeps are split: there may be one point (a batch of 1)."""
    is_single_chunk, extent = (
        isinstance(sweep.extent, prim.IntImm) and sweep.extent.value <= tiles.chunk,
        let(sweep.extent),
    )
    chunks = Axis(tirx.Var("chunk", "int64"), let((extent + (tiles.chunk - 1)) // tiles.chunk))

    def emit(point: Mapping[tirx.Var, Expr]) -> None:
        low = tirx.const(0, "int64") if is_single_chunk else let(point[chunks.var] * tiles.chunk)
        window = None if is_single_chunk else (low, tirx.min(low + tiles.chunk, extent))
        sweep.emit(point, lanes, store, window)

    if not sweep.outer:
        work = extent * sweep.work
        split_among_threads(chunks.extent, work, tiles.parallel_work, lambda task: emit({chunks.var: task}))
        return
    *before, last = sweep.outer
    axes = [*before, last] if is_single_chunk else [*before, chunks, last]

    def rows(point: list[Expr], rows_of_task: Axis) -> None:
        with T.serial(rows_of_task.extent) as i:
            emit({**dict(zip((axis.var for axis in axes), point)), last.var: let(rows_of_task.var + i)})

    split_rows(axes, let(tirx.min(extent, tiles.chunk) * sweep.work), tiles, rows)
