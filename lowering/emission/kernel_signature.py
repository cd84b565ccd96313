"""C signatures of kernels: addresses and numbers in place of the arguments of TVM's packed functions.

A kernel's function takes the address of each buffer and each scalar, in the order of its parameters, then the sizes
that shapes of its buffers name. It returns 0, or -1 if it lacks scratch memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.tirx.buffer import buffer_data_pointer_type, is_buffer_var

from ..tensorir.expressions import Expr

PASSES_OF_PACKED_ARGUMENTS = ("tirx.MakePackedAPI", "tirx.FP8StorageLegalize", "tirx.BF16StorageLegalize")
"""TVM's passes that unpack_arguments replaces, and those that must follow it."""

SCRATCH = "lowering.scratch"
"""Attribute of a kernel that is not scheduled, since its code is cached: what its code allocates."""

_LOWERED = 1  # the calling convention of functions whose parameters are final
_CPU = 1  # kDLCPU
_C_TYPES = {"int64": "int64_t", "int32": "int32_t", "float32": "float", "float64": "double", "bool": "_Bool"}


def list_shape_symbols(kernel: tirx.PrimFunc) -> list[tuple[int, int]]:
    """Return the position of each size that is not a parameter: the number of a buffer's parameter, and an axis."""
    seen = {parameter for parameter in kernel.params if not is_buffer_var(parameter)}
    positions = []
    for number, parameter in enumerate(kernel.params):
        for axis, size in enumerate(parameter.shape if is_buffer_var(parameter) else ()):
            if isinstance(size, ir.Var) and size not in seen:
                seen.add(size)
                positions.append((number, axis))
    return positions


def declare(kernel: tirx.PrimFunc, symbol: str) -> str:
    """Return the C declaration of a kernel's function, which has that name."""
    types = ["void*" if is_buffer_var(p) else _C_TYPES[str(p.ty)] for p in kernel.params]
    types += ["int64_t"] * len(list_shape_symbols(kernel))
    return f"int32_t {symbol}({', '.join(types) or 'void'});"


def unpack_arguments(lowered: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a kernel with its C signature, after TVM's passes that precede MakePackedAPI."""
    name = str(lowered.attrs["global_symbol"])
    parameters: list[tirx.Var] = []
    declarations: list[tirx.Stmt] = []
    body = tirx.AttrStmt(ir.StringImm(name), "compute_scope", ir.StringImm(f"{name}_compute_"), lowered.body)
    for parameter in lowered.params:
        if not is_buffer_var(parameter):
            parameters.append(parameter)
            continue
        parameters.append(tirx.Var(f"{parameter.name}_data", buffer_data_pointer_type(parameter)))
        declarations.append(tirx.DeclBuffer(parameter, data=parameters[-1]))
    parameters += [lowered.params[number].shape[axis] for number, axis in list_shape_symbols(lowered)]
    for key, value in (("device_type", _CPU), ("device_id", 0)):
        body = tirx.AttrStmt(ir.StringImm("default"), key, tirx.const(value, "int32"), body)
    status = tirx.stmt.Return(tirx.const(0, "int32"))
    statements = tirx.SeqStmt([*declarations, body, status])
    return tirx.PrimFunc(parameters, statements, ir.PrimType("int32"), lowered.attrs).with_attr(
        "calling_conv", _LOWERED
    )


def list_scratch_sizes(kernel: tirx.PrimFunc) -> list[tuple[Sequence[Expr], int]]:
    """Return the shape of each array that a kernel allocates, and the bytes of an element.

    The kernel is scheduled, or the attribute SCRATCH of an unscheduled one says this (compiling/scratch_records.py).
    """
    if SCRATCH in (kernel.attrs or {}):
        return [(tuple(shape), int(itemsize)) for itemsize, *shape in kernel.attrs[SCRATCH]]
    buffers: list[tirx.Buffer] = []
    tvm_ffi.structural_walk(
        kernel.body,
        [
            (tirx.AllocBuffer, lambda stmt: buffers.append(stmt.buffer)),
            (s_tir.SBlock, lambda block: buffers.extend(block.alloc_buffers)),
        ],
    )
    return [(buffer.shape, tvm.DataType(buffer.dtype).itemsize) for buffer in buffers]
