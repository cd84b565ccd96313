"""AVX512-BF16: matmuls of bfloat16 pairs, accumulated in float32, at twice the rate of float32 arithmetic.

A packed lane is 32 bits that hold a pair of values, which is multiplied with the pair of another packed lane. Buffers
hold packed lanes as float32, whose bits nothing interprets. The multiplications are exact; accumulators are rounded to
nearest even and flush denormals to zero (Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..primitives.vector import cast, lanes_of, let, reinterpret, splat, splat_like, vector_type

LANES = 16

# TVM widens bfloat16 vectors before they reach LLVM, so a function of integers wraps the instruction, and LLVM inlines
# it.
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


def import_dot(used: bool) -> AbstractContextManager[None]:
    """Open the context in which emitted code may call `dot`, if it is `used`."""
    return T.attr(tirx.const(0, "int32"), "pragma_import_llvm", _LLVM) if used else nullcontext()


def dot(total: Expr, a: Expr, b: Expr) -> Expr:
    """Return total + a.low b.low + a.high b.high in every lane; a and b are vectors of packed lanes."""
    operands = (reinterpret(x, "int32") for x in (a, b))
    return tirx.call_extern(f"float32x{LANES}", _NAME, total, *operands)


def pack_rounded(low: Expr, high: Expr) -> Expr:
    """Pack two float32 vectors, rounded to nearest (ties away from 0). No NaN may have a full mantissa."""
    half = splat_like(0x8000, reinterpret(low, "uint32"))
    low, high = (let(reinterpret(x, "uint32") + half) for x in (low, high))
    upper = T.bitwise_and(high, splat_like(0xFFFF0000, high))
    return let(reinterpret(T.bitwise_or(T.shift_right(low, splat_like(16, low)), upper), "float32"))


def interleave_rows(low: Expr, high: Expr | None) -> Expr:
    """Interleave two vectors, or elements, of bfloat16 into packed lanes; without high, its values are 0."""
    bits = cast(reinterpret(low, "uint16"), "uint32")
    if high is not None:
        upper = cast(reinterpret(high, "uint16"), "uint32")
        bits = T.bitwise_or(bits, T.shift_left(upper, splat_like(16, upper)))
    return reinterpret(bits, "float32")


def pack_vector(x: Expr) -> Expr:
    """Reinterpret a vector of bfloat16 as half as many packed lanes."""
    return let(T.reinterpret(vector_type("float32", lanes_of(x) // 2), reinterpret(x, "uint16")))


def mask_zero_weights(packed: Expr, weights: Expr) -> Expr:
    """Return the packed values with 0 where the packed weights are 0."""
    values, zero = _unpack(packed), splat(0, 2 * lanes_of(packed), "uint16")
    nonzero = tirx.Select(_unpack(weights) != zero, values, zero)
    return let(T.reinterpret(vector_type("float32", lanes_of(packed)), nonzero))


def _unpack(packed: Expr) -> Expr:
    return let(T.reinterpret(vector_type("uint16", 2 * lanes_of(packed)), packed))


def interleave_halves(rows: list[Expr], half: int) -> Expr:
    """Interleave half of two rows of 32 bfloat16, or of one row and zeros, into packed lanes.

    half selects the first or the second four of every eight values. One instruction that stays within 128 bits does it
    (vpunpcklwd, vpunpckhwd).
    """
    low, *rest = (reinterpret(row, "uint16") for row in rows)
    high = rest[0] if rest else splat(0, 2 * LANES, "uint16")
    elements = [8 * block + 4 * half + n for block in range(4) for n in range(4)]
    interleaved = tirx.Shuffle([low, high], [index for element in elements for index in (element, 2 * LANES + element)])
    return let(T.reinterpret(vector_type("float32", LANES), interleaved))


def restore_order(first: Expr, second: Expr) -> list[Expr]:
    """Return two result vectors for both halves of `interleave_halves`, in the order of the values."""
    vectors = [let(first), let(second)]
    order = [start + n for block in range(0, LANES, 4) for start in (block, LANES + block) for n in range(4)]
    return [tirx.Shuffle(vectors, order[:LANES]), tirx.Shuffle(vectors, order[LANES:])]
