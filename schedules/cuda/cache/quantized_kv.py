"""Quantized keys and values (lowering/attention/record/cache_layout.py), dequantized to the half precision of tensor
cores.

Every int4, int8 and float8_e4m3fn is a number of float16 and of bfloat16 too, so dequantizing rounds nothing. It needs
no conversion, of which an SM does few per cycle, but one addition or multiplication of two numbers at a time. Integers
become the low bits of a power of two, which is subtracted again. Exponent and mantissa of a float8, shifted to those of
half precision, are a number that is too small by a power of two. From sm_89 on, an instruction converts it to float16.

A scale of the tensor is a factor of scores, or of O, in float32; so are scales of the channels of V. Scales of the
channels of K are multiplied into Q, and those of groups into the dequantized values; both round to half precision once.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.expr.emit import widen_to
from lowering.attention.record.problem import AttentionProblem

from ..primitives import ptx
from ..primitives.device import Device
from ..primitives.ptx import alloc_registers, let, store_element, unrolled
from ..primitives.shared_tile import CHUNK

_ONE = {"float16": 0x3C00, "bfloat16": 0x3F80}
_MAGIC = {"float16": 0x6400, "bfloat16": 0x4300}
"""The power of two whose lowest bits count ones: 1024 and 128."""
_SHIFT = {"float16": 1, "bfloat16": 4}
"""The shift of exponent and mantissa of a float8 in the upper byte."""
_REBIAS = {"float16": 0x5C00, "bfloat16": 0x7B80}
"""The power of two that is then missing: 2^8 and 2^120."""
_SIGN, _NAN_BY = 0x8000, 9  # 0x8000 - (0x8000 >> 9) are the bits of a NaN of both


def can_dequantize(problem: AttentionProblem) -> bool:
    """Return whether a quantized problem has rows and groups of whole chunks, and scales that copies of 4 bytes can
    fetch.
    """
    quantization = problem.quantization
    assert quantization is not None
    if problem.head_dim % 16 or problem.v_head_dim % CHUNK or quantization.group % CHUNK:
        return False
    if quantization.group and quantization.scale_dtype != "float32":
        return (
            quantization.scale_dtype == "float16"
            and problem.head_dim % (2 * quantization.group) == problem.v_head_dim % (2 * quantization.group) == 0
        )
    return True


def quantized_chunk_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of the quantized values of a chunk."""
    assert problem.quantization is not None
    return CHUNK // problem.quantization.packing


