"""Ordinary operators on GPUs: TVM's own schedules (dlight), and one thread for what they cannot take."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir import dlight

from ..variant import Variant

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
    if isinstance(func.body, s_tir.SBlockRealize) or _has_loops(func.body):
        return None
    return [Variant("one thread", None, None, {}, lambda tiles: _by_one_thread(func))]


def _has_loops(body: tirx.Stmt) -> bool:
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(body, (tirx.For, found.append))
    return bool(found)


def ordinary(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant]:
    """Any function, with its loops bound to threads. TVM's schedules choose their sizes themselves."""
    return [Variant("dlight", None, None, {}, lambda tiles: _scheduled(func, target))]


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
                return scheduled["main"]
    return _by_one_thread(func)


def _by_one_thread(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Right for any function, and slow: for statements without loops, and loops over nothing, by which TVM divides."""
    thread = tirx.IterVar((0, 1), tirx.Var("thread", "int32"), tirx.IterVar.ThreadIndex, "threadIdx.x")
    if not isinstance(func.body, s_tir.SBlockRealize):
        return func.with_body(tirx.AttrStmt(thread, "thread_extent", 1, func.body))
    outer = func.body.block
    inside = tirx.AttrStmt(thread, "thread_extent", 1, outer.body)
    block = s_tir.SBlock(
        outer.iter_vars,
        outer.reads,
        outer.writes,
        outer.name_hint,
        inside,
        outer.init,
        outer.alloc_buffers,
        outer.match_buffers,
        outer.annotations,
    )
    return func.with_body(s_tir.SBlockRealize([], tirx.const(True), block))
