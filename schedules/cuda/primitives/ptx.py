"""PTX instructions and CUDA functions under the names that kernels use, for TVM's IRBuilder.

Registers are elements of buffers in scope "local" whose indices are static after loops are unrolled. Addresses of
shared memory and of global memory are elements of buffers too, where the instruction begins to read or write.
Instructions are named as in the PTX ISA. A fragment is the share of a matrix of one of the 32 threads of a warp (PTX
ISA, "Matrix Fragments for mma.m16n8k16"): thread t has rows t / 4 and t / 4 + 8, columns 2 (t % 4) and 2 (t % 4) + 1,
of every 8 columns.
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
PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}
"""PTX names of the element types that tensor cores multiply."""

WAIT = "wait_for_earlier_kernels"
"""The name of that function in CUDA C++."""


# Registers and memory.


def alloc_registers(count: int, dtype: str) -> tirx.Buffer:
    """Allocate `count` registers of the thread."""
    return T.alloc_buffer((count,), dtype, scope="local")


def alloc_shared_memory(count: int, dtype: str, align: int) -> tirx.Buffer:
    """Allocate the block's dynamic shared memory, aligned to so many bytes.

    In CUDA C++ it is one variable per file for all kernels that use its name. They must agree on its type, so the name
    includes it.
    """
    memory = T.alloc_buffer((count,), dtype, scope="shared.dyn", align=align)
    return IRBuilder.name(f"shared_{dtype}_{align}", memory)


def store_element(buffer: tirx.Buffer, index: Expr | int, value: Expr) -> None:
    """Emit buffer[index] := value."""
    T.buffer_store(buffer, value, [index])


def unrolled(count: int) -> Any:
    """Return a loop that the CUDA compiler unrolls: its variable may be part of a register's index."""
    return T.serial(count, unroll=True)


def let(value: Expr) -> Expr:
    """Compute the value here, in a register, and return it (TVM may move the definition of a `T.bind` to each of its
    uses).
    """
    register = alloc_registers(1, str(value.ty))
    store_element(register, 0, value)
    return register[0]


def int32(value: Expr) -> Expr:
    """Return the value as int32; a constant stays constant, so that TVM can simplify."""
    return tirx.const(int(value), "int32") if isinstance(value, tirx.IntImm) else value.astype("int32")


# Tensor cores.


def load_matrices(target: Sequence[Element], address: Element, *, transposed: bool = False) -> None:
    """Emit ldmatrix: load one, two or four 8 x 8 matrices of 16-bit elements from shared memory, a register of each per
    thread.

    Thread 8 n + r passes the 16-byte aligned address of row r of matrix n.
    """
    variant = f"ldmatrix.sync.aligned.m8n8.x{len(target)}{'.trans' if transposed else ''}.shared.b16"
    T.evaluate(T.ptx[variant](*target, _address(address)))


