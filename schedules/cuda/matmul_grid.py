"""Tiles of the result of products of matrices: how many, in which order, and into how many parts k is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..reading.stages import unravel
from .host import multiprocessors, on_host
from .matmul_tiles import MatmulTiles, WgmmaMatmulTiles
from .products import Products
from .ptx import fixed, int32

Where: TypeAlias = dict[tirx.Var, Expr]
"""The batch axes at a batch."""


@dataclass(frozen=True)
class Place:
    """A tile: its first row and column, int32, and its batch."""

    m0: Expr
    n0: Expr
    where: Where


class Grid:
    """Made by the host, of int64, for kernels whose blocks have such tiles.

    k is in parts where tiles alone would not fill the GPU: so many, of so many steps each or more. A tile is that of a
    cluster of so many blocks, whose own lie below each other.
    """

    def __init__(self, products: Products, tiles: MatmulTiles | WgmmaMatmulTiles, cluster: int = 1) -> None:
        self.products, self.tiles, self.cluster = products, tiles, cluster
        self.count = len(products.group.products)
        self.each = tiles.n // self.count  # columns of a product
        self.rows, self.columns = on_host(products.rows), on_host(products.columns)
        self.depth, self.batch = on_host(products.depth), on_host(products.batch)
        self.high = T.int64(tiles.m * cluster)
        self.m_tiles = on_host(tirx.ceildiv(self.rows, self.high))
        self.n_tiles = on_host(tirx.ceildiv(self.columns, self.each))
        self.steps = on_host(tirx.ceildiv(self.depth, tiles.k))
        self.blocks = on_host(self.m_tiles * self.n_tiles * self.batch)

    def split(self) -> None:
        """Decides on the parts; there are blocks."""
        wanted = tirx.truncdiv(multiprocessors(), self.blocks * self.cluster)
        most = tirx.truncdiv(self.steps, T.int64(self.tiles.split_steps))
        self.parts = on_host(tirx.max(tirx.min(wanted, most), T.int64(1)))

    def place(self, block: Expr) -> Place:
        """The tile of that number: `swizzle` tiles of rows are worked on together, column by column."""
        m_tiles, n_tiles = (fixed(n.astype("int32")) for n in (self.m_tiles, self.n_tiles))
        per_batch = fixed(m_tiles * n_tiles)
        rest = fixed(tirx.truncmod(block, per_batch))
        wide = fixed(self.tiles.swizzle * n_tiles)
        first = fixed(tirx.truncdiv(rest, wide) * self.tiles.swizzle)
        high = fixed(tirx.min(m_tiles - first, self.tiles.swizzle))
        within = fixed(tirx.truncmod(rest, wide))
        m0 = fixed((first + tirx.truncmod(within, high)) * int32(self.high))
        n0 = fixed(tirx.truncdiv(within, high) * self.each)
        return Place(m0, n0, self.where(tirx.truncdiv(block, per_batch)))

    def where(self, batch: Expr) -> Where:
        """The batch axes at the batch of that number."""
        axes = self.products.batch_axes
        return {axis.var: fixed(i) for axis, i in zip(axes, unravel(fixed(batch.astype("int64")), axes))}

    def steps_of(self, part: Expr) -> tuple[Expr, Expr]:
        """The first step of a part of k, and the one behind its last; int32."""
        steps, parts = (fixed(n.astype("int32")) for n in (self.steps, self.parts))
        each = fixed(tirx.truncdiv(steps + parts - 1, parts))
        first = fixed(tirx.min(part * each, steps))
        return first, fixed(tirx.min(first + each, steps))
