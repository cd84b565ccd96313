"""Which of a warp's tiles of keys a formula shows to some row: found out 32 tiles at a time, by a lane each."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .ptx import WARP, ballot, let, put, registers


class ShownTiles:
    """The code of one warp, for `count` tiles, about which it asks one after the other. shows(u) emits what finds out
    about tile u, and gives the condition."""

    def __init__(self, count: Expr, lane: Expr, shows: Callable[[Expr], Expr]) -> None:
        self.count, self.lane, self.shows = count, lane, shows
        self.shown, self.asked = registers(1, "uint32"), registers(1, "uint32")
        put(self.asked, 0, T.uint32(0))

    def ask(self, u: Expr) -> Expr:
        """Whether tile u, the next one, is shown; none is from `count` on."""
        with T.If(u % WARP == 0), T.Then():
            tile, found = let(u + self.lane), registers(1, "bool")
            put(found, 0, tirx.const(False, "bool"))
            with T.If(tile < self.count), T.Then():
                put(found, 0, self.shows(tile))
            put(self.shown, 0, ballot(found[0]))
        answer = let(T.bitwise_and(self.shown[0] >> (u % WARP).astype("uint32"), T.uint32(1)))
        put(self.asked, 0, T.bitwise_or(self.asked[0] << T.uint32(1), answer))
        return tirx.NE(answer, T.uint32(0))

    def was(self, ago: int) -> Expr:
        """What the answer was so many questions ago: fewer than 32."""
        return tirx.NE(T.bitwise_and(self.asked[0] >> T.uint32(ago), T.uint32(1)), T.uint32(0))
