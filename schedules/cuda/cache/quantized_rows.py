"""Quantized rows on their way to tensor cores: copied unchanged to a ring in shared memory, and dequantized from
there.
"""

from __future__ import annotations

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..primitives import ptx
from ..primitives.ptx import alloc_registers, let
from ..primitives.shared_tile import CHUNK, SharedTile
from .quantized_kv import KvDequantizer, quantized_chunk_bytes, staged_chunk_bytes
from .row_copies import RowCopies


class QuantizedRows:
    """`rows` of k or v, `count` of which make a tile. Slots for tiles are in shared memory from element `start` on.

    A thread dequantizes the chunks that it has copied itself, as soon as its own copies have arrived. Quantized values
    are in the order of rows. The threads of a warp have successive chunks, a power of two of them, of each of several
    rows. A row has an odd number of such runs, so all banks are accessed equally often.
    """

    def __init__(
        self, dequantizer: KvDequantizer, rows: RowCopies, memory: tirx.Buffer, start: Expr | int, count: int
    ) -> None:
        self.dequantizer, self.rows, self.memory, self.start, self.count = dequantizer, rows, memory, start, count
        p = rows.addressing.problem
        self.bytes, self.scale_bytes = quantized_chunk_bytes(p), DataType(dequantizer.quantization.scale_dtype).itemsize
        self.size = count * rows.chunks * staged_chunk_bytes(p) // 2
        """Elements of 16 bits in a slot."""

    def copy(self, slot: Expr, first: Expr, end: Expr) -> None:
        """Begin to copy a tile, from row `first` on, to a slot; rows from `end` on become zeros, and so do their
        scales.
        """
        addressing, name, group = self.rows.addressing, self.rows.name, self.dequantizer.quantization.group

        def copy_chunk(row: Expr, chunk: Expr, offset: Expr, exists: Expr | None) -> None:
            buffer, indices = addressing.flat(name, offset)
            ptx.copy_chunk(self._values_at(slot, row, chunk), buffer[tuple(indices)], exists, self.bytes)
            if group:
                scales_per_copy = 4 // self.scale_bytes
                scales, indices = addressing.scales(
                    name, tirx.truncdiv(offset, group * scales_per_copy) * scales_per_copy
                )
                ptx.copy_chunk(self._scale_at(slot, row, chunk), scales[tuple(indices)], exists, 4)

        self.rows.visit_addresses(first, self.count, end, copy_chunk)

    def dequantize(self, slot: Expr, tile: SharedTile) -> None:
        """Write to `tile` the dequantized values of a slot, which the thread has waited for."""
        self.rows.visit_chunks(self.count, lambda row, chunk: self._dequantize_chunk(slot, tile, row, chunk))

    def _dequantize_chunk(self, slot: Expr, tile: SharedTile, row: Expr, chunk: Expr) -> None:
        packed, group = alloc_registers(self.dequantizer.registers, "uint32"), self.dequantizer.quantization.group
        ptx.load_shared(packed, self._values_at(slot, row, chunk))
        half = self.dequantizer.dequantize(packed)
        if group:
            scale_bits = alloc_registers(1, "uint32")
            ptx.load_shared(scale_bits, self._scale_at(slot, row, chunk))
            if self.scale_bytes == 4:
                scale = T.reinterpret("float32", scale_bits[0])
            else:  # a row has an even number of them
                is_odd = tirx.EQ(tirx.truncmod(tirx.truncdiv(chunk * CHUNK, group), 2), 1)
                scale = tirx.Select(is_odd, *reversed(ptx.unpack("float16", scale_bits[0])))
            self.dequantizer.apply_scales(half, [let(scale)] * CHUNK)
        ptx.store_chunk(tile.at(row, chunk), half)

    def _values_at(self, slot: Expr, row: Expr, chunk: Expr) -> ptx.Element:
        """Return the first element of a chunk of quantized values."""
        return self.memory[self.start + slot * self.size + (row * self.rows.chunks + chunk) * (self.bytes // 2)]

    def _scale_at(self, slot: Expr, row: Expr, chunk: Expr) -> ptx.Element:
        """Return the scale of a chunk, stored after all quantized values."""
        scales_start = self.count * self.rows.chunks * (self.bytes // 2)
        return self.memory[self.start + slot * self.size + scales_start + (row * self.rows.chunks + chunk) * 2]
