"""Order of consumer warpgroups at the tensor cores, by named barriers: the softmax of one overlaps matmuls of another.

Consumer w waits at named barrier 1 + w for consumer w - 1. One consumer needs no order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .pipeline import WARPGROUP, named_arrive, named_sync


@dataclass(frozen=True)
class PingPong:
    """The turns of consumer w of `consumers`; no code is emitted unless they are ordered."""

    is_ordered: bool
    consumers: int
    w: Expr

    def start(self) -> None:
        """Give the first turn to consumer 0."""
        if self.is_ordered:
            with T.If(tirx.EQ(self.w, self.consumers - 1)), T.Then():
                named_arrive(1, 2 * WARPGROUP)

    def wait_for_turn(self) -> None:
        if self.is_ordered:
            named_sync(1 + self.w, 2 * WARPGROUP)

    def signal_turn(self) -> None:
        """Give the turn to the next consumer."""
        if self.is_ordered:
            named_arrive(1 + tirx.truncmod(self.w + 1, self.consumers), 2 * WARPGROUP)

    def end(self) -> None:
        """Drain the last barrier: no block may end with a barrier half full."""
        if self.is_ordered:
            with T.If(tirx.EQ(self.w, 0)), T.Then():
                named_sync(1, 2 * WARPGROUP)
