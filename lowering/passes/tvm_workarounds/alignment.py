"""Generated code must not assume more alignment than callers' arrays have.

TVM takes every buffer for 64-byte aligned. LLVM then emits aligned vector loads, which crash on a NumPy array (16
bytes) or on a slice of one (the size of an element). GPU arrays are at multiples of 16 bytes, the widest access of
kernels (runtime/devices.py).
"""

from __future__ import annotations

import dataclasses

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx.buffer import is_buffer_var

from ..compile_state import CompileState


def assume_alignment(state: CompileState) -> CompileState:
    """Assume external buffers aligned to their element's size, and to 16 bytes on a GPU.

    External buffers are the parameters of all PrimFuncs, and the views that blocks and declarations make of them.
    Buffers that a function allocates itself keep their alignment: accumulators must not straddle cache lines.
    """
    least = 16 if state.kernel_target.architecture else 1
    mod = state.module.clone()
    for variable, function in state.module.functions_items():
        if isinstance(function, tirx.PrimFunc):
            mod.update_func(variable, _lower_alignment(function, least))
    return dataclasses.replace(state, module=mod)


def _lower_alignment(function: tirx.PrimFunc, least: int) -> tirx.PrimFunc:
    allocated: set[tirx.Buffer] = set()
    tvm_ffi.structural_walk(
        function,
        [
            (tirx.AllocBuffer, lambda s: allocated.add(s.buffer)),
            (s_tir.SBlock, lambda s: allocated.update(s.alloc_buffers)),
        ],
    )
    replacements: dict[tvm.ir.Var, tvm.ir.Var] = {}

    def replace(variable: tvm.ir.Var) -> tvm.ir.Var:
        replacement = replacements.get(variable)
        if replacement is None:
            is_unchanged = not is_buffer_var(variable) or variable in allocated
            replacement = replacements[variable] = variable if is_unchanged else _set_alignment(variable, least)
        return replacement

    return tvm_ffi.structural_map(function, (tvm.ir.Var, replace))


def _set_alignment(buffer: tirx.Buffer, least: int) -> tirx.Buffer:
    kind = buffer.ty
    return tirx.decl_buffer(
        kind.shape,
        kind.dtype,
        buffer.name,
        strides=kind.strides,
        elem_offset=kind.elem_offset,
        scope=buffer.scope(),
        data_alignment=max(least, tvm.DataType(buffer.dtype).bits // 8),
        offset_factor=kind.offset_factor,
        layout=kind.layout,
    )
