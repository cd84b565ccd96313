"""Rows of A, quantized to int8 for matmuls by quantized weights that are stored in quads (quantized_weights.py).

The values of a block of successive k become integers q from -127 to 127 and a scale, the largest magnitude / 127:

    x ~ q * scale,    error at most scale / 2

A block of weights with scale s and zero point z adds  scale * s * (sum of q w - z * sum of q)  to an element of C
(int8_matmul.py), so the sum of q is stored, too. All panels of B read the same rows, so they are quantized first. If a
block has an infinity or NaN, its scale is not finite, and all elements of C in that row become infinite or NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, substitute

from ...reading.quantized_weights import NIBBLES, QUAD
from ...reading.values import load_widened
from ..elementwise.loops import split_among_threads
from ..primitives.vector import (
    CpuFeatures,
    allocate_workspace,
    cast,
    convert,
    let,
    load,
    reduce_lanes,
    reinterpret,
    splat,
    store,
    vector_type,
)

if TYPE_CHECKING:
    from .blocked import BlockedMatmul

# The block of a row where weights share a scale over more than _LONGEST values, or a whole column. Other blocks are
# those of the weights, which are multiples of the nibbles of an int32.
_BLOCK = 32
_LONGEST = 128

# Bits of float32 numbers. Magnitudes below 2^-120 become 0, as 127 divided by them might be infinite.
_MAGNITUDE, _TINY, _INFINITY = 0x7FFFFFFF, 7 << 23, 0x7F800000
# Adding 1.5 * 2^23 rounds a small number to an integer, which is then in the lowest bits.
_ROUND = 12582912.0


def choose_row_block(block: int, cpu: CpuFeatures) -> int:
    """Return how many values of a row share a scale for weights of that block (0: a column).

    Return 0 if the machine multiplies bytes no faster than floats, or if the block is neither a multiple of 8 up to 128
    nor one of 32.
    """
    if not cpu.int8_dot and cpu.vector_bytes < 32:
        return 0
    if 0 < block <= _LONGEST and block % NIBBLES == 0:
        return block
    return _BLOCK if block % _BLOCK == 0 else 0


class Int8Rows:
    """The quantized rows of A of a matmul.

    Attributes:
        block: Values of k that share a scale.
        values: int32 [rows * quads]: q, four of them in each integer; 0 after the last k.
        scales: float32 [rows * blocks].
        totals: int32 [rows * blocks]: the sum of q of each block.
    """

    values: tirx.Buffer
    scales: tirx.Buffer
    totals: tirx.Buffer

    def __init__(self, b: BlockedMatmul) -> None:
        assert b.matmul.quantization is not None
        self.b, self.block = b, choose_row_block(b.matmul.quantization.block, b.cpu)
        self.rows, self.depth = b.results.rows, int(b.matmul.k.extent)
        self.blocks = -(-self.depth // self.block)
        self.quads = self.blocks * self.block // QUAD

    def serves(self, b: BlockedMatmul) -> bool:
        """Return whether another matmul multiplies the same rows in the same blocks."""
        assert b.matmul.quantization is not None
        if b.matmul.a.source is not self.b.matmul.a.source or b.k.extent.value != self.depth:
            return False
        names = {b.results.m: self.b.results.m, b.k.var: self.b.k.var}
        has_same_offset = prim.expr_deep_equal(substitute(b.a_offsets[0], names), self.b.a_offsets[0])
        return has_same_offset and choose_row_block(b.matmul.quantization.block, b.cpu) == self.block

    def list_buffers(self) -> dict[str, tuple[Expr, str]]:
        """Return the number and type of the elements of each buffer."""
        values, blocks = self.rows * self.quads, self.rows * self.blocks
        return {"values": (values, "int32"), "scales": (blocks, "float32"), "totals": (blocks, "int32")}

    def emit(self) -> None:
        """Quantize the rows, among threads."""
        whole, rest = divmod(self.depth, self.block)

        def quantize_row(row: Expr) -> None:
            with T.serial(tirx.const(whole, "int64")) as n:
                self.quantize_block(row, n, self.block)
            if rest:
                self.quantize_block(row, tirx.const(whole, "int64"), rest)

        split_among_threads(self.rows, self.rows * self.depth, self.b.tiles.parallel_work, quantize_row)

    def quantize_block(self, row: Expr, n: Expr, length: int) -> None:
        """Quantize block n of a row, which has `length` values."""
        vectors = self.load_block(row, n, length)
        magnitudes = [
            let(T.bitwise_and(reinterpret(x, "int32"), splat(_MAGNITUDE, self.lanes, "int32"))) for x in vectors
        ]
        # As integers, NaN is more than infinity, and infinity more than all numbers.
        most = magnitudes[0]
        for magnitude in magnitudes[1:]:
            most = let(T.max(most, magnitude))
        bits = reduce_lanes(most, T.max)
        largest, zero = let(reinterpret(bits, "float32")), tirx.const(0, "float32")
        is_regular = tirx.all(bits >= _TINY, bits < _INFINITY)
        inverse = let(tirx.Select(is_regular, tirx.const(127, "float32") / largest, zero))
        at = let(row * self.blocks + n)
        store(self.scales, tirx.Select(bits >= _TINY, largest * tirx.const(1 / 127, "float32"), zero), at)
        total = None
        for i, x in enumerate(vectors):
            rounded = x * splat(inverse, self.lanes, "float32") + splat(_ROUND, self.lanes, "float32")
            q = let(cast(reinterpret(rounded, "int32"), "int8"))
            quads = T.reinterpret(vector_type("int32", self.lanes // QUAD), q)
            store(self.values, quads, row * self.quads + (n * self.block + i * self.lanes) // QUAD)
            total = let(cast(q, "int32") if total is None else total + cast(q, "int32"))
        store(self.totals, reduce_lanes(total, lambda x, y: x + y), at)

    @property
    def lanes(self) -> int:
        """The vectors' lanes: as many as divide a block."""
        lanes = self.b.lanes
        while self.block % lanes:
            lanes //= 2
        return lanes

    def load_block(self, row: Expr, n: Expr, length: int) -> list[Expr]:
        """Load a block of A in float32, with zeros after its last value."""
        b, memory, first = self.b, self.b.operands.a, n * self.block
        starts = range(0, self.block, self.lanes)
        if length == self.block and b.is_dense(b.a_offsets, b.k.var, 1):
            start = let(b.bind_offset(b.a_offsets[0], m=row, k=first))
            return [let(convert(load(memory, self.lanes, start + i), "float32", b.cpu)) for i in starts]
        copy = allocate_workspace(block=(self.block, "float32"))["block"]
        with T.serial(tirx.const(length, "int64")) as i:
            store(copy, load_widened(memory, b.bind_offset(b.a_offsets[0], m=row, k=first + i)), i)
        with T.serial(tirx.const(self.block - length, "int64")) as i:
            store(copy, tirx.const(0, "float32"), length + i)
        return [let(load(copy, self.lanes, i)) for i in starts]


def quantize_rows(matmuls: list[BlockedMatmul]) -> None:
    """Quantize the rows of the matmuls whose weights are stored in quads, those of several matmuls once."""
    quantized: list[Int8Rows] = []
    for b in matmuls:
        if b.has_int8_rows:
            b.int8_rows = next((rows for rows in quantized if rows.serves(b)), None) or Int8Rows(b)
            if b.int8_rows not in quantized:
                quantized.append(b.int8_rows)
    if not quantized:
        return
    # One block of memory: TVM sees no use of memory through views.
    sizes = {f"{name}{n}": size for n, rows in enumerate(quantized) for name, size in rows.list_buffers().items()}
    memory = allocate_workspace(**sizes)
    for n, rows in enumerate(quantized):
        rows.values, rows.scales, rows.totals = (memory[f"{name}{n}"] for name in ("values", "scales", "totals"))
        rows.emit()
