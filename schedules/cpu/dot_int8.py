"""Products of four unsigned by four signed bytes, added up in int32: exact, whatever the machine.

A word is 32 bits that hold four bytes, which are multiplied with those of another word. AVX-512 VNNI has an
instruction (VPDPBUSD, which does not saturate). Elsewhere bytes are widened to 16 bits, those with even places apart
from those with odd ones, so that x86 can multiply and add pairs of them (VPMADDWD), and to 32 bits where there is no
such instruction.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .vector import Machine, fixed, lanes_of, like, reinterpret, vector_type

INSTRUCTION = "llvm.x86.avx512.vpdpbusd.512"
_PAIRS = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd"}


def dot(total: Expr, a: Expr, b: Expr, cpu: Machine) -> Expr:
    """total + a_0 b_0 + a_1 b_1 + a_2 b_2 + a_3 b_3 in every lane, modulo 2^32; a and b are vectors of words, of bytes
    without and with a sign."""
    lanes = lanes_of(total)
    if cpu.int8_dot:
        a, b = (fixed(T.reinterpret(vector_type("int8", 4 * lanes), x)) for x in (a, b))
        return T.call_llvm_pure_intrin(vector_type("int32", lanes), INSTRUCTION, total, a, b)
    if lanes in _PAIRS:
        for x, y in ((_even(a), _signed(b, even=True)), (_even(T.shift_right(a, like(8, a))), _signed(b, even=False))):
            total = fixed(total + T.call_llvm_pure_intrin(vector_type("int32", lanes), _PAIRS[lanes], x, y))
        return total
    for n in range(4):
        x = T.bitwise_and(T.shift_right(a, like(8 * n, a)), like(255, a))
        total = fixed(total + x * T.shift_right(T.shift_left(b, like(24 - 8 * n, b)), like(24, b)))
    return total


def _even(a: Expr) -> Expr:
    """Bytes 0 and 2 of words, as 16 bits each."""
    return _halves(T.bitwise_and(a, like(0x00FF00FF, a)))


def _signed(b: Expr, even: bool) -> Expr:
    """Bytes 0 and 2 of words, or 1 and 3, as 16 bits each with their sign."""
    halves = fixed(_halves(b))
    halves = T.shift_left(halves, like(8, halves)) if even else halves
    return T.shift_right(halves, like(8, halves))


def _halves(words: Expr) -> Expr:
    """Words as twice as many integers of 16 bits."""
    return fixed(T.reinterpret(vector_type("int16", 2 * lanes_of(words)), words))


def words_of(x: Expr) -> Expr:
    """A vector of bytes as a quarter as many words."""
    return fixed(T.reinterpret(vector_type("int32", lanes_of(x) // 4), x))


def word_of(bytes_: list[Expr]) -> Expr:
    """A word of up to four bytes, with zeros behind them."""
    word = reinterpret(bytes_[0], "uint8").astype("uint32")
    for n, byte in enumerate(bytes_[1:], 1):
        word = T.bitwise_or(word, T.shift_left(reinterpret(byte, "uint8").astype("uint32"), like(8 * n, word)))
    return reinterpret(word, "int32")
