"""The micro-kernel of a matmul by a quantized matrix: integers in blocks, each with a scale (codes.py)."""

from __future__ import annotations

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


def accumulate_quantized(
    b: BlockedMatmul,
    quantized: WeightQuantization,
    a: tirx.Buffer,
    starts: list[Expr],
    row: Expr,
    k0: Expr,
    depth: Expr,
    tile: tirx.Buffer,
) -> None:
    """Emit tile[row + i, c] += scale * (sum of A times (value - zero)) for each block of steps from k0 on.

    It is the counterpart of `Blocked.micro_kernel` for quantized values; row i of A begins at starts[i] of `a`.
    """
    cpu = b.cpu
    vectors, group = range(0, b.nr, b.lanes), quantized.group
    panel = let(substitute(quantized.first_panel(b.matmul.j.var), b.values) + b.values[b.results.panel])
    stored, blocks = quantized.load.source.shape[1], quantized.scale.source.shape[1]
    memory = b.operands.memory
    block_length = quantized.block or b.kc  # the length of a block

    is_memory_bound = len(starts) <= b.tiles.waiting_rows

    def block(start: Expr, length: int) -> None:
        """Emit the block that begins at k0 + start."""
        scale_offset = let((panel * blocks + ((k0 + start) // quantized.block if quantized.block else 0)) * b.nr)
        if quantized.block and is_memory_bound:
            _prefetch_row(memory[quantized.scale.source], scale_offset, b.nr, b.tiles.ahead // 4)
        zeros = [
            T.bind(_load_widened(memory[quantized.zero.source], b.lanes, scale_offset + v, cpu))
            if quantized.zero is not None
            else None
            for v in vectors
        ]
        c = [[Register(splat(0.0, b.lanes, "float32")) for _ in vectors] for _ in starts]

        with T.serial((length + group - 1) // group) as g:
            first = let((panel * stored + (k0 + start) // group + g) * b.nr)
            if is_memory_bound:
                _prefetch_row(b.operands.b, first, b.nr, b.tiles.ahead)
            packed = [Register(load(b.operands.b, b.lanes, first + v)) for v in vectors]
            with T.serial(group if length % group == 0 else tirx.min(group, length - g * group)) as k:
                for n, zero in enumerate(zeros):
                    value = _pop_value(quantized, packed[n], cpu)
                    b_v = let(value if zero is None else value - zero)
                    for row_start, accumulators in zip(starts, c):
                        a_ik = splat(a[row_start + start + g * group + k], b.lanes, "float32")
                        accumulators[n].value += a_ik * b_v
        for n, v in enumerate(vectors):
            scale = T.bind(_load_widened(memory[quantized.scale.source], b.lanes, scale_offset + v, cpu))
            for i, accumulators in enumerate(c):
                at = (row + i) * b.nr + v
                store(tile, load(tile, b.lanes, at) + scale * accumulators[n].value, at)

    with T.serial(depth // block_length) as n:
        block(n * block_length, block_length)
    rest = b.matmul.k.extent.value % block_length
    if rest:
        with T.If(depth % block_length != 0), T.Then():
            block(depth - rest, rest)


def _prefetch_row(buffer: tirx.Buffer, start: Expr, elements: int, ahead: int) -> None:
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
