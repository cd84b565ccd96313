"""Ordinary operators on GPUs: TVM's own schedules (dlight), the last of which binds any block to threads."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.s_tir import dlight

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


def ordinary(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """The function with its loops bound to threads; None where TVM has no schedule for it."""
    module = tvm.IRModule({"main": func})
    with target:
        for schedule in _SCHEDULES:
            try:
                scheduled = schedule(module)
                # Threads reduce together only by the combiners that TVM knows: not by a maximum that keeps NaN.
                tvm.s_tir.transform.LowerCrossThreadReduction()(scheduled)
            except (ValueError, AssertionError):
                continue
            if not scheduled["main"].same_as(func):
                return scheduled["main"]
    return None
