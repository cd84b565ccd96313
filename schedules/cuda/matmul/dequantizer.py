"""Quantized matrices (schedules/reading/quantized_weights.py), dequantized in registers on the way to tensor cores.

Columns are stored one after another, each with its quantized values along k: int8, or int32 with 8 values of 4 bits
each. An element is (value - zero) * scale in float32, rounded to half precision. Quantized values become floats without
a conversion, of which an SM does few per cycle: they are placed in the low bits of 2^23.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ...reading.quantized_weights import WeightQuantization
from ..elementwise.chunks import load_vector
from ..primitives import ptx
from ..primitives.ptx import let, store_element
from ..primitives.shared_tile import CHUNK

_TWO_TO_23 = 0x4B000000  # as a float32, whose lowest mantissa bit is 1


class Dequantizer:
    """Dequantization of a matrix. `memory` maps the function's tensors to flat views."""

    def __init__(self, quantized: WeightQuantization, dtype: str, memory: Mapping[tirx.Buffer, tirx.Buffer]) -> None:
        self.dtype, self.group, self.bits = dtype, quantized.stored_steps, quantized.bits
        self.memory, self.scale = memory[quantized.load.source], memory[quantized.scale.source]
        self.zero = None if quantized.zero is None else memory[quantized.zero.source]
        self.block = quantized.block or quantized.depth
        self.blocks = -(-quantized.depth // self.block)

    @property
    def registers(self) -> int:
        """Registers of 32 bits of a chunk of quantized values."""
        return CHUNK * self.bits // 32

    def fetch(self, to: tirx.Buffer, at: int, number: Expr, chunks: int) -> None:
        """Load to[at:] := the quantized values of successive chunks, from number `number` on; uint32."""
        load_vector(to, at, self.memory, self.offset(number), chunks * CHUNK // self.group)

    def offset(self, number: Expr) -> Expr:
        """Return the offset in memory of the quantized value with that number."""
        return number // self.group

    def load_scale_and_zero(self, to: tirx.Buffer, column: Expr, k: Expr, exists: Expr) -> None:
        """Load to[0], to[1] := scale and zero point of the chunk from k on in a column, float32; 0 where it does not
        exist.
        """
        for n in range(2):
            store_element(to, n, T.float32(0))
        with T.If(exists), T.Then():
            index = let((column * self.blocks + k // self.block).astype("int64"))
            store_element(to, 0, self.scale[index].astype("float32"))
            if self.zero is not None:
                store_element(to, 1, self.zero[index].astype("float32"))

    def dequantize(
        self, to: tirx.Buffer, at: int, quantized: tirx.Buffer, start: int, scale_and_zero: tirx.Buffer
    ) -> None:
        """Emit to[at : at + 4] := the eight elements of the chunk quantized[start:], two in a register."""
        per_register = 32 // self.bits
        sign = 1 << self.bits - 1  # adding it makes a value in two's complement unsigned
        signs = sum(sign << self.bits * n for n in range(per_register))
        unsigned = [let(T.bitwise_xor(quantized[start + n], T.uint32(signs))) for n in range(self.registers)]

        def element(n: int) -> Expr:
            value = T.bitwise_and(
                unsigned[n // per_register] >> T.uint32(n % per_register * self.bits), T.uint32((1 << self.bits) - 1)
            )
            number = T.reinterpret("float32", T.bitwise_or(value, T.uint32(_TWO_TO_23))) - T.float32((1 << 23) + sign)
            if self.zero is not None:
                number = number - scale_and_zero[1]
            return let(number * scale_and_zero[0])

        for pair in range(CHUNK // 2):
            ptx.pack(self.dtype, to[at + pair], element(2 * pair), element(2 * pair + 1))
