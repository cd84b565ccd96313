"""Which query tiles a block of a persistent grid works through, and in which order."""

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

    Heads whose K and V fit the second-level cache together are worked on together. Among these expensive query tiles
    come first: late rows, under a causal mask.
    """

    def __init__(self, bound: Bound, tiles: WgmmaTiles, device: Device) -> None:
        self.bound, self.tiles = bound, tiles
        p = bound.problem
        q_tiles = on_host(tirx.truncdiv(int64(bound.S) + (tiles.q - 1), tiles.q))
        heads = on_host(int64(bound.B) * p.q_heads)
        kv_bytes = (int64(bound.T) + 1) * (2 * (p.head_dim + p.v_head_dim))
        cached = tirx.max(tirx.truncdiv(T.int64(device.l2 * 2 // 3), kv_bytes), T.int64(1)) * p.group
        section = on_host(tirx.max(tirx.min(cached, heads), T.int64(1)))
        most = multiprocessors() if tiles.blocks is None else T.int64(tiles.blocks)
        blocks = on_host(tirx.min(most, q_tiles * heads))
        self.q_tiles, self.heads, self.section, self.blocks = map(int32, (q_tiles, heads, section, blocks))

    @contextmanager
    def query_tiles(self, block: Expr) -> Iterator[tuple[Expr, Expr, Expr, Expr]]:
        """A loop over the block's query tiles: how many came before, batch, query head, first row; int32.

        Every second round runs backwards, so that no block always gets the dearest tile of a round.
        """
        total = fixed(self.q_tiles * self.heads)
        with T.serial(tirx.truncdiv(total + self.blocks - 1, self.blocks)) as turn:
            place = tirx.Select(tirx.EQ(T.bitwise_and(turn, 1), 0), block, self.blocks - 1 - block)
            work = fixed(turn * self.blocks + place)
            with T.If(work < total), T.Then():
                per_section = fixed(self.section * self.q_tiles)
                start = fixed(tirx.truncdiv(work, per_section) * self.section)
                rest = fixed(tirx.truncmod(work, per_section))
                width = fixed(tirx.min(self.section, self.heads - start))
                i0 = fixed((self.q_tiles - 1 - tirx.truncdiv(rest, width)) * self.tiles.q)
                head = fixed(start + tirx.truncmod(rest, width))
                b, h = (fixed(f(head, self.bound.problem.q_heads)) for f in (tirx.truncdiv, tirx.truncmod))
                yield turn, b, h, i0
