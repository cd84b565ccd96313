"""What the kernels of a model are called with: a run of the model tells, whose kernels are timed as `bench` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from ..manifest import KernelSpec
from ..measuring import arguments
from ..profiling.benchmark import bench
from ..profiling.inputs import synthetic_inputs
from ..runtime import Model
from ..runtime.tensors import view_as

Argument = tuple[str, tuple[int, ...]] | int
"""Type and shape of a tensor, or a number."""

Call = tuple[str, tuple[Argument, ...]]
"""The name of a kernel, and what it is called with."""


@dataclass(frozen=True)
class Use:
    """Calls of a kernel with arguments of the same shapes: seconds of all of them in one run of the model, and what
    they computed and read."""

    kernel: KernelSpec
    arguments: tuple[Argument, ...]
    nodes: tuple[str, ...]
    calls: int
    seconds: float
    flops: int
    bytes: int

    @property
    def call(self) -> Call:
        return self.kernel.name, self.arguments

    @property
    def shapes(self) -> list[tuple[int, ...] | int]:
        return [a if isinstance(a, int) else a[1] for a in self.arguments]


def uses(model: Model, sizes: Mapping[str, int], threads: int, seconds: float) -> list[Use]:
    """The kernels of a run at these sizes, the costliest first."""
    inputs = synthetic_inputs(model, sizes)
    profile = bench(model, sizes, inputs, threads, seconds)
    found: dict[Call, Use] = {}
    for key, call in zip(called(model, inputs, threads), profile.calls, strict=True):
        old = found.get(key, Use(call.kernel, key[1], (), 0, 0.0, 0, 0))
        nodes = tuple(dict.fromkeys((*old.nodes, *call.nodes)))
        found[key] = Use(
            call.kernel, key[1], nodes, old.calls + 1, old.seconds + call.seconds, old.flops + call.flops,
            old.bytes + call.bytes,
        )  # fmt: skip
    return sorted(found.values(), key=lambda use: -use.seconds)


def called(model: Model, inputs: Mapping[str, Any], threads: int) -> list[Call]:
    """The calls of kernels in a run, in their order."""
    found: list[Call] = []
    kernels = {kernel.name for kernel in model.manifest.kernels}

    def note(function: Any, name: str, before: bool, result: Any, *given: Any) -> int:
        if before and name in kernels:
            found.append((name, tuple(map(_described, given))))
        return 0

    _run(model, inputs, threads, note)
    return found


def keep(
    model: Model,
    sizes: Mapping[str, int],
    threads: int,
    wanted: Mapping[Call, Sequence[Path]],
    outputs: Callable[[str], Sequence[bool]],
) -> None:
    """Writes the arguments of the first call of each use that is wanted into the folders that are given for it.

    outputs tells which parameters of a kernel it writes.
    """
    left = dict(wanted)
    kernels = {name for name, _ in wanted}

    def note(function: Any, name: str, before: bool, result: Any, *given: Any) -> int:
        if not before or name not in kernels:
            return 0
        for folder in left.pop((name, tuple(map(_described, given))), ()):
            arguments.write(
                folder,
                [
                    a if isinstance(a, int) else (*_tensor(a), _bytes(a), model.holds(a), written)
                    for a, written in zip(given, outputs(name), strict=True)
                ],
            )
        return 0

    _run(model, synthetic_inputs(model, sizes), threads, note)


def _run(model: Model, inputs: Mapping[str, Any], threads: int, note: Callable[..., int]) -> None:
    with model.instrumented(note):
        model.bind(inputs, threads=threads)()


def _described(argument: Any) -> Argument:
    return _tensor(argument) if isinstance(argument, tvm_ffi.Tensor) else int(argument)


def _tensor(tensor: tvm_ffi.Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype), tuple(int(n) for n in tensor.shape)


def _bytes(tensor: tvm_ffi.Tensor) -> np.ndarray:
    """A tensor's contents."""
    size = tensor.numel() * tensor.dtype.itemsize
    return np.from_dlpack(view_as(tensor, "uint8", (size,))) if size else np.empty(0, np.uint8)
