"""Rows of Q, K and V on their way from global to shared memory."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound

from . import ptx
from .ptx import fixed, unrolled
from .shared_tile import CHUNK, SharedTile


class Rows:
    """The rows of head h of q, k or v in batch b, which the threads of a block copy in chunks.

    A thread has chunks and rows at equal distances, so that one offset says where all of them are.
    """

    def __init__(self, bound: Bound, name: str, b: Expr, h: Expr, thread: Expr, threads: int) -> None:
        p = bound.problem
        self.chunks = (p.v_head_dim if name == "v" else p.head_dim) // CHUNK
        self.across = math.gcd(self.chunks, threads)  # threads along a row
        self.at_once = threads // self.across
        self.row, self.chunk = fixed(thread // self.across), fixed(thread % self.across)
        zero = T.int64(0)
        _, _, self.stride = bound.places.strides(name)
        buffer, indices = bound.places.at(name, b, h, zero, zero)
        self.head = _offset(buffer, indices)
        self.mine = fixed(self.row * self.stride.astype("int32") + self.chunk * CHUNK)  # within one pass over the rows
        self.memory = T.decl_buffer((_offset(buffer, buffer.shape),), buffer.dtype, data=buffer.data)

    def copy(self, tile: SharedTile, first: Expr, count: int, end: Expr | None = None) -> None:
        """Begins to copy so many rows from `first` on to a tile; rows from `end` on become zeros."""
        start = fixed(self.head + first.astype("int64") * self.stride) + self.mine
        left = None if end is None else fixed(end - first - self.row)

        def copy_row(step: Expr) -> None:
            with unrolled(self.chunks // self.across) as n:
                source = start + step * self.at_once * self.stride + n * self.across * CHUNK
                to = tile.at(step * self.at_once + self.row, n * self.across + self.chunk)
                ptx.copy_chunk(to, self.memory[source], None if left is None else step * self.at_once < left)

        with unrolled(-(-count // self.at_once)) as step:
            if count % self.at_once:
                with T.If(step * self.at_once + self.row < count), T.Then():
                    copy_row(step)
            else:
                copy_row(step)


def _offset(buffer: tirx.Buffer, indices: list[Expr]) -> Expr:
    """The number of an element in memory; int64."""
    offset: Expr = T.int64(0)
    for index, size in zip(indices, buffer.shape):
        offset = offset * size + index
    return offset
