"""Copies of rows of Q, K and V from global to shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention

from ..primitives import ptx
from ..primitives.ptx import let, unrolled
from ..primitives.shared_tile import CHUNK, SharedTile

_LOOKED_UP = 4  # rows of a thread at once, of a quantized cache


class RowCopies:
    """The rows of head h of q, k or v in batch b, which the threads of a block copy in chunks.

    A thread has chunks and rows at equal distances, so that one offset determines all of their addresses, unless rows
    are looked up in a table.
    """

    def __init__(self, bound: BoundAttention, name: str, b: Expr, h: Expr, thread: Expr, threads: int) -> None:
        p = bound.problem
        self.chunks = (p.v_head_dim if name == "v" else p.head_dim) // CHUNK
        self.size = CHUNK if name == "q" else CHUNK // bound.addressing.packing
        """Elements of the buffer in a chunk."""
        self.across = math.gcd(self.chunks, threads)  # threads along a row
        self.rows_per_pass = threads // self.across
        self.row, self.chunk = let(thread // self.across), let(thread % self.across)
        self.addressing, self.name, self.b, self.h = bound.addressing, name, b, h
        self.has_lookup = name in ("k", "v") and bound.addressing.has_lookup
        _, _, self.stride = bound.addressing.strides(name)
        self.head = bound.addressing.offset(name, b, h, T.int64(0))
        self.thread_offset = let(
            self.row * self.stride.astype("int32") + self.chunk * self.size
        )  # within one pass over the rows

    def copy(self, tile: SharedTile, first: Expr, count: int, end: Expr | None = None) -> None:
        """Begin to copy `count` rows from `first` on to a tile; rows from `end` on become zeros."""

        def copy_chunk(row: Expr, chunk: Expr, address: Expr, exists: Expr | None) -> None:
            buffer, indices = self.addressing.flat(self.name, address)
            ptx.copy_chunk(tile.at(row, chunk), buffer[tuple(indices)], exists)

        self.visit_addresses(first, count, end, copy_chunk)

    def visit_addresses(
        self, first: Expr, count: int, end: Expr | None, body: Callable[[Expr, Expr, Expr, Expr | None], None]
    ) -> None:
        """Emit body(row, chunk, address, exists) for each of the thread's chunks in `count` rows from `first` on.

        `address` is its offset in memory, `exists` tells whether it comes before `end`.
        """
        start = None if self.has_lookup else let(self.head + first.astype("int64") * self.stride) + self.thread_offset
        rows_left = None if end is None else let(end - first - self.row)

        def visit_row(step: Expr) -> None:
            if start is not None:
                address = start + step * self.rows_per_pass * self.stride
            else:
                key = let((first + step * self.rows_per_pass + self.row).astype("int64"))
                address = let(self.addressing.offset(self.name, self.b, self.h, key)) + self.chunk * self.size
            with unrolled(self.chunks // self.across) as n:
                exists = None if rows_left is None else step * self.rows_per_pass < rows_left
                row, chunk = step * self.rows_per_pass + self.row, n * self.across + self.chunk
                body(row, chunk, address + n * self.across * self.size, exists)

        # Addresses of many rows that are looked up at once do not fit next to the registers that dequantize.
        is_partly_unrolled = (
            self.has_lookup and self.addressing.problem.is_quantized and count > _LOOKED_UP * self.rows_per_pass
        )
        self._visit_rows(count, visit_row, _LOOKED_UP if is_partly_unrolled else True)

    def visit_chunks(self, count: int, body: Callable[[Expr, Expr], None]) -> None:
        """Emit body(row, chunk) for each of the thread's chunks in `count` rows."""

        def visit_row(step: Expr) -> None:
            with unrolled(self.chunks // self.across) as n:
                body(step * self.rows_per_pass + self.row, n * self.across + self.chunk)

        self._visit_rows(count, visit_row)

    def _visit_rows(self, count: int, body: Callable[[Expr], None], unroll: int | bool = True) -> None:
        with T.serial(-(-count // self.rows_per_pass), unroll=unroll) as step:
            if count % self.rows_per_pass:
                with T.If(step * self.rows_per_pass + self.row < count), T.Then():
                    body(step)
            else:
                body(step)
