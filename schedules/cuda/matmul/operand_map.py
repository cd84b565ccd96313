"""Operands of wgmma matmuls, whose tiles TMA loads by tensor maps that the host encodes."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..primitives.tma import COLUMNS, ROW_BYTES, ROW_WORDS, alloc_tensor_map, encode_tensor_map, format_load
from .epilogue import Epilogue
from .matmul_grid import Grid, TilePosition
from .matmul_reader import Order
from .tma_operand import TmaOperand


class OperandMap:
    """Tiles of an operand: 64 values of k by `size` rows or columns, as wgmma reads them.

    `blocks` blocks of a cluster load a tile together: each has its share of the rows of 128 bytes.
    """

    def __init__(
        self, grid: Grid, epilogue: Epilogue, operand: TmaOperand, extent: Expr, size: int, blocks: int
    ) -> None:
        self.tma_operand, self.size, self.along_k, self.blocks = operand, size, operand.operand.order is Order.K, blocks
        self.share = (size if self.along_k else COLUMNS) // blocks
        memory = epilogue.memory[operand.operand.buffer]
        inner, rows = (grid.depth, extent) if self.along_k else (extent, grid.depth)
        sizes = [inner, rows, *(axis_extent for _, axis_extent, _ in operand.batch)]
        strides = [step * 2 for step in (operand.outer, *(step for *_, step in operand.batch))]
        box = [COLUMNS, self.share, *(1 for _ in operand.batch)]
        self.rank, self.handle = len(sizes), alloc_tensor_map()
        # A dimension of one element may have any stride, but the driver must accept it.
        strides = [tirx.max(step, T.int64(16)) for step in strides]
        encode_tensor_map(self.handle, memory.data, dtype=str(memory.dtype), sizes=sizes, strides=strides, box=box)

    @property
    def word_count(self) -> int:
        """The 32-bit words of a tile in shared memory."""
        return self.size * ROW_BYTES // 4

    def load(
        self, memory: tirx.Buffer, at: Expr, position: TilePosition, at_k: tuple[Expr, Expr], block: Expr, barrier: Expr
    ) -> None:
        """Load memory[at:] := the tile at (outer, k), by one thread, and signal the barrier.

        Of a tile for a cluster, it loads this block's share, which is multicast to all.
        """
        name = format_load(self.rank)
        (outer, k), mask = at_k, [] if self.blocks == 1 else [tirx.const((1 << self.blocks) - 1, "uint16")]
        instruction = T.ptx[f"{name}.multicast::cluster" if mask else name]
        batch = [position.batch_indices[var].astype("int32") for var, *_ in self.tma_operand.batch]
        first = block * self.share if mask else T.int32(0)
        at = at + first * ROW_WORDS

        def copy(at: Expr, *where: Expr) -> None:
            target = memory.ptr_to([at])
            T.evaluate(instruction(target, T.address_of(self.handle), *where, *batch, barrier, *mask))

        if self.along_k:
            copy(at, k, outer + first)
            return
        for panel in range(self.size // COLUMNS):
            copy(at + panel * (COLUMNS * ROW_WORDS), outer + panel * COLUMNS, k + first)
