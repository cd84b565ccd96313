"""Marking of float32 matmuls to be computed on tensor cores, on request: an attribute of functions (MATMULS).

Kernels are chosen by functions only, and so are tuning records: a record for one way to multiply does not apply to
another. Functions without such a matmul, and matmuls without a tensor-core kernel, stay float32.
"""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm import tirx

import schedules
from schedules.reading.matmul import MATMULS, read_matmul
from schedules.reading.stages import read_stages

from ..compile_state import CompileState

NAMES = {"tf32": "TF32", "3xtf32": "TF32, in two parts for each operand"}


def mark_tf32_matmuls(state: CompileState) -> CompileState:
    """Mark the functions of float32 matmuls with the option `matmuls`, if it is set."""
    mod, matmuls = state.module, state.options.matmuls
    if matmuls is None:
        return state
    marked = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and _has_float32_matmul(func):
            marked.update_func(name, func.with_attr(MATMULS, matmuls))
    return replace(state, module=marked)


def describe_tf32_matmuls(scheduled: tvm.IRModule, matmuls: str) -> str:
    """Return a note about the marked functions of a scheduled module, for the reader."""
    marked = [func for _, func in scheduled.functions_items() if func.attrs is not None and MATMULS in func.attrs]
    fast = sum(str(func.attrs.get(schedules.ATTRIBUTE, "")) == "matmul" for func in marked)
    return f"precision: {fast} kernels of matmuls compute in {NAMES[matmuls]}, {len(marked) - fast} others in float32"


def _has_float32_matmul(func: tirx.PrimFunc) -> bool:
    matmuls = [read_matmul(stage) for stage in read_stages(func) or ()]
    return any(p is not None and p.quantization is None and {str(p.a.ty), str(p.b.ty)} == {"float32"} for p in matmuls)
