"""Host code of GPU kernels queries the GPU of the call.

Schedules query the first GPU (schedules/cuda/primitives/host.py). The GPU of a call is determined when arguments are
unpacked, where TVM annotates the code with the device number of the tensors. Grids then fit the GPU on hosts with
different GPUs.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, tirx

_DEVICE_QUERY = "runtime.GetDeviceAttr"


@tvm.transform.module_pass(opt_level=0, name="ask_own_device")
def ask_own_device(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
    """Rewrite host functions that have been converted to packed functions."""
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            mod.update_func(name, _rewrite_queries(func))
    return mod


def is_device_query(call: ir.Call) -> bool:
    """Return whether a call queries a device: its arguments are a name, device kind, device number, and attribute."""
    return bool(call.args) and isinstance(call.args[0], ir.StringImm) and call.args[0].value == _DEVICE_QUERY


def _rewrite_queries(func: tirx.PrimFunc) -> tirx.PrimFunc:
    numbers: list[ir.Expr] = []

    def note(statement: tirx.AttrStmt) -> None:
        if statement.attr_key == "device_id":
            numbers.append(statement.value)

    def ask(call: ir.Call) -> ir.Call:
        if not is_device_query(call):
            return call
        name, kind, _, *rest = call.args
        return ir.Call(call.op, [name, kind, numbers[0], *rest], call.attrs, call.ty_args, ret_ty=call.ty)

    tvm_ffi.structural_walk(func.body, (tirx.AttrStmt, note))
    return func.with_body(tvm_ffi.structural_map(func.body, (ir.Call, ask))) if numbers else func
