"""Arguments of a model's kernels, captured from a run of the model that is timed as `bench` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from ..manifest import KernelSpec
from ..measuring import arguments
from ..profiling.benchmark import time_calls
from ..profiling.inputs import synthetic_inputs
from ..runtime import Model
from ..runtime.arrays.tensors import view_as

ArgumentSignature = tuple[str, tuple[int, ...]] | int
"""Type and shape of a tensor, or an integer."""

CallSignature = tuple[str, tuple[ArgumentSignature, ...]]
"""The name of a kernel, and the signatures of its arguments."""


@dataclass(frozen=True)
class KernelUse:
    """Calls of a kernel with arguments of the same shapes.

    seconds, flops and bytes are totals of these calls in one run of the model.
    """

    kernel: KernelSpec
    arguments: tuple[ArgumentSignature, ...]
    nodes: tuple[str, ...]
    calls: int
    seconds: float
    flops: int
    bytes: int

    @property
    def call(self) -> CallSignature:
        return self.kernel.name, self.arguments

    @property
    def shapes(self) -> list[tuple[int, ...] | int]:
        return [a if isinstance(a, int) else a[1] for a in self.arguments]


def profile_kernel_uses(model: Model, sizes: Mapping[str, int], threads: int, seconds: float) -> list[KernelUse]:
    """Return the kernel uses of a run at these sizes, the most expensive first."""
    inputs = synthetic_inputs(model, sizes)
    calls = time_calls(model, inputs, threads, seconds)
    uses_by_signature: dict[CallSignature, KernelUse] = {}
    for key, call in zip(record_calls(model, inputs, threads), calls, strict=True):
        prior = uses_by_signature.get(key, KernelUse(call.kernel, key[1], (), 0, 0.0, 0, 0))
        nodes = tuple(dict.fromkeys((*prior.nodes, *call.nodes)))
        uses_by_signature[key] = KernelUse(
            call.kernel, key[1], nodes, prior.calls + 1, prior.seconds + call.seconds, prior.flops + call.flops,
            prior.bytes + call.bytes,
        )  # fmt: skip
    return sorted(uses_by_signature.values(), key=lambda use: -use.seconds)


def record_calls(model: Model, inputs: Mapping[str, Any], threads: int) -> list[CallSignature]:
    """Return the kernel calls of a run, in order."""
    signatures: list[CallSignature] = []
    kernels = {kernel.name for kernel in model.manifest.kernels}

    def note(function: Any, name: str, before: bool, result: Any, *arguments: Any) -> int:
        if before and name in kernels:
            signatures.append((name, tuple(map(_describe_argument, arguments))))
        return 0

    _run_instrumented(model, inputs, threads, note)
    return signatures


def save_arguments(
    model: Model,
    sizes: Mapping[str, int],
    threads: int,
    folders: Mapping[CallSignature, Sequence[Path]],
    find_outputs: Callable[[str], Sequence[bool]],
) -> None:
    """Write the arguments of the first call of each signature in `folders` into its folders.

    find_outputs returns which parameters a kernel writes.
    """
    pending = dict(folders)
    kernels = {name for name, _ in folders}

    def note(function: Any, name: str, before: bool, result: Any, *call_arguments: Any) -> int:
        if not before or name not in kernels:
            return 0
        for folder in pending.pop((name, tuple(map(_describe_argument, call_arguments))), ()):
            arguments.write_arguments(
                folder,
                [
                    a if isinstance(a, int) else (*_describe_tensor(a), _read_bytes(a), model.holds(a), is_output)
                    for a, is_output in zip(call_arguments, find_outputs(name), strict=True)
                ],
            )
        return 0

    _run_instrumented(model, synthetic_inputs(model, sizes), threads, note)


def _run_instrumented(model: Model, inputs: Mapping[str, Any], threads: int, note: Callable[..., int]) -> None:
    with model.instrumented(note):
        model.bind(inputs, threads=threads)()


def _describe_argument(argument: Any) -> ArgumentSignature:
    return _describe_tensor(argument) if isinstance(argument, tvm_ffi.Tensor) else int(argument)


def _describe_tensor(tensor: tvm_ffi.Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype), tuple(int(n) for n in tensor.shape)


def _read_bytes(tensor: tvm_ffi.Tensor) -> np.ndarray:
    """Return the contents of a tensor as bytes."""
    size = tensor.numel() * tensor.dtype.itemsize
    return np.from_dlpack(view_as(tensor, "uint8", (size,))) if size else np.empty(0, np.uint8)
