"""Partial results of attention: (m, l, O) of query rows with ranges of the keys, and their merge into Y.

m = max m_s,  w_s = exp(m_s - m)                     s counts the ranges; a sink is one more, with O_s = 0
Y = sum w_s O_s / sum w_s l_s                        0 where no key was visible
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.key_ranges import KeyRange, count_keys, slice_ranges
from lowering.attention.codegen.scores import HIDDEN_BIAS

from ..primitives import ptx
from ..primitives.host import bind_on_host
from ..primitives.ptx import WARP, alloc_registers, int32, let, store_element, unrolled
from .fragments import OnlineSoftmax
from .plain import WarpRow

MERGE_UNROLL = 8
"""Partial results that the last launch loads at once, to wait for memory once."""


class KeySplits:
    """The visible keys of each batch (visible to some query), split into at most `splits` ranges of multiples of `unit`
    keys.

    Sizes are the host's.
    """

    def __init__(self, bound: BoundAttention, splits: Expr, unit: int) -> None:
        self.bound, self.splits, self.unit = bound, splits, unit

    def find_keys(self, b: Expr, split: Expr) -> list[KeyRange]:
        """Return the keys of a split; int32."""
        ranges, total, split_size = self._find_batch_keys(b)
        start = let(tirx.min(split * split_size, total))
        return [(let(lo), let(hi)) for lo, hi in slice_ranges(ranges, start, tirx.min(start + split_size, total))]

    def count_used(self, b: Expr) -> Expr:
        """Return how many splits have keys: these come first; int32."""
        _, total, split_size = self._find_batch_keys(b)
        return let(tirx.truncdiv(total + split_size - 1, split_size))

    def _find_batch_keys(self, b: Expr) -> tuple[list[KeyRange], Expr, Expr]:
        """Return the ranges of all keys, their number, and the number in a split."""
        ranges64 = self.bound.keys.compute_tile_ranges(b, T.int64(0), T.int64(1) * self.bound.S)
        ranges = [(let(int32(lo)), let(int32(hi))) for lo, hi in ranges64]
        total, splits = let(count_keys(ranges)), let(int32(self.splits))
        units = let(tirx.truncdiv(total + (self.unit - 1), self.unit))
        return ranges, total, let(tirx.max(tirx.truncdiv(units + splits - 1, splits), 1) * self.unit)


class PartialResults:
    """(m, l, O) of every packed query row and split of its keys, in the device's memory, where there is more than one
    split.

    `group` query heads that share keys are packed: row r of a pack, of which batch b has q_heads / group, is query row
    r // group of its head r % group. In a ragged batch, sequences with `min_rows` to `max_rows` rows are served.
    `careful`: a row may have multiplied 0 by hidden values, or lack keys that finite numbers hide. Such rows are
    recomputed, `ahead` keys at once. Blocks of `warps` warps merge the splits. `splits` is the host's.
    """

    def __init__(
        self,
        bound: BoundAttention,
        splits: Expr,
        *,
        group: int,
        careful: bool,
        warps: int = 4,
        ahead: int = 2,
        min_rows: int = 1,
        max_rows: int | None = None,
    ) -> None:
        self.bound, self.problem, self.acc, self.group = bound, bound.problem, bound.problem.acc_dtype, group
        self.warps, self.ahead, self.served_rows, self.careful = warps, ahead, (min_rows, max_rows), careful
        self.packs = self.problem.q_heads // group  # of a batch
        self.splits = splits
        self.heads = bind_on_host(T.int64(1) * bound.B * self.packs)
        S = T.int64(1) * bound.S
        self.rows = bind_on_host((S if max_rows is None else tirx.min(S, T.int64(max_rows))) * group)
        count = tirx.Select(splits > 1, self.heads * self.rows * splits, T.int64(1))
        self.m, self.l = (T.alloc_buffer((count,), self.acc) for _ in range(2))
        self.O = T.alloc_buffer((count * self.problem.v_head_dim,), self.acc)

    def if_served(self, b: Expr) -> AbstractContextManager[None]:
        """Run the enclosed code if the sequence of batch b is among the served ones."""
        return self.bound.guard_row_count(b, *self.served_rows)

    def row_of(self, pack: Expr, r: Expr) -> tuple[Expr, Expr, Expr]:
        """Return batch, query head and query row of row r of a pack, counted over all batches."""
        b, first = let(tirx.truncdiv(pack, self.packs)), tirx.truncmod(pack, self.packs) * self.group
        return b, let(first + tirx.truncmod(r, self.group)), let(tirx.truncdiv(r, self.group))

    def store_state_ends(self, index: Expr, m: Expr, l: Expr) -> None:
        """Store m and l at an index; the elements of its O begin at index * Dv."""
        store_element(self.m, index, m)
        store_element(self.l, index, l)

    def store_fragment(
        self, softmax: OnlineSoftmax, O: tirx.Buffer, pack: Expr, rows: list[Expr], split: Expr, lane: Expr
    ) -> None:
        """Store m, l and O of the two rows of a pack that a thread has in accumulators of tensor cores (fragments.py).

        They are those of a split of the keys. Rows may be after the last one.
        """
        column, dim = let(tirx.truncmod(lane, 4) * 2), self.problem.v_head_dim
        for r, row in enumerate(rows):
            l = let(ptx.reduce_quad(softmax.l[r], lambda x, y: x + y))
            with T.If(row < int32(self.rows)), T.Then():
                index = self.index(pack, row, split)
                with T.If(tirx.EQ(column, 0)), T.Then():
                    self.store_state_ends(index, softmax.maximum(r), l)
                with unrolled(dim // 8) as n, T.vectorized(2) as x:
                    store_element(self.O, index * dim + n * 8 + column + x, O[4 * n + 2 * r + x])

    def index(self, pack: Expr, r: Expr, split: Expr) -> Expr:
        """Return the index of the results of row r of a pack with a split of the keys; int64."""
        return let((pack.astype("int64") * self.rows + r) * self.splits + split)

    def merge(self, used: Callable[[Expr], Expr]) -> None:
        """Launch the merge into Y, a warp for each row. Of the splits of batch b the first used(b) have keys."""
        total = self.heads * self.rows
        with (
            T.If(self.splits > 1),
            T.Then(),
            T.launch_thread("blockIdx.x", tirx.ceildiv(total, T.int64(self.warps)).astype("int32")) as block,
            T.launch_thread("threadIdx.x", self.warps * WARP) as thread,
            ptx.all_registers(),
        ):
            row = let(block * self.warps + thread // WARP)
            with T.If(row < total), T.Then():
                rows = let(self.rows.astype("int32"))
                pack, r = let(tirx.truncdiv(row, rows)), let(tirx.truncmod(row, rows))
                b, h, i = self.row_of(pack, r)
                with self.if_served(b), self.bound.guard_row(b, i):
                    first, dim, lane = self.index(pack, r, T.int32(0)), self.problem.v_head_dim, let(thread % WARP)
                    state = merge_partials(
                        (used(b), MERGE_UNROLL),
                        lambda s: (self.m[first + s], self.l[first + s]),
                        lambda s, d: self.O[(first + s) * dim + d],
                        self.bound.scores.compute_initial_statistics(h),
                        (dim, lane),
                    )
                    self.finish((b, h, i), lane, state)

    def finish(self, position: tuple[Expr, Expr, Expr], lane: Expr, state: tuple[Expr, Expr, tirx.Buffer]) -> None:
        """Store Y of query row i of head h in batch b, by a warp, from its (m, l, O) with all keys."""
        b, h, i = position
        if not self.careful:
            self.store(b, h, i, lane, state)
            return
        with T.If(self.is_doubtful(state)):
            with T.Then():
                WarpRow(self.bound, b, h, i, lane, self.ahead).emit()
            with T.Else():
                self.store(b, h, i, lane, state)

    def is_doubtful(self, state: tuple[Expr, Expr, tirx.Buffer]) -> Expr:
        """Return whether the row's O is not finite, or a finite number hides all keys that it saw."""
        m, _, O = state
        largest = alloc_registers(1, "int32")
        store_element(largest, 0, tirx.const(0, "int32"))
        with unrolled(O.shape[0]) as n:
            store_element(largest, 0, tirx.max(largest[0], T.bitwise_and(T.reinterpret("int32", O[n]), 0x7FFFFFFF)))
        doubtful = ptx.reduce_warp(largest[0], tirx.max) >= 0x7F800000
        if not self.bound.scores.can_skip_finite:
            return doubtful
        return tirx.any(doubtful, m <= T.float32(HIDDEN_BIAS / 2))

    def store(self, b: Expr, h: Expr, i: Expr, lane: Expr, state: tuple[Expr, Expr, tirx.Buffer]) -> None:
        """Store Y := O / l, or 0 where l = 0. A NaN in l is not 0, so it stays."""
        m, l, O = state
        zero, unit = tirx.const(0, self.acc), tirx.const(1, self.acc)
        inverse = let(tirx.Select(tirx.EQ(l, zero), zero, unit / l))
        visit_elements(
            self.problem.v_head_dim, lane, lambda n, d: self.bound.addressing.store_y(b, h, i, d, O[n] * inverse)
        )
        with T.If(lane == 0), T.Then():
            self.bound.addressing.store_statistics(b, h, i, m, l)


