"""The tiles of keys that a tile of query rows has to do with: what every tiled kernel loops over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from .keys import Range


class KeyTiles:
    """Tiles of `size` keys over `ranges`, one behind the other, each from the first key of its range on.

    whole holds, for each range, the keys inside it that need no mask code. keep makes of an expression one that is
    computed once; it may change its integer type.
    """

    def __init__(
        self, ranges: Sequence[Range], whole: Sequence[Range], size: int, keep: Callable[[Expr], Expr]
    ) -> None:
        self.size, self.keep = size, keep
        self.ranges = [(keep(lo), keep(hi)) for lo, hi in ranges]
        self.whole = [(keep(lo), keep(hi)) for lo, hi in whole]
        self.counts = [keep(tirx.truncdiv(hi - lo + (size - 1), size)) for lo, hi in self.ranges]
        self.count: Any = keep(sum(self.counts[1:], self.counts[0]))

    def first(self, u: Expr) -> Expr:
        """The first key of tile u."""
        return self._of(u, lambda n, u: self.ranges[n][0] + u * self.size)

    def end(self, u: Expr) -> Expr:
        """The key behind its last one."""
        return self._of(u, lambda n, u: tirx.min(self.ranges[n][0] + (u + 1) * self.size, self.ranges[n][1]))

    def stop(self, u: Expr) -> Expr:
        """The key behind the last one of its range."""
        return self._of(u, lambda n, u: self.ranges[n][1])

    def number(self, u: Expr) -> Expr:
        """In which of the ranges it is."""
        return self._of(u, lambda n, u: tirx.const(n, "int32"))

    def full(self, u: Expr) -> Expr:
        """Whether it has `size` keys, none of which needs mask code."""
        first = self.keep(self.first(u))
        inside = [tirx.all(first >= lo, first + self.size <= hi) for lo, hi in self.whole]
        return tirx.any(*inside)

    def masked_first(self) -> tuple[Expr, Callable[[Expr], Expr]]:
        """How many tiles need mask code, and the number of tile u in an order of work in which these come first: those
        behind the full tiles of the last range, those before, the full ones."""
        (lo, _), (full_lo, full_hi), size = self.ranges[-1], self.whole[-1], self.size
        before = self.keep((full_lo - lo + size - 1) // size)
        full = self.keep(tirx.max((full_hi - lo) // size - before, 0))
        behind = self.keep(self.counts[-1] - full - before)
        return self.keep(self.count - full), lambda u: tirx.Select(u < behind, u - behind + self.count, u - behind)

    def _of(self, u: Expr, value: Callable[[int, Expr], Expr]) -> Expr:
        """value(n, v) for tile v of range n, which is tile u of all."""
        if len(self.ranges) == 1:
            return value(0, u)
        return tirx.Select(u < self.counts[0], value(0, u), value(1, u - self.counts[0]))
