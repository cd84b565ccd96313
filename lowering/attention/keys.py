"""Which keys a row sees before the mask: an interval.

Its ends never decrease with the row: lengths, causal masks and windows all have this form. So the two ranges of a tile
of rows follow from its first and last row alone.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from .parameters import Parameters, int64
from .problem import Mask


class Keys:
    """Ranges of keys, int64. Indices may have any integer type."""

    def __init__(self, parameters: Parameters) -> None:
        self.problem, self.buffers, self.scalars = parameters.problem, parameters.buffers, parameters.scalars
        self.S, self.T = parameters.S, parameters.T

    @property
    def differ(self) -> bool:
        """Whether the rows of one batch may see different keys, before the mask."""
        return self.problem.window is not None

    @property
    def hides(self) -> bool:
        """Whether keys of [0, T) may be hidden from all rows of a batch, before the mask."""
        return self.problem.lengths

    def of_tile(self, b: Expr, i0: Expr, i1: Expr) -> tuple[Expr, Expr]:
        """The keys [lo, hi) that some query of [i0, min(i1, S)) may see; 0 <= lo <= hi <= T."""
        lo, _ = self.of_row(b, i0)
        _, hi = self.of_row(b, tirx.min(int64(i1), int64(self.S)) - 1)
        return tirx.min(lo, hi), hi

    def of_all(self, b: Expr, i0: Expr, i1: Expr) -> tuple[Expr, Expr]:
        """The keys [lo, hi), inside `of_tile`, that every query of [i0, min(i1, S)) sees before the mask; lo = hi where
        there is none."""
        first, end = self.of_tile(b, i0, i1)
        lo, _ = self.of_row(b, tirx.min(int64(i1), int64(self.S)) - 1)
        _, hi = self.of_row(b, i0)
        lo = tirx.max(tirx.min(lo, end), first)
        return lo, tirx.max(tirx.min(hi, end), lo)

    def of_row(self, b: Expr, i: Expr) -> tuple[Expr, Expr]:
        """The keys [lo, hi) that row i sees; 0 <= lo <= hi <= T."""
        lo, hi = int64(0), self.count(b)
        window = self.problem.window
        if window is not None:
            p = int64(i) + self._offset(b)
            if window.right is not None:
                hi = _clamp(p + window.right + 1, hi)
            if window.left is not None:
                lo = _clamp(p - window.left, hi)
        return lo, hi

    def rows_of(self, b: Expr, j: Expr) -> tuple[Expr, Expr]:
        """The rows [lo, hi) that see key j; 0 <= lo <= hi <= S."""
        lo, hi = int64(0), tirx.Select(int64(j) < self.count(b), int64(self.S), int64(0))
        window = self.problem.window
        if window is not None:
            i = int64(j) - self._offset(b)
            if window.left is not None:
                hi = _clamp(i + window.left + 1, hi)
            if window.right is not None:
                lo = _clamp(i - window.right, hi)
        return lo, hi

    def count(self, b: Expr) -> Expr:
        """How many leading keys of batch b count: T, its valid length, or a shorter mask."""
        end = int64(self.T)
        if self.problem.lengths:
            end = _clamp(self.buffers["lengths"][b], end)
        if "mask_keys" in self.scalars:
            end = tirx.min(end, self.scalars["mask_keys"])
        if isinstance(self.problem.mask, Mask) and self.problem.mask.pad:
            end = tirx.min(end, self.buffers["mask"].shape[3])
        return end

    def _offset(self, b: Expr) -> Expr:
        """p - i, from the window's offset rule; never clamped."""
        window = self.problem.window
        assert window is not None
        if window.offset == "past":
            return self.scalars["past"]
        if window.offset == "lengths":
            return self.buffers["lengths"][b] - int64(self.S)
        return int64(0)


def _clamp(value: Expr, end: Expr) -> Expr:
    return tirx.max(tirx.min(value, end), 0)
