"""The micro-kernel of a matmul by a quantized matrix: integers in blocks, each with a scale (quantized_weights.py)."""

from __future__ import annotations

from collections.abc import Callable
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
    prefetch,
    splat,
    splat_like,
    store,
)

if TYPE_CHECKING:
    from .blocked import BlockedMatmul


class QuantizedPanel:
    """A panel of a quantized matrix from step k0 on: blocks of steps that share scales, and the values of a step."""

    def __init__(self, b: BlockedMatmul, k0: Expr) -> None:
        quantized = b.matmul.quantization
        assert quantized is not None
        self.b, self.quantized, self.k0 = b, quantized, k0
        self.vectors = range(0, b.nr, b.lanes)
        self.panel = let(substitute(quantized.first_panel(b.matmul.j.var), b.values) + b.values[b.results.panel])
        self.stored, self.blocks = quantized.load.source.shape[1], quantized.scale.source.shape[1]

    def emit_blocks(self, depth: Expr, length: int, emit_block: Callable[[Expr, int], None]) -> None:
        """Emit emit_block(start, length) for `depth` steps in blocks of that length; they begin at k0 + start.

        The last block of k is shorter if the length does not divide k.
        """
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
        ahead: int,
        emit: Callable[[Expr, int, Expr], None],
    ) -> None:
        """Emit emit(k, n, values minus zeros of vector n at step k0 + k) for the steps of a block.

        Stored integers are prefetched `ahead` bytes early, if that is not 0.
        """
        b, group = self.b, self.quantized.group
        with T.serial((length + group - 1) // group) as g:
            first = let((self.panel * self.stored + (self.k0 + start) // group + g) * b.nr)
            if ahead:
                prefetch_row(b.operands.b, first, b.nr, ahead)
            packed = [Register(load(b.operands.b, b.lanes, first + v)) for v in self.vectors]
            with T.serial(group if length % group == 0 else tirx.min(group, length - g * group)) as k:
                for n, zero in enumerate(zeros):
                    value = _pop_value(self.quantized, packed[n], b.cpu)
                    emit(start + g * group + k, n, let(value if zero is None else value - zero))


def accumulate_quantized(
    b: BlockedMatmul,
    a: tirx.Buffer,
    starts: list[Expr],
    row: Expr,
    k0: Expr,
    depth: Expr,
    tile: tirx.Buffer,
) -> None:
    """Emit tile[row + i, c] += scale * (sum of A times (value - zero)) for each block of steps from k0 on.

    It is the counterpart of `BlockedMatmul.emit_micro_kernel` for quantized values; row i of A begins at starts[i] of
    `a`.
    """
    source = QuantizedPanel(b, k0)
    is_memory_bound = len(starts) <= b.tiles.waiting_rows
    ahead = b.tiles.ahead if is_memory_bound else 0

    def block(start: Expr, length: int) -> None:
        offset = source.scale_offset(start)
        if source.quantized.block and is_memory_bound:
            prefetch_row(b.operands.memory[source.quantized.scale.source], offset, b.nr, ahead // 4)
        zeros = source.load_zeros(offset)
        c = [[Register(splat(0.0, b.lanes, "float32")) for _ in source.vectors] for _ in starts]

        def add(k: Expr, n: int, b_v: Expr) -> None:
            for row_start, accumulators in zip(starts, c):
                accumulators[n].value += splat(a[row_start + k], b.lanes, "float32") * b_v

        source.emit_steps(start, length, zeros, ahead, add)
        for n, scale in enumerate(source.load_scales(offset)):
            for i, accumulators in enumerate(c):
                at = (row + i) * b.nr + n * b.lanes
                store(tile, load(tile, b.lanes, at) + scale * accumulators[n].value, at)

    source.emit_blocks(depth, source.quantized.block or b.kc, block)


def dequantize_panel(b: BlockedMatmul, k0: Expr, depth: Expr, panel: tirx.Buffer) -> None:
    """Emit panel[k, c] = (value - zero) * scale for the steps from k0 on."""
    source = QuantizedPanel(b, k0)

    def block(start: Expr, length: int) -> None:
        offset = source.scale_offset(start)
        zeros, scales = source.load_zeros(offset), source.load_scales(offset)

        def write(k: Expr, n: int, b_v: Expr) -> None:
            store(panel, b_v * scales[n], k * b.nr + n * b.lanes)

        source.emit_steps(start, length, zeros, b.tiles.ahead, write)

    source.emit_blocks(depth, source.quantized.block or b.dequantized_kc, block)


def prefetch_row(buffer: tirx.Buffer, start: Expr, elements: int, ahead: int) -> None:
    """Prefetch a row of a panel `ahead` bytes early. Processors do so themselves, up to the end of a page."""
    size = DataType(buffer.dtype).itemsize
    for line in range(0, elements * size, LINE):
        prefetch(buffer, start + (ahead + line) // size, level=1)


def _pop_value(quantized: WeightQuantization, stored: Register, cpu: CpuFeatures) -> Expr:
    """Return the quantized value of the lowest k as float32, and shift the packed integers to the next k."""
    if quantized.group == 1:
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
