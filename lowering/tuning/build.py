"""Candidates become libraries that hold one function, `main`."""

from __future__ import annotations

from pathlib import Path

import tvm
from tvm import tirx

import schedules

from ..compiling.build import build
from ..compiling.objects import Kernels
from ..passes.alignment import assume_alignment
from ..passes.guard_divisions import guard_divisions
from ..target import Target
from .choices import annotated
from .loop_space import code
from .task import KERNEL, MAIN, has_kernel
from .tile_space import TileSpace


def library(module: tvm.IRModule, target: Target, path: str) -> None:
    """Writes the library of a candidate: a task's module after the schedule that was drawn for it.

    Raises TargetError, and ValueError for an illegal choice.
    """
    Path(path).write_bytes(compiled(kernel(module, target.tvm), target))


def kernel(module: tvm.IRModule, target: tvm.target.Target) -> tirx.PrimFunc:
    """The function of a candidate: with the tiles of its annotation, or as MetaSchedule scheduled it. Without an
    annotation it is what serves untuned."""
    if not has_kernel(module):
        return code(module) or schedules.apply(tvm.IRModule({MAIN: module[MAIN]}), target)[MAIN]
    text = annotated(module)
    space = TileSpace(module, target)
    choice = space.usual if text is None else space.read(text)
    only = tvm.IRModule({KERNEL: module[KERNEL]})
    return schedules.apply(only, target, lambda func, variants: choice)[KERNEL]


def unscheduled(module: tvm.IRModule) -> tirx.PrimFunc:
    """The function that says what every candidate computes."""
    return module[KERNEL if has_kernel(module) else MAIN]


def compiled(func: tirx.PrimFunc, target: Target) -> bytes:
    """The bytes of a library."""
    module = tvm.IRModule({MAIN: func.with_attr("global_symbol", MAIN)})
    with target.tvm:
        module = assume_alignment(guard_divisions(module), 16 if target.architecture else 1)
    return build(module, target, Kernels(target, kept=False))  # few candidates come again
