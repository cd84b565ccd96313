"""The keys that a row sees before the mask: an interval, or two if sinks precede a window.

The ends of the intervals never decrease with the row. All keys of the first interval precede all keys of the second,
whatever the row. Lengths, causal masks, windows and sinks have this form. So the ranges of a tile of rows follow from
its first and last row alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ...arithmetic import LARGEST_SIZE
from ..record.problem import Mask
from .addressing import Addressing
from .parameters import AttentionParameters, int64

KeyRange = tuple[Expr, Expr]
"""Keys [lo, hi), int64, with lo <= hi. If a row can see any keys of the range, 0 <= lo and hi <= T."""


class KeyRanges:
    """Ranges of keys. Indices may have any integer type."""

    def __init__(self, parameters: AttentionParameters, addressing: Addressing) -> None:
        self.problem, self.buffers, self.scalars = parameters.problem, parameters.buffers, parameters.scalars
        self.T, self.addressing = parameters.T, addressing

    @property
    def is_row_dependent(self) -> bool:
        """Whether the rows of one batch may see different keys, before the mask."""
        return self.problem.window is not None

    @property
    def range_count(self) -> int:
        """How many ranges a row has."""
        window = self.problem.window
        return 2 if window is not None and window.left is not None and window.sinks else 1

    @property
    def can_hide_keys(self) -> bool:
        """Whether keys of [0, T) may be masked for all rows of a batch, before the mask."""
        return self.problem.lengths

    def compute_tile_ranges(self, b: Expr, i0: Expr, i1: Expr) -> tuple[KeyRange, ...]:
        """Return the keys that some query of [i0, min(i1, rows of the batch)) may see."""
        first, last = self.compute_row_ranges(b, i0), self.compute_row_ranges(b, self._last(b, i1))
        return tuple((tirx.min(lo, hi), hi) for (lo, _), (_, hi) in zip(first, last))

    def compute_common_ranges(self, b: Expr, i0: Expr, i1: Expr) -> tuple[KeyRange, ...]:
        """Return the part of each tile range that every query sees before the mask.

        The queries are those of [i0, min(i1, rows of the batch)).
        """
        ranges = []
        first, last = self.compute_row_ranges(b, i0), self.compute_row_ranges(b, self._last(b, i1))
        for (start, _), (_, end), (_, hi), (lo, _) in zip(self.compute_tile_ranges(b, i0, i1), last, first, last):
            lo = tirx.max(tirx.min(lo, end), start)
            ranges.append((lo, tirx.max(tirx.min(hi, end), lo)))
        return tuple(ranges)

    def compute_row_ranges(self, b: Expr, i: Expr) -> tuple[KeyRange, ...]:
        """Return the keys that row i sees."""
        lo, hi = int64(0), self.find_key_end(b)
        end = hi
        window = self.problem.window
        if window is None:
            return ((lo, hi),)
        p = int64(i) + self._offset(b)
        if window.right is not None:
            hi = self._unless_free(b, _clamp(p + window.right + 1, hi), hi)
        if window.left is None:
            return ((lo, hi),)
        # The extent of a window that is data is limited to all keys: sums with it must not wrap.
        left = _clamp(self.buffers["lefts"][b], int64(LARGEST_SIZE)) if window.left == "given" else int64(window.left)
        lo = self._unless_free(b, _clamp(p - left, hi), lo)
        if self.range_count == 1:
            return ((lo, hi),)
        # The same for all rows, so that the ranges of a tile follow from its first and last row.
        sinks = _clamp(self.buffers["sink_keys"][b], end) if window.sinks == "given" else int64(window.sinks)
        lo = tirx.max(lo, sinks)
        return (int64(0), tirx.min(hi, sinks)), (lo, tirx.max(hi, lo))

    def find_key_end(self, b: Expr) -> Expr:
        """Return the number of leading keys of batch b that are valid.

        It is T, the valid length of the batch, or the length of a shorter mask.
        """
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
        """Return the last row of the batch before i1."""
        return tirx.min(int64(i1), int64(self.addressing.rows(b))) - 1

    def _unless_free(self, b: Expr, end: Expr, free: Expr) -> Expr:
        window = self.problem.window
        assert window is not None
        return tirx.Select(int64(b) < self.scalars["free_batches"], free, end) if window.free else end

    def _offset(self, b: Expr) -> Expr:
        """Return p - i, from the window's offset rule; never clamped."""
        window = self.problem.window
        assert window is not None
        if window.offset == "past":
            return self.scalars["past"]
        if window.offset == "lengths":
            return self.buffers["lengths"][b] - int64(self.addressing.rows(b))
        if window.offset == "behind":
            return self.buffers["lengths"][b]
        return int64(0)


def count_keys(ranges: Sequence[KeyRange]) -> Expr:
    """Return the number of keys of the ranges."""
    return functools.reduce(lambda total, ends: total + ends[1] - ends[0], ranges[1:], ranges[0][1] - ranges[0][0])


def select_key(ranges: Sequence[KeyRange], n: Expr) -> Expr:
    """Return key number n of the concatenated ranges."""
    (lo, hi), rest = ranges[0], ranges[1:]
    return tirx.Select(n < hi - lo, lo + n, select_key(rest, n - (hi - lo))) if rest else lo + n


def slice_ranges(ranges: Sequence[KeyRange], start: Expr, stop: Expr) -> tuple[KeyRange, ...]:
    """Return the keys from number `start` to `stop` of the concatenated ranges, where start <= stop."""
    (lo, hi), rest = ranges[0], ranges[1:]
    clipped = tirx.min(lo + start, hi), tirx.min(lo + stop, hi)
    if not rest:
        return (clipped,)
    start, stop = (tirx.max(n - (hi - lo), 0) for n in (start, stop))
    return clipped, *slice_ranges(rest, start, stop)


def _clamp(value: Expr, end: Expr) -> Expr:
    return tirx.max(tirx.min(value, end), 0)
