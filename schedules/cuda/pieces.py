"""Pieces of a row of k, from memory to the registers of the thread that multiplies them: of codes, expanded there."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, substitute

from ..reading.codes import Codes
from .chunks import load
from .expansion import Expansion
from .matmul_grid import Where
from .products import Operand
from .ptx import fixed, put, registers
from .tensor_types import TensorType


def chunks_at_once(codes: Codes | None) -> int:
    """How many chunks 16 bytes of a row have: one of elements, more of codes."""
    return 16 // (16 if codes is None else codes.bits)


class Pieces:
    """`ahead` pieces of c chunks of a row of A, or of a column of B; zeros where it does not exist. Rows are whole
    pieces. `memory` are the function's tensors as vectors, `where` the batch axes."""

    def __init__(
        self,
        operand: Operand,
        type: TensorType,
        memory: Mapping[tirx.Buffer, tirx.Buffer],
        where: Where,
        outer: Expr,
        exists: Expr,
        ahead: int,
        c: int,
    ) -> None:
        self.operand, self.memory, self.outer, self.exists, self.c = operand, memory, outer, exists, c
        self.type = type
        self.expansion = None if operand.codes is None else Expansion(operand.codes, type.element, memory)
        self.words = 4 if self.expansion is None else self.expansion.words  # of a chunk
        start = substitute(operand.start, {**where, operand.outer: outer.astype("int64")})
        self.start, self.fetched = fixed(start), registers(ahead * c * self.words, "uint32")
        self.scales: dict[tuple[int, int], tirx.Buffer] = {}

    def fetch(self, piece: int, k: Expr, inside: Expr) -> None:
        """Asks for the piece from k on."""
        size = self.c * self.words
        there = tirx.all(self.exists, inside)
        for n in range(size):
            put(self.fetched, piece * size + n, T.uint32(0))
        if self.expansion is None:
            memory = self.memory[self.operand.buffer]
            with T.If(there), T.Then():
                for n in range(self.c):
                    along = substitute(self.operand.along, {self.operand.k: (k + n * self.type.chunk).astype("int64")})
                    load(self.fetched, (piece * self.c + n) * 4, memory, self.start + along, self.type.chunk)
            return
        with T.If(there), T.Then():
            self.expansion.fetch(self.fetched, piece * size, self.start + k.astype("int64"), self.c)
        one = self.expansion.block % (self.type.chunk * self.c) == 0
        for n in range(self.c):
            if n and one:
                self.scales[piece, n] = self.scales[piece, 0]
            else:
                self.scales[piece, n] = registers(2, "float32")
                first = fixed(k + n * self.type.chunk)
                self.expansion.scale_and_zero(self.scales[piece, n], self.outer, first, there)

    def chunk(self, piece: int, n: int) -> list[list[Expr]]:
        """The words of its n-th chunk, of each part that elements are multiplied by."""
        at, words = (piece * self.c + n) * self.words, registers(4 * self.type.parts, "uint32")
        if self.expansion is not None:
            self.expansion.expand(words, 0, self.fetched, at, self.scales[piece, n])
        else:
            for x in range(4):
                put(words, x, self.fetched[at + x])
        self.type.split(words, 4)
        return [[words[4 * part + x] for x in range(4)] for part in range(self.type.parts)]
