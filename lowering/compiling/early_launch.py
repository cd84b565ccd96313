"""Kernels that begin while the one before ends: programmatic dependent launch (CUDA C++ Programming Guide), from sm_90.

A launch takes a microsecond or two in which the GPU does nothing else, and a decode step has hundreds. Every kernel
says at its begin that the next may be launched, as soon as all of its blocks are there, and waits for the one before it
to end, memory and all, before it reads or writes anything. So each is on its SMs by the time its turn
comes, and in between it may do what needs nothing of the others: kernels that read weights begin to (schedules/cuda/
small_m_matmul.py). They wait where they stand; for all others the wait is put here.

What is launched so waits for kernels alone in another way; behind copies and events it is launched as ever.

Pointers of such a kernel are not `__restrict__`. Where nothing is written through a restricted pointer nvcc reads by
`ld.global.nc`, which is for memory that nobody writes while the kernel runs: such a load may move above the wait, and
the first-level cache may answer it with an old line (PTX ISA, ld.global.nc). The kernel before still writes.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules.cuda import ptx
from schedules.cuda.device import device

_TAGS, _TAG, _LAST = (
    "tirx.kernel_launch_params",
    "tirx.use_programtic_dependent_launch",
    "tirx.use_dyn_shared_memory",
)


@tvm.transform.module_pass(opt_level=0, name="early_launch")
def early_launch(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
    """The device functions of a module, launched early where their target has it."""
    for name, func in mod.functions_items():
        is_kernel = isinstance(func, tirx.PrimFunc) and func.attrs is not None and _TAGS in func.attrs
        if is_kernel and device(func.attrs["target"]).begins_early:
            mod.update_func(name, _launched_early(func))
    return mod


def _launched_early(func: tirx.PrimFunc) -> tirx.PrimFunc:
    tags = [str(tag) for tag in func.attrs[_TAGS] if str(tag) != _LAST]
    last = [_LAST] if any(str(tag) == _LAST for tag in func.attrs[_TAGS]) else []
    first = _statements(waits=not _waits(func))
    func = func.with_body(tirx.SeqStmt([*first, func.body])).without_attr("tirx.noalias")
    return func.with_attr(_TAGS, [*tags, _TAG, *last])


def _waits(func: tirx.PrimFunc) -> bool:
    """Whether the kernel waits somewhere by itself."""
    found: list[str] = []
    tvm_ffi.structural_walk(func.body, (ir.StringImm, lambda text: found.append(str(text.value))))
    return ptx.WAIT in found


def _statements(waits: bool) -> list[tirx.Stmt]:
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
