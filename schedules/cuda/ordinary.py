"""Ordinary operators on GPUs: TVM's own schedules (dlight), the last of which binds any block to threads."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.s_tir import dlight

_SCHEDULES = dlight.ApplyDefaultSchedule(
    dlight.gpu.Matmul(),
    dlight.gpu.GEMV(),
    dlight.gpu.Reduction(),
    dlight.gpu.GeneralReduction(),
    dlight.gpu.Fallback(),
)


def ordinary(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """The function with its loops bound to threads; None where TVM has no schedule for it."""
    with target:
        scheduled = _SCHEDULES(tvm.IRModule({"main": func}))["main"]
    return None if scheduled.same_as(func) else scheduled
