"""Build candidates into libraries of a single function, `main`."""

from __future__ import annotations

from pathlib import Path

import tvm
from tvm import tirx

import schedules

from ..compiling.build import build
from ..compiling.objects import KernelCompiler
from ..passes.compile_state import CompileState
from ..passes.tvm_workarounds.alignment import assume_alignment
from ..passes.tvm_workarounds.guard_divisions import guard_divisions
from ..target import Target
from ..tuning_records.candidate_choices import extract_scheduled_function, read_choice
from ..tuning_records.task import KERNEL, MAIN, has_kernel
from .search.tile_space import TileSpace


def build_library(module: tvm.IRModule, target: Target, path: str) -> None:
    """Write the library of a candidate: a task's module after its sampled schedule.

    Raises TargetError, and ValueError for an illegal choice.
    """
    Path(path).write_bytes(compile_library(schedule_candidate(module, target.tvm), target))


def schedule_candidate(module: tvm.IRModule, target: tvm.target.Target) -> tirx.PrimFunc:
    """Return the function of a candidate: with the tiles of its annotation, or as MetaSchedule scheduled it.

    Without an annotation it is the default function.
    """
    if not has_kernel(module):
        return (
            extract_scheduled_function(module)
            or schedules.apply_schedules(tvm.IRModule({MAIN: module[MAIN]}), target)[MAIN]
        )
    text = read_choice(module)
    space = TileSpace(module, target)
    choice = space.default_choice if text is None else space.read(text)
    kernel_module = tvm.IRModule({KERNEL: module[KERNEL]})
    return schedules.apply_schedules(kernel_module, target, lambda func, variants: choice)[KERNEL]


def get_unscheduled_function(module: tvm.IRModule) -> tirx.PrimFunc:
    """Return the function that defines the results of every candidate."""
    return module[KERNEL if has_kernel(module) else MAIN]


def compile_library(func: tirx.PrimFunc, target: Target) -> bytes:
    """Return the bytes of a library."""
    module = tvm.IRModule({MAIN: func.with_attr("global_symbol", MAIN)})
    with target.tvm:
        module = assume_alignment(CompileState(guard_divisions(module), target)).module
    return build(module, target, KernelCompiler(target, use_cache=False))  # few candidates recur
