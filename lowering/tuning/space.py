"""What is searched of a task: the tiles of a kernel of ours, or the loops of any other function."""

from __future__ import annotations

from typing import Protocol

import tvm
from tvm.s_tir import Trace
from tvm.s_tir import meta_schedule as ms

from .loop_space import LoopSpace
from .task import has_kernel
from .tile_space import TileSpace


class Space(Protocol):
    """kind says what is searched, to people; default is the text of what serves untuned (choices.py)."""

    @property
    def kind(self) -> str: ...

    @property
    def default(self) -> str: ...

    @property
    def target(self) -> tvm.target.Target:
        """For MetaSchedule."""

    def generator(self) -> ms.space_generator.SpaceGenerator: ...

    def default_trace(self, module: tvm.IRModule) -> Trace:
        """One of a task's module that ends with the default."""


def space_of(module: tvm.IRModule, target: tvm.target.Target, threads: int = 1) -> TileSpace | LoopSpace:
    """The space of a task; candidates of loops are for so many threads."""
    return TileSpace(module, target) if has_kernel(module) else LoopSpace(module, target, threads)
