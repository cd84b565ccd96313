"""Arrays where kernels must not assume more than they were promised: unaligned, or next to inaccessible pages."""

from __future__ import annotations

import ctypes
import mmap

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi

_NOTHING = 0  # PROT_NONE


def guarded(array: np.ndarray, at_end: bool) -> np.ndarray:
    """Return a copy that ends, or begins, at the edge of readable memory: an access outside ends the process.

    At an end it is aligned to its elements alone.
    """
    array, page = np.asarray(array), mmap.PAGESIZE
    size = -(-max(array.nbytes, 1) // page) * page
    memory = np.frombuffer(mmap.mmap(-1, size + 2 * page), np.uint8)
    for address in (memory.ctypes.data, memory.ctypes.data + page + size):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), _NOTHING) == 0
    return _copied(array, memory, page + (size - array.nbytes if at_end else 0))


def unaligned(array: np.ndarray) -> np.ndarray:
    """Return a copy one element past a multiple of 64 bytes, and no more aligned than that."""
    memory = np.empty(array.nbytes + 64 + array.itemsize, np.uint8)
    return _copied(array, memory, -memory.ctypes.data % 64 + array.itemsize)


def _copied(array: np.ndarray, memory: np.ndarray, start: int) -> np.ndarray:
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def borrow(array: np.ndarray) -> tvm.runtime.Tensor:
    """The array's own memory as a tensor (NumPy cannot export bfloat16, and gives empty arrays odd strides)."""
    if array.dtype == ml_dtypes.float8_e4m3fn:
        array = array.view(np.uint8)  # as compiled code has it
    if array.size == 0:
        return tvm.runtime.empty(array.shape, array.dtype.name)
    if array.dtype != ml_dtypes.bfloat16:
        return tvm_ffi.from_dlpack(array)
    return tvm_ffi.from_dlpack(array.view(np.uint16))._create_view(array.shape, array.dtype.name)
