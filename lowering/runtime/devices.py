"""Memory of the GPU that a model runs on: copies to and from it, and their order on streams.

A call enqueues its kernels and returns. Later reads of device memory on the same stream see the results, as between
kernels of PyTorch. Calls use PyTorch's current stream if arrays are PyTorch tensors. Otherwise they use the stream set
by `tvm_ffi.use_raw_stream`, which must stay alive until calls use another one, or the default stream.
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
from .arrays.elements import BYTE_CARRIED_TYPES, ElementType
from .arrays.inputs import InputPort
from .arrays.tensors import Tensor, copy_tensor, copy_to, view_as, view_row
from .gpu import CUDA

# Alignment in bytes that generated code assumes for arguments: its widest access.
_ALIGNMENT = 16

# By GPU, the stream of the last call. The runtime's pool of device memory serves all models and ignores streams, so a
# new stream must wait for the previous one.
_last_streams: dict[int, int] = {}


class Gpu:
    """The GPU number `number`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.device = tvm_ffi.device("cuda", number)

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the memory of this GPU."""
        return tensor.__dlpack_device__() == (CUDA, self.number)

    def move_to_device(self, ports: Sequence[InputPort], tensors: Sequence[Tensor], in_place: bool) -> list[Tensor]:
        """Return the tensors in this GPU's memory, as generated code can read them, in place or copied.

        in_place rejects copies, as a bound call must. Raises InputError.
        """
        moved = []
        for port, tensor in zip(ports, tensors):
            is_here = self.owns(tensor)
            if not is_here or (tensor.data_ptr() % _ALIGNMENT and tensor.numel()):
                if in_place or (is_here and port.is_written):
                    problem = "is not aligned to 16 bytes" if is_here else f"is not in the memory of GPU {self.number}"
                    raise InputError(
                        "gpu.array_not_usable_in_place",
                        f"{port.where} {problem}, but it is used in place. Pass an array that is.",
                    )
                tensor = copy_tensor(tensor, self.device)
            moved.append(tensor)
        return moved

    def copy_back(self, ports: Sequence[InputPort], tensors: Sequence[Tensor], moved: Sequence[Tensor]) -> None:
        """Copy updated device tensors back to donated arrays of the host."""
        updates = [
            (copy, tensor)
            for port, tensor, copy in zip(ports, tensors, moved)
            if port.is_written and not self.owns(tensor)
        ]
        for copy, tensor in updates:
            copy_to(copy, tensor)
        if updates:
            self.wait()

    def copy(self, array: Any) -> Tensor:
        """Return a copy of a host array in this GPU's memory."""
        return copy_tensor(tvm_ffi.from_dlpack(array), self.device)

    def zeros(self, spec: TensorSpec, shape: Sequence[int]) -> Tensor:
        """Return a new array of zeros on this GPU for an input."""
        element = ElementType(spec.dtype, spec.storage)
        memory = self.copy(np.zeros(math.prod(shape) * element.numpy.itemsize, np.uint8))
        return view_as(memory, spec.storage if spec.dtype in BYTE_CARRIED_TYPES else spec.dtype, tuple(shape))

    def copy_row(self, array: Tensor, source: int, target: int) -> None:
        """Copy one index of the first axis to another."""
        copy_to(view_row(array, source), view_row(array, target))

    def copy_bandwidth(self, size: int) -> float:
        """Return the bytes per second read and written by a copy of `size` bytes, the best of 8 runs."""
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
        """Return a copy in host memory, after waiting for it."""
        copy = copy_tensor(tensor, tvm_ffi.device("cpu"))
        self.wait()
        return copy

    def wait(self) -> None:
        """Wait until all work enqueued on the current stream is done."""
        stream = tvm_ffi.get_raw_stream(self.device)
        tvm_ffi.get_global_func("runtime.Device_StreamSync")(self.device, stream)

    @contextmanager
    def use_stream_of(self, inputs: Iterable[Any]) -> Iterator[int]:
        """Make the stream that orders the arrays current, and yield it."""
        torch = sys.modules.get("torch")
        if torch is not None and any(isinstance(array, torch.Tensor) and array.is_cuda for array in inputs):
            stream = torch.cuda.current_stream(self.number).cuda_stream
        else:
            stream = tvm_ffi.get_raw_stream(self.device)
        if _last_streams.setdefault(self.number, stream) != stream:
            last_stream = _last_streams[self.number]
            tvm_ffi.get_global_func("runtime.Device_StreamSyncFromTo")(self.device, last_stream, stream)
            _last_streams[self.number] = stream
        with tvm_ffi.use_raw_stream(self.device, stream):
            yield stream
