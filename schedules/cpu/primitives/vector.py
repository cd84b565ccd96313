"""SIMD building blocks for kernels written with TVM's IRBuilder.

A vector is a TIR expression with lanes. The caller chooses its width, which is never a constant here. LLVM maps a
vector as wide as the machine's registers to one register. Facts about LLVM and TVM that this file relies on:

* An accumulator is a small stack buffer of its own, which LLVM promotes to a register (`Register`).
* `T.exp2` and `T.tanh` on vectors become scalar calls of libm, so both are polynomials here.
* A half-precision conversion without hardware support becomes a call of a compiler runtime, so it is integer
  arithmetic here.

These functions bind every expression that they use more than once to a variable.
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

from .fast_math import expand_vector_function

Buffer = tirx.Buffer

LOG2_E = math.log2(math.e)
LINE = 64  # bytes of a cache line

# LLVM's names of the instructions that multiply four bytes by four bytes and add the results to an accumulator. SDOT
# takes two signed operands; the others take an unsigned and a signed one. None saturates.
VNNI_512, VNNI_256 = "llvm.x86.avx512.vpdpbusd.512", "llvm.x86.avx512.vpdpbusd.256"
USDOT, SDOT = "llvm.aarch64.neon.usdot.v4i32.v16i8", "llvm.aarch64.neon.sdot.v4i32.v16i8"


@dataclass(frozen=True)
class CpuFeatures:
    """The processor features that kernels depend on.

    They are the width and number of vector registers, fp16 conversion, bfloat16 pair matmuls, and LLVM's name of the
    instruction that multiplies four bytes (`dot_int8.py`).
    """

    vector_bytes: int
    registers: int
    f16_conversion: bool
    bf16_dot: bool = False
    int8_dot: str = ""

    def lanes(self, dtype: str) -> int:
        """Return the number of elements of dtype in one register."""
        return self.vector_bytes * 8 // DataType(dtype).bits


def read_cpu_features(target: tvm.target.Target) -> CpuFeatures:
    """Return the features that the target's triple, mcpu and mattr promise, and no others."""

    def has(feature: str) -> bool:
        return bool(target_has_features(feature, target))

    if has("avx512f"):
        return CpuFeatures(
            64, 32, f16_conversion=True, bf16_dot=has("avx512bf16"), int8_dot=VNNI_512 * has("avx512vnni")
        )
    if has("avx2"):
        return CpuFeatures(32, 16, f16_conversion=has("f16c"), int8_dot=VNNI_256 * has("avxvnni"))
    if has("neon"):
        return CpuFeatures(16, 32, f16_conversion=True, int8_dot=USDOT if has("i8mm") else SDOT * has("dotprod"))
    registers = 32 if has("v") else 16  # RISC-V's V has vectors of at least 16 bytes
    return CpuFeatures(vector_bytes=16, registers=registers, f16_conversion=False)


# Lanes.


def lanes_of(x: Expr) -> int:
    return x.ty.dtype.lanes


def element_type(x: Expr) -> str:
    return str(x.ty.dtype.with_lanes(1))


