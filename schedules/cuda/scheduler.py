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
from .host import multiprocessors, on_host
from .ptx import fixed, int32


class Scheduler:
    """Made by the host, read by a kernel whose grid has `blocks` blocks.

    Packs of `group` query heads whose K and V fit the second-level cache together are worked on together. Among these
    expensive query tiles come first: late rows, under a causal mask. Where there are fewer tiles than multiprocessors,
    the keys of each are cut into `splits` parts, each of which is work of its own.
    """

    def __init__(self, bound: Bound, tiles: WgmmaTiles, device: Device, group: int) -> None:
        self.tiles, p = tiles, bound.problem
        self.packs_of_batch = p.q_heads // group
        q_tiles = on_host(tirx.ceildiv(int64(bound.S) * group, T.int64(tiles.q)))
        packs = on_host(int64(bound.B) * self.packs_of_batch)
        most = multiprocessors() if tiles.blocks is None else T.int64(tiles.blocks)
        by_keys = tirx.ceildiv(int64(bound.T), T.int64(tiles.split))
        self.splits = on_host(tirx.max(tirx.min(tirx.truncdiv(most, q_tiles * packs), by_keys), T.int64(1)))
        kv_bytes = (int64(bound.T) + 1) * (2 * (p.head_dim + p.v_head_dim))
        cached = tirx.max(tirx.truncdiv(T.int64(device.l2 * 2 // 3), kv_bytes), T.int64(1)) * (p.group // group)
        section = on_host(tirx.min(cached, packs))
        parts = on_host(q_tiles * self.splits)
        blocks = on_host(tirx.min(most, parts * packs))
        self.parts, self.packs, self.section, self.blocks = map(int32, (parts, packs, section, blocks))

    @contextmanager
    def work(self, block: Expr) -> Iterator[tuple[Expr, Expr, Expr, Expr, Expr]]:
        """A loop over the block's query tiles, or parts of them: how many came before, batch, pack, first packed row,
        and the number of the part; int32.

        Every second round runs backwards, so that no block always gets the dearest tile of a round.
        """
        splits = fixed(int32(self.splits))
        total, last = fixed(self.parts * self.packs), fixed(tirx.truncdiv(self.parts, splits) - 1)
        with T.serial(tirx.truncdiv(total + self.blocks - 1, self.blocks)) as turn:
            place = tirx.Select(tirx.EQ(T.bitwise_and(turn, 1), 0), block, self.blocks - 1 - block)
            work = fixed(turn * self.blocks + place)
            with T.If(work < total), T.Then():
                per_section = fixed(self.section * self.parts)
                start = fixed(tirx.truncdiv(work, per_section) * self.section)
                rest = fixed(tirx.truncmod(work, per_section))
                width = fixed(tirx.min(self.section, self.packs - start))
                part, pack = fixed(tirx.truncdiv(rest, width)), fixed(start + tirx.truncmod(rest, width))
                r0, split = (
                    fixed((last - tirx.truncdiv(part, splits)) * self.tiles.q),
                    fixed(tirx.truncmod(part, splits)),
                )
                b, own = (fixed(f(pack, self.packs_of_batch)) for f in (tirx.truncdiv, tirx.truncmod))
                yield turn, b, own, r0, split
