"""Rows of Q, K and V on their way from global to shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound

from . import ptx
from .ptx import let, unrolled
from .shared_tile import CHUNK, SharedTile

_LOOKED_UP = 4  # rows of a thread at once, of codes


class Rows:
    """The rows of head h of q, k or v in batch b, which the threads of a block copy in chunks.

    A thread has chunks and rows at equal distances, so that one offset says where all of them are, unless rows have to
    be looked up.
    """

    def __init__(self, bound: Bound, name: str, b: Expr, h: Expr, thread: Expr, threads: int) -> None:
        p = bound.problem
        self.chunks = (p.v_head_dim if name == "v" else p.head_dim) // CHUNK
        self.size = CHUNK if name == "q" else CHUNK // bound.addressing.packing
        """Elements of the buffer that a chunk has."""
        self.across = math.gcd(self.chunks, threads)  # threads along a row
        self.at_once = threads // self.across
        self.row, self.chunk = let(thread // self.across), let(thread % self.across)
        self.addressing, self.name, self.b, self.h = bound.addressing, name, b, h
        self.looked_up = name in ("k", "v") and bound.addressing.looked_up
        _, _, self.stride = bound.addressing.strides(name)
        self.head = bound.addressing.offset(name, b, h, T.int64(0))
        self.mine = let(
            self.row * self.stride.astype("int32") + self.chunk * self.size
        )  # within one pass over the rows

    def copy(self, tile: SharedTile, first: Expr, count: int, end: Expr | None = None) -> None:
        """Begins to copy so many rows from `first` on to a tile; rows from `end` on become zeros."""

        def copy_chunk(row: Expr, chunk: Expr, place: Expr, there: Expr | None) -> None:
            buffer, indices = self.addressing.flat(self.name, place)
            ptx.copy_chunk(tile.at(row, chunk), buffer[tuple(indices)], there)

        self.find(first, count, end, copy_chunk)

    def find(
        self, first: Expr, count: int, end: Expr | None, body: Callable[[Expr, Expr, Expr, Expr | None], None]
    ) -> None:
        """body(row, chunk, place, there) for each of the thread's chunks in so many rows from `first` on: where it is
        in memory, and whether it comes before `end`."""
        start = None if self.looked_up else let(self.head + first.astype("int64") * self.stride) + self.mine
        left = None if end is None else let(end - first - self.row)

        def find_row(step: Expr) -> None:
            if start is not None:
                place = start + step * self.at_once * self.stride
            else:
                key = let((first + step * self.at_once + self.row).astype("int64"))
                place = let(self.addressing.offset(self.name, self.b, self.h, key)) + self.chunk * self.size
            with unrolled(self.chunks // self.across) as n:
                there = None if left is None else step * self.at_once < left
                row, chunk = step * self.at_once + self.row, n * self.across + self.chunk
                body(row, chunk, place + n * self.across * self.size, there)

        # Places that are looked up for many rows at once do not fit beside what expands codes.
        some = self.looked_up and self.addressing.problem.coded and count > _LOOKED_UP * self.at_once
        self._each_row(count, find_row, _LOOKED_UP if some else True)

    def each(self, count: int, body: Callable[[Expr, Expr], None]) -> None:
        """body(row, chunk) for each of the thread's chunks in so many rows."""

        def chunks(step: Expr) -> None:
            with unrolled(self.chunks // self.across) as n:
                body(step * self.at_once + self.row, n * self.across + self.chunk)

        self._each_row(count, chunks)

    def _each_row(self, count: int, body: Callable[[Expr], None], unroll: int | bool = True) -> None:
        with T.serial(-(-count // self.at_once), unroll=unroll) as step:
            if count % self.at_once:
                with T.If(step * self.at_once + self.row < count), T.Then():
                    body(step)
            else:
                body(step)
