"""The search space of a task: tiles of one of the compiler's kernels, or MetaSchedule's schedules of other
functions."""

from __future__ import annotations

from typing import Protocol

import tvm
from tvm.s_tir import Trace
from tvm.s_tir import meta_schedule as ms

from ...tuning_records.task import has_kernel
from .loop_space import LoopSpace
from .tile_space import TileSpace


class SearchSpace(Protocol):
    """A search space. kind is its name in reports, default the choice (choices.py) of the untuned kernel."""

    @property
    def kind(self) -> str: ...

    @property
    def default(self) -> str: ...

    @property
    def target(self) -> tvm.target.Target:
        """The target for MetaSchedule."""

    def generator(self) -> ms.space_generator.SpaceGenerator: ...

    def default_trace(self, module: tvm.IRModule) -> Trace:
        """Return the trace of a task's module that selects the default choice."""


def create_space(module: tvm.IRModule, target: tvm.target.Target, threads: int = 1) -> TileSpace | LoopSpace:
    """Return the search space of a task. MetaSchedule's schedules are for this number of threads."""
    return TileSpace(module, target) if has_kernel(module) else LoopSpace(module, target, threads)