def merge_partials(
    partials: tuple[Expr, int],
    ends: Callable[[Expr], tuple[Expr, Expr]],
    element: Callable[[Expr, Expr], Expr],
    before: tuple[Expr, Expr],
    vector: tuple[int, Expr],
) -> tuple[Expr, Expr, tirx.Buffer]:
    """Return (m, l, O) of a row from its partial results, of which a warp loads several at once; O is spread over its
    lanes.

    `partials` is their number and how many to load at once. `ends` returns m and l of one, `element` an element of its
    O. `before` is m and l before all of them, `vector` the length of O and the thread's lane.
    """
    (count, ahead), (dim, lane) = partials, vector
    m_0, l_0 = (let(x) for x in before)
    acc, slots = str(m_0.ty), -(-dim // WARP)
    zero = tirx.const(0, acc)
    m, l, O = alloc_registers(1, acc), alloc_registers(1, acc), alloc_registers(slots, acc)
    blocks = let(tirx.truncdiv(count + (WARP - 1), WARP))
    store_element(m, 0, m_0)
    with T.serial(blocks) as n:
        s = let(n * WARP + lane)
        with T.If(s < count), T.Then():
            store_element(m, 0, tirx.max(m[0], ends(s)[0]))
    store_element(m, 0, ptx.reduce_warp(m[0], tirx.max))
    # Nothing visible: m = -inf, and m_s - m would be NaN.
    shift = let(tirx.Select(tirx.EQ(m[0], tirx.const(float("-inf"), acc)), zero, m[0]))

    def weight(m_s: Expr) -> Expr:
        return let(T.exp(m_s - shift))

    store_element(l, 0, zero)
    with T.serial(blocks) as n:
        s = let(n * WARP + lane)
        with T.If(s < count), T.Then():
            m_s, l_s = ends(s)
            store_element(l, 0, l[0] + weight(m_s) * l_s)
    store_element(l, 0, l_0 * weight(m_0) + ptx.reduce_warp(l[0], lambda x, y: x + y))
    with unrolled(slots) as n:
        store_element(O, n, zero)
    with T.serial(tirx.truncdiv(count + (ahead - 1), ahead)) as block:
        w, o = alloc_registers(ahead, acc), alloc_registers(ahead * slots, acc)
        with unrolled(ahead) as k:
            s = let(block * ahead + k)
            store_element(w, k, zero)
            with T.If(s < count), T.Then():
                store_element(w, k, weight(ends(s)[0]))
            with unrolled(slots) as n:
                d = let(n * WARP + lane)
                # Results without weight were perhaps never written.
                is_written = tirx.all(w[k] > zero, d < dim)
                store_element(o, k * slots + n, tirx.if_then_else(is_written, element(s, d), zero))
        with unrolled(ahead) as k, unrolled(slots) as n:
            store_element(O, n, O[n] + w[k] * o[k * slots + n])
    return m[0], l[0], O


def visit_elements(dim: int, lane: Expr, body: Callable[[Expr, Expr], None]) -> None:
    """Emit body(n, d) for the n-th element of a lane, which is element d of the vector."""
    with unrolled(-(-dim // WARP)) as n:
        d = let(n * WARP + lane)
        if dim % WARP:
            with T.If(d < dim), T.Then():
                body(n, d)
        else:
            body(n, d)