def staged_chunk_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of a chunk of K or V in shared memory: quantized values with the scale of their group, if
    any.
    """
    quantization = problem.quantization
    return 2 * CHUNK if quantization is None else quantized_chunk_bytes(problem) + (4 if quantization.group else 0)


class KvDequantizer:
    """Dequantization of the cache of a problem on a GPU."""

    def __init__(self, bound: BoundAttention, gpu: Device) -> None:
        quantization = bound.problem.quantization
        assert quantization is not None
        self.bound, self.quantization, self.dtype = bound, quantization, bound.problem.dtype
        self.converts = gpu.generation >= 89 and self.dtype == "float16"
        self.registers = quantized_chunk_bytes(bound.problem) // 4
        """Registers of 32 bits of the quantized values of a chunk."""

    def dequantize(self, quantized: tirx.Buffer) -> tirx.Buffer:
        """Return the numbers of a chunk before scaling, two in a register."""
        half = alloc_registers(CHUNK // 2, "uint32")
        convert = {"int8": self._int8, "float8_e4m3fn": self._float8, "int4": self._int4}[self.quantization.dtype]
        numbers = [number for n in range(self.registers) for number in convert(quantized[n])]
        for n, number in enumerate(numbers):
            store_element(half, n, number)
        return half

    def apply_scales(self, half: tirx.Buffer, scales: list[Expr]) -> None:
        """Multiply the numbers in `half` by scales, and round."""
        for n in range(CHUNK // 2):
            low, high = (let(x) for x in ptx.unpack(self.dtype, half[n]))
            ptx.pack(self.dtype, half[n], low * scales[2 * n], high * scales[2 * n + 1])

    # Pairs of numbers from the quantized values of a register, in order.

    def _int8(self, packed: Expr) -> list[Expr]:
        if self.dtype == "float16":
            packed = let(T.bitwise_xor(packed, T.uint32(0x80808080)))
            pairs = [ptx.permute(packed, _twice(_MAGIC["float16"] >> 8, 8), selector) for selector in (0x4140, 0x4342)]
            return [self._fma(pair, _twice(_ONE["float16"]), _twice(0xE480)) for pair in pairs]  # less 1024 + 128
        numbers = []
        for selector in (0x4140, 0x4342):
            pair = ptx.permute(packed, T.uint32(0), selector)
            # The sign bit turns 128 into 256.
            low = T.bitwise_or(T.bitwise_and(pair, _twice(0x7F)), _twice(_MAGIC["bfloat16"]))
            sign = T.bitwise_or(T.bitwise_and(pair, _twice(0x80)), _twice(_SIGN | _MAGIC["bfloat16"]))
            numbers.append(self._fma(low, _twice(_ONE["bfloat16"]), sign))
        return numbers

    def _int4(self, packed: Expr) -> list[Expr]:
        magic = _MAGIC[self.dtype]
        numbers = []
        for byte in range(4):
            pair = ptx.permute(packed, T.uint32(0), 0x4040 | byte << 8 | byte)
            low, high = T.bitwise_and(pair, T.uint32(0xF)), T.bitwise_and(pair >> T.uint32(4), T.uint32(0xF0000))
            biased = T.bitwise_or(T.bitwise_or(low, high), _twice(magic))
            numbers.append(self._fma(biased, _twice(_ONE[self.dtype]), _twice(_SIGN | magic | 8)))
        return numbers

    def _float8(self, packed: Expr) -> list[Expr]:
        if self.converts:
            return [ptx.from_float8((packed >> T.uint32(16 * n)).astype("uint16")) for n in range(2)]
        numbers = []
        for selector in (0x1404, 0x3424):
            pair = ptx.permute(packed, T.uint32(0), selector)
            magnitude = let(T.bitwise_and(pair, _twice(0x7F00)))
            sign = T.bitwise_and(pair, _twice(_SIGN))
            shifted = T.bitwise_or(magnitude >> T.uint32(_SHIFT[self.dtype]), sign)
            number = self._fma(shifted, _twice(_REBIAS[self.dtype]), _twice(_SIGN))
            nan = let(T.bitwise_and(magnitude + _twice(0x100), _twice(_SIGN)))
            numbers.append(let(T.bitwise_or(number, nan - (nan >> T.uint32(_NAN_BY)))))
        return numbers

    def _fma(self, a: Expr, b: Expr, c: Expr) -> Expr:
        return ptx.fma_pair(self.dtype, a, b, c)

    # Scales outside of the dequantized values.

    @property
    def in_query(self) -> bool:
        """Whether Q is to be multiplied by scales of K."""
        return self.quantization.channels

    def scale_query(self, address: ptx.Element, hk: Expr, chunk: Expr) -> None:
        """Multiply a chunk of a row of Q in shared memory by the scales of the channels of K."""
        packed = alloc_registers(CHUNK // 2, "uint32")
        ptx.load_shared(packed, address)
        self.apply_scales(packed, [self._channel("k", hk, chunk * CHUNK + n) for n in range(CHUNK)])
        ptx.store_chunk(address, packed)

    def scale_values(self, O: tirx.Buffer, hk: Expr, lane: Expr) -> None:
        """Multiply O by the scales of V that all keys share; O is laid out as in fragments.py.

        Elements without contributions are 0 and stay 0, whatever the scale.
        """
        if self.quantization.group:
            return
        tensor = self.bound.addressing.tensor_scale("v")
        factor = None if tensor is None else let(tensor)
        with unrolled(int(O.shape[0]) // 4) as column, unrolled(4) as x:
            at = column * 4 + x
            scale = factor
            if scale is None:
                scale = self._channel("v", hk, column * CHUNK + lane % 4 * 2 + x % 2)
            store_element(O, at, tirx.Select(tirx.EQ(O[at], T.float32(0)), O[at], O[at] * scale))

    def _channel(self, name: str, hk: Expr, d: Expr) -> Expr:
        buffer, indices = self.bound.addressing.channel_scales(name, hk, d)
        return widen_to(buffer[tuple(indices)], "float32")


def _twice(half: int, bits: int = 16) -> Expr:
    """Return the bits in both halves of a 32-bit word, or in all of its bytes."""
    return T.uint32(sum(half << n for n in range(0, 32, bits)))
