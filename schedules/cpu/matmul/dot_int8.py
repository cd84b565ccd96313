"""Matmuls of four bytes, of which the second are signed, accumulated in int32: exact on every machine.

A packed lane is 32 bits that hold four bytes, which are multiplied with those of another packed lane. AVX-512 VNNI and
AVX-VNNI have an instruction for that (VPDPBUSD, which does not saturate), and so has AArch64 with i8mm (USDOT). AArch64
with dotprod only multiplies two signed operands (SDOT): 128 is subtracted from the first bytes, and 128 times the
second bytes is added. Elsewhere bytes are widened to 16 bits, even ones apart from odd ones, so that x86 can multiply
and add pairs of them (VPMADDWD). Without such an instruction they are widened to 32 bits.

If both operands are signed, AVX2 multiplies the absolute value of the first by the second with the sign of the first
(VPSIGNB, VPMADDUBSW): four instructions instead of seven. -128 in the first operand becomes 128, which is correct; the
second must not contain it. Sums of two products stay below 2^15.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..primitives.vector import SDOT, CpuFeatures, element_type, lanes_of, let, reinterpret, splat_like, vector_type

_SIGN_BYTES = "llvm.x86.avx2.psign.b"
_MULTIPLY_BYTES = {16: "llvm.x86.avx512.pmaddubs.w.512", 8: "llvm.x86.avx2.pmadd.ub.sw"}
_PAIRS = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd"}


def dot(total: Expr, a: Expr, b: Expr, cpu: CpuFeatures) -> Expr:
    """Return total + a_0 b_0 + a_1 b_1 + a_2 b_2 + a_3 b_3 in every lane, modulo 2^32.

    a and b are vectors of packed lanes; a holds unsigned bytes, b signed ones.
    """
    lanes = lanes_of(total)
    if cpu.int8_dot == SDOT:
        halves = splat_like(0x40404040, b)  # 64 in every byte, twice: 128 is not a signed byte
        for x in (T.bitwise_xor(a, splat_like(-0x7F7F7F80, a)), halves, halves):
            total = let(_call_dot(total, x, b, SDOT))
        return total
    if cpu.int8_dot:
        return _call_dot(total, a, b, cpu.int8_dot)
    if lanes in _PAIRS:
        for x, y in (
            (_widen_even(a), _widen_signed(b, even=True)),
            (_widen_even(T.shift_right(a, splat_like(8, a))), _widen_signed(b, even=False)),
        ):
            total = let(total + T.call_llvm_pure_intrin(vector_type("int32", lanes), _PAIRS[lanes], x, y))
        return total
    for n in range(4):
        x = T.bitwise_and(T.shift_right(a, splat_like(8 * n, a)), splat_like(255, a))
        total = let(total + x * T.shift_right(T.shift_left(b, splat_like(24 - 8 * n, b)), splat_like(24, b)))
    return total


def multiplies_signed(cpu: CpuFeatures, holds_lowest: bool) -> bool:
    """Return whether `dot_signed` is faster; holds_lowest says that -128 is among the second bytes."""
    return cpu.int8_dot == SDOT or (not cpu.int8_dot and cpu.vector_bytes == 32 and not holds_lowest)


def dot_signed(total: Expr, a: Expr, b: Expr, cpu: CpuFeatures) -> Expr:
    """Do `dot` for two signed operands, if `multiplies_signed`."""
    if cpu.int8_dot == SDOT:
        return _call_dot(total, a, b, SDOT)
    lanes = lanes_of(total)
    bytes_ = vector_type("int8", 4 * lanes)
    a, b = (let(T.reinterpret(bytes_, x)) for x in (a, b))
    absolute, signed = (let(T.call_llvm_pure_intrin(bytes_, _SIGN_BYTES, x, a)) for x in (a, b))
    return add_pairs(total, multiply_pairs(absolute, signed))


def multiply_pairs(a: Expr, b: Expr) -> Expr:
    """Return a_0 b_0 + a_1 b_1 and a_2 b_2 + a_3 b_3 of packed lanes of unsigned and signed bytes, saturated, in int16.

    For x86 with AVX2 and more.
    """
    a, b = (
        let(T.reinterpret(vector_type("int8", 4 * lanes_of(x)), x)) if element_type(x) == "int32" else x for x in (a, b)
    )
    lanes = lanes_of(a) // 4
    return T.call_llvm_pure_intrin(vector_type("int16", 2 * lanes), _MULTIPLY_BYTES[lanes], a, b)


def add_pairs(total: Expr, pairs: Expr) -> Expr:
    """Return the total plus the sums of successive int16, for x86 with AVX2 and more."""
    lanes, ones = lanes_of(total), splat_like(1, pairs)
    return total + T.call_llvm_pure_intrin(vector_type("int32", lanes), _PAIRS[lanes], pairs, ones)


def _call_dot(total: Expr, a: Expr, b: Expr, instruction: str) -> Expr:
    lanes = lanes_of(total)
    a, b = (let(T.reinterpret(vector_type("int8", 4 * lanes), x)) for x in (a, b))
    return T.call_llvm_pure_intrin(vector_type("int32", lanes), instruction, total, a, b)


def _widen_even(a: Expr) -> Expr:
    """Return bytes 0 and 2 of packed lanes, as 16 bits each."""
    return _reinterpret_as_int16(T.bitwise_and(a, splat_like(0x00FF00FF, a)))


def _widen_signed(b: Expr, even: bool) -> Expr:
    """Return bytes 0 and 2 of packed lanes, or 1 and 3, sign-extended to 16 bits each."""
    halves = let(_reinterpret_as_int16(b))
    halves = T.shift_left(halves, splat_like(8, halves)) if even else halves
    return T.shift_right(halves, splat_like(8, halves))


def _reinterpret_as_int16(packed: Expr) -> Expr:
    """Reinterpret packed lanes as twice as many 16-bit integers."""
    return let(T.reinterpret(vector_type("int16", 2 * lanes_of(packed)), packed))


def pack_vector(x: Expr) -> Expr:
    """Reinterpret a vector of bytes as a quarter as many packed lanes."""
    return let(T.reinterpret(vector_type("int32", lanes_of(x) // 4), x))


def pack_bytes(bytes_: list[Expr]) -> Expr:
    """Pack up to four bytes into one lane, followed by zeros."""
    packed = reinterpret(bytes_[0], "uint8").astype("uint32")
    for n, byte in enumerate(bytes_[1:], 1):
        packed = T.bitwise_or(
            packed, T.shift_left(reinterpret(byte, "uint8").astype("uint32"), splat_like(8 * n, packed))
        )
    return reinterpret(packed, "int32")
