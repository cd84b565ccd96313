"""Profiler of a model's kernels: the time of each kernel call, and its work at the sizes of this run.

The virtual machine reports before and after every function that it calls. The timing adds about a microsecond to each
kernel, and on a GPU the time to synchronize.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi

from ..arithmetic import evaluate
from ..manifest import KernelSpec
from .model import Model


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel: its ONNX nodes where recorded, and its work in FLOPs and bytes."""

    kernel: KernelSpec
    nodes: tuple[str, ...]
    flops: int
    bytes: int


class Profiler:
    """An instrument (library.Instrument) that times kernels. `calls` has the kernel calls of the first run.

    `times` has the nanoseconds of each call, one list for each run. `begins` has the start of each call, in nanoseconds
    since the start of the run.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kernels = {kernel.name: kernel for kernel in model.manifest.kernels}
        self._expected = list(model.manifest.calls)
        self._begin = self._start = 0
        self.calls: list[KernelCall] = []
        self.times: list[list[int]] = []
        self.begins: list[list[int]] = []

    def start(self) -> None:
        """Start the next run."""
        self.times.append([])
        self.begins.append([])
        self._start = time.perf_counter_ns()

    def __call__(self, function: Any, name: str, before: bool, result: Any, *arguments: Any) -> int:
        if before:
            self._begin = time.perf_counter_ns()
            return 0
        self._model.wait()
        end = time.perf_counter_ns()
        if name in self._kernels:
            self.times[-1].append(end - self._begin)
            self.begins[-1].append(self._begin - self._start)
            if len(self.times) == 1:
                self.calls.append(self._describe(self._kernels[name], arguments))
        return 0

    def _describe(self, kernel: KernelSpec, arguments: Sequence[Any]) -> KernelCall:
        values: dict[str, int] = {"volume": sum(map(_count_bytes, arguments))}
        for names, argument in zip(kernel.arguments, arguments):
            if isinstance(names, str):
                values[names] = int(argument)
            else:
                values.update(zip(names, argument.shape))
        if kernel.counter is not None:
            counts = np.zeros(2, np.int64)
            host_arguments = (self._copy_to_host(argument) for argument in arguments)
            self._model.function(kernel.counter)(*host_arguments, tvm_ffi.from_dlpack(counts))
            values["pairs"], values["unseen"] = map(int, counts)
        return KernelCall(
            kernel, self._read_nodes(kernel), evaluate(kernel.flops, values), evaluate(kernel.bytes, values)
        )

    def _copy_to_host(self, argument: Any) -> Any:
        gpu = self._model.gpu
        return argument if gpu is None or not isinstance(argument, tvm_ffi.Tensor) else gpu.to_host(argument)

    def _read_nodes(self, kernel: KernelSpec) -> tuple[str, ...]:
        """Return the nodes of a call. Calls follow the manifest's order, without those of branches not taken."""
        for position, call in enumerate(self._expected):
            if call.kernel == kernel.name:
                del self._expected[: position + 1]
                return call.nodes
        return ()


def _count_bytes(argument: Any) -> int:
    return argument.numel() * argument.dtype.itemsize if isinstance(argument, tvm_ffi.Tensor) else 0
