"""SIMD building blocks for kernels written with TVM's IRBuilder.

A vector is a TIR expression with lanes; its width is the caller's choice and is never a constant here. LLVM turns
a vector as wide as the machine's registers into one register. What this file knows about LLVM and TVM:

* an accumulator is a small stack buffer of its own, which LLVM promotes to a register (`Register`);
* `T.exp2` and `T.tanh` on vectors become scalar calls of libm, so both are polynomials here;
* a half-precision conversion without hardware becomes a call of a compiler runtime, so it is integer arithmetic here.

Expressions that are used more than once are bound to variables inside these functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer
from tvm.target.codegen import target_has_features

from .fast_math import function_of_vectors

Buffer = tirx.Buffer

LOG2_E = math.log2(math.e)
LINE = 64  # bytes of a cache line

# LLVM's names of instructions that multiply four bytes by four and add the products to a sum. SDOT is for bytes that
# both have a sign, the others for bytes without and with one. None saturates.
VNNI_512, VNNI_256 = "llvm.x86.avx512.vpdpbusd.512", "llvm.x86.avx512.vpdpbusd.256"
USDOT, SDOT = "llvm.aarch64.neon.usdot.v4i32.v16i8", "llvm.aarch64.neon.sdot.v4i32.v16i8"


@dataclass(frozen=True)
class Machine:
    """What a kernel has to know about the processor: width and number of vector registers, fp16 conversion, products
    of pairs of bfloat16, and LLVM's name of the instruction for those of four bytes, of `dot_int8.py`."""

    vector_bytes: int
    registers: int
    f16_conversion: bool
    bf16_dot: bool = False
    int8_dot: str = ""

    def lanes(self, dtype: str) -> int:
        """Elements of dtype in one register."""
        return self.vector_bytes * 8 // DataType(dtype).bits


def machine(target: tvm.target.Target) -> Machine:
    """The features that the target's triple, mcpu and mattr promise, and no others."""

    def has(feature: str) -> bool:
        return bool(target_has_features(feature, target))

    if has("avx512f"):
        return Machine(64, 32, f16_conversion=True, bf16_dot=has("avx512bf16"), int8_dot=VNNI_512 * has("avx512vnni"))
    if has("avx2"):
        return Machine(32, 16, f16_conversion=has("f16c"), int8_dot=VNNI_256 * has("avxvnni"))
    if has("neon"):
        return Machine(16, 32, f16_conversion=True, int8_dot=USDOT if has("i8mm") else SDOT * has("dotprod"))
    return Machine(vector_bytes=16, registers=16, f16_conversion=False)


# Lanes.


def lanes_of(x: Expr) -> int:
    return x.ty.dtype.lanes


def element_type(x: Expr) -> str:
    return str(x.ty.dtype.with_lanes(1))


