"""Arrays for kernels, in two kinds of memory: NumPy's, copied to the GPU for a call, and PyTorch's on the GPU.

The first needs no PyTorch, so that checks run under compute-sanitizer and emulation; the second is fast at full size.
What both have under one name (arithmetic, indexing, `xp.exp`) is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

Array = Any


class Host:
    """Arrays of NumPy."""

    xp: Any = np

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def normal(self, shape: Sequence[int], dtype: str) -> Array:
        return self._rng.standard_normal(shape, np.float32).astype(_numpy_type(dtype))

    def uniform(self, shape: Sequence[int]) -> Array:
        """From 0 to 1, float32."""
        return self._rng.random(shape, np.float32)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Array:
        return np.full(shape, value, _numpy_type(dtype))

    def random_int32(self, shape: Sequence[int]) -> Array:
        """Return any int32."""
        return self._rng.integers(-(1 << 31), 1 << 31, shape, np.int32)

    def integers(self, values: Sequence[int]) -> Array:
        return np.array(values, np.int64)

    def arange(self, start: int, stop: int) -> Array:
        return np.arange(start, stop)

    def double(self, array: Array) -> Array:
        return array.astype(np.float64)

    def times(self, array: Array, factor: float) -> Array:
        return (array.astype(np.float32) * np.float32(factor)).astype(array.dtype)

    def copy(self, array: Array) -> Array:
        return array.copy()

    def call(self, function: Callable[..., object], arrays: Sequence[Array]) -> list[Array]:
        """The arrays as they are after a call with copies of them on the GPU."""
        import tvm_ffi

        from lowering.runtime.arrays.elements import ElementType
        from lowering.runtime.arrays.tensors import copy_tensor, view_as
        from lowering.runtime.gpu import CUDA

        gpu, cpu = tvm_ffi.device("cuda", 0), tvm_ffi.device("cpu", 0)
        types = [ElementType(array.dtype.name, array.dtype.name) for array in arrays]
        carried = [tvm_ffi.from_dlpack(t.carry(np.ascontiguousarray(array))) for t, array in zip(types, arrays)]
        there = [
            view_as(copy_tensor(x, gpu), t.storage, tuple(array.shape)) for x, t, array in zip(carried, types, arrays)
        ]
        function(*there)
        stream = tvm_ffi.get_raw_stream(gpu)
        tvm_ffi.get_global_func("runtime.Device_StreamSync")(gpu, stream)
        assert all(x.__dlpack_device__()[0] == CUDA for x in there)
        back = [copy_tensor(view_as(x, t.carrier.name, tuple(x.shape)), cpu) for x, t in zip(there, types)]
        return [t.uncarry(np.from_dlpack(x).copy()) for x, t in zip(back, types)]


class Torch:
    """Arrays of PyTorch on its device "cuda", or another."""

    def __init__(self, seed: int, device: str = "cuda") -> None:
        import torch

        self.xp: Any = torch
        self.device = device
        torch.manual_seed(seed)

    def normal(self, shape: Sequence[int], dtype: str) -> Array:
        return self.xp.randn(*shape, device=self.device, dtype=getattr(self.xp, dtype))

    def uniform(self, shape: Sequence[int]) -> Array:
        return self.xp.rand(*shape, device=self.device)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Array:
        return self.xp.full(tuple(shape), value, device=self.device, dtype=getattr(self.xp, dtype))

    def random_int32(self, shape: Sequence[int]) -> Array:
        return self.xp.randint(-(1 << 31), 1 << 31, tuple(shape), device=self.device, dtype=self.xp.int32)

    def integers(self, values: Sequence[int]) -> Array:
        return self.xp.tensor(values, device=self.device, dtype=self.xp.int64)

    def arange(self, start: int, stop: int) -> Array:
        return self.xp.arange(start, stop, device=self.device)

    def double(self, array: Array) -> Array:
        return array.double()

    def times(self, array: Array, factor: float) -> Array:
        return array * factor

    def copy(self, array: Array) -> Array:
        return array.clone()

    def bound(self, function: Callable[..., object], arrays: Sequence[Array]) -> Callable[[], object]:
        """A call that works in place, on the current stream."""
        import tvm_ffi

        tensors = [tvm_ffi.from_dlpack(array) for array in arrays]
        return lambda: function(*tensors)


class HostTorch(Torch):
    """Arrays of PyTorch in the host's memory, copied to the GPU and back around each call."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, "cpu")

    def bound(self, function: Callable[..., object], arrays: Sequence[Array]) -> Callable[[], object]:
        import tvm_ffi

        from lowering.runtime.arrays.tensors import copy_tensor, copy_to

        tensors = [tvm_ffi.from_dlpack(array) for array in arrays]

        def call() -> None:
            there = [copy_tensor(tensor, tvm_ffi.device("cuda", 0)) for tensor in tensors]
            function(*there)
            for tensor, source in zip(tensors, there):
                copy_to(source, tensor)

        return call


Memory: TypeAlias = "Host | Torch"


def _numpy_type(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
