"""Tensors of the TVM runtime: views, copies, and the arrays that a call returns.

All of it through the runtime's registered functions, so that nothing of the compiler is imported.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import tvm_ffi

from .gpu import CPU

# The TVM Python package registers a class of its own for tensors; this one is tvm_ffi's, which it derives from.
Tensor = tvm_ffi.Tensor

# item(array, index): an element of an array, several times faster than indexing it.
item = tvm_ffi.get_global_func("ffi.ArrayGetItem")

_reference_count = ctypes.c_uint32.from_address


@cache
def _function(name: str) -> tvm_ffi.Function:
    return tvm_ffi.get_global_func(name)


def view_as(tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The memory of a contiguous tensor under another element type and shape."""
    return _function("runtime.TVMTensorCreateView")(tensor, shape, dtype, 0)


def row_of(tensor: Tensor, index: int) -> Tensor:
    """The memory of one index of the first axis of a contiguous tensor."""
    shape = tensor.shape[1:]
    size = math.prod(shape) * tensor.dtype.itemsize
    return _function("runtime.TVMTensorCreateView")(tensor, shape, str(tensor.dtype), index * size)


def empty_like(tensor: Tensor, rows: int) -> Tensor:
    """A tensor of that type and place with so many rows of that shape, which hold anything."""
    shape = (rows, *tensor.shape[1:])
    return _function("runtime.TVMTensorAllocWithScope")(shape, tensor.dtype, tensor.device, None)


def copy_of(tensor: Tensor, device: tvm_ffi.Device | None = None) -> Tensor:
    """A tensor of its own memory with the same contents, on another device if one is named."""
    copy = _function("runtime.TVMTensorAllocWithScope")(tensor.shape, tensor.dtype, device or tensor.device, None)
    copy_to(tensor, copy)
    return copy


def copy_to(source: Tensor, target: Tensor) -> None:
    """Copies the contents of a tensor to another of the same size in bytes, both contiguous, on the current stream."""
    copy = _function("runtime.TVMTensorCopyFromTo")
    device = source.device if target.device.dlpack_device_type() == CPU else target.device
    stream = 0 if device.dlpack_device_type() == CPU else tvm_ffi.get_raw_stream(device)
    if not stream:
        copy(source, target)
        return
    # The runtime copies on the default stream, whichever is current, and some streams do not wait for that one.
    order = _function("runtime.Device_StreamSyncFromTo")
    order(device, stream, 0)
    copy(source, target)
    order(device, 0, stream)


def held_elsewhere(tensor: Tensor) -> bool:
    """Whether others hold the tensor that `item` has just taken out of an array: more than that array and the caller.

    A C object of tvm_ffi begins with its 32-bit strong reference count (c_api.h, TVMFFIObject).
    """
    return _reference_count(tensor.__chandle__()).value > 2
