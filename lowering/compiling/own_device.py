"""Host code of GPU kernels asks the GPU that a call is for about itself.

Schedules ask the first GPU (schedules/cuda/host.py): which one a call is for is known once arguments are unpacked, when
TVM marks the code with the number that the tensors have. Grids of hosts whose GPUs differ follow from it.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, tirx

_ASKS = "runtime.GetDeviceAttr"


@tvm.transform.module_pass(opt_level=0, name="ask_own_device")
def ask_own_device(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
    """Rewrite host functions that have been made packed ones."""
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            mod.update_func(name, _rewritten(func))
    return mod


def is_question(call: ir.Call) -> bool:
    """Return whether a call asks a device about itself: name, kind and number of the device, and what is asked."""
    return bool(call.args) and isinstance(call.args[0], ir.StringImm) and call.args[0].value == _ASKS


def _rewritten(func: tirx.PrimFunc) -> tirx.PrimFunc:
    numbers: list[ir.Expr] = []

    def note(statement: tirx.AttrStmt) -> None:
        if statement.attr_key == "device_id":
            numbers.append(statement.value)

    def ask(call: ir.Call) -> ir.Call:
        if not is_question(call):
            return call
        name, kind, _, *rest = call.args
        return ir.Call(call.op, [name, kind, numbers[0], *rest], call.attrs, call.ty_args, ret_ty=call.ty)

    tvm_ffi.structural_walk(func.body, (tirx.AttrStmt, note))
    return func.with_body(tvm_ffi.structural_map(func.body, (ir.Call, ask))) if numbers else func
