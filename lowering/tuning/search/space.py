"""The search space of a task: the tiles of one of the compiler's kernels, or the loops of another function."""

from __future__ import annotations

from typing import Protocol

import tvm
from tvm.s_tir import Trace
from tvm.s_tir import meta_schedule as ms

from ...tuning_records.task import has_kernel
from .loop_space import LoopSpace
from .tile_space import TileSpace


class SearchSpace(Protocol):
    """A search space. kind names it for people, and default is the choice of the default (choices.py)."""

    @property
    def kind(self) -> str: ...

    @property
    def default(self) -> str: ...

    @property
    def target(self) -> tvm.target.Target:
        """The target for MetaSchedule."""

    def generator(self) -> ms.space_generator.SpaceGenerator: ...

    def default_trace(self, module: tvm.IRModule) -> Trace:
        """Return a trace of a task's module that ends with the default."""


def create_space(module: tvm.IRModule, target: tvm.target.Target, threads: int = 1) -> TileSpace | LoopSpace:
    """Return the search space of a task. Candidates of loops are for so many threads."""
    return TileSpace(module, target) if has_kernel(module) else LoopSpace(module, target, threads)