def multiply_add(dtype: str, d: Sequence[Element], a: Sequence[Element], b: Sequence[Element]) -> None:
    """Emit mma.sync: D [16, 8] += A [16, 16] B [16, 8] by a warp; A and B of that type, D float32 (4 + 4 + 2
    registers).

    For tf32, A is [16, 8] and B [8, 8]: a register has one element, where it has two of half precision.
    """
    kind, depth = ("tf32", 8) if dtype == "tf32" else (PTX_TYPES[dtype], 16)
    T.evaluate(T.ptx[f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"](*d, *a, *b, *d))


def round_to_tf32(target: Element, x: Expr) -> None:
    """Emit cvt: a float32 number rounded to TF32, ties away from zero, in a register of 32 bits."""
    T.evaluate(T.ptx["cvt.rna.tf32.f32"](target, x))


def pack(dtype: str, target: Element, low: Expr, high: Expr) -> None:
    """Emit cvt: two float32 numbers, rounded to that 16-bit type, packed in one register."""
    T.evaluate(T.ptx[f"cvt.rn.{PTX_TYPES[dtype]}x2.f32"](target, high, low))


# Pairs of 16-bit numbers in one register.


def unpack(dtype: str, pair: Expr) -> tuple[Expr, Expr]:
    """Return the lower and the upper number in float32."""
    if dtype == "bfloat16":
        bits = (pair << T.uint32(16), T.bitwise_and(pair, T.uint32(0xFFFF0000)))
        return T.reinterpret("float32", bits[0]), T.reinterpret("float32", bits[1])
    halves = (pair.astype("uint16"), (pair >> T.uint32(16)).astype("uint16"))
    low, high = (T.reinterpret(dtype, half).astype("float32") for half in halves)
    return low, high


def fma_pair(dtype: str, a: Expr, b: Expr, c: Expr) -> Expr:
    """Emit fma: a b + c of both numbers, rounded once; subnormal numbers are not flushed."""
    register = alloc_registers(1, "uint32")
    T.evaluate(T.ptx[f"fma.rn.{PTX_TYPES[dtype]}x2"](register[0], a, b, c))
    return register[0]


def permute(low: Expr, high: Expr, selector: int) -> Expr:
    """Emit prmt: select four of the eight bytes of two registers by the hexadecimal digits of `selector`."""
    register = alloc_registers(1, "uint32")
    T.evaluate(T.ptx["prmt.b32"](register[0], low, high, T.uint32(selector)))
    return register[0]


def from_float8(pair: Expr) -> Expr:
    """Emit cvt: two float16 from the float8_e4m3fn in a uint16; from sm_89 on."""
    register = alloc_registers(1, "uint32")
    T.evaluate(T.ptx["cvt.rn.f16x2.e4m3x2"](register[0], pair))
    return register[0]


# Asynchronous copies.

CHUNK_BYTES = 16


def copy_chunk(target: Element, source: Element, condition: Expr | None = None, size: int = CHUNK_BYTES) -> None:
    """Emit cp.async: 4, 8 or 16 bytes from global to shared memory, both aligned so; zeros where the condition fails.

    In that case the source is not read, and need not exist.
    """
    operands: list[Expr | int] = [_address(target), _address(source), size]
    if condition is not None:
        operands.append(tirx.Select(condition, T.uint32(size), T.uint32(0)))
    cached = "cg" if size == CHUNK_BYTES else "ca"  # only whole chunks bypass the first level
    T.evaluate(T.ptx[f"cp.async.{cached}.shared.global"](*operands))


def commit_copies() -> None:
    """End a group of this thread's asynchronous copies, which may be empty."""
    T.evaluate(T.ptx["cp.async.commit_group"]())


def wait_for_copies(pending: int) -> None:
    """Wait until at most so many of this thread's latest groups are in flight."""
    T.evaluate(T.ptx["cp.async.wait_group"](pending))


# Synchronous copies.


def store_shared(target: Element, register: Element) -> None:
    """Emit st.shared: a register of two 16-bit elements."""
    T.evaluate(T.ptx["st.shared.b32"](_address(target), register))


def store_chunk(target: Element, packed: tirx.Buffer) -> None:
    """Store 16 bytes of registers to shared memory, aligned so."""
    T.evaluate(T.ptx["st.shared.v4.b32"](_address(target), *(packed[n] for n in range(4))))


def load_shared(target: tirx.Buffer, source: Element) -> None:
    """Load one, two or four registers of 32 bits from shared memory, aligned as a whole."""
    elements = [target[n] for n in range(int(target.shape[0]))]
    vector = f".v{len(elements)}" if len(elements) > 1 else ""
    T.evaluate(T.ptx[f"ld.shared{vector}.b32"](*elements, _address(source)))


def copy_from_shared(target: Element, source: Element) -> None:
    """Copy 16 bytes from shared to global memory, both aligned so."""
    chunk = alloc_registers(4, "uint32")
    values = [chunk[n] for n in range(4)]
    T.evaluate(T.ptx["ld.shared.v4.b32"](*values, _address(source)))
    T.evaluate(T.ptx["st.global.v4.b32"](_address(target), *values))


# Threads of a block and of a warp.


def all_registers() -> AbstractContextManager[object]:
    """Wrap a kernel so that a thread may use all registers.

    Otherwise the CUDA compiler spills some where that lets one more block run on an SM.
    """
    unit = tirx.const(1, "int32")
    return T.attr(unit, "tirx.launch_bounds_min_blocks_per_sm", unit)


def synchronize() -> None:
    """Emit __syncthreads()."""
    T.evaluate(T.cuda.cta_sync())


def synchronize_warp() -> None:
    """Emit __syncwarp()."""
    T.evaluate(T.cuda.warp_sync())


def synchronize_cluster() -> None:
    """Emit barrier.cluster for all blocks of the cluster.

    Their shared memory is accessible to each other from here on, or until here.
    """
    T.evaluate(T.ptx["barrier.cluster.arrive.release"]())
    T.evaluate(T.ptx["barrier.cluster.wait.acquire"]())


def wait_for_earlier_kernels() -> None:
    """Emit griddepcontrol.wait, from sm_90 on: the kernels before this one have ended, and their writes are visible.

    Kernels begin before that (schedules/cuda/dependent_launch.py); that pass inserts this at the start of each kernel
    that has none.
    """
    code = f"""
__forceinline__ __device__ void {WAIT}() {{
  asm volatile("griddepcontrol.wait;" ::: "memory");
}}
"""
    T.evaluate(T.cuda.func_call(WAIT, source_code=code))


def any_thread(condition: Expr) -> Expr:
    """Emit __syncthreads_or: return, after a barrier, whether the condition holds for some thread of the block."""
    return let(T.cuda.syncthreads_or(condition.astype("int32"))) != 0


def shuffle_xor(value: Expr, lanes: int) -> Expr:
    """Return the value of the thread of the warp whose index differs in those bits."""
    return tirx.call_intrin(value.ty, "tirx.cuda.__shfl_xor_sync", T.uint32(0xFFFFFFFF), value, lanes, WARP)


def shuffle_up(value: Expr, lanes: Expr | int) -> Expr:
    """Return the value of the thread of the warp whose index is smaller by `lanes`; the first threads return their
    own.
    """
    return tirx.call_intrin(value.ty, "tirx.cuda.__shfl_up_sync", T.uint32(0xFFFFFFFF), value, lanes, WARP)


def uniform(value: Expr, lane: int = 0) -> Expr:
    """Return the value of a lane in all lanes of a warp, in a form that nvcc treats as uniform."""
    return tirx.call_intrin(value.ty, "tirx.cuda.__shfl_sync", T.uint32(0xFFFFFFFF), value, lane, WARP)


def launder(value: Expr) -> Expr:
    """Return the same value, opaque to nvcc.

    Expressions of it are computed here, not where the value came from, and so are not kept in registers over a loop.
    """
    return let(shuffle_xor(value, 0))


def ballot(condition: Expr) -> Expr:
    """Return the lanes of the warp in which the condition holds, a bit each; uint32."""
    return let(T.cuda.ballot_sync(T.uint32(0xFFFFFFFF), condition.astype("int32")))


def reduce_quad(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Combine the values of four neighboring threads, which have the same rows of a fragment; all four get the
    result.
    """
    for lanes in (1, 2):
        value = let(combine(let(value), shuffle_xor(value, lanes)))
    return value


def reduce_warp(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """Combine the values of the 32 threads of a warp; all of them get the result."""
    for lanes in (16, 8, 4, 2, 1):
        value = let(combine(let(value), let(shuffle_xor(value, lanes))))
    return value


# Functions of float32 numbers.


def exp2(x: Expr) -> Expr:
    """Emit ex2.approx: 2^x with a relative error of 2^-22, and exp2(-inf) = 0."""
    register = alloc_registers(1, "float32")
    T.evaluate(T.ptx["ex2.approx.ftz.f32"](register[0], x))
    return register[0]


def tanh(x: Expr) -> Expr:
    """Emit tanh with a relative error below 1e-6.

    With --use_fast_math tanhf is tanh.approx, whose relative error of 5e-4 is multiplied by a soft cap: with a cap of
    50, that changes weights by a percent. Near 0, where 1 - 2 / (1 + exp(2 x)) cancels, a few terms of the series
    suffice.
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
    """Emit rcp.approx: 1 / x with a relative error of 2^-23.

    nvcc compiles a division as a call, unless it may use this instruction.
    """
    register = alloc_registers(1, "float32")
    T.evaluate(T.ptx["rcp.approx.ftz.f32"](register[0], x))
    return register[0]


def _address(element: Element) -> Expr:
    return element.source.ptr_to(list(element.indices))
