"""Which kernels a call of a model runs, how long each takes, and what each has to do for the sizes of this call.

The virtual machine reports before and after every function that it calls. Taking the time adds about a microsecond to
each kernel, on a GPU the time to wait for it.
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
    """One call of a kernel: what it is, its ONNX nodes as far as they are known, and its work in FLOPs and bytes."""

    kernel: KernelSpec
    nodes: tuple[str, ...]
    flops: int
    bytes: int


class Profiler:
    """An instrument (library.Instrument) that takes the times of kernels; `calls` is what the first run called.

    `times` has the nanoseconds of each of them, one list for each run, and `begins` those since the run began.
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
        """The next run begins."""
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
                self.calls.append(self._call(self._kernels[name], arguments))
        return 0

    def _call(self, kernel: KernelSpec, arguments: Sequence[Any]) -> KernelCall:
        values: dict[str, int] = {"volume": sum(map(_bytes, arguments))}
        for names, argument in zip(kernel.arguments, arguments):
            if isinstance(names, str):
                values[names] = int(argument)
            else:
                values.update(zip(names, argument.shape))
        if kernel.counter is not None:
            counts = np.zeros(2, np.int64)
            on_host = (self._on_host(argument) for argument in arguments)
            self._model.function(kernel.counter)(*on_host, tvm_ffi.from_dlpack(counts))
            values["pairs"], values["unseen"] = map(int, counts)
        return KernelCall(kernel, self._nodes(kernel), evaluate(kernel.flops, values), evaluate(kernel.bytes, values))

    def _on_host(self, argument: Any) -> Any:
        gpu = self._model.gpu
        return argument if gpu is None or not isinstance(argument, tvm_ffi.Tensor) else gpu.to_host(argument)

    def _nodes(self, kernel: KernelSpec) -> tuple[str, ...]:
        """Calls come in the order of the manifest, less those of the branches not taken."""
        for position, call in enumerate(self._expected):
            if call.kernel == kernel.name:
                del self._expected[: position + 1]
                return call.nodes
        return ()


def _bytes(argument: Any) -> int:
    return argument.numel() * argument.dtype.itemsize if isinstance(argument, tvm_ffi.Tensor) else 0
