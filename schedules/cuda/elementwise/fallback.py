"""Fallback for any function on GPUs: TVM's own schedules (dlight), and loop nests by threads for functions that they
reject.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir import dlight
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, is_int, rewrite, substitute

from ...reading.stages import Stage, read_stages, write_stages
from ...variant import Variant
from .loop_nests import lower_to_threads

_SCHEDULES = tuple(
    dlight.ApplyDefaultSchedule(rule())
    for rule in (
        dlight.gpu.Matmul,
        dlight.gpu.GEMV,
        dlight.gpu.Reduction,
        dlight.gpu.GeneralReduction,
        dlight.gpu.Fallback,
    )
)


def one_number(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return a variant of one thread for a function without loops, such as one that stores a length.

    None for anything else.
    """
    if _has_loops(func.body):
        return None
    return [Variant("one thread", None, None, {}, lambda tiles: lower_to_threads(func))]


def _has_loops(body: tirx.Stmt) -> bool:
    loops: list[tirx.Stmt] = []
    tvm_ffi.structural_walk(body, ((tirx.For, tirx.While), loops.append))
    return bool(loops)


def ordinary(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant]:
    """Return a variant for any function, with its loops bound to threads.

    TVM's schedules choose their sizes themselves.
    """
    return [Variant("dlight", None, None, {}, lambda tiles: _apply_schedules(_drop_unit_reductions(func), target))]


def _drop_unit_reductions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function without its reductions over one element.

    dlight fuses the following stages into such a reduction, and these are then applied to the initial value too.
    """
    stages = read_stages(func)
    if stages is None or not any(map(_is_unit_reduction, stages)):
        return func
    rewritten = write_stages(
        [_drop_reduction(stage) if _is_unit_reduction(stage) else stage for stage in stages], list(func.params)
    )
    for key, value in func.attrs.items():
        rewritten = rewritten.with_attr(key, value)
    return rewritten


def _is_unit_reduction(stage: Stage) -> bool:
    return bool(stage.reduce) and all(is_int(axis.extent, 1) for axis in stage.reduce)


def _drop_reduction(stage: Stage) -> Stage:
    """Return the stage that combines init with the one element."""

    def first(node: Expr) -> Expr | None:
        return stage.init if isinstance(node, ir.TensorLoad) and node.source.same_as(stage.output) else None

    only = {axis.var: tirx.const(0, "int64") for axis in stage.reduce}
    return Stage(stage.output, stage.axes, (), None, substitute(rewrite(stage.value, first), only))


def _apply_schedules(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    with target:
        for schedule in _SCHEDULES:
            try:
                scheduled = schedule(tvm.IRModule({"main": func}))
                # Cross-thread reductions need combiners that TVM recognizes: a maximum that keeps NaN is not one.
                s_tir.transform.LowerCrossThreadReduction()(scheduled)
            except (ValueError, AssertionError, RuntimeError):
                continue
            if not scheduled["main"].same_as(func):
                return _guard_empty_launches(scheduled["main"])
    return lower_to_threads(func)


def _guard_empty_launches(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function with its launches of no blocks left out.

    The driver rejects such launches. Where no block is provable, TVM makes one, which would access invalid memory.
    """
    root = func.body.block

    def guard(nest: tirx.Stmt) -> tirx.Stmt:
        loops: list[tirx.For] = []
        tvm_ffi.structural_walk(nest, (tirx.For, loops.append))
        counts = [loop.extent for loop in loops if loop.kind == tirx.ForKind.THREAD_BINDING]
        is_launched = Analyzer().simplify(tirx.all(*(count > 0 for count in counts)))
        if isinstance(is_launched, tirx.IntImm):
            return nest if is_launched.value else tirx.Evaluate(0)
        # TVM puts no barrier into a condition.
        return tirx.For(tirx.Var("once", "int64"), T.int64(0), is_launched.astype("int64"), tirx.ForKind.SERIAL, nest)

    body = tirx.stmt_seq(*map(guard, tirx.stmt_list(root.body)))
    return func.with_body(s_tir.SBlockRealize([], tirx.const(True), _with_body(root, body)))


def _with_body(block: s_tir.SBlock, body: tirx.Stmt) -> s_tir.SBlock:
    return s_tir.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        body,
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )
