"""Matmuls of float32 that tensor cores are to compute, on request: functions of them say how (MATMULS).

Kernels are chosen by functions alone, and so are records of tuning: what was found for one way to multiply is no
record of another. Functions that hold no such matmul, and matmuls that no kernel on tensor cores takes, stay float32.
"""

from __future__ import annotations

import tvm
from tvm import tirx

import schedules
from schedules.reading.matmul import MATMULS, read_matmul
from schedules.reading.stages import read_stages

NAMES = {"tf32": "TF32", "3xtf32": "TF32, in two parts for each operand"}


def mark_tf32_matmuls(mod: tvm.IRModule, matmuls: str | None) -> tvm.IRModule:
    """The module, whose functions with matmuls of float32 are marked; matmuls is "tf32", "3xtf32", or None."""
    if matmuls is None:
        return mod
    marked = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and _holds_matmul(func):
            marked.update_func(name, func.with_attr(MATMULS, matmuls))
    return marked


def note(scheduled: tvm.IRModule, matmuls: str) -> str:
    """What became of the marked functions of a module, for the reader."""
    marked = [func for _, func in scheduled.functions_items() if func.attrs is not None and MATMULS in func.attrs]
    taken = sum(str(func.attrs.get(schedules.ATTRIBUTE, "")) == "matmul" for func in marked)
    return f"precision: {taken} kernels of matmuls compute in {NAMES[matmuls]}, {len(marked) - taken} others in float32"


def _holds_matmul(func: tirx.PrimFunc) -> bool:
    found = [read_matmul(stage) for stage in read_stages(func) or ()]
    return any(p is not None and p.codes is None and {str(p.a.ty), str(p.b.ty)} == {"float32"} for p in found)
