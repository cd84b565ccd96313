"""The micro-kernel of a matmul of rows in int8 (int8_rows.py) by a quantized matrix that is stored in quads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ...reading.quantized_weights import QUAD
from ..primitives.vector import Register, cast, let, load, splat, splat_like, store
from . import dot_int8
from .quantized_matmul import QuantizedPanel, prefetch_row

if TYPE_CHECKING:
    from .blocked import BlockedMatmul

_SHORT_SUMS = 8  # products of a nibble (at most 15) by a byte (127), two by two, that 16 bits hold


def accumulate_int8(
    b: BlockedMatmul, first: Expr, height: int, tile_row: Expr, k0: Expr, depth: Expr, tile: tirx.Buffer
) -> None:
    """Emit tile[tile_row + i, c] += sum of A[first + i] times (value - zero) * scale, for the steps from k0 on."""
    rows, source = b.int8_rows, QuantizedPanel(b, k0)
    assert rows is not None
    kernel = _QuadKernel(source, height)

    def block(start: Expr, length: int) -> None:
        number = let((k0 + start) // rows.block)
        at = [let((first + i) * rows.blocks + number) for i in range(height)]
        starts = [let((first + i) * rows.quads + (k0 + start) // QUAD) for i in range(height)]
        sums = [T.bind(rows.sums[i]) for i in at]
        dots = kernel.emit(start, length, rows.values, starts, sums)
        offset = source.scale_offset(start)
        zeros, scales = source.load_zeros(offset), source.load_scales(offset)
        for i, row_dots in enumerate(dots):
            row_scale = T.bind(splat(rows.scales[at[i]], b.lanes, "float32"))
            for n, (dot, scale, zero) in enumerate(zip(row_dots, scales, zeros)):
                value = cast(dot, "float32")
                if zero is not None:
                    value = value - zero * splat(sums[i].astype("float32"), b.lanes, "float32")
                position = (tile_row + i) * b.nr + n * b.lanes
                store(tile, load(tile, b.lanes, position) + value * (row_scale * scale), position)

    source.emit_blocks(depth, rows.block, block)


class _QuadKernel:
    """Integer dot products of a strip of rows and the columns of a panel.

    Instructions that take unsigned weights get them with an offset. Its product with the sum of q is what an
    accumulator starts from.
    """

    def __init__(self, source: QuantizedPanel, height: int) -> None:
        self.source, self.b, self.height = source, source.b, height
        self.nibbles = source.quantized.form.nibbles
        cpu = self.b.cpu
        self.is_signed = dot_int8.multiplies_signed(cpu, holds_lowest=False)
        self.is_short = self.nibbles and not cpu.int8_dot
        self.offset = 8 if self.nibbles else 0 if self.is_signed else 128

    def emit(
        self, start: Expr, length: int, values: tirx.Buffer, starts: list[Expr], sums: list[Expr]
    ) -> list[list[Expr]]:
        """Emit the dot products of a block of `length` steps, and return those of each row by vectors of columns."""
        b, group = self.b, self.source.quantized.group if self.nibbles else QUAD
        words = -(-length // group)
        first = let((self.source.panel * self.source.stored + (self.source.k0 + start) // group) * b.nr)
        totals = [
            [Register(splat(total * -self.offset if self.offset else 0, b.lanes, "int32")) for _ in self.source.vectors]
            for total in sums
        ]
        chunk = _SHORT_SUMS * QUAD // group if self.is_short else words
        for word in range(0, words, chunk):
            self.emit_words(first, word, min(chunk, words - word), values, starts, totals)
        return [[total.value for total in row] for row in totals]

    def emit_words(
        self,
        first: Expr,
        word: int,
        count: int,
        values: tirx.Buffer,
        starts: list[Expr],
        totals: list[list[Register]],
    ) -> None:
        """Add the products of `count` stored integers of each column, from number `word` of the block on."""
        b, lanes = self.b, self.b.lanes
        is_memory_bound = self.height <= b.tiles.waiting_rows
        sums = totals
        if self.is_short:
            sums = [[Register(splat(0, 2 * lanes, "int16")) for _ in row] for row in totals]
        with T.serial(tirx.const(count, "int64")) as n:
            at = let(first + (word + n) * b.nr)
            if is_memory_bound:
                prefetch_row(
                    b.operands.b,
                    at if self.nibbles else at * QUAD,
                    b.nr if self.nibbles else b.nr * QUAD,
                    b.tiles.ahead,
                )
            weights = [self.load_quads(at + v) for v in self.source.vectors]
            per_word = len(weights[0])
            for quad in range(per_word):
                for row, row_start in zip(sums, starts):
                    a = T.bind(splat(values[row_start + (word + n) * per_word + quad], lanes, "int32"))
                    for total, by_quad in zip(row, weights):
                        total.value = self.multiply(total.value, by_quad[quad], a)
        if self.is_short:
            for row, short_row in zip(totals, sums):
                for total, short in zip(row, short_row):
                    total.value = dot_int8.add_pairs(total.value, short.value)

    def load_quads(self, at: Expr) -> list[Expr]:
        """Load the quads of a vector of columns that are stored at word `at`."""
        lanes, memory = self.b.lanes, self.b.operands.b
        if not self.nibbles:
            quads = dot_int8.pack_vector(load(memory, QUAD * lanes, at * QUAD))
            return [quads if self.is_signed else let(T.bitwise_xor(quads, splat_like(-0x7F7F7F80, quads)))]
        word = let(load(memory, lanes, at))
        low = splat_like(0x0F0F0F0F, word)
        return [let(T.bitwise_and(bits, low)) for bits in (word, T.shift_right(word, splat_like(4, word)))]

    def multiply(self, total: Expr, weights: Expr, a: Expr) -> Expr:
        """Return the total plus the products of quads."""
        if self.is_short:
            return total + dot_int8.multiply_pairs(weights, a)
        multiply = dot_int8.dot_signed if self.is_signed else dot_int8.dot
        return multiply(total, weights, a, self.b.cpu)
