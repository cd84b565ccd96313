"""The work list of each block of a persistent grid: which query tiles, or shares of their keys, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.key_tiles import KeyTiles
from lowering.attention.codegen.parameters import int64

from ..primitives.device import Device
from ..primitives.host import bind_on_host, sm_count
from ..primitives.ptx import int32, let
from .attention_tiles import WgmmaTiles

_SHARE = 10  # pairs leave at most one block in so many without work
_FAIR = 16  # iterations of a section after which blocks have about equal work


@dataclass(frozen=True)
class KeyShare:
    """The `count` key tiles of a query tile up to number `last`, for one block. It uses as few registers as
    possible.
    """

    tiles: KeyTiles
    last: Expr
    count: Expr

    def back(self, j: Expr | int) -> Expr:
        """Return the number of tile j from the last."""
        return self.last - j


class Scheduler:
    """Computed by the host, read by a kernel whose grid has `blocks` blocks.

    Packs of `group` query heads whose K and V fit the second-level cache together are processed together. Where there
    are fewer query tiles than SMs, the keys of each are split into `splits` ranges, each of which is a work item.

    Under a causal mask, late rows are expensive and early ones cheap. A block then takes tiles from both ends of a pack
    in turn, the first tile with the last, the second with the last but one. All pairs cost the same, whatever their
    pack. If the number of tiles is odd, the middle one is computed twice. Where pairs would leave blocks idle, tiles
    are processed one by one, expensive ones first, of as many packs as balance the load.
    """

    def __init__(self, bound: BoundAttention, tiles: WgmmaTiles, device: Device, group: int) -> None:
        self.tiles, p = tiles, bound.problem
        self.packs_of_batch = p.q_heads // group
        q_tiles = bind_on_host(tirx.ceildiv(int64(bound.S) * group, T.int64(tiles.q)))
        packs = bind_on_host(int64(bound.B) * self.packs_of_batch)
        max_blocks = sm_count() if tiles.blocks is None else T.int64(tiles.blocks)
        by_keys = tirx.ceildiv(int64(bound.T), T.int64(tiles.split))
        self.splits = bind_on_host(tirx.max(tirx.min(tirx.truncdiv(max_blocks, q_tiles * packs), by_keys), T.int64(1)))
        kv_bytes = (int64(bound.T) + 1) * (2 * (p.head_dim + p.v_head_dim))
        cached_packs = tirx.max(tirx.truncdiv(T.int64(device.l2 * 2 // 3), kv_bytes), T.int64(1)) * (p.group // group)
        items = bind_on_host(q_tiles * self.splits)
        blocks = bind_on_host(tirx.min(max_blocks, items * packs))
        self.has_uneven_tiles = bound.keys.is_row_dependent
        per_pack, iterations = items, bind_on_host(tirx.ceildiv(items * packs, blocks))
        if self.has_uneven_tiles:
            half = tirx.ceildiv(q_tiles, T.int64(2))
            rounds = bind_on_host(tirx.ceildiv(half * packs, blocks))
            is_busy = q_tiles * packs * _SHARE >= 2 * blocks * rounds * (_SHARE - 1)
            pairs = bind_on_host(tirx.all(is_busy, tirx.EQ(self.splits, T.int64(1))))
            is_paired = pairs > 0
            cached_packs = tirx.Select(
                is_paired, cached_packs, tirx.max(cached_packs, tirx.ceildiv(_FAIR * blocks, items))
            )
            per_pack, iterations = (
                bind_on_host(tirx.Select(is_paired, half, items)),
                bind_on_host(tirx.Select(is_paired, 2 * rounds, iterations)),
            )
            self.uses_pairs = int32(pairs)
        section = bind_on_host(tirx.min(cached_packs, packs))
        self.items, self.packs, self.section, self.blocks = map(int32, (items, packs, section, blocks))
        self.per_pack, self.iterations = int32(per_pack), int32(iterations)

    @contextmanager
    def work(self, block: Expr) -> Iterator[tuple[Expr, Expr, Expr, Expr, Expr]]:
        """Loop over the block's work items; yield iteration, batch, pack, first packed row, and split; int32.

        Without pairs every second iteration runs backwards, so that no block always gets the most expensive tile.
        """
        splits = let(int32(self.splits))
        total, last = let(self.per_pack * self.packs), let(tirx.truncdiv(self.items, splits) - 1)
        with T.serial(self.iterations) as iteration:
            back = T.bitwise_and(iteration, 1)
            work = iteration * self.blocks + tirx.Select(tirx.EQ(back, 0), block, self.blocks - 1 - block)
            if self.has_uneven_tiles:
                work = tirx.Select(self.uses_pairs > 0, T.shift_right(iteration, 1) * self.blocks + block, work)
            work = let(work)
            with T.If(work < total), T.Then():
                per_section = let(self.section * self.per_pack)
                start = let(tirx.truncdiv(work, per_section) * self.section)
                rest = let(tirx.truncmod(work, per_section))
                width = let(tirx.min(self.section, self.packs - start))
                item, pack = let(tirx.truncdiv(rest, width)), let(start + tirx.truncmod(rest, width))
                if self.has_uneven_tiles:
                    item = let(tirx.Select(tirx.all(self.uses_pairs > 0, back > 0), self.items - 1 - item, item))
                r0, split = (
                    let((last - tirx.truncdiv(item, splits)) * self.tiles.q),
                    let(tirx.truncmod(item, splits)),
                )
                b, own_pack = (let(f(pack, self.packs_of_batch)) for f in (tirx.truncdiv, tirx.truncmod))
                yield iteration, b, own_pack, r0, split
