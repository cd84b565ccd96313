"""What the host computes before it launches a kernel."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

CUDA, SM_COUNT = 2, 7  # DLDeviceType, TVM's DeviceAttrKind


def on_host(value: Expr) -> Expr:
    """The value as int64, computed once where the IRBuilder stands, in the host's code, and given to kernels.

    TVM puts the definition of a plain `T.bind` wherever it is used, in kernels too; behind a load it stops. A buffer of
    T.alloc_buffer would be allocated on the device, even here.
    """
    place = T.decl_buffer((1,), "int64", data=T.bind(T.tvm_stack_alloca("shape", 1)))
    T.buffer_store(place, value.astype("int64"), [0])
    return T.bind(place[0])


def sm_count() -> Expr:
    """How many SMs the first GPU has: int64, asked for when the kernel is launched."""
    return on_host(T.call_packed("runtime.GetDeviceAttr", CUDA, 0, SM_COUNT))
