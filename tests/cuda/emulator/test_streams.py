"""Streams and graphs of the emulated driver: what a capture records and forbids."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import pytest

from tests import cuda_emulation as emulated
from tests.cuda_emulation import device
from tests.cuda_emulation.build import compile_for_emulation, libraries

pytestmark = pytest.mark.no_gpu

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
FINE, UNSUPPORTED, INVALIDATED, IMPLICIT, WRONG_THREAD, ILLEGAL = 0, 900, 901, 906, 908, 401
SOURCE = 'extern "C" __global__ void add(float* __restrict__ x, float a) { x[threadIdx.x] += a; }'


class Gpu:
    """The driver and the runtime, an array x of 4 zeros, and a kernel that adds a number to it."""

    def __init__(self) -> None:
        self.driver, self.runtime = (ctypes.CDLL(str(path)) for path in libraries())
        self.module, self.kernel, self.x = (ctypes.c_void_p() for _ in range(3))
        assert not self.driver.cuModuleLoadData(ctypes.byref(self.module), compile_for_emulation(SOURCE))
        assert not self.driver.cuModuleGetFunction(ctypes.byref(self.kernel), self.module, b"add")
        assert not self.runtime.cudaMalloc(ctypes.byref(self.x), ctypes.c_size_t(16))
        ctypes.memset(self.x, 0, 16)

    def values(self) -> list[float]:
        return list((ctypes.c_float * 4).from_address(self.x.value))

    def stream(self, flags: int = 0) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        assert not self.runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), flags)
        return stream

    def add(self, number: float, stream: ctypes.c_void_p | None) -> int:
        class Config(ctypes.Structure):
            _fields_ = [("extents", ctypes.c_uint * 6), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
                        ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]  # fmt: skip

        config = Config((ctypes.c_uint * 6)(1, 1, 1, 4, 1, 1), 0, stream, None, 0)
        argument = ctypes.c_float(number)
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(self.x), ctypes.addressof(argument))
        status = self.driver.cuLaunchKernelEx(ctypes.byref(config), self.kernel, pointers, None)
        argument.value = np.nan  # its later value does not matter
        return status

    def end(self, stream: ctypes.c_void_p) -> tuple[int, ctypes.c_void_p]:
        graph = ctypes.c_void_p()
        return self.runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)), graph


def record() -> list[Any]:
    """Return x after the capture, and after launches on another stream and on the default one; a copy of it from the
    graph; the status of a launch after the kernel was unloaded; and the calls by name and stream."""
    gpu = Gpu()
    stream, other, executable = gpu.stream(), gpu.stream(), ctypes.c_void_p()
    y = ctypes.c_void_p()
    assert not gpu.runtime.cudaMalloc(ctypes.byref(y), ctypes.c_size_t(16))
    device.take_calls()
    assert not gpu.runtime.cudaStreamBeginCapture(stream, GLOBAL)
    value = ctypes.c_int()
    assert not gpu.runtime.cudaDeviceGetAttribute(ctypes.byref(value), 16, 0) and value.value == 108
    assert [gpu.add(1, stream), gpu.add(2, stream)] == [0, 0]
    assert not gpu.runtime.cudaMemcpyAsync(y, gpu.x, ctypes.c_size_t(16), 3, stream)
    status, graph = gpu.end(stream)
    captured = gpu.values()
    assert not status and not gpu.runtime.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
    assert not gpu.runtime.cudaGraphDestroy(graph)
    assert [gpu.runtime.cudaGraphLaunch(executable, s) for s in (other, None)] == [0, 0]
    launched = [gpu.values(), list((ctypes.c_float * 4).from_address(y.value))]
    names = {stream.value: "captured", other.value: "other", 0: "default", None: ""}
    calls = [(call.name, names[call.stream]) for call in device.take_calls()]
    gpu.driver.cuModuleUnload(gpu.module)
    unloaded = gpu.runtime.cudaGraphLaunch(executable, other)
    assert not gpu.runtime.cudaGraphExecDestroy(executable)
    return [captured, *launched, unloaded, calls]


def test_a_capture_records_and_a_launch_repeats() -> None:
    captured, launched, copied, unloaded, calls = emulated.run(record, arch="sm_80")
    assert (captured, launched, copied, unloaded) == ([0] * 4, [6] * 4, [6] * 4, 400)
    assert calls == [
        ("cudaStreamBeginCapture", "captured"), ("cudaDeviceGetAttribute", ""), ("cuLaunchKernelEx", "captured"),
        ("cuLaunchKernelEx", "captured"), ("cudaMemcpyAsync", "captured"), ("cudaStreamEndCapture", "captured"),
        ("cudaGraphInstantiate", ""), ("cudaGraphDestroy", ""), ("cudaGraphLaunch", "other"),
        ("cudaGraphLaunch", "default"),
    ]  # fmt: skip


FORBIDDEN: dict[str, Callable[[Gpu, ctypes.c_void_p], int]] = {
    "wait": lambda gpu, stream: gpu.runtime.cudaStreamSynchronize(stream),
    "wait for all": lambda gpu, stream: gpu.runtime.cudaStreamSynchronize(None),
    "kernel on the default stream": lambda gpu, stream: gpu.add(1, None),
    "allocate": lambda gpu, stream: gpu.runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(16)),
    "free": lambda gpu, stream: gpu.runtime.cudaFree(gpu.x),
    "load": lambda gpu, stream: gpu.driver.cuModuleLoadData(
        ctypes.byref(ctypes.c_void_p()), compile_for_emulation(SOURCE)
    ),
    "pageable": lambda gpu, stream: gpu.runtime.cudaMemcpyAsync(
        gpu.x, ctypes.create_string_buffer(16), ctypes.c_size_t(16), 1, stream
    ),
}
REFUSALS = {"wait for all": IMPLICIT, "kernel on the default stream": IMPLICIT}


def in_a_thread(function: Callable[[], int]) -> int:
    results: list[int] = []
    thread = Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def forbid(what: str, mode: int, elsewhere: bool, flags: int) -> tuple[int, int, bool, int]:
    """Return the status of a call in a capture, in another thread or not.

    Then the end of the capture, whether there is a graph, and the same call after it."""
    gpu = Gpu()
    stream = gpu.stream(flags)
    assert not gpu.runtime.cudaStreamBeginCapture(stream, mode)

    def call() -> int:
        return FORBIDDEN[what](gpu, stream)

    status = in_a_thread(call) if elsewhere else call()
    end, graph = gpu.end(stream)
    return status, end, bool(graph), call()


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_a_capture_forbids(what: str) -> None:
    refused = (REFUSALS.get(what, UNSUPPORTED), INVALIDATED, False, FINE)
    fine = (FINE, FINE, True, FINE if what != "free" else 1)
    depends = what in ("allocate", "free", "load")  # on the mode and the thread
    default = what in REFUSALS  # on whether the stream waits for the default one

    def run(mode: int, elsewhere: bool, flags: int = 0) -> Any:
        return emulated.run(forbid, what, mode, elsewhere, flags, arch="sm_80")

    assert run(GLOBAL, False) == run(GLOBAL, True) == run(THREAD_LOCAL, False) == refused
    assert run(THREAD_LOCAL, True) == run(RELAXED, False) == (fine if depends else refused)
    assert run(GLOBAL, False, flags=1) == (fine if default else refused)


def states() -> list[int]:
    gpu = Gpu()
    stream = gpu.stream()
    statuses = [gpu.runtime.cudaStreamBeginCapture(None, GLOBAL), gpu.end(stream)[0]]
    statuses += [gpu.runtime.cudaStreamBeginCapture(stream, GLOBAL), gpu.runtime.cudaStreamBeginCapture(stream, GLOBAL)]
    return [*statuses, in_a_thread(lambda: gpu.end(stream)[0]), gpu.end(stream)[0]]


def test_a_capture_ends_where_it_began() -> None:
    assert emulated.run(states, arch="sm_80") == [UNSUPPORTED, ILLEGAL, FINE, ILLEGAL, WRONG_THREAD, FINE]
