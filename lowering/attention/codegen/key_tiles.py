"""The tiles of keys for a tile of query rows: the main loop of every tiled kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from .key_ranges import KeyRange


class KeyTiles:
    """Tiles of `size` keys over the concatenated `ranges`, each aligned to the first key of its range.

    unmasked is, for each range, the keys in it that need no mask code. materialize binds an expression to a variable
    that is computed once; it may change its integer type.
    """

    def __init__(
        self, ranges: Sequence[KeyRange], unmasked: Sequence[KeyRange], size: int, materialize: Callable[[Expr], Expr]
    ) -> None:
        self.size, self.materialize = size, materialize
        self.ranges = [(materialize(lo), materialize(hi)) for lo, hi in ranges]
        self.unmasked = [(materialize(lo), materialize(hi)) for lo, hi in unmasked]
        self.counts = [materialize(tirx.truncdiv(hi - lo + (size - 1), size)) for lo, hi in self.ranges]
        self.count: Any = materialize(sum(self.counts[1:], self.counts[0]))

    def first(self, u: Expr) -> Expr:
        """Return the first key of tile u."""
        return self._select_range(u, lambda n, u: self.ranges[n][0] + u * self.size)

    def end(self, u: Expr) -> Expr:
        """Return the key following the last one of tile u."""
        return self._select_range(u, lambda n, u: tirx.min(self.ranges[n][0] + (u + 1) * self.size, self.ranges[n][1]))

    def stop(self, u: Expr) -> Expr:
        """Return the key following the last one of the range of tile u."""
        return self._select_range(u, lambda n, u: self.ranges[n][1])

    def number(self, u: Expr) -> Expr:
        """Return the index of the range of tile u."""
        return self._select_range(u, lambda n, u: tirx.const(n, "int32"))

    def full(self, u: Expr) -> Expr:
        """Return whether tile u has `size` keys, none of which needs mask code."""
        first = self.materialize(self.first(u))
        inside = [tirx.all(first >= lo, first + self.size <= hi) for lo, hi in self.unmasked]
        return tirx.any(*inside)

    def order_masked_first(self) -> tuple[Expr, Callable[[Expr], Expr]]:
        """Return the number of tiles that need mask code, and the tile at position u of an order that puts these first.

        The order is: the tiles after the full ones of the last range, those before, the full ones.
        """
        (lo, _), (full_lo, full_hi), size = self.ranges[-1], self.unmasked[-1], self.size
        before = self.materialize((full_lo - lo + size - 1) // size)
        full = self.materialize(tirx.max((full_hi - lo) // size - before, 0))
        trailing = self.materialize(self.counts[-1] - full - before)
        return self.materialize(self.count - full), lambda u: tirx.Select(
            u < trailing, u - trailing + self.count, u - trailing
        )

    def _select_range(self, u: Expr, value: Callable[[int, Expr], Expr]) -> Expr:
        """Return value(n, v) for tile v of range n, which is tile u of all."""
        if len(self.ranges) == 1:
            return value(0, u)
        return tirx.Select(u < self.counts[0], value(0, u), value(1, u - self.counts[0]))
