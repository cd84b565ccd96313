"""Correctness before time: a kernel on fresh random inputs of small, odd sizes against float64, by NumPy alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..plan import Kernel, Sizes, read
from . import attention, matmul, reading, update
from .memory import Host

OPERATIONS: dict[str, ModuleType] = {"attention": attention, "matmul": matmul, "read": reading, "update": update}


def function_of(folder: Path, kernel: Kernel) -> Callable[..., object]:
    """The kernel's function, out of the bundle in `folder`."""
    import tvm_ffi

    from lowering.runtime.gpu import load_device_runtime
    from lowering.runtime.library import load_runtime

    load_runtime(folder)
    load_device_runtime(folder)
    return tvm_ffi.load_module(str(folder / kernel.library))["kernel"]


def check(folder: Path, name: str, say: Callable[[str], None]) -> dict[str, Any]:
    """The kernel at all of its sizes, with poison in what must not be read: {"error": the worst}.

    Raises ValueError for the first answer that is wrong.
    """
    kernel = read(folder).kernels[name]
    function, errors = function_of(folder, kernel), []
    for seed, sizes in enumerate(kernel.checks):
        say(str(sizes))
        deviation = error(kernel, sizes, function, seed)
        if not deviation <= kernel.tolerance:
            raise ValueError(f"wrong at {sizes}: error {deviation:.2g}, and {kernel.tolerance:.2g} is right")
        errors.append(deviation)
    return {"error": max(errors)}


def error(kernel: Kernel, sizes: Sizes, function: Callable[..., object], seed: int) -> float:
    """How far the function's answer is from float64, as its operation measures it."""
    operation, problem, memory = OPERATIONS[kernel.operation], kernel.record, Host(seed)
    arrays = operation.draw(problem, sizes, memory, poison=True)
    after = memory.call(function, [arrays[name] for name in kernel.parameters])
    with np.errstate(all="ignore"):  # poison
        right = operation.expected(problem, arrays, memory)
        return operation.error(dict(zip(kernel.parameters, after))[kernel.result], right, memory)


def run_small(folder: str, name: str) -> None:
    """The kernel at its smallest size, for compute-sanitizer to look at, which takes a hundred times as long.

    Matmuls run at all sizes of their checks: by the number of rows another kernel is launched. Raises ValueError where
    an answer is wrong.
    """
    kernel = read(Path(folder)).kernels[name]
    function = function_of(Path(folder), kernel)
    for sizes in kernel.checks if kernel.operation == "matmul" else kernel.checks[:1]:
        deviation = error(kernel, sizes, function, seed=0)
        if not deviation <= kernel.tolerance:
            raise ValueError(f"wrong at {sizes}: error {deviation:.2g}, and {kernel.tolerance:.2g} is right")
