"""Kernels written in CUDA C++, launched through the driver, emulated or real, without TVM."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import card
from .device import Arrivals, Order
from .worker import EmulationError, run


@dataclass(frozen=True)
class TensorMap:
    """A kernel's CUtensorMap parameter over the array at this index among the arguments.

    box: extents, innermost first; swizzle: 0, 32, 64 or 128 bytes; strides: bytes, without the innermost, of a view.
    """

    index: int
    box: tuple[int, ...]
    swizzle: int = 0
    strides: tuple[int, ...] | None = None
    offset: int = 0


@dataclass(frozen=True)
class Pointer:
    """A kernel's pointer into the array at this index among the arguments, `offset` bytes after its start."""

    index: int
    offset: int = 0


def launch(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[Any],
    *,
    shared_bytes: int = 0,
    cluster: int = 1,
    arch: str = "sm_90a",
    order: Order = "ascending",
    arrivals: Arrivals = "late",
) -> list[Any]:
    """Compile the source, launch one of its kernels, and return the arguments as they are afterwards.

    arguments: NumPy arrays and Pointers (pointers), NumPy scalars, and TensorMaps; cluster: blocks along x. Raises
    EmulationError.
    """
    sizes = ([*grid, 1, 1][:3], [*block, 1, 1][:3], shared_bytes, cluster)
    return run(_launch, source, kernel, sizes, list(arguments), arch, arch=arch, order=order, arrivals=arrivals)


# ---- in the worker


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of a cluster's dimensions."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("cluster", ctypes.c_uint * 3),
                ("rest", ctypes.c_char * 52)]  # fmt: skip


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("extents", ctypes.c_uint * 6), ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint)]  # fmt: skip


def _checked(status: int) -> None:
    from .device import take_failure

    if status:
        raise EmulationError(("" if card.is_used() else take_failure()) or f"CUDA error {status}")


class _Driver:
    """The driver and the runtime, with the memory of one launch."""

    def __init__(self) -> None:
        from .build import libraries

        paths = card.libraries() if card.is_used() else libraries()
        self.driver, self.runtime = (ctypes.CDLL(str(path)) for path in paths)
        self.memory: dict[int, ctypes.c_void_p] = {}
        _checked(self.runtime.cudaFree(None))  # makes a context

    def load(self, source: str, arch: str) -> ctypes.c_void_p:
        """Compile the source and return the module."""
        from .build import compile_for_emulation

        image = card.compile_source(source, arch) if card.is_used() else compile_for_emulation(source)
        module = ctypes.c_void_p()
        _checked(self.driver.cuModuleLoadData(ctypes.byref(module), image))
        return module

    def put(self, number: int, array: np.ndarray) -> None:
        """Copy an argument to memory of its own."""
        self.memory[number] = ctypes.c_void_p()
        _checked(self.runtime.cudaMalloc(ctypes.byref(self.memory[number]), ctypes.c_size_t(array.nbytes)))
        self._copy(self.memory[number], array.ctypes.data, array.nbytes)

    def take(self, number: int, array: np.ndarray) -> np.ndarray:
        """Return a copy of an argument after the launch."""
        copied = np.empty_like(array)
        self._copy(copied.ctypes.data, self.memory[number], array.nbytes)
        return copied

    def _copy(self, to: Any, source: Any, size: int) -> None:
        if card.is_used():
            ends = (ctypes.c_void_p(_address(pointer)) for pointer in (to, source))
            _checked(self.runtime.cudaMemcpyAsync(*ends, ctypes.c_size_t(size), 4, None))
            _checked(self.runtime.cudaStreamSynchronize(None))
        else:  # the emulation's memory is the host's
            ctypes.memmove(to, source, size)

    def free(self, module: ctypes.c_void_p) -> None:
        for pointer in self.memory.values():
            self.runtime.cudaFree(pointer)
        self.driver.cuModuleUnload(module)


def _address(pointer: Any) -> int:
    return pointer if isinstance(pointer, int) else pointer.value or 0


def _launch(source: str, kernel: str, sizes: tuple[list, list, int, int], arguments: list, arch: str) -> list[Any]:
    grid, block, shared_bytes, cluster = sizes
    cuda = _Driver()
    module, function = cuda.load(source, arch), ctypes.c_void_p()
    try:
        _checked(cuda.driver.cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()))
        if shared_bytes >= 48 << 10:  # as TVM does
            _checked(cuda.driver.cuFuncSetAttribute(function, 8, shared_bytes))
        arrays = {i: argument for i, argument in enumerate(arguments) if isinstance(argument, np.ndarray)}
        for i, array in arrays.items():
            cuda.put(i, array)
        memory = cuda.memory
        values = [
            memory[i] if i in memory else _value(cuda.driver, a, arguments, memory) for i, a in enumerate(arguments)
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attribute = _Attribute(4, b"", (cluster, 1, 1))
        where = ctypes.addressof(attribute)
        config = _Config((ctypes.c_uint * 6)(*grid, *block), shared_bytes, None, where, int(cluster > 1))
        _checked(cuda.driver.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None))
        return [cuda.take(i, argument) if i in arrays else argument for i, argument in enumerate(arguments)]
    finally:
        cuda.free(module)


_TYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}


def _value(driver: ctypes.CDLL, argument: Any, arguments: list, memory: dict[int, ctypes.c_void_p]) -> Any:
    """Return a scalar, a pointer, or a tensor map at an address that is aligned as the driver demands."""
    if isinstance(argument, Pointer):
        return ctypes.c_void_p((memory[argument.index].value or 0) + argument.offset)
    if not isinstance(argument, TensorMap):
        return ctypes.create_string_buffer(argument.tobytes())
    array = arguments[argument.index]
    buffer = ctypes.create_string_buffer(128 + 64)
    value = (ctypes.c_char * 128).from_buffer(buffer, -ctypes.addressof(buffer) % 64)
    strides = argument.strides if argument.strides is not None else tuple(reversed(array.strides[:-1]))
    rank = len(argument.box)

    def packed(kind: Any, numbers: Any) -> Any:
        return (kind * rank)(*numbers)

    _checked(
        driver.cuTensorMapEncodeTiled(
            value, _TYPES[array.dtype.name], rank,
            ctypes.c_void_p((memory[argument.index].value or 0) + argument.offset),
            packed(ctypes.c_uint64, reversed(array.shape)), packed(ctypes.c_uint64, strides),
            packed(ctypes.c_uint32, argument.box), packed(ctypes.c_uint32, [1] * rank),
            0, {0: 0, 32: 1, 64: 2, 128: 3}[argument.swizzle], 0, 0,
        )
    )  # fmt: skip
    return value
