"""The micro-kernel of a matmul of rows in int8 (int8_rows.py) by a quantized matrix that is stored in quads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ...reading.quantized_weights import QUAD
from ..primitives.vector import Register, cast, let, load, splat, splat_like, store
from . import dot_int8
from .quantized_matmul import QuantizedPanel
from .strips import MicroKernel, Strip

if TYPE_CHECKING:
    from .blocked import BlockedMatmul

_SHORT_QUADS = 8  # that an int16 can accumulate: each adds two of at most 15 * 127, and 8 * 2 * 15 * 127 < 2^15


def accumulate_int8(b: BlockedMatmul, kernel: MicroKernel, strip: Strip, tile: tirx.Buffer) -> None:
    """Emit tile[tile_row + i, c] += sum of A[row + i] times (value - zero) * scale, for the strip's steps."""
    rows, source, height, k0 = b.int8_rows, QuantizedPanel(b, strip.k0, strip.depth), kernel.height, strip.k0
    assert rows is not None
    prefetch_values, prefetch_scales = source.plan_streams(strip) if kernel.has_streams else (None, None)
    quad_kernel = _QuadKernel(source, prefetch_values)

    def block(start: Expr, length: int) -> None:
        number = let((k0 + start) // rows.block)
        at = [let((strip.row + i) * rows.blocks + number) for i in range(height)]
        starts = [let((strip.row + i) * rows.quads + (k0 + start) // QUAD) for i in range(height)]
        totals = [T.bind(rows.totals[i]) for i in at]
        dots = quad_kernel.emit(start, length, rows.values, starts, totals)
        offset = source.scale_offset(start)
        if prefetch_scales is not None:
            prefetch_scales(let(start // source.quantized.block))
        zeros, scales = source.load_zeros(offset), source.load_scales(offset)
        for i, row_dots in enumerate(dots):
            row_scale = T.bind(splat(rows.scales[at[i]], b.lanes, "float32"))
            for n, (dot, scale, zero) in enumerate(zip(row_dots, scales, zeros)):
                value = cast(dot, "float32")
                if zero is not None:
                    value = value - zero * splat(totals[i].astype("float32"), b.lanes, "float32")
                position = (strip.tile_row + i) * b.nr + n * b.lanes
                store(tile, load(tile, b.lanes, position) + value * (row_scale * scale), position)

    source.emit_blocks(rows.block, block)


class _QuadKernel:
    """Multiplies a strip of rows by the columns of a panel, in integers.

    Unsigned weights are value + offset. Accumulators start from -offset * (sum of q), which cancels that.
    """

    def __init__(self, source: QuantizedPanel, prefetch_rows: Callable[[Expr], None] | None) -> None:
        self.source, self.b, self.prefetch_rows = source, source.b, prefetch_rows
        self.nibbles, cpu = source.quantized.form.nibbles, self.b.cpu
        self.is_signed = dot_int8.multiplies_signed(cpu, holds_lowest=False)
        self.is_short = self.nibbles and not cpu.int8_dot
        self.offset = 8 if self.nibbles else 0 if self.is_signed else 128
        self.quads = source.quantized.stored_steps // QUAD  # of a column in a stored row

    def emit(
        self, start: Expr, length: int, values: tirx.Buffer, starts: list[Expr], totals: list[Expr]
    ) -> list[list[Expr]]:
        """Emit a block of `length` steps, and return the int32 accumulators of each row by vectors of columns.

        The rows' quads begin at `starts` of values, and `totals` are the sums of q.
        """
        steps = self.source.quantized.stored_steps
        count, first = -(-length // steps), let(start // steps)
        accumulators = [
            [
                Register(splat(total * -self.offset if self.offset else 0, self.b.lanes, "int32"))
                for _ in self.source.vectors
            ]
            for total in totals
        ]
        limit = _SHORT_QUADS // self.quads if self.is_short else count
        for begin in range(0, count, limit):
            row_starts = [start + begin * self.quads for start in starts]
            self.emit_rows(min(limit, count - begin), first + begin, values, row_starts, accumulators)
        return [[register.value for register in row] for row in accumulators]

    def emit_rows(
        self, count: int, first: Expr, values: tirx.Buffer, starts: list[Expr], accumulators: list[list[Register]]
    ) -> None:
        """Accumulate `count` rows of stored elements from row `first` after step k0 on."""
        source, lanes, registers = self.source, self.b.lanes, accumulators
        before = source.panel * source.stored + source.k0 // source.quantized.stored_steps
        if self.is_short:
            registers = [[Register(splat(0, 2 * lanes, "int16")) for _ in row] for row in accumulators]
        with source.iterate_rows(first, count, self.prefetch_rows) as n:
            at = let((before + first + n) * self.b.nr)
            weights = [self.load_quads(at + v) for v in self.source.vectors]
            for quad in range(self.quads):
                for row, row_start in zip(registers, starts):
                    a = T.bind(splat(values[row_start + n * self.quads + quad], lanes, "int32"))
                    for register, of_vector in zip(row, weights):
                        register.value = self.multiply(register.value, of_vector[quad], a)
        if self.is_short:
            for row, short_row in zip(accumulators, registers):
                for register, short in zip(row, short_row):
                    register.value = dot_int8.add_pairs(register.value, short.value)

    def load_quads(self, at: Expr) -> list[Expr]:
        """Load the quads of a vector of columns that are stored at element `at` of a panel."""
        lanes, memory = self.b.lanes, self.b.operands.b
        if not self.nibbles:
            quads = dot_int8.pack_vector(load(memory, QUAD * lanes, at * QUAD))
            return [quads if self.is_signed else let(T.bitwise_xor(quads, splat_like(-0x7F7F7F80, quads)))]
        packed = let(load(memory, lanes, at))
        low = splat_like(0x0F0F0F0F, packed)
        return [let(T.bitwise_and(bits, low)) for bits in (packed, T.shift_right(packed, splat_like(4, packed)))]

    def multiply(self, total: Expr, weights: Expr, a: Expr) -> Expr:
        """Return the accumulator plus quads of weights times quads of rows."""
        if self.is_short:
            return total + dot_int8.multiply_pairs(weights, a)
        multiply = dot_int8.dot_signed if self.is_signed else dot_int8.dot
        return multiply(total, weights, a, self.b.cpu)
