"""Blocks of rows of a matmul, and their strips: the rows of one call of the micro-kernel.

The heights of a block's strips differ by one at most: seven rows are four and three. Code is emitted for each height
that occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr


@dataclass(frozen=True)
class RowBlock:
    """`count` rows of M from `first` on. Where sizes are static, `counts` are the values that count can have."""

    first: Expr
    count: Expr
    counts: Sequence[int] | None = None

    def list_heights(self, mr: int, *, above: int = 0, up_to: int | None = None) -> list[int]:
        """Return the heights of strips of at most mr rows, in blocks of more than `above` and up to `up_to` rows."""
        last = above + mr if up_to is None else up_to  # strips of more rows than above + mr have no other heights
        counts = range(above + 1, last + 1) if self.counts is None else self.counts
        heights: set[int] = set()
        for count in counts:
            if count > above and (up_to is None or count <= up_to):
                low, higher = divmod(count, -(-count // mr))
                heights |= {low, low + bool(higher)}
        return sorted(heights, reverse=True)

    def branch(self, bound: int, few: Callable[[], None], many: Callable[[], None]) -> None:
        """Emit few() for blocks of at most `bound` rows and many() for others; only one of them if counts tell."""
        if self.counts is not None and max(self.counts) <= bound:
            few()
        elif self.counts is not None and min(self.counts) > bound:
            many()
        else:
            with T.If(self.count <= bound):
                with T.Then():
                    few()
                with T.Else():
                    many()


@dataclass(frozen=True)
class Strip:
    """The rows of one call of the micro-kernel, in a block of k."""

    row: Expr
    """The first row of M, ..."""
    tile_row: Expr
    """... and its row in the tile of accumulators."""
    k0: Expr
    """The first step, ..."""
    depth: Expr
    """... and the number of steps."""
    number: Expr
    """The number of the strip in its block of rows, ..."""
    count: Expr
    """... which has so many."""


@dataclass(frozen=True)
class MicroKernel:
    """A micro-kernel for strips of this height, under a condition."""

    height: int
    has_streams: bool = False
    """Whether it prefetches B from several streams."""
    when: Expr | None = None

    def applies_to(self, height: Expr) -> Expr:
        """Return whether it multiplies a strip of that height."""
        fits = height == self.height
        return fits if self.when is None else tirx.all(fits, self.when)


@dataclass(frozen=True)
class Strips:
    """How the strips of a block of rows are multiplied."""

    kernels: Sequence[MicroKernel]
    mr: int
    """The maximum height."""
    panel: tirx.Buffer | None
    """Memory for packed or dequantized columns of B, or None to read B in place."""
    length: Expr
    """The number of steps of a block of k."""


def list_block_sizes(rows: Expr, blocks: Expr, height: Expr) -> list[int] | None:
    """Return the possible sizes of `blocks` blocks of `height` rows, the last of which has the remaining rows.

    Return None for sizes that are not static.
    """
    sizes = [size.value for size in (rows, blocks, height) if isinstance(size, tirx.IntImm)]
    if len(sizes) < 3:
        return None
    total, count, full = sizes
    return sorted({min(full, total), total - (count - 1) * full})
