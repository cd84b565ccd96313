"""The tiles of keys of a warp that a formula shows to some row: evaluated 32 tiles at a time, one by each lane."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..primitives.ptx import WARP, alloc_registers, ballot, let, store_element


class VisibleTiles:
    """The code of one warp, for `count` tiles, which it tests one after another.

    is_visible(u) emits the evaluation of tile u, and returns the condition.
    """

    def __init__(self, count: Expr, lane: Expr, is_visible: Callable[[Expr], Expr]) -> None:
        self.count, self.lane, self.is_visible = count, lane, is_visible
        self.visible_bits, self.history = alloc_registers(1, "uint32"), alloc_registers(1, "uint32")
        store_element(self.history, 0, T.uint32(0))

    def test_tile(self, u: Expr) -> Expr:
        """Return whether tile u, the next one, is visible; tiles from `count` on are not."""
        with T.If(u % WARP == 0), T.Then():
            tile, result = let(u + self.lane), alloc_registers(1, "bool")
            store_element(result, 0, tirx.const(False, "bool"))
            with T.If(tile < self.count), T.Then():
                store_element(result, 0, self.is_visible(tile))
            store_element(self.visible_bits, 0, ballot(result[0]))
        answer = let(T.bitwise_and(self.visible_bits[0] >> (u % WARP).astype("uint32"), T.uint32(1)))
        store_element(self.history, 0, T.bitwise_or(self.history[0] << T.uint32(1), answer))
        return tirx.NE(answer, T.uint32(0))

    def recall(self, ago: int) -> Expr:
        """Return the result of the test `ago` tests before: fewer than 32."""
        return tirx.NE(T.bitwise_and(self.history[0] >> T.uint32(ago), T.uint32(1)), T.uint32(0))
