"""The emulated device of a process: only a worker of the emulation calls this (see worker.py).

After `pretend`, TVM in this process takes the emulation for a GPU; nothing undoes that.
"""

import ctypes
import importlib
from typing import Literal, NamedTuple

from . import card
from .build import compile_for_emulation, libraries

Order = Literal["ascending", "descending"]
Arrivals = Literal["late", "at once", "last first"]

ORDERS: tuple[Order, ...] = ("ascending", "descending")
ARRIVALS: tuple[Arrivals, ...] = ("late", "at once", "last first")


class Properties(NamedTuple):
    """Properties of an emulated GPU: number of SMs, KB of shared memory that a block may use."""

    sm_count: int
    shared_memory: int


PROPERTIES = {
    80: Properties(108, 163),
    86: Properties(84, 99),
    89: Properties(128, 99),
    90: Properties(132, 227),
    100: Properties(148, 227),
    120: Properties(170, 99),
}

_library: ctypes.CDLL | None = None


def pretend() -> None:
    """Load the emulated driver, and make TVM compile CUDA for it and run CUDA on it."""
    global _library
    if _library is not None:
        return
    # Loaded by their names before TVM's CUDA runtime, which needs libraries of these names, is.
    driver, runtime = libraries()
    _library = ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    set_arch("sm_90a")
    import tvm
    import tvm_ffi

    importlib.import_module("lowering.target.cubin")  # registers its own compiler, which ours replaces
    artifact_cache = importlib.import_module("lowering.compiling.cache.artifact_cache")

    if not tvm.cuda(0).exist:
        raise RuntimeError("TVM's CUDA runtime was loaded before the emulated driver")
    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_for_emulation, override=True)
    artifact_cache.key = lambda *_: None  # a GPU cannot run what is compiled here, nor the emulation the reverse


def set_arch(arch: str) -> None:
    """Set the architecture of the emulated GPU: "sm_80", "sm_90a", ..."""
    capability, SMs, shared_memory = properties_of(arch)
    assert _library is not None
    _library.emu_set_device(capability, SMs, ctypes.c_size_t(shared_memory))


def properties_of(arch: str) -> tuple[int, int, int]:
    """Return compute capability, SMs, and bytes of shared memory."""
    capability = int("".join(c for c in arch if c.isdigit()))
    SMs, shared_memory = PROPERTIES[capability]
    return capability, SMs, shared_memory << 10


def set_order(order: Order = "ascending", arrivals: Arrivals = "late", races: bool = True) -> None:
    """Set the order of threads and blocks, when asynchronous work is done, and whether races are reported."""
    assert _library is not None
    _library.emu_set_order(ORDERS.index(order), ARRIVALS.index(arrivals), int(races))


def leave_out(step: int) -> bool:
    """Omit a step of kernels from now on (-1: none), and return whether a thread reached the previous one."""
    assert _library is not None
    return bool(_library.emu_leave_out(step))


def take_matmuls() -> int:
    """Return the matmuls since the last call: a warp's mma.sync counts one, as does a warpgroup's wgmma.

    On a real GPU, it is 0."""
    if card.is_used():
        return 0
    assert _library is not None
    _library.emu_take_matmuls.restype = ctypes.c_longlong
    return _library.emu_take_matmuls()


def set_counting(on: bool) -> None:
    """Set whether accesses to memory are counted."""
    assert _library is not None
    _library.emu_set_counting(int(on))


def take_accesses() -> str:
    """Return the counts since the last call, for accesses.py."""
    assert _library is not None
    _library.emu_take_accesses.restype = ctypes.c_char_p
    return _library.emu_take_accesses().decode()


class Call(NamedTuple):
    """A call of the driver or the runtime; stream is the address of its stream, None for calls that have none."""

    name: str
    stream: int | None


def take_calls() -> list[Call]:
    """Return the calls since the last time, in order; none on a real GPU."""
    if card.is_used():
        return []
    assert _library is not None
    _library.emu_take_calls.restype = ctypes.c_char_p
    lines = (line.split("\t") for line in _library.emu_take_calls().decode().splitlines())
    return [Call(name, int(stream[0]) if stream else None) for name, *stream in lines]


def take_failure() -> str:
    """Return why the last driver or runtime call failed, once; "" after success."""
    assert _library is not None
    _library.emu_take_failure.restype = ctypes.c_char_p
    return _library.emu_take_failure().decode()
