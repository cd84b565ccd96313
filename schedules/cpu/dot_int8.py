"""Matmuls of four bytes, of which the second have a sign, added up in int32: exact, whatever the machine.

A word is 32 bits that hold four bytes, which are multiplied with those of another word. AVX-512 VNNI and AVX-VNNI have
an instruction for that (VPDPBUSD, which does not saturate), and so has AArch64 with i8mm (USDOT). With dotprod alone it
multiplies bytes that both have a sign (SDOT): the first are made smaller by 128, and 128 times the others are added.
Elsewhere bytes are widened to 16 bits, those with even places apart from those with odd ones, so that x86 can multiply
and add pairs of them (VPMADDWD), and to 32 bits where there is no such instruction.

Where both have a sign, AVX2 multiplies the absolute value of the first by the second with the first one's sign
(VPSIGNB, VPMADDUBSW): four instructions in place of seven. -128 of the first is 128 then, which is right; of the second
it must not occur. Pairs of matmuls stay below 2^15.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .vector import SDOT, Machine, lanes_of, let, like, reinterpret, vector_type

_MULTIPLY_BYTES, _SIGN_BYTES = "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.psign.b"
_PAIRS = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd"}


def dot(total: Expr, a: Expr, b: Expr, cpu: Machine) -> Expr:
    """total + a_0 b_0 + a_1 b_1 + a_2 b_2 + a_3 b_3 in every lane, modulo 2^32; a and b are vectors of words, of bytes
    without and with a sign."""
    lanes = lanes_of(total)
    if cpu.int8_dot == SDOT:
        halves = like(0x40404040, b)  # 64 in every byte, twice: 128 is no byte with a sign
        for x in (T.bitwise_xor(a, like(-0x7F7F7F80, a)), halves, halves):
            total = let(_added(total, x, b, SDOT))
        return total
    if cpu.int8_dot:
        return _added(total, a, b, cpu.int8_dot)
    if lanes in _PAIRS:
        for x, y in ((_even(a), _signed(b, even=True)), (_even(T.shift_right(a, like(8, a))), _signed(b, even=False))):
            total = let(total + T.call_llvm_pure_intrin(vector_type("int32", lanes), _PAIRS[lanes], x, y))
        return total
    for n in range(4):
        x = T.bitwise_and(T.shift_right(a, like(8 * n, a)), like(255, a))
        total = let(total + x * T.shift_right(T.shift_left(b, like(24 - 8 * n, b)), like(24, b)))
    return total


def multiplies_signed(cpu: Machine, holds_lowest: bool) -> bool:
    """Whether `dot_signed` is the faster one; holds_lowest says that -128 is among the second bytes."""
    return cpu.int8_dot == SDOT or (not cpu.int8_dot and cpu.vector_bytes == 32 and not holds_lowest)


def dot_signed(total: Expr, a: Expr, b: Expr, cpu: Machine) -> Expr:
    """`dot` of bytes that both have a sign, where `multiplies_signed`."""
    if cpu.int8_dot == SDOT:
        return _added(total, a, b, SDOT)
    lanes = lanes_of(total)
    bytes_ = vector_type("int8", 4 * lanes)
    a, b = (let(T.reinterpret(bytes_, x)) for x in (a, b))
    absolute, signed = (let(T.call_llvm_pure_intrin(bytes_, _SIGN_BYTES, x, a)) for x in (a, b))
    pairs = T.call_llvm_pure_intrin(vector_type("int16", 2 * lanes), _MULTIPLY_BYTES, absolute, signed)
    ones = like(1, pairs)
    return total + T.call_llvm_pure_intrin(vector_type("int32", lanes), _PAIRS[lanes], pairs, ones)


def _added(total: Expr, a: Expr, b: Expr, instruction: str) -> Expr:
    lanes = lanes_of(total)
    a, b = (let(T.reinterpret(vector_type("int8", 4 * lanes), x)) for x in (a, b))
    return T.call_llvm_pure_intrin(vector_type("int32", lanes), instruction, total, a, b)


def _even(a: Expr) -> Expr:
    """Bytes 0 and 2 of words, as 16 bits each."""
    return _halves(T.bitwise_and(a, like(0x00FF00FF, a)))


def _signed(b: Expr, even: bool) -> Expr:
    """Bytes 0 and 2 of words, or 1 and 3, as 16 bits each with their sign."""
    halves = let(_halves(b))
    halves = T.shift_left(halves, like(8, halves)) if even else halves
    return T.shift_right(halves, like(8, halves))


def _halves(words: Expr) -> Expr:
    """Words as twice as many integers of 16 bits."""
    return let(T.reinterpret(vector_type("int16", 2 * lanes_of(words)), words))


def words_of(x: Expr) -> Expr:
    """A vector of bytes as a quarter as many words."""
    return let(T.reinterpret(vector_type("int32", lanes_of(x) // 4), x))


def word_of(bytes_: list[Expr]) -> Expr:
    """A word of up to four bytes, with zeros behind them."""
    word = reinterpret(bytes_[0], "uint8").astype("uint32")
    for n, byte in enumerate(bytes_[1:], 1):
        word = T.bitwise_or(word, T.shift_left(reinterpret(byte, "uint8").astype("uint32"), like(8 * n, word)))
    return reinterpret(word, "int32")
