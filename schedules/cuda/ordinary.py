"""Ordinary operators on GPUs: TVM's own schedules (dlight), and loop nests by threads for what they do not take."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir import dlight
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, is_int, rewrite, substitute

from ..reading.stages import Stage, read_stages, write_stages
from ..variant import Variant
from .loop_nests import by_threads

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
    """A function without loops, such as one that stores a length, by one thread; None for anything else."""
    if _has_loops(func.body):
        return None
    return [Variant("one thread", None, None, {}, lambda tiles: by_threads(func))]


def _has_loops(body: tirx.Stmt) -> bool:
    found: list[tirx.Stmt] = []
    tvm_ffi.structural_walk(body, ((tirx.For, tirx.While), found.append))
    return bool(found)


def ordinary(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant]:
    """Any function, with its loops bound to threads. TVM's schedules choose their sizes themselves."""
    return [Variant("dlight", None, None, {}, lambda tiles: _scheduled(_without_single(func), target))]


def _without_single(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, whose reductions over one element are none: into such a one dlight puts what comes behind it, and
    that is applied to the first value too."""
    stages = read_stages(func)
    if stages is None or not any(map(_is_single, stages)):
        return func
    made = write_stages([_unreduced(stage) if _is_single(stage) else stage for stage in stages], list(func.params))
    for key, value in func.attrs.items():
        made = made.with_attr(key, value)
    return made


def _is_single(stage: Stage) -> bool:
    return bool(stage.reduce) and all(is_int(axis.extent, 1) for axis in stage.reduce)


def _unreduced(stage: Stage) -> Stage:
    """init combined with the one element."""

    def first(node: Expr) -> Expr | None:
        return stage.init if isinstance(node, ir.TensorLoad) and node.source.same_as(stage.output) else None

    only = {axis.var: tirx.const(0, "int64") for axis in stage.reduce}
    return Stage(stage.output, stage.axes, (), None, substitute(rewrite(stage.value, first), only))


def _scheduled(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    with target:
        for schedule in _SCHEDULES:
            try:
                scheduled = schedule(tvm.IRModule({"main": func}))
                # Threads reduce together only by the combiners that TVM knows: not by a maximum that keeps NaN.
                s_tir.transform.LowerCrossThreadReduction()(scheduled)
            except (ValueError, AssertionError, RuntimeError):
                continue
            if not scheduled["main"].same_as(func):
                return _launched_for_some(scheduled["main"])
    return by_threads(func)


def _launched_for_some(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, whose launches of no blocks are left out: the driver refuses them, and where none is known to be
    there TVM makes one, which would touch what is not there."""
    root = func.body.block

    def guarded(nest: tirx.Stmt) -> tirx.Stmt:
        loops: list[tirx.For] = []
        tvm_ffi.structural_walk(nest, (tirx.For, loops.append))
        counts = [loop.extent for loop in loops if loop.kind == tirx.ForKind.THREAD_BINDING]
        some = Analyzer().simplify(tirx.all(*(count > 0 for count in counts)))
        if isinstance(some, tirx.IntImm):
            return nest if some.value else tirx.Evaluate(0)
        # TVM puts no barrier into a condition.
        return tirx.For(tirx.Var("once", "int64"), T.int64(0), some.astype("int64"), tirx.ForKind.SERIAL, nest)

    body = tirx.stmt_seq(*map(guarded, tirx.stmt_list(root.body)))
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
