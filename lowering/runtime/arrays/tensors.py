"""Tensors of the TVM runtime: views, copies, and the arrays that a call returns.

Everything uses the runtime's registered functions, so that no part of the compiler is imported.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import tvm_ffi

from ..gpu import CPU

# The TVM Python package registers a subclass for tensors; this is the base class of tvm_ffi.
Tensor = tvm_ffi.Tensor

# item(array, index) returns an element of an array, several times faster than indexing it.
item = tvm_ffi.get_global_func("ffi.ArrayGetItem")

_reference_count = ctypes.c_uint32.from_address


@cache
def _get_function(name: str) -> tvm_ffi.Function:
    return tvm_ffi.get_global_func(name)


def view_as(tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a view of a contiguous tensor with another element type and shape."""
    return _get_function("runtime.TVMTensorCreateView")(tensor, shape, dtype, 0)


def view_row(tensor: Tensor, index: int) -> Tensor:
    """Return a view of one index of the first axis of a contiguous tensor."""
    shape = tensor.shape[1:]
    size = math.prod(shape) * tensor.dtype.itemsize
    return _get_function("runtime.TVMTensorCreateView")(tensor, shape, str(tensor.dtype), index * size)


def allocate_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return an uninitialized tensor with that many rows, of the same row shape, type and device."""
    shape = (rows, *tensor.shape[1:])
    return _get_function("runtime.TVMTensorAllocWithScope")(shape, tensor.dtype, tensor.device, None)


def copy_tensor(tensor: Tensor, device: tvm_ffi.Device | None = None) -> Tensor:
    """Return a copy of a tensor in new memory, on another device if one is given."""
    copy = _get_function("runtime.TVMTensorAllocWithScope")(tensor.shape, tensor.dtype, device or tensor.device, None)
    copy_to(tensor, copy)
    return copy


def copy_to(source: Tensor, target: Tensor) -> None:
    """Copy a tensor to another of the same bytes, both contiguous, on the current stream."""
    copy = _get_function("runtime.TVMTensorCopyFromTo")
    device = source.device if target.device.dlpack_device_type() == CPU else target.device
    stream = 0 if device.dlpack_device_type() == CPU else tvm_ffi.get_raw_stream(device)
    if not stream:
        copy(source, target)
        return
    # The runtime copies on the default stream, whichever is current, and some streams do not wait for that one.
    synchronize = _get_function("runtime.Device_StreamSyncFromTo")
    synchronize(device, stream, 0)
    copy(source, target)
    synchronize(device, 0, stream)


def is_shared(tensor: Tensor) -> bool:
    """Return whether others refer to the tensor that `item` has just returned.

    That is, more references than those of the array and the caller exist. A C object of tvm_ffi begins with its 32-bit
    strong reference count (c_api.h, TVMFFIObject).
    """
    return _reference_count(tensor.__chandle__()).value > 2