def vector_type(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def splat(x: float | Expr, lanes: int, dtype: str) -> Expr:
    """x in every lane."""
    x = tirx.const(x, dtype) if isinstance(x, int | float) else x
    return x if lanes == 1 else T.broadcast(x, lanes)


def like(x: float | Expr, vector: Expr) -> Expr:
    """x in as many lanes, and with the element type, of another vector."""
    return splat(x, lanes_of(vector), element_type(vector))


def cast(x: Expr, dtype: str) -> Expr:
    return x.astype(vector_type(dtype, lanes_of(x)))


def reinterpret(x: Expr, dtype: str) -> Expr:
    return T.reinterpret(vector_type(dtype, lanes_of(x)), x)


# Memory. The vector lies along the last axis and may start at any element.


def at(start: Expr | int, lanes: int) -> Expr | int:
    """The index of `lanes` consecutive elements."""
    return start if lanes == 1 else T.ramp(start, 1, lanes)


def load(buffer: tirx.Buffer, lanes: int, *index: Expr | int) -> Expr:
    return buffer[(*index[:-1], at(index[-1], lanes))]


def store(buffer: tirx.Buffer, value: Expr, *index: Expr | int) -> None:
    T.buffer_store(buffer, value, [*index[:-1], at(index[-1], lanes_of(value))])


def prefetch(buffer: tirx.Buffer, *index: Expr | int, level: int = 2, write: bool = False) -> None:
    """Asks for the cache line of an element to be brought into the cache of that level, 1 to 3. It need not exist."""
    locality, data = 4 - level, 1
    options = (tirx.const(option, "int32") for option in (int(write), locality, data))
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", T.address_of(buffer[index]), *options))


def cover(length: int, lanes: int) -> tuple[int, list[int]]:
    """(w, starts): vectors of w lanes that cover [0, length) and never leave it.

    w is `lanes`, or the largest power of two that fits a shorter row. The last vector overlaps the one before where w
    does not divide the length, so a row is read and written without a scalar tail and without touching its neighbor.
    """
    w = min(lanes, 2 ** int(math.log2(length)))
    return w, [min(start, length - w) for start in range(0, length, w)]


def workspace(**buffers: tuple[int | Expr, str]) -> dict[str, tirx.Buffer]:
    """One allocation, aligned to a cache line, as buffers: name -> (number of elements, element type).

    The thread that runs this code makes one call of TVM's allocator where it stands. The buffers are views: TVM would
    take minutes to look at every access of an allocation, hoping to shrink it (CompactBufferAllocation). One allocation
    and not one for each buffer, as TVM sees no use of memory through views and would give two of them the same memory.
    """
    line = 64
    sizes = [(size * _bytes(dtype) + (line - 1)) // line * line for size, dtype in buffers.values()]
    # An element type that no view has would make TVM (VectorTypeRewriter) round the index of every vector access down.
    first = next(iter(buffers.values()))[1]
    memory = T.alloc_buffer((sum(sizes[1:], sizes[0]) // _bytes(first),), first, align=line)
    views = {}
    for (name, (size, dtype)), start in zip(buffers.items(), itertools.accumulate(sizes, initial=0)):
        offset = start // _bytes(dtype)
        views[name] = T.decl_buffer((size,), dtype, data=memory.data, elem_offset=offset, align=line)
    return views


def _bytes(dtype: str) -> int:
    return DataType(dtype).bits // 8


def let(x: Expr) -> Expr:
    """x, a scalar or a vector, as a variable that TVM does not look into: for values that are used more than once.

    TVM's simplifier replaces a variable bound by `T.bind` by its definition wherever it is used, for minutes where
    definitions nest. Behind a load it stops, and LLVM removes the load. A `T.bind` of a load needs no such care.
    A number stays one: to LLVM the body of a parallel loop is a function of its own, which would read a variable. But
    0 is a variable: TVM refuses code that divides by it, even where nothing does at run time.
    """
    if lanes_of(x) == 1 and not tirx.analysis.undefined_vars(x):
        number = Analyzer().simplify(x)
        if isinstance(number, tirx.IntImm) and number.value:
            return number
    return T.bind(Register(x).value)


class Register:
    """A vector accumulator: LLVM keeps it in a register while its index is constant. `r.value += a * b` is an FMA."""

    def __init__(self, value: Expr) -> None:
        self.lanes = lanes_of(value)
        self.buffer = T.alloc_buffer((self.lanes,), element_type(value))
        self.value = value

    @property
    def value(self) -> Expr:
        return load(self.buffer, self.lanes, 0)

    @value.setter
    def value(self, new: Expr) -> None:
        store(self.buffer, new, 0)


def combine(operation: Callable[[Expr, Expr], Expr], registers: list[Register]) -> Expr:
    """The registers' values combined as a tree; their number is a power of two."""
    values = [r.value for r in registers]
    while len(values) > 1:
        values = [T.bind(operation(x, y)) for x, y in zip(values[::2], values[1::2])]
    return values[0]


# Across lanes.


def reduce_lanes(x: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """All lanes combined into a scalar, as a tree."""
    x = let(x)
    while (n := lanes_of(x)) > 1:
        low, high = list(range(n // 2)), list(range(n // 2, n))
        x = let(combine(tirx.Shuffle([x], low), tirx.Shuffle([x], high)))
    return x


def transpose(rows: list[Expr]) -> list[Expr]:
    """n vectors of n lanes, n a power of two: element j of vector i becomes element i of vector j."""
    n, rows = len(rows), list(rows)
    half = n // 2
    while half:  # swap the off-diagonal blocks of size `half`, then go inside the blocks
        upper = [k - half + n if k & half else k for k in range(n)]
        lower = [k + n if k & half else k + half for k in range(n)]
        for i in (i for i in range(n) if not i & half):
            pair = [rows[i], rows[i + half]]
            rows[i], rows[i + half] = let(tirx.Shuffle(pair, upper)), T.bind(tirx.Shuffle(pair, lower))
        half //= 2
    return rows


def sum_each(rows: list[Expr]) -> Expr:
    """n vectors of n lanes, n a power of two: lane i of the result is the sum of the lanes of vector i."""
    n = len(rows)
    half = n // 2
    while half:  # each addition halves the lanes that belong to a vector and packs two vectors into one
        upper = [k - half + n if k & half else k for k in range(n)]
        lower = [k + n if k & half else k + half for k in range(n)]
        pairs = [[rows[i], rows[i + half]] for i in range(half)]
        rows = [let(tirx.Shuffle(pair, upper) + tirx.Shuffle(pair, lower)) for pair in pairs]
        half //= 2
    return rows[0]


# Functions.

# 2^f on [-1/2, 1/2] as 1 + c1 f + c2 f^2 + ...: the minimax fit in relative error (9e-8) for float32, Taylor's series
# (2e-16) for float64. The constant term must be exactly 1, see `exp2`.
_EXP2 = {
    "float32": (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957,
                0.001326472731307149),
    "float64": tuple(math.log(2) ** k / math.factorial(k) for k in range(13)),
}  # fmt: skip

# Element type: (integer type, bits of the mantissa, lowest exponent of a normal number minus one).
_FLOAT_FORMAT = {"float32": ("int32", 23, -127), "float64": ("int64", 52, -1023)}


def exp2(x: Expr) -> Expr:
    """2^x for x < 128 (float64: 1024), exactly 0 from -127 (-1023) down and at -inf; NaN stays NaN.

    x = n + f with n the nearest integer: adding 1.5 * 2^mantissa leaves n in the low bits of the sum, and shifted into
    the exponent field it scales the polynomial of f. At the lower clamp f = 0, the polynomial is exactly 1 and the
    exponent field of the product is 0: the result is +0.0, without a comparison.
    """
    dtype = element_type(x)
    integer, mantissa, lowest = _FLOAT_FORMAT[dtype]
    magic = like(1.5 * 2.0**mantissa, x)
    x = let(x)
    x = let(tirx.Select(x < like(float(lowest), x), like(float(lowest), x), x))
    n_bits = let(reinterpret(x + magic, integer))
    f = let(x - (reinterpret(n_bits, dtype) - magic))
    bits = reinterpret(polynomial(f, _EXP2[dtype]), integer)
    return let(reinterpret(bits + T.shift_left(n_bits, like(mantissa, n_bits)), dtype))


def of_vectors(name: str, operands: list[Expr]) -> Expr | None:
    """A function of TVM's name of vectors in float32; None for one that goes lane by lane."""
    return function_of_vectors(name, operands, let)


def polynomial(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """Horner's scheme; lowest power first."""
    p = like(coefficients[-1], x)
    for c in reversed(coefficients[:-1]):
        p = p * x + like(c, x)
    return p


# tanh(x) = x P(x^2) / Q(x^2) for |x| <= 9.01, where tanh rounds to 1: minimax in relative error, 2.1e-8 (3e-7 rounded).
_TANH_LIMIT = 9.01
_TANH_P = (1.0, 0.13380371034145355, 0.0034948112443089485, 2.059627695416566e-05, 1.3336852511258712e-08)
_TANH_Q = (1.0, 0.46713685989379883, 0.025874027982354164, 0.0003284363483544439, 7.76928459345072e-07)


def tanh(x: Expr) -> Expr:
    """tanh of a float32 vector to 3e-7 relative, of a float64 vector to 3e-16 absolute; NaN stays NaN."""
    if element_type(x) == "float64":  # 1 - 2 / (e^2x + 1)
        x = clamp(x, 20.0)
        return let(like(1.0, x) - like(2.0, x) / (exp2(x * like(2 * LOG2_E, x)) + like(1.0, x)))
    x = clamp(x, _TANH_LIMIT)
    u = let(x * x)
    return let(x * polynomial(u, _TANH_P) / polynomial(u, _TANH_Q))


def clamp(x: Expr, limit: float) -> Expr:
    """x limited to [-limit, limit]; NaN stays NaN."""
    x = let(x)
    x = let(tirx.Select(x > like(limit, x), like(limit, x), x))
    return let(tirx.Select(x < like(-limit, x), like(-limit, x), x))


# Half precision.


def convert(x: Expr, dtype: str, cpu: Machine) -> Expr:
    """x in another floating-point type, rounded to nearest even (float64 to 16 bits by way of float32).

    Do not bind a bfloat16 vector to a variable: TVM rewrites its type to uint16 and then rejects the binding.
    """
    source = element_type(x)
    if source == dtype:
        return x
    if {source, dtype} & {"float16", "bfloat16"} and "float32" not in (source, dtype):
        return convert(convert(x, "float32", cpu), dtype, cpu)
    if source == "bfloat16":
        bits = cast(reinterpret(x, "uint16"), "uint32")
        return let(reinterpret(T.shift_left(bits, like(16, bits)), "float32"))
    if dtype == "bfloat16":
        return _round_to_bf16(x)
    if source == "float16" and not cpu.f16_conversion:
        return _widen_f16(x)
    if dtype == "float16" and not cpu.f16_conversion:
        return _round_to_f16(x)
    return let(cast(x, dtype))


def _round_to_bf16(x: Expr) -> Expr:
    """The upper half of a float32, after adding half a unit of its last place (less one where that bit is 0)."""
    bits = let(reinterpret(x, "uint32"))
    sixteen = like(16, bits)
    odd = T.bitwise_and(T.shift_right(bits, sixteen), like(1, bits))
    rounded = T.shift_right(bits + (like(0x7FFF, bits) + odd), sixteen)
    quiet = T.bitwise_or(T.shift_right(bits, sixteen), like(0x40, bits))  # a NaN must not be rounded to infinity
    is_nan = T.bitwise_and(bits, like(0x7FFFFFFF, bits)) > like(0x7F800000, bits)
    return reinterpret(let(cast(tirx.Select(is_nan, quiet, rounded), "uint16")), "bfloat16")


def _widen_f16(x: Expr) -> Expr:
    """float16 to float32 by integers: a multiplication rebiases the exponent, and normalizes subnormals."""
    half = let(cast(reinterpret(x, "uint16"), "uint32"))
    magnitude = let(T.bitwise_and(half, like(0x7FFF, half)))
    scaled = reinterpret(T.shift_left(magnitude, like(13, half)), "float32")
    scaled = reinterpret(scaled * like(2.0**112, scaled), "uint32")
    special = T.bitwise_or(T.shift_left(magnitude, like(13, half)), like(0x7F800000, half))  # infinity and NaN
    bits = tirx.Select(magnitude >= like(0x7C00, half), special, scaled)
    sign = T.shift_left(T.bitwise_and(half, like(0x8000, half)), like(16, half))
    return let(reinterpret(T.bitwise_or(bits, sign), "float32"))


def _round_to_f16(x: Expr) -> Expr:
    """float32 to float16 by integers."""
    bits = let(reinterpret(x, "uint32"))
    sign = T.shift_right(T.bitwise_and(bits, like(0x80000000, bits)), like(16, bits))
    magnitude = let(T.bitwise_and(bits, like(0x7FFFFFFF, bits)))
    odd = T.bitwise_and(T.shift_right(magnitude, like(13, bits)), like(1, bits))
    # Normal: rebias the exponent by -112, round the 13 bits that go. Overflow carries into the exponent of infinity.
    normal = T.shift_right(magnitude + odd + like((0xFFF - (112 << 23)) & 0xFFFFFFFF, bits), like(13, bits))
    # Subnormal: adding 0.5 aligns the mantissa with that of 0.5, and the addition rounds.
    aligned = reinterpret(magnitude, "float32") + splat(0.5, lanes_of(x), "float32")
    subnormal = reinterpret(aligned, "uint32") - like(0x3F000000, bits)
    nan = T.bitwise_or(
        like(0x7E00, bits), T.shift_right(T.bitwise_and(magnitude, like(0x7FFFFF, bits)), like(13, bits))
    )
    half = tirx.Select(magnitude < like(0x38800000, bits), subnormal, normal)  # below 2^-14
    half = tirx.Select(magnitude >= like(0x47800000, bits), like(0x7C00, bits), half)  # from 2^16
    half = tirx.Select(magnitude > like(0x7F800000, bits), nan, half)
    return let(reinterpret(cast(T.bitwise_or(half, sign), "uint16"), "float16"))
