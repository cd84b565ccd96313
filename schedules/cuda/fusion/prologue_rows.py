"""Norm prologue: rows of A that a block of a matmul computes for itself in shared memory, from the inputs of a norm.

A norm of few rows costs a launch and almost no time. The kernel that multiplies its rows can compute them: a block has
them after a read of the second-level cache and one exchange between its warps, while its first weights are in flight.

    for each row                          all warps of the block
        its reductions                    reduction.py
        the row, in half precision        shared memory, `pitch` elements after the one before
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ...reading.stages import Stage
from ..elementwise.chunks import CHUNK, pack_chunk, store_vector
from ..elementwise.reduction import ReducedRow, ReducedRows
from ..matmul.k_slices import CHUNK_REGISTERS, ThreadSlots
from ..primitives import ptx
from ..primitives.ptx import alloc_registers, let, store_element

MAX_ROW_BYTES = 17 << 10
"""Maximum bytes of shared memory of a block for such rows: about as many as k-slices of A would take."""

_EXCHANGE_BYTES = 256  # bytes for a number of each warp
_EXCHANGES = 2


def row_pitch(depth: int) -> int:
    """Return the elements from one row to the next: rows begin in different halves of the banks."""
    return depth + (32 - depth) % 64


def max_rows(depth: int) -> int:
    """Return how many rows fit, up to the eight that are multiplied at a time."""
    return min(MAX_ROW_BYTES // (2 * row_pitch(depth)), 8)


def row_memory_bytes(depth: int) -> int:
    """Return the bytes of the rows and of the exchanges between warps."""
    return max_rows(depth) * 2 * row_pitch(depth) + _EXCHANGES * _EXCHANGE_BYTES


@dataclass(frozen=True, eq=False)
class PrologueRows:
    """A [rows, depth] in half precision, by the stages that compute it, the last of which is A itself."""

    rows: ReducedRows
    depth: int

    @property
    def max_rows(self) -> int:
        return max_rows(self.depth)

    @property
    def row_memory_bytes(self) -> int:
        """Bytes at the start of shared memory."""
        return row_memory_bytes(self.depth)

    def emit(
        self,
        rows: Expr,
        warps: int,
        memory: dict[tirx.Buffer, tirx.Buffer],
        thread_memory: tuple[tirx.Buffer, Expr],
        stores_a: Expr | None,
    ) -> None:
        """Compute so many rows, at most `max_rows`, at the start of shared memory, by all threads of the block.

        `memory` maps the function's tensors to flat views. `thread_memory` is the shared memory and the thread's index.
        `stores_a` tells whether A is stored, too.
        """
        with T.serial(rows.astype("int64")) as row:
            _PrologueRow(self, warps, memory, thread_memory, row, stores_a).emit(row)
            ptx.synchronize()


class _PrologueRow(ReducedRow):
    def __init__(
        self,
        prologue: PrologueRows,
        warps: int,
        memory: dict[tirx.Buffer, tirx.Buffer],
        thread_memory: tuple[tirx.Buffer, Expr],
        row: Expr,
        stores_a: Expr | None,
    ) -> None:
        shared, thread = thread_memory
        super().__init__(prologue.rows, warps, memory, thread)
        self.prologue, self.shared, self.row, self.stores_a, self.exchanges = prologue, shared, row, stores_a, 0

    def exchange(self, dtype: str) -> tuple[tirx.Buffer, int]:
        """Return memory after the rows: a block with static memory may be rejected where it has 48 KiB in total."""
        size = DataType(dtype).itemsize
        first = self.prologue.row_memory_bytes - (1 + self.exchanges % _EXCHANGES) * _EXCHANGE_BYTES
        self.exchanges += 1
        size_of_all = self.prologue.row_memory_bytes // size
        return T.decl_buffer((size_of_all,), dtype, data=self.shared.data, scope="shared.dyn"), first // size

    def store_row_chunk(self, stage: Stage, at: Expr, values: tirx.Buffer) -> None:
        """Store a chunk to shared memory, and to A."""
        A = self.memory[stage.output]
        packed = pack_chunk(str(A.dtype), values)
        offset = at + self.row * (row_pitch(self.prologue.depth) - self.prologue.depth)
        ptx.store_chunk(self.shared[let((offset // 2).astype("int32"))], packed)
        if self.stores_a is not None:
            with T.If(self.stores_a), T.Then():
                store_vector(A, at, packed, CHUNK_REGISTERS)


class PrologueSlices:
    """The counterpart of `KSlices` for a row that the block has computed: c chunks of k at a time."""

    def __init__(self, prologue: PrologueRows, slots: ThreadSlots, position: tuple[Expr, Expr], c: int) -> None:
        """`position` is the index of the row, and whether it exists."""
        self.memory, self.c = slots.memory, c
        self.start, self.exists = let(position[0] * (row_pitch(prologue.depth) // 2)), let(position[1])
        self.registers = alloc_registers(c * CHUNK_REGISTERS, "uint32")

    def fetch(self, index: int, k: Expr, inside: Expr) -> None:
        """Do nothing: the row is in shared memory."""

    def read(self, index: int, k: Expr, inside: Expr) -> None:
        """Load the k-slice into registers; zeros where it does not exist."""
        for n in range(self.c * CHUNK_REGISTERS):
            store_element(self.registers, n, T.uint32(0))
        with T.If(tirx.all(self.exists, inside)), T.Then():
            for n in range(self.c):
                chunk = alloc_registers(CHUNK_REGISTERS, "uint32")
                ptx.load_shared(chunk, self.memory[self.start + tirx.truncdiv(k, 2) + n * (CHUNK // 2)])
                for x in range(CHUNK_REGISTERS):
                    store_element(self.registers, n * CHUNK_REGISTERS + x, chunk[x])

    def chunk(self, index: int, n: int) -> list[list[Expr]]:
        """Return the packed registers of the n-th chunk of the k-slice that was read."""
        return [[self.registers[n * CHUNK_REGISTERS + x] for x in range(CHUNK_REGISTERS)]]
