"""Codes of keys and values (lowering/attention/cache_layout.py), expanded to the half precision that tensor cores
multiply.

Every int4, int8 and float8_e4m3fn is a number of float16 and of bfloat16 too: expanding rounds nothing. It takes no
conversion, of which an SM does few in a cycle, but a sum or product of two numbers at a time: integers
become the low bits of a power of two, which is taken off again; exponent and mantissa of a float8, put where those of
half precision are, are a number that is too small by a power of two. From sm_89 on an instruction makes float16 of it.

A scale of the tensor is a factor of scores, or of O, in float32; so are scales of the channels of V. Scales of the
channels of K go into Q, and those of groups into what is expanded, both of which round to half precision once.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.expr.emit import widened
from lowering.attention.problem import AttentionProblem

from . import ptx
from .device import Device
from .ptx import let, put, registers, unrolled
from .shared_tile import CHUNK

_ONE = {"float16": 0x3C00, "bfloat16": 0x3F80}
_MAGIC = {"float16": 0x6400, "bfloat16": 0x4300}
"""The power of two whose lowest bits count ones: 1024 and 128."""
_SHIFT = {"float16": 1, "bfloat16": 4}
"""By which exponent and mantissa of a float8 in the upper byte are moved ..."""
_REBIAS = {"float16": 0x5C00, "bfloat16": 0x7B80}
""" ... and the power of two that is then missing: 2^8 and 2^120."""
_SIGN, _NAN_BY = 0x8000, 9  # 0x8000 - (0x8000 >> 9) are the bits of a NaN of both


def takes(problem: AttentionProblem) -> bool:
    """Whether a problem over codes has rows and groups of whole chunks, and scales that copies of 4 bytes can fetch."""
    codec = problem.codec
    assert codec is not None
    if problem.head_dim % 16 or problem.v_head_dim % CHUNK or codec.group % CHUNK:
        return False
    if codec.group and codec.scale_dtype != "float32":
        return (
            codec.scale_dtype == "float16"
            and problem.head_dim % (2 * codec.group) == problem.v_head_dim % (2 * codec.group) == 0
        )
    return True


def code_bytes(problem: AttentionProblem) -> int:
    """Of the codes of a chunk."""
    assert problem.codec is not None
    return CHUNK // problem.codec.packing


def arriving_bytes(problem: AttentionProblem) -> int:
    """In which a chunk of K or V comes to shared memory: codes with the scale of their group, if they have one."""
    codec = problem.codec
    return 2 * CHUNK if codec is None else code_bytes(problem) + (4 if codec.group else 0)


class KvCodes:
    """The codes of a problem on a GPU."""

    def __init__(self, bound: Bound, gpu: Device) -> None:
        codec = bound.problem.codec
        assert codec is not None
        self.bound, self.codec, self.dtype = bound, codec, bound.problem.dtype
        self.converts = gpu.generation >= 89 and self.dtype == "float16"
        self.words = code_bytes(bound.problem) // 4
        """Of the codes of a chunk, 32 bits each."""

    def expand(self, codes: tirx.Buffer) -> tirx.Buffer:
        """The numbers of a chunk before their scale, two in a word."""
        half = registers(CHUNK // 2, "uint32")
        make = {"int8": self._int8, "float8_e4m3fn": self._float8, "int4": self._int4}[self.codec.dtype]
        numbers = [number for n in range(self.words) for number in make(codes[n])]
        for n, number in enumerate(numbers):
            put(half, n, number)
        return half

    def scale(self, half: tirx.Buffer, scales: list[Expr]) -> None:
        """half := its numbers times these, rounded."""
        for n in range(CHUNK // 2):
            low, high = (let(x) for x in ptx.unpack(self.dtype, half[n]))
            ptx.pack(self.dtype, half[n], low * scales[2 * n], high * scales[2 * n + 1])

    # Pairs of numbers from the codes of a word, which come in order.

    def _int8(self, word: Expr) -> list[Expr]:
        if self.dtype == "float16":
            word = let(T.bitwise_xor(word, T.uint32(0x80808080)))
            pairs = [ptx.permute(word, _twice(_MAGIC["float16"] >> 8, 8), place) for place in (0x4140, 0x4342)]
            return [self._fma(pair, _twice(_ONE["float16"]), _twice(0xE480)) for pair in pairs]  # less 1024 + 128
        numbers = []
        for place in (0x4140, 0x4342):
            pair = ptx.permute(word, T.uint32(0), place)
            # The bit of the sign makes 256 of 128.
            low = T.bitwise_or(T.bitwise_and(pair, _twice(0x7F)), _twice(_MAGIC["bfloat16"]))
            sign = T.bitwise_or(T.bitwise_and(pair, _twice(0x80)), _twice(_SIGN | _MAGIC["bfloat16"]))
            numbers.append(self._fma(low, _twice(_ONE["bfloat16"]), sign))
        return numbers

    def _int4(self, word: Expr) -> list[Expr]:
        magic = _MAGIC[self.dtype]
        numbers = []
        for byte in range(4):
            pair = ptx.permute(word, T.uint32(0), 0x4040 | byte << 8 | byte)
            low, high = T.bitwise_and(pair, T.uint32(0xF)), T.bitwise_and(pair >> T.uint32(4), T.uint32(0xF0000))
            code = T.bitwise_or(T.bitwise_or(low, high), _twice(magic))
            numbers.append(self._fma(code, _twice(_ONE[self.dtype]), _twice(_SIGN | magic | 8)))
        return numbers

    def _float8(self, word: Expr) -> list[Expr]:
        if self.converts:
            return [ptx.from_float8((word >> T.uint32(16 * n)).astype("uint16")) for n in range(2)]
        numbers = []
        for place in (0x1404, 0x3424):
            pair = ptx.permute(word, T.uint32(0), place)
            magnitude = let(T.bitwise_and(pair, _twice(0x7F00)))
            sign = T.bitwise_and(pair, _twice(_SIGN))
            moved = T.bitwise_or(magnitude >> T.uint32(_SHIFT[self.dtype]), sign)
            number = self._fma(moved, _twice(_REBIAS[self.dtype]), _twice(_SIGN))
            nan = let(T.bitwise_and(magnitude + _twice(0x100), _twice(_SIGN)))
            numbers.append(let(T.bitwise_or(number, nan - (nan >> T.uint32(_NAN_BY)))))
        return numbers

    def _fma(self, a: Expr, b: Expr, c: Expr) -> Expr:
        return ptx.fma_pair(self.dtype, a, b, c)

    # Scales outside of what is expanded.

    @property
    def in_query(self) -> bool:
        """Whether Q is to be multiplied by scales of K."""
        return self.codec.channels

    def scale_query(self, place: ptx.Element, hk: Expr, chunk: Expr) -> None:
        """A chunk of a row of Q in shared memory := itself times the scales of the channels of K."""
        words = registers(CHUNK // 2, "uint32")
        ptx.load_shared(words, place)
        self.scale(words, [self._channel("k", hk, chunk * CHUNK + n) for n in range(CHUNK)])
        ptx.store_chunk(place, words)

    def scale_values(self, O: tirx.Buffer, hk: Expr, lane: Expr) -> None:
        """O := O times the scales of V that all keys share; O as fragments.py has it. Where no value has a part, no
        scale has one."""
        if self.codec.group:
            return
        tensor = self.bound.addressing.factor("v")
        factor = None if tensor is None else let(tensor)
        with unrolled(int(O.shape[0]) // 4) as column, unrolled(4) as x:
            at = column * 4 + x
            scale = factor
            if scale is None:
                scale = self._channel("v", hk, column * CHUNK + lane % 4 * 2 + x % 2)
            put(O, at, tirx.Select(tirx.EQ(O[at], T.float32(0)), O[at], O[at] * scale))

    def _channel(self, name: str, hk: Expr, d: Expr) -> Expr:
        buffer, indices = self.bound.addressing.channel_scales(name, hk, d)
        return widened(buffer[tuple(indices)], "float32")


def _twice(half: int, bits: int = 16) -> Expr:
    """The bits in both halves of a word, or in all of its bytes."""
    return T.uint32(sum(half << n for n in range(0, 32, bits)))
