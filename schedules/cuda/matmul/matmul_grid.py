"""Tiles of the result of matmuls: their number, their order, and the distribution of their k-steps.

Where tiles do not fill the GPU, their steps are distributed as shares: the sequence of all steps, tile by tile, is
divided evenly. Split-K has several shares for each tile; stream-K (Osama et al., arXiv:2301.03598) has one share for
each block, wherever tiles end. Partial accumulators of tiles are added by a second launch, in the order of k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ...reading.stages import unravel
from ..primitives.host import bind_on_host, sm_count
from ..primitives.ptx import int32, let
from .matmul_reader import Matmuls
from .matmul_tiles import MatmulTiles, WgmmaMatmulTiles

BatchIndices: TypeAlias = dict[tirx.Var, Expr]
"""The values of the batch axes at a batch."""


@dataclass(frozen=True)
class TilePosition:
    """A tile: its first row and column, int32, and its batch."""

    m0: Expr
    n0: Expr
    batch_indices: BatchIndices


@dataclass(frozen=True)
class WorkUnit:
    """The work of a block on a tile: its k-steps from `first` to the one before `last`, int32."""

    position: TilePosition
    first: Expr
    last: Expr
    is_whole: Expr
    """Whether these are all steps of the tile."""
    slot: Expr
    """Number of the partial accumulator where they are not, int32."""
    end: Expr
    """The row of C after the last one of this unit, int32."""

    @property
    def steps(self) -> Expr:
        return self.last - self.first


class Grid:
    """The tile grid, created by the host as int64, for kernels with the given tiles.

    After `split` or `distribute`, the first `whole_tiles` tiles are in no share, and the steps of the others form
    `shares` equal shares. A tile is that of a cluster of `cluster` blocks, whose own tiles are stacked vertically.
    """

    def __init__(self, matmuls: Matmuls, tiles: MatmulTiles | WgmmaMatmulTiles, cluster: int = 1) -> None:
        self.matmuls, self.tiles = matmuls, tiles
        self.count = len(matmuls.group.matmuls)
        self.columns_per_matmul = tiles.n // self.count  # per tile
        self.rows, self.columns = bind_on_host(matmuls.rows), bind_on_host(matmuls.columns)
        self.depth, self.batch = bind_on_host(matmuls.depth), bind_on_host(matmuls.batch)
        self.n_tiles = bind_on_host(tirx.ceildiv(self.columns, self.columns_per_matmul))
        self.rows_per_tile = T.int64(tiles.m * cluster)
        if matmuls.selection is not None and isinstance(tiles, WgmmaMatmulTiles):
            self.rows_per_tile = self._choose_low_rows(tiles)
        self.m_tiles = bind_on_host(tirx.ceildiv(self.rows, self.rows_per_tile))
        self.steps = bind_on_host(tirx.ceildiv(self.depth, tiles.k))
        self.blocks = bind_on_host(self.m_tiles * self.n_tiles * self.batch)

    def _choose_low_rows(self, tiles: WgmmaMatmulTiles) -> Expr:
        """Return the rows of a tile where rows choose their matrices: so few that each SM has two tiles.

        The cost of a tile is the number of matrices that it reads, not the number of its rows.
        """
        at_once = sm_count() if tiles.blocks is None else T.int64(tiles.blocks)
        rows = tirx.ceildiv(self.rows * self.n_tiles, 2 * at_once)
        return bind_on_host(tirx.max(tirx.min(rows, T.int64(tiles.m)), T.int64(1)))

    def split(self, at_once: Expr) -> None:
        """Split k of all tiles into equally many ranges of `split_steps` or more, if `at_once` tiles run at a time."""
        max_splits = tirx.truncdiv(self.steps, T.int64(self.tiles.split_steps))
        self.splits = bind_on_host(tirx.max(tirx.min(tirx.truncdiv(at_once, self.blocks), max_splits), T.int64(1)))
        is_split, zero = self.splits > 1, T.int64(0)
        self._share(tirx.Select(is_split, zero, self.blocks), tirx.Select(is_split, self.blocks * self.splits, zero))

    def distribute(self, at_once: Expr) -> None:
        """Split as `split`, or into one share for each of `at_once` blocks where that is faster.

        It must save more than two partial tiles cost, because both ends of a share may be partial. Tiles of the last
        wave, which is not full, and of the one before are then in shares.
        """
        self.split(at_once)
        waves, longest = tirx.ceildiv(self.blocks, at_once), tirx.ceildiv(self.steps, self.splits)
        ends = T.int64(2 * self.tiles.split_steps)
        is_faster = bind_on_host(self.blocks * self.steps + ends * at_once < waves * longest * at_once) > 0
        full_tiles = tirx.max(tirx.truncdiv(self.blocks, at_once) - 1, T.int64(0)) * at_once
        self._share(tirx.Select(is_faster, full_tiles, self.whole_tiles), tirx.Select(is_faster, at_once, self.shares))

    def assign_whole_tiles(self) -> None:
        """Assign whole tiles only, without shares."""
        self._share(self.blocks, T.int64(0))

    def _share(self, whole: Expr, shares: Expr) -> None:
        self.whole_tiles, self.shares = bind_on_host(whole), bind_on_host(shares)
        self.shared_tiles = bind_on_host(self.blocks - self.whole_tiles)  # tiles whose steps are in shares

    def locate_tile(self, block: Expr) -> TilePosition:
        """Return the tile with that number: `swizzle` rows of tiles are processed together, column by column."""
        m_tiles, n_tiles = (let(n.astype("int32")) for n in (self.m_tiles, self.n_tiles))
        per_batch = let(m_tiles * n_tiles)
        rest = let(tirx.truncmod(block, per_batch))
        band_size = let(self.tiles.swizzle * n_tiles)
        first = let(tirx.truncdiv(rest, band_size) * self.tiles.swizzle)
        height = let(tirx.min(m_tiles - first, self.tiles.swizzle))
        within = let(tirx.truncmod(rest, band_size))
        m0 = let((first + tirx.truncmod(within, height)) * int32(self.rows_per_tile))
        n0 = let(tirx.truncdiv(within, height) * self.columns_per_matmul)
        return TilePosition(m0, n0, self.find_batch_indices(tirx.truncdiv(block, per_batch)))

    def find_batch_indices(self, batch: Expr) -> BatchIndices:
        """Return the batch axes at the batch with that number."""
        axes = self.matmuls.batch_axes
        return {axis.var: let(i) for axis, i in zip(axes, unravel(let(batch.astype("int64")), axes))}

    def split_unit(self, tile: Expr, index: Expr) -> WorkUnit:
        """Return split number `index` of a tile, after `split`."""
        steps, splits = (let(n.astype("int32")) for n in (self.steps, self.splits))
        first, last = (let(tirx.truncdiv(n * steps, splits)) for n in (index, index + 1))
        slot = let(tile * splits + index + tile)
        return WorkUnit(self.locate_tile(tile), first, last, self.splits == 1, slot, int32(self.rows))

    def find_share(self, number: Expr) -> tuple[Expr, Expr]:
        """Return the first step of a share and the one after its last, among those in shares; int32.

        There must be shares.
        """
        steps, number = let(self.shared_tiles * self.steps), number.astype("int64")
        first, last = (tirx.truncdiv(n * steps, self.shares).astype("int32") for n in (number, number + 1))
        return let(first), let(last)

    def make_unit(self, tile: Expr, share: Expr, steps: tuple[Expr, Expr]) -> WorkUnit:
        """Return the work on a tile in a share with the given steps, or the whole tile if it is in no share."""
        all_steps, whole = (let(n.astype("int32")) for n in (self.steps, self.whole_tiles))
        shared_index = let(tile - whole)
        before = let(shared_index * all_steps)
        first = let(tirx.Select(shared_index < 0, T.int32(0), tirx.max(steps[0] - before, T.int32(0))))
        last = let(tirx.Select(shared_index < 0, all_steps, tirx.min(steps[1] - before, all_steps)))
        is_whole = tirx.EQ(last - first, all_steps)
        return WorkUnit(self.locate_tile(tile), first, last, is_whole, let(share + shared_index), int32(self.rows))

    def find_tile_shares(self, shared_index: Expr) -> tuple[Expr, Expr]:
        """Return the first and the last share with steps of a tile, by its index among those in shares; int64."""
        steps = let(self.shared_tiles * self.steps)

        def find_owner(step: Expr) -> Expr:
            return let(tirx.truncdiv((step + 1) * self.shares - 1, steps))

        return find_owner(shared_index * self.steps), find_owner((shared_index + 1) * self.steps - 1)
