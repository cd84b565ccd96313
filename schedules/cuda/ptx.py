"""PTX instructions and CUDA functions under the names that kernels use, for TVM's IRBuilder.

Registers are elements of buffers in scope "local" with indices that are known once loops are unrolled. Addresses of
shared memory and of global memory are elements of buffers too, where the instruction begins to read or write.
Instructions are named as in the PTX ISA; a fragment is what one of the 32 threads of a warp holds of a matrix (PTX ISA,
"Matrix Fragments for mma.m16n8k16"): thread t holds rows t / 4 and t / 4 + 8, columns 2 (t % 4) and 2 (t % 4) + 1, of
every 8 columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

Element: TypeAlias = Any  # an element of a buffer: buffer[...]

LOG2_E = math.log2(math.e)
WARP = 32
SHORT = {"float16": "f16", "bfloat16": "bf16"}
"""PTX names of the element types that tensor cores multiply."""

WAIT = "wait_for_earlier_kernels"
"""The name of that function in CUDA C++."""


# Registers and memory.


def registers(count: int, dtype: str) -> tirx.Buffer:
    """So many registers of the thread."""
    return T.alloc_buffer((count,), dtype, scope="local")


def shared_memory(count: int, dtype: str, align: int) -> tirx.Buffer:
    """The block's shared memory whose size the launch says, aligned to so many bytes. In CUDA C++ it is one variable of
    the file to all kernels that call it by one name, who must agree on its type: the name says it."""
    memory = T.alloc_buffer((count,), dtype, scope="shared.dyn", align=align)
    return IRBuilder.name(f"shared_{dtype}_{align}", memory)


def put(buffer: tirx.Buffer, index: Expr | int, value: Expr) -> None:
    """buffer[index] := value"""
    T.buffer_store(buffer, value, [index])


def unrolled(count: int) -> Any:
    """A loop that the CUDA compiler unrolls: its variable may be part of a register's index."""
    return T.serial(count, unroll=True)


def let(value: Expr) -> Expr:
    """The value, computed here and now (TVM may move the definition of a `T.bind` to each of its uses)."""
    register = registers(1, str(value.ty))
    put(register, 0, value)
    return register[0]


def int32(value: Expr) -> Expr:
    """The value as int32; a constant stays one, by which TVM simplifies."""
    return tirx.const(int(value), "int32") if isinstance(value, tirx.IntImm) else value.astype("int32")


# Tensor cores.


def load_matrices(to: Sequence[Element], address: Element, *, transposed: bool = False) -> None:
    """ldmatrix: one, two or four 8 x 8 matrices of 16-bit elements from shared memory, a register of each per thread.

    Thread 8 n + r gives the 16-byte aligned address of row r of matrix n.
    """
    variant = f"ldmatrix.sync.aligned.m8n8.x{len(to)}{'.trans' if transposed else ''}.shared.b16"
    T.evaluate(T.ptx[variant](*to, _address(address)))


