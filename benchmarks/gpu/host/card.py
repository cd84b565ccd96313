"""The services of the GPU for jobs, next to arrays: time, graphs, profiles and its description.

`card()` is PyTorch's GPU or, in a rehearsal, a stand-in whose arrays of PyTorch lie in the host's memory, while kernels
run wherever the driver runs them (an emulation of it will do). Its times mean nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from .memory import HostTorch, Torch
from .profiles import Launch, kernels_of

Call: TypeAlias = Callable[[], object]

REHEARSAL = "ONNX_LOWERING_REHEARSAL"
"""The variable of the environment that makes every job a rehearsal."""


class Card:
    """The first GPU, by PyTorch."""

    device = "cuda"
    turns = 15
    """Turns of every contender."""
    calls = 60
    """Calls that the host's clock times, one by one."""

    @property
    def l2(self) -> int:
        """Bytes of the second-level cache."""
        return torch.cuda.get_device_properties(0).L2_cache_size

    def about(self) -> dict[str, Any]:
        """Return the GPU's properties, and the versions of the software on it."""
        return {
            "SMs": torch.cuda.get_device_properties(0).multi_processor_count,
            "l2": self.l2,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }

    def memory(self, seed: int) -> Torch:
        return Torch(seed)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def rotation(self, calls: Sequence[Call]) -> tuple[Call, bool]:
        """All calls one after the other as one CUDA graph, and whether they could be captured."""
        import tvm_ffi

        def plain() -> None:
            for call in calls:
                call()

        for _ in range(2):
            plain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with tvm_ffi.use_torch_stream(torch.cuda.graph(graph)):
                plain()
        except RuntimeError:
            torch.cuda.synchronize()
            return plain, False
        return graph.replay, True

    def seconds(self, run: Call, repeat: int) -> float:
        """By the GPU's clock, per run, after one that is not timed."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        start.record()
        for _ in range(repeat):
            run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / repeat

    def launches(self, run: Call) -> list[Launch]:
        """The kernels that a run launches, in order."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run()
            torch.cuda.synchronize()
        return kernels_of(profiled.events(), "CUDA")

    def upload(self, tensor: torch.Tensor) -> Any:
        """An array that `Model.bind` takes, with the contents of a tensor."""
        return tensor.to(self.device).contiguous().clone()

    def write(self, array: Any, tensor: torch.Tensor) -> None:
        """Changes the contents of such an array."""
        array.copy_(tensor)

    def download(self, array: Any) -> torch.Tensor:
        """A tensor, where `memory` has its arrays, with the contents of an array of a bound model."""
        return torch.from_dlpack(array).clone()


class Rehearsal(Card):
    """The stand-in."""

    device = "cpu"
    turns = 1
    calls = 2
    l2 = 1 << 10

    def about(self) -> dict[str, Any]:
        versions = {"torch": torch.__version__, "cuda": "none", "cudnn": "none"}
        return {"SMs": 0, "l2": self.l2, **versions}

    def memory(self, seed: int) -> Torch:
        return HostTorch(seed)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def rotation(self, calls: Sequence[Call]) -> tuple[Call, bool]:
        def plain() -> None:
            for call in calls:
                call()

        return plain, False

    def seconds(self, run: Call, repeat: int) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def launches(self, run: Call) -> list[Launch]:
        """The run itself, as if it were one kernel."""
        start = time.perf_counter()
        run()
        return [Launch("rehearsal", start, time.perf_counter())]

    def upload(self, tensor: torch.Tensor) -> Any:
        import tvm_ffi

        from lowering.runtime.arrays.tensors import copy_tensor

        return copy_tensor(tvm_ffi.from_dlpack(tensor.contiguous()), tvm_ffi.device("cuda", 0))

    def write(self, array: Any, tensor: torch.Tensor) -> None:
        import tvm_ffi

        from lowering.runtime.arrays.tensors import copy_to

        copy_to(tvm_ffi.from_dlpack(tensor.contiguous()), array)

    def download(self, array: Any) -> torch.Tensor:
        import tvm_ffi

        from lowering.runtime.arrays.tensors import copy_tensor

        return torch.from_dlpack(copy_tensor(array, tvm_ffi.device("cpu", 0))).clone()


def card() -> Card:
    """The GPU, or its stand-in where this process belongs to a rehearsal."""
    return Rehearsal() if os.environ.get(REHEARSAL) else Card()
