"""Pieces of a row of k on their way from memory to the thread that multiplies them: of codes, expanded there.

A thread copies its own chunks to places in shared memory that nobody else touches, asynchronously. Registers would do,
but ptxas moves a load to where its value is used, to save them, and then next to nothing is on its way.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx

from lowering.tensorir.expressions import Expr, substitute

from . import ptx
from .expansion import Expansion
from .matmul_grid import Where
from .matmul_reader import Operand
from .ptx import CHUNK_BYTES, let, put, registers, shared_memory
from .tensor_types import TensorType

WORDS = CHUNK_BYTES // 4


class Ring:
    """Places in shared memory, of 16 bytes for each thread of a block, of which operands take some in turn."""

    def __init__(self, thread: Expr, threads: int, size: int, front: int = 0) -> None:
        """size: bytes of the memory; front: of them in front of the places, for something else."""
        self.thread, self.threads, self.taken, self.first = thread, threads, 0, front // 4
        self.memory = shared_memory(size // 4, "uint32", CHUNK_BYTES)

    def take(self, places: int) -> int:
        """The first of so many places."""
        self.taken += places
        return self.taken - places

    def at(self, place: int) -> ptx.Element:
        """This thread's."""
        return self.memory[self.first + (place * self.threads + self.thread) * WORDS]


class Pieces:
    """`ahead` pieces of c chunks of a row of A, or of a column of B; zeros where it does not exist. Rows are whole
    pieces. `memory` are the function's tensors as vectors, `where` the batch axes."""

    def __init__(
        self,
        operand: Operand,
        type: TensorType,
        memory: Mapping[tirx.Buffer, tirx.Buffer],
        where: Where,
        place: tuple[Expr, Expr],
        ring: Ring,
        ahead: int,
        c: int,
    ) -> None:
        """place: of the row or column, and whether it exists."""
        self.outer, self.exists = map(let, place)
        self.operand, self.memory, self.type, self.ring, self.c = operand, memory, type, ring, c
        self.expansion = None if operand.codes is None else Expansion(operand.codes, type.element, memory)
        self.start = let(substitute(operand.start, {**where, operand.outer: self.outer.astype("int64")}))
        self.column = let(self.outer + substitute(operand.first, where).astype("int32"))
        self.copies = c if self.expansion is None else 1  # of 16 bytes, for a piece
        self.first = ring.take(ahead * self.copies)
        self.words = registers(self.copies * WORDS, "uint32")
        self.scales: dict[int, list[tirx.Buffer]] = {}

    def fetch(self, piece: int, k: Expr, inside: Expr) -> None:
        """Begins to copy the piece from k on."""
        there, place = let(tirx.all(self.exists, inside)), self.first + piece * self.copies
        if self.expansion is None:
            memory = self.memory[self.operand.buffer]
            for n in range(self.c):
                along = substitute(self.operand.along, {self.operand.k: (k + n * self.type.chunk).astype("int64")})
                ptx.copy_chunk(self.ring.at(place + n), memory[self.start + along], there)
            return
        codes = self.expansion.place(self.start + k.astype("int64"))
        ptx.copy_chunk(self.ring.at(place), self.expansion.memory[codes], there)
        one = self.expansion.block % (self.type.chunk * self.c) == 0
        if piece not in self.scales:
            self.scales[piece] = [registers(2, "float32") for _ in range(1 if one else self.c)]
        for n, scale in enumerate(self.scales[piece]):
            self.expansion.scale_and_zero(scale, self.column, let(k + n * self.type.chunk), there)

    def read(self, piece: int, k: Expr, inside: Expr) -> None:
        """The piece, which was fetched there and has arrived, to registers."""
        for n in range(self.copies):
            four = registers(WORDS, "uint32")
            ptx.load_shared(four, self.ring.at(self.first + piece * self.copies + n))
            for x in range(WORDS):
                put(self.words, n * WORDS + x, four[x])

    def chunk(self, piece: int, n: int) -> list[list[Expr]]:
        """The words of the n-th chunk of the piece that was read, of each part that elements are multiplied by."""
        words = registers(4 * self.type.parts, "uint32")
        if self.expansion is not None:
            scales = self.scales[piece]
            self.expansion.expand(words, 0, self.words, n * self.expansion.words, scales[min(n, len(scales) - 1)])
        else:
            for x in range(WORDS):
                put(words, x, self.words[n * WORDS + x])
        self.type.split(words, 4)
        return [[words[4 * part + x] for x in range(4)] for part in range(self.type.parts)]
