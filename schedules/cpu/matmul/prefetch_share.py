"""Prefetching of a panel: while strips of rows are multiplied by a block of it, each prefetches its share of the next.

Memory is thus read at all times, however few strips there are: eight rows take no longer than one.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..primitives.vector import LINE, let, prefetch

_STREAMS = 8
"""A core has more reads in flight from several pages than from one, as its own prefetchers work page by page."""

_BITS = 8  # after the point of a fixed-point number


class PrefetchShare:
    """The share that a strip prefetches of the memory after its block.

    The block has `depth` steps of `width` elements, and the next one begins at element `following`. It is shared by
    `count` strips, of which this one has that number.
    """

    def __init__(
        self, buffer: tirx.Buffer, following: Expr, *, depth: Expr, width: int, number: Expr, count: Expr
    ) -> None:
        self.buffer, self.width = buffer, width
        self.line = LINE // DataType(buffer.dtype).itemsize
        size = let(depth * width)
        self.size, self.start = let(size // count), let(following + number * size // count)
        self.ratio = let(tirx.const(1 << _BITS, "int64") // count)

    def plan_sequence(self) -> Callable[[Expr], None]:
        """Return a function that prefetches the line of a step k, for many strips.

        It takes few instructions, because they compete with those that multiply.
        """
        advance = let(self.width * self.ratio)
        return lambda k: prefetch(self.buffer, self.start + T.shift_right(k * advance, _constant(_BITS)))

    def plan_streams(self) -> Callable[[Expr], None]:
        """Return a function that prefetches the lines of a step k, for a few strips: each line from another stream."""
        lines = -(-self.width // self.line)
        turns = max(_STREAMS // lines, 1)  # steps take turns among the streams
        length = let(self.size // (turns * lines))
        begins = [let(self.start + n * turns * length) for n in range(lines)]
        advance = let(self.width // lines * self.ratio)

        def prefetch_step(k: Expr) -> None:
            round_number = T.shift_right(k, _constant(turns.bit_length() - 1))
            within = T.shift_right(round_number * advance, _constant(_BITS))
            offset = let(T.bitwise_and(k, _constant(turns - 1)) * length + within)
            for begin in begins:
                prefetch(self.buffer, begin + offset, level=1)

        return prefetch_step


def _constant(value: int) -> Expr:
    return tirx.const(value, "int64")
