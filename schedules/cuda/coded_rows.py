"""Rows of codes on their way to tensor cores: to a ring in shared memory as they are, and expanded from there."""

from __future__ import annotations

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from . import ptx
from .kv_codes import KvCodes, arriving_bytes, code_bytes
from .ptx import let, registers
from .row_copies import Rows
from .shared_tile import CHUNK, SharedTile


class CodedRows:
    """`rows` of k or v, so many of which make a tile; slots for tiles lie in shared memory from element `start` on.

    A thread expands what it has copied itself: as soon as its own copies are there, whatever others do. Codes lie in
    the order of rows. The threads of a warp have successive chunks, a power of two of them, of each of several rows,
    which are an odd number of such runs long: so they reach every bank as often as any other.
    """

    def __init__(self, codes: KvCodes, rows: Rows, memory: tirx.Buffer, start: Expr | int, count: int) -> None:
        self.codes, self.rows, self.memory, self.start, self.count = codes, rows, memory, start, count
        p = rows.addressing.problem
        self.bytes, self.scale_bytes = code_bytes(p), DataType(codes.codec.scale_dtype).itemsize
        self.size = count * rows.chunks * arriving_bytes(p) // 2
        """Of a slot, in elements of 16 bits."""

    def copy(self, slot: Expr, first: Expr, end: Expr) -> None:
        """Begins to copy a tile, from row `first` on, to a slot; rows from `end` on become zeros, and so do scales."""
        addressing, name, group = self.rows.addressing, self.rows.name, self.codes.codec.group

        def copy_chunk(row: Expr, chunk: Expr, place: Expr, there: Expr | None) -> None:
            buffer, indices = addressing.flat(name, place)
            ptx.copy_chunk(self._code(slot, row, chunk), buffer[tuple(indices)], there, self.bytes)
            if group:
                each = 4 // self.scale_bytes
                scales, indices = addressing.scales(name, tirx.truncdiv(place, group * each) * each)
                ptx.copy_chunk(self._scale(slot, row, chunk), scales[tuple(indices)], there, 4)

        self.rows.find(first, self.count, end, copy_chunk)

    def expand(self, slot: Expr, tile: SharedTile) -> None:
        """tile := the numbers of the tile of codes in a slot, which the thread has waited for."""
        self.rows.each(self.count, lambda row, chunk: self._expand(slot, tile, row, chunk))

    def _expand(self, slot: Expr, tile: SharedTile, row: Expr, chunk: Expr) -> None:
        words, group = registers(self.codes.words, "uint32"), self.codes.codec.group
        ptx.load_shared(words, self._code(slot, row, chunk))
        half = self.codes.expand(words)
        if group:
            word = registers(1, "uint32")
            ptx.load_shared(word, self._scale(slot, row, chunk))
            if self.scale_bytes == 4:
                scale = T.reinterpret("float32", word[0])
            else:  # a row has an even number of them
                odd = tirx.EQ(tirx.truncmod(tirx.truncdiv(chunk * CHUNK, group), 2), 1)
                scale = tirx.Select(odd, *reversed(ptx.unpack("float16", word[0])))
            self.codes.scale(half, [let(scale)] * CHUNK)
        ptx.store_chunk(tile.at(row, chunk), half)

    def _code(self, slot: Expr, row: Expr, chunk: Expr) -> ptx.Element:
        """The first element of the place of a chunk of codes ..."""
        return self.memory[self.start + slot * self.size + (row * self.rows.chunks + chunk) * (self.bytes // 2)]

    def _scale(self, slot: Expr, row: Expr, chunk: Expr) -> ptx.Element:
        """... and of its scale, behind all codes."""
        behind = self.count * self.rows.chunks * (self.bytes // 2)
        return self.memory[self.start + slot * self.size + behind + (row * self.rows.chunks + chunk) * 2]