def multiply_add(dtype: str, d: Sequence[Element], a: Sequence[Element], b: Sequence[Element]) -> None:
    """mma.sync: D [16, 8] += A [16, 16] B [16, 8] by a warp; A and B of that type, D float32 (4 + 4 + 2 registers).

    Of tf32 A is [16, 8] and B [8, 8]: a register holds one element where it has two of half precision.
    """
    kind, depth = ("tf32", 8) if dtype == "tf32" else (SHORT[dtype], 16)
    T.evaluate(T.ptx[f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"](*d, *a, *b, *d))


def round_to_tf32(to: Element, x: Expr) -> None:
    """cvt: a float32 number rounded to TF32, ties away from zero, in a register of 32 bits."""
    T.evaluate(T.ptx["cvt.rna.tf32.f32"](to, x))


def pack(dtype: str, to: Element, low: Expr, high: Expr) -> None:
    """cvt: two float32 numbers, rounded to that 16-bit type, in one register."""
    T.evaluate(T.ptx[f"cvt.rn.{SHORT[dtype]}x2.f32"](to, high, low))


# Two numbers of 16 bits in one register.


def unpack(dtype: str, pair: Expr) -> tuple[Expr, Expr]:
    """The lower and the upper one in float32."""
    if dtype == "bfloat16":
        bits = (pair << T.uint32(16), T.bitwise_and(pair, T.uint32(0xFFFF0000)))
        return T.reinterpret("float32", bits[0]), T.reinterpret("float32", bits[1])
    halves = (pair.astype("uint16"), (pair >> T.uint32(16)).astype("uint16"))
    low, high = (T.reinterpret(dtype, half).astype("float32") for half in halves)
    return low, high


def fma_pair(dtype: str, a: Expr, b: Expr, c: Expr) -> Expr:
    """fma: a b + c of both, rounded once; subnormal numbers are numbers."""
    register = registers(1, "uint32")
    T.evaluate(T.ptx[f"fma.rn.{SHORT[dtype]}x2"](register[0], a, b, c))
    return register[0]


def permute(low: Expr, high: Expr, places: int) -> Expr:
    """prmt: four of the eight bytes of two registers. Hexadecimal digits of `places` say which."""
    register = registers(1, "uint32")
    T.evaluate(T.ptx["prmt.b32"](register[0], low, high, T.uint32(places)))
    return register[0]


def from_float8(pair: Expr) -> Expr:
    """cvt: two float16 of the float8_e4m3fn in a uint16; from sm_89 on."""
    register = registers(1, "uint32")
    T.evaluate(T.ptx["cvt.rn.f16x2.e4m3x2"](register[0], pair))
    return register[0]


# Asynchronous copies.

CHUNK_BYTES = 16


def copy_chunk(to: Element, source: Element, condition: Expr | None = None, size: int = CHUNK_BYTES) -> None:
    """cp.async: 4, 8 or 16 bytes from global to shared memory, both aligned so; zeros where the condition fails.

    Nothing is read from the source then, which need not exist.
    """
    operands: list[Expr | int] = [_address(to), _address(source), size]
    if condition is not None:
        operands.append(tirx.Select(condition, T.uint32(size), T.uint32(0)))
    cached = "cg" if size == CHUNK_BYTES else "ca"  # past the first level go only whole chunks
    T.evaluate(T.ptx[f"cp.async.{cached}.shared.global"](*operands))


def commit_copies() -> None:
    """Ends a group of this thread's asynchronous copies, which may be empty."""
    T.evaluate(T.ptx["cp.async.commit_group"]())


def wait_for_copies(pending: int) -> None:
    """Waits until at most so many of this thread's latest groups are on their way."""
    T.evaluate(T.ptx["cp.async.wait_group"](pending))


# Synchronous copies.


def store_shared(to: Element, register: Element) -> None:
    """st.shared: a register of two 16-bit elements."""
    T.evaluate(T.ptx["st.shared.b32"](_address(to), register))


def store_chunk(to: Element, words: tirx.Buffer) -> None:
    """16 bytes of registers to shared memory, aligned so."""
    T.evaluate(T.ptx["st.shared.v4.b32"](_address(to), *(words[n] for n in range(4))))


def load_shared(to: tirx.Buffer, source: Element) -> None:
    """One, two or four registers of 32 bits from shared memory, aligned as a whole."""
    words = [to[n] for n in range(int(to.shape[0]))]
    several = f".v{len(words)}" if len(words) > 1 else ""
    T.evaluate(T.ptx[f"ld.shared{several}.b32"](*words, _address(source)))


def copy_from_shared(to: Element, source: Element) -> None:
    """16 bytes from shared to global memory, both aligned so."""
    four = registers(4, "uint32")
    values = [four[n] for n in range(4)]
    T.evaluate(T.ptx["ld.shared.v4.b32"](*values, _address(source)))
    T.evaluate(T.ptx["st.global.v4.b32"](_address(to), *values))


# Threads of a block and of a warp.


def all_registers() -> AbstractContextManager[object]:
    """Around the whole of a kernel: a thread may have as many registers as there are. Else the CUDA compiler moves some
    to memory where that lets one more block on an SM."""
    one = tirx.const(1, "int32")
    return T.attr(one, "tirx.launch_bounds_min_blocks_per_sm", one)


def synchronize() -> None:
    """__syncthreads()"""
    T.evaluate(T.cuda.cta_sync())


def synchronize_warp() -> None:
    """__syncwarp()"""
    T.evaluate(T.cuda.warp_sync())


def synchronize_cluster() -> None:
    """barrier.cluster: of all blocks of the cluster, whose shared memory is there for each other from here on, or until
    here."""
    T.evaluate(T.ptx["barrier.cluster.arrive.release"]())
    T.evaluate(T.ptx["barrier.cluster.wait.acquire"]())


def wait_for_earlier_kernels() -> None:
    """griddepcontrol.wait, from sm_90 on: the kernels before this one have ended, and what they wrote is there.

    Kernels begin before that (lowering/compiling/early_launch.py), which puts this at the begin of each that has none.
    """
    code = f"""
__forceinline__ __device__ void {WAIT}() {{
  asm volatile("griddepcontrol.wait;" ::: "memory");
}}
"""
    T.evaluate(T.cuda.func_call(WAIT, source_code=code))


def any_thread(condition: Expr) -> Expr:
    """__syncthreads_or: whether the condition holds for some thread of the block, which all of them wait to know."""
    return let(T.cuda.syncthreads_or(condition.astype("int32"))) != 0


def shuffle_xor(value: Expr, lanes: int) -> Expr:
    """The value of the thread of the warp whose number differs in those bits."""
    return tirx.call_intrin(value.ty, "tirx.cuda.__shfl_xor_sync", T.uint32(0xFFFFFFFF), value, lanes, WARP)


def shuffle_up(value: Expr, lanes: Expr | int) -> Expr:
    """The value of the thread of the warp whose number is smaller by that; the first ones keep their own."""
    return tirx.call_intrin(value.ty, "tirx.cuda.__shfl_up_sync", T.uint32(0xFFFFFFFF), value, lanes, WARP)


def uniform(value: Expr, lane: int = 0) -> Expr:
    """The value of a lane in all lanes of a warp, as one that nvcc knows to be equal."""
    return tirx.call_intrin(value.ty, "tirx.cuda.__shfl_sync", T.uint32(0xFFFFFFFF), value, lane, WARP)


def fresh(value: Expr) -> Expr:
    """The same for each lane, but new to nvcc: what is computed of it is computed here, not where the value came from
    and then kept in registers over a loop."""
    return let(shuffle_xor(value, 0))


def ballot(condition: Expr) -> Expr:
    """The lanes of the warp in which the condition holds, a bit each; uint32."""
    return let(T.cuda.ballot_sync(T.uint32(0xFFFFFFFF), condition.astype("int32")))


def reduce_quad(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Combines the values of four neighboring threads, which hold the same rows of a fragment; all four get it."""
    for lanes in (1, 2):
        value = let(combine(let(value), shuffle_xor(value, lanes)))
    return value


def reduce_warp(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Combines the values of the 32 threads of a warp; all of them get the result."""
    for lanes in (16, 8, 4, 2, 1):
        value = let(combine(let(value), let(shuffle_xor(value, lanes))))
    return value


# Functions of float32 numbers.


def exp2(x: Expr) -> Expr:
    """ex2.approx: 2^x with a relative error of 2^-22, and exp2(-inf) = 0."""
    register = registers(1, "float32")
    T.evaluate(T.ptx["ex2.approx.ftz.f32"](register[0], x))
    return register[0]


def tanh(x: Expr) -> Expr:
    """tanh with a relative error below 1e-6.

    With --use_fast_math tanhf is tanh.approx, whose relative error of 5e-4 a soft cap multiplies: with a cap of 50,
    that changes weights by a percent. Near 0, where 1 - 2 / (1 + exp(2 x)) cancels, a few terms of the series do.
    """
    x = let(x)
    x2 = let(x * x)
    series: Expr = tirx.const(62 / 2835, "float32")
    for coefficient in (-17 / 315, 2 / 15, -1 / 3, 1.0):
        series = series * x2 + tirx.const(coefficient, "float32")
    e = exp2(x * tirx.const(2 * LOG2_E, "float32"))
    quotient = T.float32(1) - T.float32(2) * reciprocal(T.float32(1) + e)
    return let(tirx.Select(tirx.abs(x) < T.float32(0.25), x * series, quotient))


def reciprocal(x: Expr) -> Expr:
    """rcp.approx: 1 / x with a relative error of 2^-23. A division is a call where nvcc may not take it for this."""
    register = registers(1, "float32")
    T.evaluate(T.ptx["rcp.approx.ftz.f32"](register[0], x))
    return register[0]


def _address(element: Element) -> Expr:
    return element.source.ptr_to(list(element.indices))
