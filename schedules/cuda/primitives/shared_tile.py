"""A tile of rows in shared memory that tensor cores read without bank conflicts."""

from __future__ import annotations

from collections.abc import Callable

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from . import ptx
from .ptx import Element

CHUNK = 8
"""Elements of 16 bits in the 16 bytes that a thread copies, and in a row of the 8 x 8 matrices of ldmatrix."""


class SharedTile:
    """Rows of `chunks` chunks each, from element `start` of a buffer in shared memory.

    ldmatrix reads one chunk of 8 rows at a time. That is free of conflicts if the chunks are in different groups of
    four of the 32 banks, so if their addresses differ modulo 8 chunks. Rows of 2^k * odd chunks provide 2^(3-k)
    different ones. The swizzle flips the low k bits of the chunk's index by the row's index, divided by 2^(3-k). That
    provides the others, and leaves every chunk in its row.

    down: for elements of 32 bits, which ldmatrix cannot transpose. A warp then reads 8 successive ones of 4 successive
    rows, each thread its own. Two chunks of each row must then be in other groups than those of the other rows, and
    stay neighbors.
    """

    def __init__(self, memory: tirx.Buffer, start: Expr | int, chunks: int, down: bool = False) -> None:
        self.memory, self.start, self.chunks, self.down = memory, start, chunks, down
        self.bits = min(3, (chunks & -chunks).bit_length() - 1)
        self.chunk = ptx.CHUNK_BYTES // DataType(memory.dtype).itemsize

    def at(self, row: Expr, chunk: Expr) -> Element:
        """Return the first element of a chunk; int32 indices."""
        return self.memory[self.start + (row * self.chunks + T.bitwise_xor(chunk, self.swizzle(row))) * self.chunk]

    def swizzle(self, row: Expr) -> Expr:
        if self.down:
            return T.shift_left(T.shift_right(T.bitwise_and(row, 3), 3 - self.bits), 1)
        return T.bitwise_and(T.shift_right(row, 3 - self.bits), (1 << self.bits) - 1)

    def make_reader(self, row: Expr, chunk: Expr) -> Callable[[Expr | int, Expr | int], Element]:
        """Return a function (rows, chunks) for `at(row + rows, chunk + chunks)`.

        Rows are a multiple of 8 that is static after loops are unrolled. Chunks are static too, and have no bits in
        common with `chunk`. A thread computes only with the low bits of the chunks, once. The other bits, and the rows,
        are a constant of the instruction that reads.
        """
        low = (1 << self.bits) - 1
        base = ptx.let(self.at(row, chunk).indices[0])

        def at(rows: Expr | int, chunks: Expr | int) -> Element:
            permuted = T.bitwise_xor(base, T.bitwise_and(chunks, low) * self.chunk)
            return self.memory[permuted + (rows * self.chunks + T.bitwise_and(chunks, ~low)) * self.chunk]

        return at
