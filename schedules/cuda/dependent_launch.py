"""Programmatic dependent launch (CUDA C++ Programming Guide), from sm_90: kernels begin while the previous one ends.

A launch takes a microsecond or two in which the GPU is idle, and a decode step has hundreds. Every kernel signals at
its beginning that the next one may be launched once all of its thread blocks are resident. It then waits for the
previous kernel to end, memory included, before it reads or writes anything. So each kernel is resident on its SMs by
the time the previous one ends. In the meantime it may do work that does not depend on other kernels: kernels that read
weights start loading them (schedules/cuda/matmul/small_m_matmul.py). Those kernels have their own wait; for all others
the wait is inserted here.

A kernel launched this way only changes how it waits for kernels; after copies and events it is launched normally.

Pointers of such a kernel are not `__restrict__`. If nothing is written through a restricted pointer, nvcc reads it with
`ld.global.nc`, which is for memory that is constant while the kernel runs. Such a load may move above the wait, and the
first-level cache may answer it with a stale line (PTX ISA, ld.global.nc). The previous kernel is still writing.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .primitives import ptx
from .primitives.device import device

_LAUNCH_PARAMS, _EARLY_LAUNCH, _DYNAMIC_SHARED_MEMORY = (
    "tirx.kernel_launch_params",
    "tirx.use_programtic_dependent_launch",
    "tirx.use_dyn_shared_memory",
)


@tvm.transform.module_pass(opt_level=0, name="early_launch")
def early_launch(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
    """Launch the device functions of a module early, on targets that support it."""
    for name, func in mod.functions_items():
        is_kernel = isinstance(func, tirx.PrimFunc) and func.attrs is not None and _LAUNCH_PARAMS in func.attrs
        if is_kernel and device(func.attrs["target"]).begins_early:
            mod.update_func(name, _make_early_launch(func))
    return mod


def _make_early_launch(func: tirx.PrimFunc) -> tirx.PrimFunc:
    tags = [str(tag) for tag in func.attrs[_LAUNCH_PARAMS] if str(tag) != _DYNAMIC_SHARED_MEMORY]
    last = (
        [_DYNAMIC_SHARED_MEMORY]
        if any(str(tag) == _DYNAMIC_SHARED_MEMORY for tag in func.attrs[_LAUNCH_PARAMS])
        else []
    )
    first = _make_launch_statements(waits=not _has_wait(func))
    func = func.with_body(tirx.SeqStmt([*first, func.body])).without_attr("tirx.noalias")
    return func.with_attr(_LAUNCH_PARAMS, [*tags, _EARLY_LAUNCH, *last])


def _has_wait(func: tirx.PrimFunc) -> bool:
    """Return whether the kernel has its own wait."""
    texts: list[str] = []
    tvm_ffi.structural_walk(func.body, (ir.StringImm, lambda text: texts.append(str(text.value))))
    return ptx.WAIT in texts


def _make_launch_statements(waits: bool) -> list[tirx.Stmt]:
    code = """
__forceinline__ __device__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
"""
    with IRBuilder() as builder, T.prim_func():
        T.evaluate(T.cuda.func_call("let_next_kernel_begin", source_code=code))
        if waits:
            ptx.wait_for_earlier_kernels()
    body = builder.get().body
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
