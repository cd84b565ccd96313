"""Which keys a row sees before the mask: an interval, or two where sinks stand before a window.

Their ends never decrease with the row, and all keys of the first stand before all keys of the second, whatever the row:
lengths, causal masks, windows and sinks have this form. So the ranges of a tile of rows follow from its first and last
row alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..arithmetic import LARGEST_SIZE
from .addressing import Addressing
from .parameters import Parameters, int64
from .problem import Mask

Range = tuple[Expr, Expr]
"""Keys [lo, hi), int64, with lo <= hi. Where a row can see keys at all there, 0 <= lo and hi <= T."""


class Keys:
    """Ranges of keys. Indices may have any integer type."""

    def __init__(self, parameters: Parameters, addressing: Addressing) -> None:
        self.problem, self.buffers, self.scalars = parameters.problem, parameters.buffers, parameters.scalars
        self.T, self.addressing = parameters.T, addressing

    @property
    def differ(self) -> bool:
        """Whether the rows of one batch may see different keys, before the mask."""
        return self.problem.window is not None

    @property
    def parts(self) -> int:
        """How many ranges a row has."""
        window = self.problem.window
        return 2 if window is not None and window.left is not None and window.sinks else 1

    @property
    def hides(self) -> bool:
        """Whether keys of [0, T) may be hidden from all rows of a batch, before the mask."""
        return self.problem.lengths

    def of_tile(self, b: Expr, i0: Expr, i1: Expr) -> tuple[Range, ...]:
        """The keys that some query of [i0, min(i1, rows of the batch)) may see."""
        first, last = self.of_row(b, i0), self.of_row(b, self._last(b, i1))
        return tuple((tirx.min(lo, hi), hi) for (lo, _), (_, hi) in zip(first, last))

    def of_all(self, b: Expr, i0: Expr, i1: Expr) -> tuple[Range, ...]:
        """Of these, those that every query of [i0, min(i1, rows of the batch)) sees before the mask."""
        found = []
        first, last = self.of_row(b, i0), self.of_row(b, self._last(b, i1))
        for (start, _), (_, end), (_, hi), (lo, _) in zip(self.of_tile(b, i0, i1), last, first, last):
            lo = tirx.max(tirx.min(lo, end), start)
            found.append((lo, tirx.max(tirx.min(hi, end), lo)))
        return tuple(found)

    def of_row(self, b: Expr, i: Expr) -> tuple[Range, ...]:
        """The keys that row i sees."""
        lo, hi = int64(0), self.count(b)
        end = hi
        window = self.problem.window
        if window is None:
            return ((lo, hi),)
        p = int64(i) + self._offset(b)
        if window.right is not None:
            hi = self._unless_free(b, _clamp(p + window.right + 1, hi), hi)
        if window.left is None:
            return ((lo, hi),)
        # How far a window reaches, where that is data, is at most all keys: sums with it must not wrap.
        left = _clamp(self.buffers["lefts"][b], int64(LARGEST_SIZE)) if window.left == "given" else int64(window.left)
        lo = self._unless_free(b, _clamp(p - left, hi), lo)
        if self.parts == 1:
            return ((lo, hi),)
        # The same for all rows: the ranges of a tile are those of its first and last.
        sinks = _clamp(self.buffers["sink_keys"][b], end) if window.sinks == "given" else int64(window.sinks)
        lo = tirx.max(lo, sinks)
        return (int64(0), tirx.min(hi, sinks)), (lo, tirx.max(hi, lo))

    def count(self, b: Expr) -> Expr:
        """How many leading keys of batch b count: T, its valid length, or a shorter mask."""
        end = int64(self.T)
        if self.problem.lengths:
            end = _clamp(self.buffers["lengths"][b], end)
        if "mask_keys" in self.scalars:
            end = tirx.min(end, self.scalars["mask_keys"])
        mask = self.problem.mask
        if isinstance(mask, Mask) and mask.starts:
            columns = self.buffers["mask"].shape[3]
            shown = _clamp(columns - tirx.max(self.buffers["key_starts"][b], T.int64(0)), end)
            end = tirx.Select(columns > 0, shown, end)
        elif isinstance(mask, Mask) and mask.pad:
            end = tirx.min(end, self.buffers["mask"].shape[3])
        return end

    def _last(self, b: Expr, i1: Expr) -> Expr:
        """The last row of the batch before i1."""
        return tirx.min(int64(i1), int64(self.addressing.rows(b))) - 1

    def _unless_free(self, b: Expr, end: Expr, free: Expr) -> Expr:
        window = self.problem.window
        assert window is not None
        return tirx.Select(int64(b) < self.scalars["free_batches"], free, end) if window.free else end

    def _offset(self, b: Expr) -> Expr:
        """p - i, from the window's offset rule; never clamped."""
        window = self.problem.window
        assert window is not None
        if window.offset == "past":
            return self.scalars["past"]
        if window.offset == "lengths":
            return self.buffers["lengths"][b] - int64(self.addressing.rows(b))
        if window.offset == "behind":
            return self.buffers["lengths"][b]
        return int64(0)


def length(ranges: Sequence[Range]) -> Expr:
    """How many keys the ranges have."""
    return functools.reduce(lambda total, ends: total + ends[1] - ends[0], ranges[1:], ranges[0][1] - ranges[0][0])


def key_at(ranges: Sequence[Range], n: Expr) -> Expr:
    """Key number n of the ranges, one behind the other."""
    (lo, hi), rest = ranges[0], ranges[1:]
    return tirx.Select(n < hi - lo, lo + n, key_at(rest, n - (hi - lo))) if rest else lo + n


def part(ranges: Sequence[Range], start: Expr, stop: Expr) -> tuple[Range, ...]:
    """Of the ranges, one behind the other, the keys from number `start` to `stop`, where start <= stop."""
    (lo, hi), rest = ranges[0], ranges[1:]
    mine = tirx.min(lo + start, hi), tirx.min(lo + stop, hi)
    if not rest:
        return (mine,)
    start, stop = (tirx.max(n - (hi - lo), 0) for n in (start, stop))
    return mine, *part(rest, start, stop)


def _clamp(value: Expr, end: Expr) -> Expr:
    return tirx.max(tirx.min(value, end), 0)
