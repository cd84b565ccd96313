"""Which query tiles, or parts of their keys, a block of a persistent grid works through, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.parameters import int64

from .attention_tiles import WgmmaTiles
from .device import Device
from .host import on_host, sm_count
from .ptx import int32, let

_SHARE = 10  # pairs leave at most one in so many without work
_FAIR = 16  # turns of a section, with which blocks have about as much to do


class Scheduler:
    """Made by the host, read by a kernel whose grid has `blocks` blocks.

    Packs of `group` query heads whose K and V fit the second-level cache together are worked on together. Where there
    are fewer query tiles than SMs, the keys of each are cut into `splits` parts, each of which is work of
    its own.

    Under a causal mask late rows are expensive and early ones cheap. A block takes both ends of a pack in turn then,
    the first tile with the last, the second with the last but one: pairs cost the same, whatever pack they are of. Of
    an odd number of tiles the one in the middle is computed twice. Where pairs would leave blocks without work, tiles
    come one by one, expensive ones first, of as many packs as make it fair.
    """

    def __init__(self, bound: Bound, tiles: WgmmaTiles, device: Device, group: int) -> None:
        self.tiles, p = tiles, bound.problem
        self.packs_of_batch = p.q_heads // group
        q_tiles = on_host(tirx.ceildiv(int64(bound.S) * group, T.int64(tiles.q)))
        packs = on_host(int64(bound.B) * self.packs_of_batch)
        most = sm_count() if tiles.blocks is None else T.int64(tiles.blocks)
        by_keys = tirx.ceildiv(int64(bound.T), T.int64(tiles.split))
        self.splits = on_host(tirx.max(tirx.min(tirx.truncdiv(most, q_tiles * packs), by_keys), T.int64(1)))
        kv_bytes = (int64(bound.T) + 1) * (2 * (p.head_dim + p.v_head_dim))
        cached = tirx.max(tirx.truncdiv(T.int64(device.l2 * 2 // 3), kv_bytes), T.int64(1)) * (p.group // group)
        parts = on_host(q_tiles * self.splits)
        blocks = on_host(tirx.min(most, parts * packs))
        self.differ = bound.keys.differ
        each, turns = parts, on_host(tirx.ceildiv(parts * packs, blocks))
        if self.differ:
            half = tirx.ceildiv(q_tiles, T.int64(2))
            rounds = on_host(tirx.ceildiv(half * packs, blocks))
            busy = q_tiles * packs * _SHARE >= 2 * blocks * rounds * (_SHARE - 1)
            pairs = on_host(tirx.all(busy, tirx.EQ(self.splits, T.int64(1))))
            paired = pairs > 0
            cached = tirx.Select(paired, cached, tirx.max(cached, tirx.ceildiv(_FAIR * blocks, parts)))
            each, turns = on_host(tirx.Select(paired, half, parts)), on_host(tirx.Select(paired, 2 * rounds, turns))
            self.pairs = int32(pairs)
        section = on_host(tirx.min(cached, packs))
        self.parts, self.packs, self.section, self.blocks = map(int32, (parts, packs, section, blocks))
        self.each, self.turns = int32(each), int32(turns)

    @contextmanager
    def work(self, block: Expr) -> Iterator[tuple[Expr, Expr, Expr, Expr, Expr]]:
        """A loop over the block's query tiles, or parts of them: how many came before, batch, pack, first packed row,
        and the number of the part; int32.

        Without pairs every second turn runs backwards, so that no block always gets the dearest tile of a turn.
        """
        splits = let(int32(self.splits))
        total, last = let(self.each * self.packs), let(tirx.truncdiv(self.parts, splits) - 1)
        with T.serial(self.turns) as turn:
            back = T.bitwise_and(turn, 1)
            work = turn * self.blocks + tirx.Select(tirx.EQ(back, 0), block, self.blocks - 1 - block)
            if self.differ:
                work = tirx.Select(self.pairs > 0, T.shift_right(turn, 1) * self.blocks + block, work)
            work = let(work)
            with T.If(work < total), T.Then():
                per_section = let(self.section * self.each)
                start = let(tirx.truncdiv(work, per_section) * self.section)
                rest = let(tirx.truncmod(work, per_section))
                width = let(tirx.min(self.section, self.packs - start))
                part, pack = let(tirx.truncdiv(rest, width)), let(start + tirx.truncmod(rest, width))
                if self.differ:
                    part = let(tirx.Select(tirx.all(self.pairs > 0, back > 0), self.parts - 1 - part, part))
                r0, split = (
                    let((last - tirx.truncdiv(part, splits)) * self.tiles.q),
                    let(tirx.truncmod(part, splits)),
                )
                b, own = (let(f(pack, self.packs_of_batch)) for f in (tirx.truncdiv, tirx.truncmod))
                yield turn, b, own, r0, split
