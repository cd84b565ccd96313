"""Values that the host computes before it launches a kernel."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

CUDA, SM_COUNT = 2, 7  # DLDeviceType, TVM's DeviceAttrKind


def bind_on_host(value: Expr) -> Expr:
    """Return the value as int64, computed once at the position of the IRBuilder, in the host's code, and passed to
    kernels.

    TVM moves the definition of a plain `T.bind` to its uses, even inside kernels; a load prevents that. A buffer of
    T.alloc_buffer would be allocated on the device, even here.
    """
    cell = T.decl_buffer((1,), "int64", data=T.bind(T.tvm_stack_alloca("shape", 1)))
    T.buffer_store(cell, value.astype("int64"), [0])
    return T.bind(cell[0])


def sm_count() -> Expr:
    """Return how many SMs the first GPU has: int64, queried when the kernel is launched."""
    return bind_on_host(T.call_packed("runtime.GetDeviceAttr", CUDA, 0, SM_COUNT))
