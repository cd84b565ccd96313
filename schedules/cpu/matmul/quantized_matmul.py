"""The micro-kernel of a matmul by a quantized matrix: integers in blocks, each with a scale (quantized_weights.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, substitute

from ...reading.quantized_weights import WeightQuantization
from ..primitives.vector import (
    LINE,
    CpuFeatures,
    Register,
    cast,
    convert,
    element_type,
    let,
    load,
    splat,
    splat_like,
    store,
)
from .prefetch_share import PrefetchShare

if TYPE_CHECKING:
    from .blocked import BlockedMatmul
    from .strips import MicroKernel, Strip


_LINES = 4
"""Cache lines of stored values that a call prefetches."""

_STREAMED_PANELS = 64 << 10
"""Bytes of the panels that are prefetched as one: eight streams of two pages each."""


class QuantizedPanel:
    """A panel of a quantized matrix in `depth` steps from k0 on: blocks that share scales, and the values of a step."""

    def __init__(self, b: BlockedMatmul, k0: Expr, depth: Expr) -> None:
        quantized = b.matmul.quantization
        assert quantized is not None
        self.b, self.quantized, self.k0, self.depth = b, quantized, k0, depth
        self.vectors = range(0, b.nr, b.lanes)
        self.panel = let(substitute(quantized.first_panel(b.matmul.j.var), b.values) + b.values[b.results.panel])
        self.stored, self.blocks = quantized.load.source.shape[1], quantized.scale.source.shape[1]

    def plan_streams(self, strip: Strip) -> tuple[Callable[[Expr], None], Callable[[Expr], None] | None]:
        """Return functions that prefetch a row of stored values, and of scales if blocks have their own.

        Their argument is the number of the row after step k0. A call serves several rows of `iterate_rows`. A strip
        prefetches its share of what follows the steps.
        """
        quantized, buffer, form = self.quantized, self.b.operands.b, self.quantized.form
        size = int(self.stored) * quantized.stored_width * DataType(buffer.dtype).itemsize
        panels = max(_STREAMED_PANELS // max(size, 1), 1)  # that are one block of rows

        def plan(buffer: tirx.Buffer, steps: int, rows: int, width: int, rows_per_call: int) -> Callable[[Expr], None]:
            """Return the function for a panel's rows of `width` elements and so many steps."""
            depth, before = let((self.depth + (steps - 1)) // steps), self.k0 // steps
            following, skipped = self.panel * rows + before + depth, tirx.const(0, "int64")
            if panels > 1:
                depth, skipped = tirx.const(panels * rows, "int64"), let(self.panel % panels * rows + before)
                following = (self.panel // panels + 1) * depth
            share = PrefetchShare(
                buffer,
                let(following * width),
                depth=let((depth + (rows_per_call - 1)) // rows_per_call),
                width=width * rows_per_call,
                number=strip.number,
                count=strip.count,
            )
            prefetch_lines = share.plan_streams()
            return lambda row: prefetch_lines(let((skipped + row) // rows_per_call))

        rows_per_call = self.count_prefetched_rows()
        values = plan(buffer, quantized.stored_steps, int(self.stored), quantized.stored_width, rows_per_call)
        if not form.block:
            return values, None
        return values, plan(self.b.operands.memory[quantized.scale.source], form.block, int(self.blocks), form.nr, 1)

    def count_prefetched_rows(self) -> int:
        """Return how many rows of stored values a call prefetches: up to four cache lines, which share the arithmetic.

        It is a power of two, as most blocks are.
        """
        width, buffer = self.quantized.stored_width, self.b.operands.b
        rows = max(_LINES * LINE // (width * DataType(buffer.dtype).itemsize), 1)
        return 1 << (rows.bit_length() - 1)

    @contextmanager
    def iterate_rows(self, first: Expr, count: int, prefetch_rows: Callable[[Expr], None] | None) -> Iterator[Expr]:
        """Emit a loop over `count` rows from row `first` after step k0 on, with calls of prefetch_rows."""
        rows_per_call = 1 if prefetch_rows is None else math.gcd(count, self.count_prefetched_rows())
        with T.serial(tirx.const(count // rows_per_call, "int64")) as number:
            if prefetch_rows is not None:
                prefetch_rows(let(first + number * rows_per_call))
            with T.serial(tirx.const(rows_per_call, "int64")) as row:
                yield number * rows_per_call + row

    def emit_blocks(self, length: int, emit_block: Callable[[Expr, int], None]) -> None:
        """Emit emit_block(start, length) for the steps in blocks of that length; they begin at k0 + start.

        The last block of k is shorter if the length does not divide k.
        """
        depth = self.depth
        with T.serial(depth // length) as n:
            emit_block(n * length, length)
        rest = self.b.matmul.k.extent.value % length
        if rest:
            with T.If(depth % length != 0), T.Then():
                emit_block(depth - rest, rest)

    def scale_offset(self, start: Expr) -> Expr:
        """Return the offset of the scales and zero points of the block at k0 + start."""
        number = (self.k0 + start) // self.quantized.block if self.quantized.block else 0
        return let((self.panel * self.blocks + number) * self.b.nr)

    def load_scales(self, offset: Expr) -> list[Expr]:
        """Load a block's scales in float32."""
        memory = self.b.operands.memory[self.quantized.scale.source]
        return [T.bind(_load_widened(memory, self.b.lanes, offset + v, self.b.cpu)) for v in self.vectors]

    def load_zeros(self, offset: Expr) -> list[Expr] | list[None]:
        """Load a block's zero points in float32; None where they are 0."""
        if self.quantized.zero is None:
            return [None for _ in self.vectors]
        memory = self.b.operands.memory[self.quantized.zero.source]
        return [T.bind(_load_widened(memory, self.b.lanes, offset + v, self.b.cpu)) for v in self.vectors]

    def emit_steps(
        self,
        start: Expr,
        length: int,
        zeros: list[Expr] | list[None],
        emit: Callable[[Expr, int, Expr], None],
        prefetch_rows: Callable[[Expr], None] | None = None,
    ) -> None:
        """Emit emit(k, n, values minus zeros of vector n at step k0 + k) for the steps of a block."""
        b, group = self.b, self.quantized.stored_steps
        with self.iterate_rows(start // group, (length + group - 1) // group, prefetch_rows) as g:
            first = let((self.panel * self.stored + (self.k0 + start) // group + g) * b.nr)
            packed = [Register(load(b.operands.b, b.lanes, first + v)) for v in self.vectors]
            with T.serial(group if length % group == 0 else tirx.min(group, length - g * group)) as k:
                for n, zero in enumerate(zeros):
                    value = _pop_value(self.quantized, packed[n], b.cpu)
                    emit(start + g * group + k, n, let(value if zero is None else value - zero))


def accumulate_quantized(
    b: BlockedMatmul, kernel: MicroKernel, strip: Strip, a: tirx.Buffer, starts: list[Expr], tile: tirx.Buffer
) -> None:
    """Emit tile[tile_row + i, c] += scale * (sum of A times (value - zero)) for each block of the strip's steps.

    It is the counterpart of `BlockedMatmul.emit_micro_kernel` for quantized values; row i of A begins at starts[i] of
    `a`.
    """
    source = QuantizedPanel(b, strip.k0, strip.depth)
    prefetch_values, prefetch_scales = source.plan_streams(strip) if kernel.has_streams else (None, None)

    def block(start: Expr, length: int) -> None:
        offset = source.scale_offset(start)
        if prefetch_scales is not None:
            prefetch_scales(let(start // source.quantized.block))
        zeros = source.load_zeros(offset)
        c = [[Register(splat(0.0, b.lanes, "float32")) for _ in source.vectors] for _ in starts]

        def add(k: Expr, n: int, b_v: Expr) -> None:
            for row_start, accumulators in zip(starts, c):
                accumulators[n].value += splat(a[row_start + k], b.lanes, "float32") * b_v

        source.emit_steps(start, length, zeros, add, prefetch_values)
        for n, scale in enumerate(source.load_scales(offset)):
            for i, accumulators in enumerate(c):
                at = (strip.tile_row + i) * b.nr + n * b.lanes
                store(tile, load(tile, b.lanes, at) + scale * accumulators[n].value, at)

    source.emit_blocks(source.quantized.block or min(b.kc, b.streamed_kc), block)


def dequantize_panel(b: BlockedMatmul, k0: Expr, depth: Expr, panel: tirx.Buffer) -> None:
    """Emit panel[k, c] = (value - zero) * scale for the steps from k0 on."""
    source = QuantizedPanel(b, k0, depth)

    def block(start: Expr, length: int) -> None:
        offset = source.scale_offset(start)
        zeros, scales = source.load_zeros(offset), source.load_scales(offset)

        def write(k: Expr, n: int, b_v: Expr) -> None:
            store(panel, b_v * scales[n], k * b.nr + n * b.lanes)

        source.emit_steps(start, length, zeros, write)

    source.emit_blocks(source.quantized.block or b.dequantized_kc, block)


def _pop_value(quantized: WeightQuantization, stored: Register, cpu: CpuFeatures) -> Expr:
    """Return the quantized value of the lowest k as float32, and shift the packed integers to the next k."""
    if not quantized.form.nibbles:
        return cast(stored.value, "float32")
    bits = let(stored.value)
    stored.value = T.shift_right(bits, splat_like(4, bits))
    if cpu.vector_bytes == 64:
        # A table of 16 floats in one register, indexed by the lowest four bits of each lane.
        table = tirx.Shuffle([T.float32(value if value < 8 else value - 16) for value in range(16)], list(range(16)))
        return T.call_llvm_pure_intrin("float32x16", "llvm.x86.avx512.permvar.sf.512", table, bits)
    return cast(T.shift_right(T.shift_left(bits, splat_like(28, bits)), splat_like(28, bits)), "float32")


def _load_widened(memory: tirx.Buffer, lanes: int, start: Expr, cpu: CpuFeatures) -> Expr:
    """Load a vector of scales or zero points in float32."""
    vector = load(memory, lanes, start)
    return cast(vector, "float32") if element_type(vector) == "int8" else convert(vector, "float32", cpu)
