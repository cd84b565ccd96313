"""Attention for few query rows of any type and size: split-KV over warps, each of which has one query row.

    a warp for each query row and split of the visible keys: the online softmax of plain.py, whose (m, l, O) is kept
    a warp for each query row: as in partial.py

Neighboring warps have the rows that share keys, which they so find in the caches.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.keys import Range, length

from .decode_tiles import RowTiles
from .host import on_host, sm_count
from .partial import KeySplits, Partial
from .plain import WarpRow, plain
from .ptx import WARP, let, put


def decode_rows(bound: Bound, tiles: RowTiles) -> None:
    """Emits the kernels and their launches into the PrimFunc that `bound` has opened: `plain` where rows are many.

    Any problem without qk output.
    """
    rows = on_host(T.int64(1) * bound.B * bound.problem.q_heads * bound.S)
    wanted = sm_count() * tiles.per_sm if tiles.warps is None else T.int64(tiles.warps)
    by_warps = tirx.truncdiv(wanted, tirx.max(rows, T.int64(1)))
    by_size = tirx.min(by_warps, tirx.truncdiv(T.int64(1) * bound.T + (tiles.split - 1), T.int64(tiles.split)))
    splits = on_host(by_size if bound.problem.splits is None else T.int64(bound.problem.splits))
    with T.If(tirx.all(splits > 1, rows > 0)):
        with T.Then():
            keys, group = KeySplits(bound, splits, unit=1), bound.problem.group
            partial = Partial(bound, splits, group=group, careful=False, warps=tiles.block, ahead=tiles.ahead)
            work = rows * splits
            with (
                T.launch_thread("blockIdx.x", tirx.ceildiv(work, T.int64(tiles.block)).astype("int32")) as block,
                T.launch_thread("threadIdx.x", tiles.block * WARP) as thread,
            ):
                turn = let(block * tiles.block + thread // WARP)
                with T.If(turn < work), T.Then():
                    _split(partial, keys, turn, let(thread % WARP), tiles.keys)
            partial.merge(keys.used)
        with T.Else():
            plain(bound, tiles)


def _split(partial: Partial, splits: KeySplits, turn: Expr, lane: Expr, at_once: int) -> None:
    """The code of warp number `turn`."""
    rows, parts = (let(size.astype("int32")) for size in (partial.rows, partial.splits))
    r, rest = let(tirx.truncmod(turn, rows)), let(tirx.truncdiv(turn, rows))
    split, head = let(tirx.truncmod(rest, parts)), let(tirx.truncdiv(rest, parts))
    b, h, i = partial.row_of(head, r)
    keys = splits.of(b, split)
    with T.If(length(keys) > 0), T.Then(), partial.bound.if_there(b, i):
        row = _SplitRow(partial.bound, (b, h, i), lane, at_once, keys)
        row.load_query()
        row.online_softmax()
        place, dim = partial.place(head, r, split), partial.problem.v_head_dim
        partial.keep_ends(place, row.m[0], row.l[0])
        with row.elements(dim) as (slot, d):
            put(partial.O, place * dim + d, row.o[slot])


class _SplitRow(WarpRow):
    """A query row with keys of these ranges alone; a sink is no part of it."""

    def __init__(
        self, bound: Bound, place: tuple[Expr, Expr, Expr], lane: Expr, at_once: int, keys: Sequence[Range]
    ) -> None:
        super().__init__(bound, *place, lane, at_once)
        shared = []
        for (lo, hi), (start, stop) in zip(self.ranges, keys):
            lo = let(tirx.max(lo, start.astype("int64")))
            shared.append((lo, let(tirx.max(tirx.min(hi, stop.astype("int64")), lo))))
        self.take(shared)

    def before_keys(self) -> tuple[Expr, Expr]:
        return self.minus_infinity, self.zero
