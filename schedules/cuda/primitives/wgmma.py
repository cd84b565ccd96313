"""Matmuls of a warpgroup: wgmma.mma_async of m64nNk16 (PTX ISA 9.7.17), 16-bit operands, float32 accumulators.

Operands in shared memory are tiles of `tma.py`: panels of 64 columns of 16 bits, 128-byte swizzle, addressed by
descriptors that count in units of 16 bytes. wgmma reads and writes registers asynchronously. `fence_registers` tells
nvcc where it may not move them, before the first matmul and after the wait (T.cuda.wgmma.noop_barrier of TVM 0.27 is
broken).
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .ptx import PTX_TYPES
from .tma import COLUMNS, ROW_BYTES, SWIZZLE_128B

K = 16  # depth of one matmul
UNIT = 16  # bytes
K_STEP = K * 2 // UNIT  # along a row
ROW_STEP = K * ROW_BYTES // UNIT  # 16 rows down


def encode_descriptor(memory: tirx.Buffer, at: Expr | int, rows: int) -> Expr:
    """Return the descriptor of the tile of `rows` rows at memory[at] (32-bit words): uint64; adding units moves its
    start.

    Core matrices of 8 rows are 64 units apart, panels as many units as 8 per row. The panel stride matters where the
    tile is read transposed (V): a tile read along its rows (Q, K) never leaves a panel within one matmul.
    """
    buffer = T.alloc_buffer((1,), "uint64", scope="local")
    panel = rows * ROW_BYTES // UNIT
    T.evaluate(
        T.cuda.wgmma.encode_matrix_descriptor(
            buffer.ptr_to([0]), memory.ptr_to([at]), panel, 8 * ROW_BYTES // UNIT, SWIZZLE_128B
        )
    )
    return T.bind(buffer[0])


def begin_matmuls(*registers: tirx.Buffer) -> None:
    """Fence before matmuls that read or write these registers."""
    for buffer in registers:
        fence_registers(buffer)
    T.evaluate(T.ptx.wgmma.fence.sync.aligned())


def mma_ss(dtype: str, C: tirx.Buffer, a: Expr, b: Expr, shape: tuple[int, int], rows: tuple[int, int]) -> None:
    """Emit C [64, N] := A B^T of tiles in shared memory, A [64, K], B [N, K].

    `shape` is (N, K), `rows` those of the tiles.
    """
    n, k = shape
    for step in range(-(-k // K)):
        panel, inside = divmod(step, COLUMNS // K)
        steps = [panel * r * ROW_BYTES // UNIT + inside * K_STEP for r in rows]
        T.evaluate(
            _instruction(dtype, n)(
                *_registers(C),
                _offset_descriptor(a, steps[0]),
                _offset_descriptor(b, steps[1]),
                _predicate(step > 0),
                1,
                1,
                0,
                0,
            )
        )
    T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())


def mma_rs(dtype: str, C: tirx.Buffer, A: tirx.Buffer, b: Expr, shape: tuple[int, int]) -> None:
    """Emit C [64, N] += A B, A [64, K] in registers, the tile B [K, N] in shared memory; shape is (N, K).

    Where N is not a multiple of 64, each panel of B has a matmul of its own. No layout of CuTe defines what a matmul
    over a panel and a part of the next would read.
    """
    n, k = shape
    width = n if n % COLUMNS == 0 else COLUMNS
    for step in range(k // K):
        operand = [A[4 * step + x] for x in range(4)]
        for first in range(0, n, width):
            columns = min(width, n - first)
            accumulator = [C[(first + x) // 2] for x in range(0, columns, 2)]
            b_descriptor = _offset_descriptor(b, step * ROW_STEP + first // COLUMNS * (k * ROW_BYTES // UNIT))
            T.evaluate(_instruction(dtype, columns)(*accumulator, *operand, b_descriptor, _predicate(True), 1, 1, 1))
    T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())


def add_matmul(dtype: str, C: tirx.Buffer, a: Expr, b: Expr, k: int, along_k: bool) -> None:
    """Emit C [64, N] += A B of tiles in shared memory, A [64, K] along k, without ending a group.

    B is along k, [N, K], or across, in panels of 64 columns [K, 64]. K is at most the 64 of a panel.
    """
    n = 2 * int(C.shape[0])
    for step in range(k // K):
        b_descriptor = _offset_descriptor(b, step * (K_STEP if along_k else ROW_STEP))
        operands = (_offset_descriptor(a, step * K_STEP), b_descriptor, _predicate(True), 1, 1, 0, 0 if along_k else 1)
        T.evaluate(_instruction(dtype, n)(*_registers(C), *operands))


def commit_matmuls() -> None:
    """End a group of matmuls."""
    T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())


def wait_for_matmuls(pending: int, *registers: tirx.Buffer) -> None:
    """Wait until at most so many groups of matmuls are pending; the registers can be used from here on."""
    T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(pending))
    for buffer in registers:
        fence_registers(buffer)


def fence_registers(registers: tirx.Buffer) -> None:
    """Make nvcc treat the registers as modified here."""
    n, dtype = int(registers.shape[0]), str(registers.dtype)
    kind, constraint = {"float32": ("float", "f"), "uint32": ("uint", "r")}[dtype]
    name = f"fence_{kind}_{n}"
    source = f"""
__forceinline__ __device__ void {name}({kind}* r) {{
#pragma unroll
  for (int i = 0; i < {n}; ++i) asm volatile("" : "+{constraint}"(r[i]) :: "memory");
}}
"""
    T.evaluate(T.cuda.func_call(name, registers.ptr_to([0]), source_code=source))


def _instruction(dtype: str, n: int):
    return T.ptx[f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{PTX_TYPES[dtype]}.{PTX_TYPES[dtype]}"]


def _registers(C: tirx.Buffer) -> list[Expr]:
    return [C[i] for i in range(int(C.shape[0]))]


def _offset_descriptor(descriptor: Expr, units: int) -> Expr:
    return descriptor if units == 0 else descriptor + tirx.const(units, "uint64")


def _predicate(value: bool) -> Expr:
    return T.ptx.pred(T.uint32(int(value)))
