"""AVX512-BF16: matmuls of pairs of bfloat16 numbers, added to float32, at twice the rate of float32 arithmetic.

A word is 32 bits that hold two numbers that are multiplied with those of another word; buffers hold words as float32,
whose bits nothing looks at. The matmuls are exact; sums are rounded to nearest even and flush denormals to zero
(Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .vector import cast, lanes_of, let, like, reinterpret, splat, vector_type

LANES = 16

# TVM widens bfloat16 vectors before they reach LLVM, so the instruction is wrapped into a function of integers, which
# LLVM inlines.
_NAME = "lowering_dot_bf16"
_LLVM = f"""
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define linkonce_odr <16 x float> @{_NAME}(<16 x float> %c, <16 x i32> %a, <16 x i32> %b) alwaysinline {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %sum = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %sum
}}
"""


def using_dot(used: bool) -> AbstractContextManager[None]:
    """What is emitted inside may call `dot`, if it is `used`."""
    return T.attr(tirx.const(0, "int32"), "pragma_import_llvm", _LLVM) if used else nullcontext()


def dot(total: Expr, a: Expr, b: Expr) -> Expr:
    """total + a.low b.low + a.high b.high in every lane; a and b are vectors of words."""
    words = (reinterpret(x, "int32") for x in (a, b))
    return tirx.call_extern(f"float32x{LANES}", _NAME, total, *words)


def pair(low: Expr, high: Expr) -> Expr:
    """Words of two vectors of float32 that are no NaN with a full mantissa, rounded to nearest (ties away from 0)."""
    half = like(0x8000, reinterpret(low, "uint32"))
    low, high = (let(reinterpret(x, "uint32") + half) for x in (low, high))
    upper = T.bitwise_and(high, like(0xFFFF0000, high))
    return let(reinterpret(T.bitwise_or(T.shift_right(low, like(16, low)), upper), "float32"))


def zip_rows(low: Expr, high: Expr | None) -> Expr:
    """Words of two vectors, or elements, of bfloat16; high may be 0."""
    bits = cast(reinterpret(low, "uint16"), "uint32")
    if high is not None:
        upper = cast(reinterpret(high, "uint16"), "uint32")
        bits = T.bitwise_or(bits, T.shift_left(upper, like(16, upper)))
    return reinterpret(bits, "float32")


def words_of(x: Expr) -> Expr:
    """A vector of bfloat16 as half as many words."""
    return let(T.reinterpret(vector_type("float32", lanes_of(x) // 2), reinterpret(x, "uint16")))


def non_zero(words: Expr, weights: Expr) -> Expr:
    """The words' numbers where the weights' are not 0, and 0 where they are."""
    numbers, zero = _numbers(words), splat(0, 2 * lanes_of(words), "uint16")
    kept = tirx.Select(_numbers(weights) != zero, numbers, zero)
    return let(T.reinterpret(vector_type("float32", lanes_of(words)), kept))


def _numbers(words: Expr) -> Expr:
    return let(T.reinterpret(vector_type("uint16", 2 * lanes_of(words)), words))


def zip_halves(rows: list[Expr], half: int) -> Expr:
    """Words of two rows of 32 bfloat16, or of one and zeros: of every eight numbers the first or the second four.

    That is one instruction that stays within 128 bits (vpunpcklwd, vpunpckhwd).
    """
    low, *rest = (reinterpret(row, "uint16") for row in rows)
    high = rest[0] if rest else splat(0, 2 * LANES, "uint16")
    places = [8 * part + 4 * half + n for part in range(4) for n in range(4)]
    numbers = tirx.Shuffle([low, high], [at for place in places for at in (place, 2 * LANES + place)])
    return let(T.reinterpret(vector_type("float32", LANES), numbers))


def shuffled_back(first: Expr, second: Expr) -> list[Expr]:
    """Two vectors of results for both halves of `zip_halves`, in the order of the numbers."""
    both = [let(first), let(second)]
    order = [at + n for part in range(0, LANES, 4) for at in (part, LANES + part) for n in range(4)]
    return [tirx.Shuffle(both, order[:LANES]), tirx.Shuffle(both, order[LANES:])]
