"""Matrices of codes (schedules/reading/codes.py), expanded in registers on the way to tensor cores.

Columns lie one behind the other, each with its codes along k: int8, or int32 with 8 codes of 4 bits each. An element is
(code - zero) * scale in float32, rounded to half precision. Codes become floats without a conversion, of which a
SM does few in a cycle: as the low bits of 2^23.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..reading.codes import Codes
from . import ptx
from .chunks import load
from .ptx import let, put
from .shared_tile import CHUNK

_TWO_TO_23 = 0x4B000000  # as a float32, of which the low bits are ones


class Expansion:
    """Of a matrix of codes; `memory` are the function's tensors as vectors."""

    def __init__(self, codes: Codes, dtype: str, memory: Mapping[tirx.Buffer, tirx.Buffer]) -> None:
        self.dtype, self.group, self.bits = dtype, codes.group, codes.bits
        self.memory, self.scale = memory[codes.load.source], memory[codes.scale.source]
        self.zero = None if codes.zero is None else memory[codes.zero.source]
        self.block = codes.block or codes.depth
        self.blocks = -(-codes.depth // self.block)

    @property
    def words(self) -> int:
        """Of 32 bits, that a chunk of codes has."""
        return CHUNK * self.bits // 32

    def fetch(self, to: tirx.Buffer, at: int, place: Expr, chunks: int) -> None:
        """to[at:] := the codes of successive chunks, from number `place` on; uint32."""
        load(to, at, self.memory, self.place(place), chunks * CHUNK // self.group)

    def place(self, number: Expr) -> Expr:
        """Where in memory the code of that number is."""
        return number // self.group

    def scale_and_zero(self, to: tirx.Buffer, column: Expr, k: Expr, there: Expr) -> None:
        """to[0], to[1] := scale and zero of the chunk from k on in a column, float32; 0 where it does not exist."""
        for n in range(2):
            put(to, n, T.float32(0))
        with T.If(there), T.Then():
            place = let((column * self.blocks + k // self.block).astype("int64"))
            put(to, 0, self.scale[place].astype("float32"))
            if self.zero is not None:
                put(to, 1, self.zero[place].astype("float32"))

    def expand(self, to: tirx.Buffer, at: int, codes: tirx.Buffer, start: int, scale_and_zero: tirx.Buffer) -> None:
        """to[at : at + 4] := the eight elements of the chunk codes[start:], two in a word."""
        each = 32 // self.bits
        sign = 1 << self.bits - 1  # which makes of a code in two's complement one of as much more
        signs = sum(sign << self.bits * n for n in range(each))
        words = [let(T.bitwise_xor(codes[start + n], T.uint32(signs))) for n in range(self.words)]

        def element(n: int) -> Expr:
            code = T.bitwise_and(words[n // each] >> T.uint32(n % each * self.bits), T.uint32((1 << self.bits) - 1))
            value = T.reinterpret("float32", T.bitwise_or(code, T.uint32(_TWO_TO_23))) - T.float32((1 << 23) + sign)
            if self.zero is not None:
                value = value - scale_and_zero[1]
            return let(value * scale_and_zero[0])

        for pair in range(CHUNK // 2):
            ptx.pack(self.dtype, to[at + pair], element(2 * pair), element(2 * pair + 1))
