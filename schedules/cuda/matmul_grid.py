"""Tiles of the result of matmuls: how many, in which order, and how their steps along k are dealt out.

Where tiles do not fill the GPU their steps are in shares: all of them in a row, tile by tile, are cut into equal ones.
A split of k has several shares for each tile; stream-K (Osama et al., arXiv:2301.03598) one for each block, wherever
tiles end. Sums of parts of tiles are added by a second launch, in the order of k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..reading.stages import unravel
from .host import on_host, sm_count
from .matmul_reader import Matmuls
from .matmul_tiles import MatmulTiles, WgmmaMatmulTiles
from .ptx import int32, let

Where: TypeAlias = dict[tirx.Var, Expr]
"""The batch axes at a batch."""


@dataclass(frozen=True)
class Place:
    """A tile: its first row and column, int32, and its batch."""

    m0: Expr
    n0: Expr
    where: Where


@dataclass(frozen=True)
class Piece:
    """What a block multiplies of a tile: its steps along k from the first to the one behind the last, int32."""

    place: Place
    first: Expr
    last: Expr
    whole: Expr
    """Whether that is all steps of the tile."""
    slot: Expr
    """Where its sums go if not: a number of its own, int32."""
    end: Expr
    """The row behind the last one of C that it is for, int32."""

    @property
    def steps(self) -> Expr:
        return self.last - self.first


class Grid:
    """Made by the host, of int64, for kernels whose blocks have such tiles.

    After `split` or `deal` the first `whole` tiles are in no share, and the steps of the others in `shares` equal ones.
    A tile is that of a cluster of so many blocks, whose own lie below each other.
    """

    def __init__(self, matmuls: Matmuls, tiles: MatmulTiles | WgmmaMatmulTiles, cluster: int = 1) -> None:
        self.matmuls, self.tiles = matmuls, tiles
        self.count = len(matmuls.group.matmuls)
        self.each = tiles.n // self.count  # columns of a matmul
        self.rows, self.columns = on_host(matmuls.rows), on_host(matmuls.columns)
        self.depth, self.batch = on_host(matmuls.depth), on_host(matmuls.batch)
        self.n_tiles = on_host(tirx.ceildiv(self.columns, self.each))
        self.high = T.int64(tiles.m * cluster)
        if matmuls.selection is not None and isinstance(tiles, WgmmaMatmulTiles):
            self.high = self._low(tiles)
        self.m_tiles = on_host(tirx.ceildiv(self.rows, self.high))
        self.steps = on_host(tirx.ceildiv(self.depth, tiles.k))
        self.blocks = on_host(self.m_tiles * self.n_tiles * self.batch)

    def _low(self, tiles: WgmmaMatmulTiles) -> Expr:
        """Rows of a tile where they choose their matrices: so few that each SM has two tiles. How many
        matrices a tile reads, not how many rows it has, is what it costs."""
        at_once = sm_count() if tiles.blocks is None else T.int64(tiles.blocks)
        rows = tirx.ceildiv(self.rows * self.n_tiles, 2 * at_once)
        return on_host(tirx.max(tirx.min(rows, T.int64(tiles.m)), T.int64(1)))

    def split(self, at_once: Expr) -> None:
        """k in parts of `split_steps` or more, all tiles in as many, where that many tiles are worked on at a time."""
        most = tirx.truncdiv(self.steps, T.int64(self.tiles.split_steps))
        self.parts = on_host(tirx.max(tirx.min(tirx.truncdiv(at_once, self.blocks), most), T.int64(1)))
        is_split, none = self.parts > 1, T.int64(0)
        self._share(tirx.Select(is_split, none, self.blocks), tirx.Select(is_split, self.blocks * self.parts, none))

    def deal(self, at_once: Expr) -> None:
        """As `split`, or one share for each of so many, where that saves more than two parts of tiles cost, as the ends
        of a share may be. Tiles of the last turn, which is not full, and of the one before are in shares then."""
        self.split(at_once)
        turns, longest = tirx.ceildiv(self.blocks, at_once), tirx.ceildiv(self.steps, self.parts)
        ends = T.int64(2 * self.tiles.split_steps)
        saves = on_host(self.blocks * self.steps + ends * at_once < turns * longest * at_once) > 0
        full = tirx.max(tirx.truncdiv(self.blocks, at_once) - 1, T.int64(0)) * at_once
        self._share(tirx.Select(saves, full, self.whole), tirx.Select(saves, at_once, self.shares))

    def keep_whole(self) -> None:
        """No shares."""
        self._share(self.blocks, T.int64(0))

    def _share(self, whole: Expr, shares: Expr) -> None:
        self.whole, self.shares = on_host(whole), on_host(shares)
        self.shared = on_host(self.blocks - self.whole)  # tiles whose steps are

    def place(self, block: Expr) -> Place:
        """The tile of that number: `swizzle` tiles of rows are worked on together, column by column."""
        m_tiles, n_tiles = (let(n.astype("int32")) for n in (self.m_tiles, self.n_tiles))
        per_batch = let(m_tiles * n_tiles)
        rest = let(tirx.truncmod(block, per_batch))
        wide = let(self.tiles.swizzle * n_tiles)
        first = let(tirx.truncdiv(rest, wide) * self.tiles.swizzle)
        high = let(tirx.min(m_tiles - first, self.tiles.swizzle))
        within = let(tirx.truncmod(rest, wide))
        m0 = let((first + tirx.truncmod(within, high)) * int32(self.high))
        n0 = let(tirx.truncdiv(within, high) * self.each)
        return Place(m0, n0, self.where(tirx.truncdiv(block, per_batch)))

    def where(self, batch: Expr) -> Where:
        """The batch axes at the batch of that number."""
        axes = self.matmuls.batch_axes
        return {axis.var: let(i) for axis, i in zip(axes, unravel(let(batch.astype("int64")), axes))}

    def part(self, tile: Expr, part: Expr) -> Piece:
        """That part of a tile, after `split`."""
        steps, parts = (let(n.astype("int32")) for n in (self.steps, self.parts))
        first, last = (let(tirx.truncdiv(n * steps, parts)) for n in (part, part + 1))
        slot = let(tile * parts + part + tile)
        return Piece(self.place(tile), first, last, self.parts == 1, slot, int32(self.rows))

    def share(self, number: Expr) -> tuple[Expr, Expr]:
        """The first step of a share, and the one behind its last, of those in shares; int32. There are shares."""
        steps, number = let(self.shared * self.steps), number.astype("int64")
        first, behind = (tirx.truncdiv(n * steps, self.shares).astype("int32") for n in (number, number + 1))
        return let(first), let(behind)

    def piece(self, tile: Expr, share: Expr, steps: tuple[Expr, Expr]) -> Piece:
        """Of a tile what is in a share of such steps, or all of it if the tile is in none."""
        all_steps, whole = (let(n.astype("int32")) for n in (self.steps, self.whole))
        among = let(tile - whole)
        before = let(among * all_steps)
        first = let(tirx.Select(among < 0, T.int32(0), tirx.max(steps[0] - before, T.int32(0))))
        last = let(tirx.Select(among < 0, all_steps, tirx.min(steps[1] - before, all_steps)))
        is_whole = tirx.EQ(last - first, all_steps)
        return Piece(self.place(tile), first, last, is_whole, let(share + among), int32(self.rows))

    def shares_of(self, among: Expr) -> tuple[Expr, Expr]:
        """The first and the last share that has steps of a tile, by its number among those in shares; int64."""
        steps = let(self.shared * self.steps)

        def share(step: Expr) -> Expr:
            return let(tirx.truncdiv((step + 1) * self.shares - 1, steps))

        return share(among * self.steps), share((among + 1) * self.steps - 1)
