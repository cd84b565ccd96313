"""Attention for few query rows of any type and size: split-KV over warps with one query row each.

    a warp for each query row and split of the visible keys: the online softmax of plain.py, whose (m, l, O) is stored
    a warp for each query row: merges them as in partial_results.py

Neighboring warps have rows that share keys, so that these are in the caches.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.key_ranges import KeyRange, count_keys

from ..primitives.host import bind_on_host, sm_count
from ..primitives.ptx import WARP, let, store_element
from .decode_tiles import RowTiles
from .partial_results import KeySplits, PartialResults
from .plain import WarpRow, plain


def decode_rows(bound: BoundAttention, tiles: RowTiles) -> None:
    """Emit the kernels and their launches into the PrimFunc opened by `bound`; `plain` where rows are many.

    Any problem without qk output is accepted.
    """
    rows = bind_on_host(T.int64(1) * bound.B * bound.problem.q_heads * bound.S)
    target_warps = sm_count() * tiles.per_sm if tiles.warps is None else T.int64(tiles.warps)
    by_warps = tirx.truncdiv(target_warps, tirx.max(rows, T.int64(1)))
    by_size = tirx.min(by_warps, tirx.truncdiv(T.int64(1) * bound.T + (tiles.split - 1), T.int64(tiles.split)))
    splits = bind_on_host(by_size if bound.problem.splits is None else T.int64(bound.problem.splits))
    with T.If(tirx.all(splits > 1, rows > 0)):
        with T.Then():
            keys, group = KeySplits(bound, splits, unit=1), bound.problem.group
            partial = PartialResults(bound, splits, group=group, careful=False, warps=tiles.block, ahead=tiles.ahead)
            work = rows * splits
            with (
                T.launch_thread("blockIdx.x", tirx.ceildiv(work, T.int64(tiles.block)).astype("int32")) as block,
                T.launch_thread("threadIdx.x", tiles.block * WARP) as thread,
            ):
                index = let(block * tiles.block + thread // WARP)
                with T.If(index < work), T.Then():
                    _split(partial, keys, index, let(thread % WARP), tiles.keys)
            partial.merge(keys.count_used)
        with T.Else():
            plain(bound, tiles)


def _split(partial: PartialResults, splits: KeySplits, warp: Expr, lane: Expr, at_once: int) -> None:
    """Emit the code of the warp with this index."""
    rows, split_count = (let(size.astype("int32")) for size in (partial.rows, partial.splits))
    r, rest = let(tirx.truncmod(warp, rows)), let(tirx.truncdiv(warp, rows))
    split, head = let(tirx.truncmod(rest, split_count)), let(tirx.truncdiv(rest, split_count))
    b, h, i = partial.row_of(head, r)
    keys = splits.find_keys(b, split)
    with T.If(count_keys(keys) > 0), T.Then(), partial.bound.guard_row(b, i):
        row = _SplitRow(partial.bound, (b, h, i), lane, at_once, keys)
        row.load_query()
        row.online_softmax()
        index, dim = partial.index(head, r, split), partial.problem.v_head_dim
        partial.store_state_ends(index, row.m[0], row.l[0])
        with row.elements(dim) as (slot, d):
            store_element(partial.O, index * dim + d, row.o[slot])


class _SplitRow(WarpRow):
    """A query row with the keys of these ranges only, without a sink."""

    def __init__(
        self,
        bound: BoundAttention,
        position: tuple[Expr, Expr, Expr],
        lane: Expr,
        at_once: int,
        keys: Sequence[KeyRange],
    ) -> None:
        super().__init__(bound, *position, lane, at_once)
        common = []
        for (lo, hi), (start, stop) in zip(self.ranges, keys):
            lo = let(tirx.max(lo, start.astype("int64")))
            common.append((lo, let(tirx.max(tirx.min(hi, stop.astype("int64")), lo))))
        self.set_ranges(common)

    def compute_initial_statistics(self) -> tuple[Expr, Expr]:
        return self.minus_infinity, self.zero