def vector_type(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def splat(x: float | Expr, lanes: int, dtype: str) -> Expr:
    """Return x in every lane."""
    x = tirx.const(x, dtype) if isinstance(x, int | float) else x
    return x if lanes == 1 else T.broadcast(x, lanes)


def splat_like(x: float | Expr, vector: Expr) -> Expr:
    """Return x with as many lanes, and the element type, of another vector."""
    return splat(x, lanes_of(vector), element_type(vector))


def cast(x: Expr, dtype: str) -> Expr:
    return x.astype(vector_type(dtype, lanes_of(x)))


def reinterpret(x: Expr, dtype: str) -> Expr:
    return T.reinterpret(vector_type(dtype, lanes_of(x)), x)


# Memory. The vector lies along the last axis and may start at any element.


def ramp_index(start: Expr | int, lanes: int) -> Expr | int:
    """Return the index of `lanes` consecutive elements."""
    return start if lanes == 1 else T.ramp(start, 1, lanes)


def load(buffer: tirx.Buffer, lanes: int, *index: Expr | int) -> Expr:
    return buffer[(*index[:-1], ramp_index(index[-1], lanes))]


def store(buffer: tirx.Buffer, value: Expr, *index: Expr | int) -> None:
    T.buffer_store(buffer, value, [*index[:-1], ramp_index(index[-1], lanes_of(value))])


def prefetch(buffer: tirx.Buffer, *index: Expr | int, level: int = 2, write: bool = False) -> None:
    """Prefetch the cache line of an element into the cache of that level, 1 to 3. The element need not exist."""
    locality, data = 4 - level, 1
    options = (tirx.const(option, "int32") for option in (int(write), locality, data))
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", T.address_of(buffer[index]), *options))


def cover_row(length: int, lanes: int) -> tuple[int, list[int]]:
    """Return (w, starts): vectors of w lanes that cover [0, length) and never leave it.

    w is `lanes`, or the largest power of two that fits a shorter row. The last vector overlaps the previous one where w
    does not divide the length. A row is thus read and written without a scalar remainder and without touching its
    neighbor.
    """
    w = min(lanes, 2 ** int(math.log2(length)))
    return w, [min(start, length - w) for start in range(0, length, w)]


def allocate_workspace(**buffers: tuple[int | Expr, str]) -> dict[str, tirx.Buffer]:
    """Allocate one block of memory, aligned to a cache line, and return it as buffers.

    Args:
        buffers: Number of elements and element type, by name.

    The thread that runs this code calls TVM's allocator once, at this point. The buffers are views, because TVM would
    spend minutes on every access of an allocation in order to shrink it (CompactBufferAllocation). There is one
    allocation for all buffers, because TVM sees no use of memory through views and would let two allocations share
    memory.
    """
    line = 64
    sizes = [(size * _bytes(dtype) + (line - 1)) // line * line for size, dtype in buffers.values()]
    # If no view had this element type, TVM (VectorTypeRewriter) would round down the index of every vector access.
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
    """Bind x, a scalar or a vector, to a variable that TVM does not expand: for values that are used more than once.

    TVM's simplifier replaces a variable bound by `T.bind` by its definition at every use, which takes minutes where
    definitions nest. It stops at a load, and LLVM removes the load. A `T.bind` of a load needs no such care.

    A number stays a number: LLVM outlines the body of a parallel loop into a function, which would read a variable. 0
    becomes a variable, because TVM rejects code that divides by it, even if the code never runs.
    """
    if lanes_of(x) == 1 and not tirx.analysis.undefined_vars(x):
        number = Analyzer().simplify(x)
        if isinstance(number, tirx.IntImm) and number.value:
            return number
    return T.bind(Register(x).value)


class Register:
    """A vector accumulator, which LLVM keeps in a register while its index is constant.

    `r.value += a * b` is an FMA.
    """

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


def reduce_registers(operation: Callable[[Expr, Expr], Expr], registers: list[Register]) -> Expr:
    """Reduce the registers' values as a tree; their number is a power of two."""
    values = [r.value for r in registers]
    while len(values) > 1:
        values = [T.bind(operation(x, y)) for x, y in zip(values[::2], values[1::2])]
    return values[0]


# Across lanes.


def reduce_lanes(x: Expr, operation: Callable[[Expr, Expr], Expr]) -> Expr:
    """Reduce all lanes to a scalar, as a tree."""
    x = let(x)
    while (n := lanes_of(x)) > 1:
        low, high = list(range(n // 2)), list(range(n // 2, n))
        x = let(operation(tirx.Shuffle([x], low), tirx.Shuffle([x], high)))
    return x


def transpose(rows: list[Expr]) -> list[Expr]:
    """Transpose n vectors of n lanes, n a power of two: element j of vector i becomes element i of vector j."""
    n, rows = len(rows), list(rows)
    half = n // 2
    while half:  # swap the off-diagonal blocks of size `half`, then recurse into the blocks
        upper = [k - half + n if k & half else k for k in range(n)]
        lower = [k + n if k & half else k + half for k in range(n)]
        for i in (i for i in range(n) if not i & half):
            pair = [rows[i], rows[i + half]]
            rows[i], rows[i + half] = let(tirx.Shuffle(pair, upper)), T.bind(tirx.Shuffle(pair, lower))
        half //= 2
    return rows


def sum_vector_lanes(rows: list[Expr]) -> Expr:
    """Return the lane sums of n vectors of n lanes, n a power of two: lane i holds the sum of vector i."""
    n = len(rows)
    half = n // 2
    while half:  # each addition halves the lanes of a vector and packs two vectors into one
        upper = [k - half + n if k & half else k for k in range(n)]
        lower = [k + n if k & half else k + half for k in range(n)]
        pairs = [[rows[i], rows[i + half]] for i in range(half)]
        rows = [let(tirx.Shuffle(pair, upper) + tirx.Shuffle(pair, lower)) for pair in pairs]
        half //= 2
    return rows[0]


# Functions.

# 2^f on [-1/2, 1/2] as 1 + c1 f + c2 f^2 + ...: the minimax fit in relative error (9e-8) for float32, Taylor's series
# (2e-16) for float64. The constant term must be exactly 1 (see `exp2`).
_EXP2 = {
    "float32": (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957,
                0.001326472731307149),
    "float64": tuple(math.log(2) ** k / math.factorial(k) for k in range(13)),
}  # fmt: skip

# Element type: (integer type, bits of the mantissa, lowest exponent of a normal number minus one).
_FLOAT_FORMAT = {"float32": ("int32", 23, -127), "float64": ("int64", 52, -1023)}


def exp2(x: Expr) -> Expr:
    """Return 2^x for x < 128 (float64: 1024); exactly 0 from -127 (-1023) down and at -inf; NaN stays NaN.

    x = n + f with n the nearest integer. Adding 1.5 * 2^mantissa leaves n in the low bits of the result. Shifted into
    the exponent field, n scales the polynomial of f. At the lower clamp f = 0, so the polynomial is exactly 1 and the
    exponent field of the result is 0: the result is +0.0, without a comparison.
    """
    dtype = element_type(x)
    integer, mantissa, lowest = _FLOAT_FORMAT[dtype]
    magic = splat_like(1.5 * 2.0**mantissa, x)
    x = let(x)
    x = let(tirx.Select(x < splat_like(float(lowest), x), splat_like(float(lowest), x), x))
    n_bits = let(reinterpret(x + magic, integer))
    f = let(x - (reinterpret(n_bits, dtype) - magic))
    bits = reinterpret(evaluate_polynomial(f, _EXP2[dtype]), integer)
    return let(reinterpret(bits + T.shift_left(n_bits, splat_like(mantissa, n_bits)), dtype))


def of_vectors(name: str, operands: list[Expr]) -> Expr | None:
    """Return TVM's function of this name as float32 vector code, or None if it is evaluated lane by lane."""
    return expand_vector_function(name, operands, let)


def evaluate_polynomial(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """Evaluate a polynomial by Horner's scheme; lowest power first."""
    p = splat_like(coefficients[-1], x)
    for c in reversed(coefficients[:-1]):
        p = p * x + splat_like(c, x)
    return p


# tanh(x) = x P(x^2) / Q(x^2) for |x| <= 9.01, where tanh rounds to 1: minimax in relative error, 2.1e-8 (3e-7 rounded).
_TANH_LIMIT = 9.01
_TANH_P = (1.0, 0.13380371034145355, 0.0034948112443089485, 2.059627695416566e-05, 1.3336852511258712e-08)
_TANH_Q = (1.0, 0.46713685989379883, 0.025874027982354164, 0.0003284363483544439, 7.76928459345072e-07)


def tanh(x: Expr) -> Expr:
    """Return tanh, to 3e-7 relative for float32 vectors, 3e-16 absolute for float64 ones; NaN stays NaN."""
    if element_type(x) == "float64":  # 1 - 2 / (e^2x + 1)
        x = clamp(x, 20.0)
        return let(splat_like(1.0, x) - splat_like(2.0, x) / (exp2(x * splat_like(2 * LOG2_E, x)) + splat_like(1.0, x)))
    x = clamp(x, _TANH_LIMIT)
    u = let(x * x)
    return let(x * evaluate_polynomial(u, _TANH_P) / evaluate_polynomial(u, _TANH_Q))


def clamp(x: Expr, limit: float) -> Expr:
    """Clamp x to [-limit, limit]; NaN stays NaN."""
    x = let(x)
    x = let(tirx.Select(x > splat_like(limit, x), splat_like(limit, x), x))
    return let(tirx.Select(x < splat_like(-limit, x), splat_like(-limit, x), x))


# Half precision.


def convert(x: Expr, dtype: str, cpu: CpuFeatures) -> Expr:
    """Convert x to another floating-point type, rounding to nearest even (float64 to 16 bits by way of float32).

    Do not bind a bfloat16 vector to a variable: TVM rewrites its type to uint16 and then rejects the binding.
    """
    source = element_type(x)
    if source == dtype:
        return x
    if {source, dtype} & {"float16", "bfloat16"} and "float32" not in (source, dtype):
        return convert(convert(x, "float32", cpu), dtype, cpu)
    if source == "bfloat16":
        bits = cast(reinterpret(x, "uint16"), "uint32")
        return let(reinterpret(T.shift_left(bits, splat_like(16, bits)), "float32"))
    if dtype == "bfloat16":
        return _round_to_bf16(x)
    if source == "float16" and not cpu.f16_conversion:
        return _widen_f16(x)
    if dtype == "float16" and not cpu.f16_conversion:
        return _round_to_f16(x)
    return let(cast(x, dtype))


def _round_to_bf16(x: Expr) -> Expr:
    """Return the upper half of a float32, after adding half a unit of its last place (less one where that bit is 0)."""
    bits = let(reinterpret(x, "uint32"))
    sixteen = splat_like(16, bits)
    odd = T.bitwise_and(T.shift_right(bits, sixteen), splat_like(1, bits))
    rounded = T.shift_right(bits + (splat_like(0x7FFF, bits) + odd), sixteen)
    quiet = T.bitwise_or(T.shift_right(bits, sixteen), splat_like(0x40, bits))  # a NaN must not be rounded to infinity
    is_nan = T.bitwise_and(bits, splat_like(0x7FFFFFFF, bits)) > splat_like(0x7F800000, bits)
    return reinterpret(let(cast(tirx.Select(is_nan, quiet, rounded), "uint16")), "bfloat16")


def _widen_f16(x: Expr) -> Expr:
    """Widen float16 to float32 by integers: a multiplication rebiases the exponent and normalizes subnormals."""
    half = let(cast(reinterpret(x, "uint16"), "uint32"))
    magnitude = let(T.bitwise_and(half, splat_like(0x7FFF, half)))
    scaled = reinterpret(T.shift_left(magnitude, splat_like(13, half)), "float32")
    scaled = reinterpret(scaled * splat_like(2.0**112, scaled), "uint32")
    special = T.bitwise_or(
        T.shift_left(magnitude, splat_like(13, half)), splat_like(0x7F800000, half)
    )  # infinity and NaN
    bits = tirx.Select(magnitude >= splat_like(0x7C00, half), special, scaled)
    sign = T.shift_left(T.bitwise_and(half, splat_like(0x8000, half)), splat_like(16, half))
    return let(reinterpret(T.bitwise_or(bits, sign), "float32"))


def _round_to_f16(x: Expr) -> Expr:
    """Round float32 to float16 by integers."""
    bits = let(reinterpret(x, "uint32"))
    sign = T.shift_right(T.bitwise_and(bits, splat_like(0x80000000, bits)), splat_like(16, bits))
    magnitude = let(T.bitwise_and(bits, splat_like(0x7FFFFFFF, bits)))
    odd = T.bitwise_and(T.shift_right(magnitude, splat_like(13, bits)), splat_like(1, bits))
    # Normal: rebias the exponent by -112 and round off 13 bits. Overflow carries into the exponent of infinity.
    normal = T.shift_right(magnitude + odd + splat_like((0xFFF - (112 << 23)) & 0xFFFFFFFF, bits), splat_like(13, bits))
    # Subnormal: adding 0.5 aligns the mantissa with that of 0.5, and the addition rounds.
    aligned = reinterpret(magnitude, "float32") + splat(0.5, lanes_of(x), "float32")
    subnormal = reinterpret(aligned, "uint32") - splat_like(0x3F000000, bits)
    nan = T.bitwise_or(
        splat_like(0x7E00, bits),
        T.shift_right(T.bitwise_and(magnitude, splat_like(0x7FFFFF, bits)), splat_like(13, bits)),
    )
    half = tirx.Select(magnitude < splat_like(0x38800000, bits), subnormal, normal)  # below 2^-14
    half = tirx.Select(magnitude >= splat_like(0x47800000, bits), splat_like(0x7C00, bits), half)  # from 2^16
    half = tirx.Select(magnitude > splat_like(0x7F800000, bits), nan, half)
    return let(reinterpret(cast(T.bitwise_or(half, sign), "uint16"), "float16"))
