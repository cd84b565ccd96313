"""Tiles of Q, K, V and Y between global and shared memory by the tensor memory accelerator (PTX ISA 9.7.10.28).

A tile is stored in shared memory as panels of 64 columns: rows of 128 bytes, whose eight 16-byte chunks are swizzled
(chunk c of row r is at c ^ (r mod 8)), as wgmma reads them and so that a column of rows has no bank conflicts. Where a
head's dimension is not a multiple of 64, the last panel has its full width. Elements outside of the tensor are read as
0, which costs shared memory but neither traffic nor matmuls, as those stop at the last column. Rows after the last one
are 0 too, and not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.parameters import int64

COLUMNS = 64  # of a panel, of 16 bits
ROW_BYTES = 128
CHUNKS = 8  # of 16 bytes in a row
ROW_WORDS = ROW_BYTES // 4
SWIZZLE_128B, L2_PROMOTION_128B = 3, 2  # CUtensorMapSwizzle, CUtensorMapL2promotion
RANK = 5
STORE = f"cp.async.bulk.tensor.{RANK}d.global.shared::cta.bulk_group"


def count_panels(dim: int) -> int:
    return -(-dim // COLUMNS)


def format_load(rank: int) -> str:
    """Return the name of the PTX instruction that loads a tile of a tensor of this rank."""
    return f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"


def alloc_tensor_map() -> tirx.Var:
    """Emit the host's memory of a tensor map."""
    return T.bind(T.tvm_stack_alloca("tensormap", 1))


def encode_tensor_map(
    handle: tirx.Var,
    data: tirx.Var,
    *,
    dtype: str,
    sizes: Sequence[Expr | int],
    strides: Sequence[Expr | int],
    box: Sequence[int],
) -> None:
    """Emit the host's encoding of a tensor map, innermost axis first.

    Args:
        handle: The map's memory.
        data: The tensor's memory.
        dtype: The type of its elements.
        sizes: Elements along each axis.
        strides: Bytes from one element to the next along each axis but the innermost.
        box: Elements of a tile along each axis.
    """
    T.evaluate(
        T.tensormap_encode_tiled(
            handle, data, *sizes, *strides, *box, *(1 for _ in box),
            descriptor_dtype=dtype, rank=len(box), swizzle=SWIZZLE_128B, l2_promotion=L2_PROMOTION_128B,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class TensorMap:
    """Tiles of `rows` packed rows of q, k, v or y; created by the host, used by a kernel. Coordinates are int32.

    `group` heads are packed: row r of a pack is row r // group of its head r % group. It divides `rows`.
    """

    handle: tirx.Var
    dim: int
    rows: int
    group: int

    @staticmethod
    def encode(bound: BoundAttention, name: str, rows: int, group: int = 1) -> TensorMap:
        """Emit the host's code. Elements have 16 bits, rows whole 16 bytes, and B and S are positive.

        Where there are no keys, the map is one of Q, because it needs some tensor; nothing is read through it.
        """
        p = bound.problem
        heads, length = (p.q_heads, bound.S) if name in ("q", "y") else (p.kv_heads, bound.T)
        dim = p.head_dim if name in ("q", "k") else p.v_head_dim
        buffer = bound.buffers[name]
        size = DataType(buffer.dtype).bits // 8
        length, has_keys = tirx.max(int64(length), T.int64(1)), int64(length) > 0
        batch, head, row = bound.addressing.strides(name)
        head, batch = tirx.max(head, dim), tirx.max(batch, heads * dim)  # where there are no rows
        sizes = [dim, group, length, heads // group, bound.B]
        strides = [head * size, row * size, head * group * size, batch * size]
        box = [COLUMNS, group, rows // group, 1, 1]
        handle, dtype = alloc_tensor_map(), str(buffer.dtype)
        with T.If(has_keys):
            with T.Then():
                encode_tensor_map(handle, buffer.data, dtype=dtype, sizes=sizes, strides=strides, box=box)
            with T.Else():
                data = bound.buffers["q"].data
                encode_tensor_map(handle, data, dtype=dtype, sizes=sizes, strides=strides, box=box)
        return TensorMap(handle, dim, rows, group)

    @property
    def bytes(self) -> int:
        """Bytes of a tile in shared memory."""
        return count_panels(self.dim) * self.rows * ROW_BYTES

    def load(self, memory: tirx.Buffer, at: Expr, position: tuple[Expr, Expr, Expr], barrier: Expr) -> None:
        """Load memory[at:] (32-bit words, 1024-byte aligned) := the tile at (batch, pack, row), by one thread;
        signal the barrier.
        """
        for panel, where in self._panels(position):
            target = memory.ptr_to([at + panel * self.rows * ROW_WORDS])
            T.evaluate(T.ptx[format_load(RANK)](target, T.address_of(self.handle), *where, barrier))

    def store(self, memory: tirx.Buffer, at: Expr, position: tuple[Expr, Expr, Expr]) -> None:
        """Store the tile at (batch, pack, row) := memory[at:], by one thread; see `wait_for_stores`."""
        for panel, where in self._panels(position):
            source = memory.ptr_to([at + panel * self.rows * ROW_WORDS])
            T.evaluate(T.ptx[STORE](T.address_of(self.handle), *where, source))
        T.evaluate(T.ptx["cp.async.bulk.commit_group"]())

    def _panels(self, position: tuple[Expr, Expr, Expr]) -> Iterator[tuple[int, list[Expr]]]:
        """Yield the panels of the tile, and their coordinates."""
        b, pack, row = position
        row = tirx.truncdiv(row, self.group)
        for panel in range(count_panels(self.dim)):
            yield panel, [T.int32(panel * COLUMNS), T.int32(0), row, pack, b]


def wait_for_stores() -> None:
    """Wait, in the thread that stored tiles, until they have been read from shared memory."""
    T.evaluate(T.ptx["cp.async.bulk.wait_group.read"](0))


def fence_async() -> None:
    """Make this thread's earlier writes to shared memory visible to TMA and wgmma after the next barrier."""
    T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
