"""Memory of the GPU that a model runs on: what goes there, what comes back, and in which order.

A call enqueues its kernels and returns; whoever reads device memory on the same stream later sees the results, as
between kernels of PyTorch. Calls follow PyTorch's current stream where arrays are its own, else the one that the caller
has set by `tvm_ffi.use_raw_stream`, which must live until calls go to another; the default stream where none is set.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import InputError
from ..manifest import TensorSpec
from .elements import BYTES_ELSEWHERE, ElementType
from .gpu import CUDA
from .inputs import Port
from .tensors import Tensor, copy_of, copy_to, row_of, view_as

# What generated code takes memory from outside to be aligned to: its widest access.
_ALIGNMENT = 16

# The runtime's pool of device memory serves all models and knows no streams: what one stream may still use, another
# must wait for. By GPU, the stream of the last call.
_last_streams: dict[int, int] = {}


class Gpu:
    """GPU number `number`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.device = tvm_ffi.device("cuda", number)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.__dlpack_device__() == (CUDA, self.number)

    def place(self, ports: Sequence[Port], tensors: Sequence[Tensor], in_place: bool) -> list[Tensor]:
        """The tensors in this GPU's memory, as generated code can read them, in place or copied.

        in_place refuses copies, as a bound call must. Raises InputError.
        """
        placed = []
        for port, tensor in zip(ports, tensors):
            here = self.holds(tensor)
            if not here or (tensor.data_ptr() % _ALIGNMENT and tensor.numel()):
                if in_place or (here and port.written):
                    what = "is not aligned to 16 bytes" if here else f"is not in the memory of GPU {self.number}"
                    raise InputError(f"{port.where} {what}, but it is used in place. Pass an array that is.")
                tensor = copy_of(tensor, self.device)
            placed.append(tensor)
        return placed

    def take_back(self, ports: Sequence[Port], tensors: Sequence[Tensor], placed: Sequence[Tensor]) -> None:
        """Donated arrays of the host get what their copies on the GPU have become."""
        changed = [
            (copy, tensor)
            for port, tensor, copy in zip(ports, tensors, placed)
            if port.written and not self.holds(tensor)
        ]
        for copy, tensor in changed:
            copy_to(copy, tensor)
        if changed:
            self.wait()

    def copy(self, array: Any) -> Tensor:
        """An array of the host in this GPU's memory."""
        return copy_of(tvm_ffi.from_dlpack(array), self.device)

    def zeros(self, spec: TensorSpec, shape: Sequence[int]) -> Tensor:
        """A new array of this GPU for an input."""
        element = ElementType(spec.dtype, spec.storage)
        memory = self.copy(np.zeros(math.prod(shape) * element.numpy.itemsize, np.uint8))
        return view_as(memory, spec.storage if spec.dtype in BYTES_ELSEWHERE else spec.dtype, tuple(shape))

    def copy_row(self, array: Tensor, source: int, target: int) -> None:
        """Copies one index of the first axis to another."""
        copy_to(row_of(array, source), row_of(array, target))

    def copy_bandwidth(self, size: int) -> float:
        """Bytes per second that a copy of `size` bytes reads and writes, in the best of some."""
        source = self.copy(np.empty(size, np.uint8))
        target = self.copy(np.empty(size, np.uint8))
        times = []
        for _ in range(8):
            self.wait()
            begin = time.perf_counter()
            copy_to(source, target)
            self.wait()
            times.append(time.perf_counter() - begin)
        return 2 * size / min(times)

    def to_host(self, tensor: Tensor) -> Tensor:
        copy = copy_of(tensor, tvm_ffi.device("cpu"))
        self.wait()
        return copy

    def wait(self) -> None:
        """Until all that was enqueued on the current stream is done."""
        stream = tvm_ffi.get_raw_stream(self.device)
        tvm_ffi.get_global_func("runtime.Device_StreamSync")(self.device, stream)

    @contextmanager
    def stream_of(self, inputs: Iterable[Any]) -> Iterator[int]:
        """While it is open, work goes to the stream that the arrays are ordered on, which it gives."""
        torch = sys.modules.get("torch")
        if torch is not None and any(isinstance(array, torch.Tensor) and array.is_cuda for array in inputs):
            stream = torch.cuda.current_stream(self.number).cuda_stream
        else:
            stream = tvm_ffi.get_raw_stream(self.device)
        if _last_streams.setdefault(self.number, stream) != stream:
            before = _last_streams[self.number]
            tvm_ffi.get_global_func("runtime.Device_StreamSyncFromTo")(self.device, before, stream)
            _last_streams[self.number] = stream
        with tvm_ffi.use_raw_stream(self.device, stream):
            yield stream
