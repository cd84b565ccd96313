"""Rows that a block makes for itself in shared memory, of what the rows of a norm are made of: A of a matmul.

A norm of few rows takes a launch and next to no time. Whoever multiplies its rows can make them: a block has them after
a read of the second-level cache and one meeting of its warps, while its first weights are on their way.

    for each row                          all warps of the block
        its sums                          reduction.py
        the row, in half precision        shared memory, `pitch` elements behind the one before
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..reading.stages import Stage
from . import ptx
from .chunks import CHUNK, pack_chunk, store_words
from .pieces import WORDS, Ring
from .ptx import let, put, registers
from .reduction import OneRow, Rows

ROOM = 17 << 10
"""Bytes of shared memory that a block may have for such rows: about what pieces of A would take."""

_MEETING = 256  # bytes for a number of each warp
_MEETINGS = 2


def pitch(depth: int) -> int:
    """Elements from one row to the next: rows begin in different halves of the banks."""
    return depth + (32 - depth) % 64


def most_rows(depth: int) -> int:
    """How many rows there is room for, up to the eight that are multiplied at a time."""
    return min(ROOM // (2 * pitch(depth)), 8)


def shared_memory(depth: int) -> int:
    """Bytes: the rows, and places where warps meet."""
    return most_rows(depth) * 2 * pitch(depth) + _MEETINGS * _MEETING


@dataclass(frozen=True, eq=False)
class PrologueRows:
    """A [rows, depth] in half precision, by the stages that compute it, the last of which is A itself."""

    rows: Rows
    depth: int

    @property
    def most(self) -> int:
        return most_rows(self.depth)

    @property
    def shared_memory(self) -> int:
        """Bytes that stand in front of all others."""
        return shared_memory(self.depth)

    def emit(
        self,
        rows: Expr,
        warps: int,
        memory: dict[tirx.Buffer, tirx.Buffer],
        place: tuple[tirx.Buffer, Expr],
        stores: Expr | None,
    ) -> None:
        """Makes so many rows, at most `most`, in the words at the begin of shared memory, for all threads of the block.

        memory: the function's tensors as vectors; place: the shared memory, and the thread's number; stores: whether A
        is stored, too.
        """
        with T.serial(rows.astype("int64")) as row:
            _NormedRow(self, warps, memory, place, row, stores).emit(row)
            ptx.synchronize()


class _NormedRow(OneRow):
    def __init__(
        self,
        normed: PrologueRows,
        warps: int,
        memory: dict[tirx.Buffer, tirx.Buffer],
        place: tuple[tirx.Buffer, Expr],
        row: Expr,
        stores: Expr | None,
    ) -> None:
        shared, thread = place
        super().__init__(normed.rows, warps, memory, thread)
        self.normed, self.shared, self.row, self.stores, self.meetings = normed, shared, row, stores, 0

    def meeting(self, dtype: str) -> tuple[tirx.Buffer, int]:
        """Behind the rows: a block that has static memory, too, may be refused where it has 48 KiB in all."""
        size = DataType(dtype).itemsize
        first = self.normed.shared_memory - (1 + self.meetings % _MEETINGS) * _MEETING
        self.meetings += 1
        size_of_all = self.normed.shared_memory // size
        return T.decl_buffer((size_of_all,), dtype, data=self.shared.data, scope="shared.dyn"), first // size

    def keep_chunk(self, stage: Stage, at: Expr, values: tirx.Buffer) -> None:
        """To shared memory, and to A."""
        A = self.memory[stage.output]
        words = pack_chunk(str(A.dtype), values)
        here = at + self.row * (pitch(self.normed.depth) - self.normed.depth)
        ptx.store_chunk(self.shared[let((here // 2).astype("int32"))], words)
        if self.stores is not None:
            with T.If(self.stores), T.Then():
                store_words(A, at, words, WORDS)


class ProloguePieces:
    """What `Pieces` are, of a row that the block has made: c chunks of k at a time."""

    def __init__(self, normed: PrologueRows, ring: Ring, place: tuple[Expr, Expr], c: int) -> None:
        """place: the row, and whether it exists."""
        self.memory, self.c = ring.memory, c
        self.start, self.exists = let(place[0] * (pitch(normed.depth) // 2)), let(place[1])
        self.words = registers(c * WORDS, "uint32")

    def fetch(self, piece: int, k: Expr, inside: Expr) -> None:
        """It is there."""

    def read(self, piece: int, k: Expr, inside: Expr) -> None:
        """The piece to registers; zeros where it does not exist."""
        for n in range(self.c * WORDS):
            put(self.words, n, T.uint32(0))
        with T.If(tirx.all(self.exists, inside)), T.Then():
            for n in range(self.c):
                four = registers(WORDS, "uint32")
                ptx.load_shared(four, self.memory[self.start + tirx.truncdiv(k, 2) + n * (CHUNK // 2)])
                for x in range(WORDS):
                    put(self.words, n * WORDS + x, four[x])

    def chunk(self, piece: int, n: int) -> list[list[Expr]]:
        """The words of the n-th chunk of the piece that was read."""
        return [[self.words[n * WORDS + x] for x in range(WORDS)]]
