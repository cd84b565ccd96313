"""Block-mask pre-pass: the key tiles that concern a tile of query rows.

They are the ranges of the record, or the subset of them that a formula shows, which a launch before the kernel finds.

Key tiles that the formula hides from all rows are skipped, wherever they are. Those that it shows in full need no mask
code. So the cost of a causal mask, a window, documents or blocks is proportional to the visible keys, whatever nodes
produced them.

A warp bounds a tile of rows: a lane bounds the formula (interval analysis) in every 32nd tile of keys, and the warp
lists the remaining tiles. Where a finite number hides keys, a row that sees nothing better gives them weight; then only
keys hidden by -inf are skipped. A list takes four bytes for each possible tile of keys.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.key_tiles import KeyTiles
from lowering.attention.codegen.scores import HIDDEN_BIAS

from ..primitives.host import bind_on_host
from ..primitives.ptx import WARP, all_registers, alloc_registers, ballot, int32, let, reduce_warp, store_element

_MASKED, _ALL, _END, _FIRST = range(4)
"""Header of a list: the number of its tiles that need mask code, the number of all tiles, the key after the last one,
and then the first key of each tile.

Tiles that need mask code are at the front; the others end at the capacity of the list.
"""


class MaskPrepass:
    """Created by the host before the launch of a kernel with tiles of `rows` query rows and `keys` keys, which reads
    it.

    There are query rows. Blocks of the pre-pass have `warps` warps.
    """

    def __init__(self, bound: BoundAttention, rows: int, keys: int, warps: int) -> None:
        self.bound, self.rows, self.keys = bound, rows, keys
        self.lists = bound.scores.formula is not None and bound.keys.range_count == 1
        if not self.lists:
            return
        self.heads = bound.problem.q_heads if bound.problem.has_formula_per_head else 1
        self.count = bind_on_host(tirx.ceildiv(T.int64(1) * bound.S, rows))
        self.room = bind_on_host(tirx.ceildiv(T.int64(1) * bound.T, keys))
        total = bind_on_host(T.int64(1) * bound.B * self.heads * self.count)
        self.memory = T.alloc_buffer((total * (self.room + _FIRST),), "int32")
        with (
            T.launch_thread("blockIdx.x", tirx.ceildiv(total, warps).astype("int32")) as block,
            T.launch_thread("threadIdx.x", warps * WARP) as thread,
            all_registers(),
        ):
            index = let(block.astype("int64") * warps + thread // WARP)
            with T.If(index < total), T.Then():
                head, tile = let(tirx.truncdiv(index, self.count)), let(tirx.truncmod(index, self.count))
                b, h = let(tirx.truncdiv(head, self.heads)), let(tirx.truncmod(head, self.heads))
                i0 = let(tile * rows)
                with bound.guard_row(b, i0):
                    _QueryTile(self, (b, h, i0), let(thread % WARP), self.list_at(index)).write()

    def list_at(self, index: Expr) -> Expr:
        """Return the offset of the list with that index."""
        return let(index * (self.room + _FIRST))

    def key_tiles(self, b: Expr, h: Expr, i0: Expr) -> KeyTiles:
        """Return the tiles of keys that some row of the tile from row i0 of query head h sees; int32."""
        if not self.lists:
            rows = i0, let(i0 + self.rows)
            ranges, whole = self.bound.keys.compute_tile_ranges(b, *rows), self.bound.find_unmasked_ranges(b, *rows)
            return KeyTiles(ranges, whole, self.keys, lambda value: let(int32(value)))
        head = b.astype("int64") * self.heads + (h if self.heads > 1 else 0)
        return _Listed(self, self.list_at(head * self.count + tirx.truncdiv(i0.astype("int64"), self.rows)))


class _Listed(KeyTiles):
    """The tiles of a list, those that need mask code first. Ranges are positions in the list, `size` for each tile."""

    def __init__(self, prepass: MaskPrepass, at: Expr) -> None:
        self.memory, self.tiles = prepass.memory, let(at + _FIRST)
        self.masked, count, self.last = (let(prepass.memory[at + n]) for n in (_MASKED, _ALL, _END))
        self.gap = let(prepass.room - count)
        size = prepass.keys
        super().__init__([(T.int32(0), count * size)], [(self.masked * size, count * size)], size, let)

    def first(self, u: Expr) -> Expr:
        index = self.tiles + u + tirx.Select(u < self.masked, T.int64(0), self.gap)
        return let(self.memory[index])

    def end(self, u: Expr) -> Expr:
        return tirx.min(self.first(u) + self.size, self.last)

    def stop(self, u: Expr) -> Expr:
        return self.last

    def full(self, u: Expr) -> Expr:
        return u >= self.masked

    def order_masked_first(self) -> tuple[Expr, Callable[[Expr], Expr]]:
        return self.masked, lambda u: u


class _QueryTile:
    """The code of one warp. Tiles of keys are numbered from the first one that the record shows to some row."""

    def __init__(self, prepass: MaskPrepass, position: tuple[Expr, Expr, Expr], lane: Expr, at: Expr) -> None:
        self.prepass, self.bound, self.size, self.lane, self.at = prepass, prepass.bound, prepass.keys, lane, at
        self.b, self.h, self.i0 = position
        self.i1 = let(tirx.min(self.i0 + prepass.rows, T.int64(1) * self.bound.rows(self.b)))
        ((lo, hi),) = self.bound.keys.compute_tile_ranges(self.b, self.i0, self.i1)
        ((all_lo, all_hi),) = self.bound.keys.compute_common_ranges(self.b, self.i0, self.i1)
        self.lo, self.hi, self.seen_by_all = let(lo), let(hi), (let(all_lo), let(all_hi))
        self.count = let(tirx.ceildiv(self.hi - self.lo, T.int64(self.size)))

    def write(self) -> None:
        """Write the list."""
        self.threshold = alloc_registers(1, "float32")  # tiles whose mask values are all at most this one are skipped
        store_element(self.threshold, 0, T.float32(HIDDEN_BIAS))
        if not self.bound.scores.can_skip_finite:
            self.list_tiles()
            return
        is_pending = alloc_registers(1, "int32")
        store_element(is_pending, 0, tirx.const(1, "int32"))
        with T.While(is_pending[0] != 0):
            self.list_tiles()
            store_element(is_pending, 0, tirx.const(0, "int32"))
            hidden_by_numbers = reduce_warp(self.doubtful[0], tirx.max) != 0
            with T.If(hidden_by_numbers), T.Then(), T.If(self.has_blind_row()), T.Then():
                store_element(self.threshold, 0, T.float32(float("-inf")))
                store_element(is_pending, 0, tirx.const(1, "int32"))

    def list_tiles(self) -> None:
        self.masked, self.full = alloc_registers(1, "int32"), alloc_registers(1, "int32")
        self.doubtful, self.span = (
            alloc_registers(1, "int32"),
            (alloc_registers(1, "int64"), alloc_registers(1, "int64")),
        )
        for register in (self.masked, self.full, self.doubtful):
            store_element(register, 0, tirx.const(0, "int32"))
        store_element(self.span[0], 0, self.count)
        store_element(self.span[1], 0, tirx.const(0, "int64"))
        with T.serial(tirx.ceildiv(self.count, T.int64(WARP))) as n:
            self.classify_tiles(let(n * WARP))
        with T.If(self.lane == 0), T.Then():
            store_element(self.prepass.memory, self.at + _MASKED, self.masked[0])
            store_element(self.prepass.memory, self.at + _ALL, self.masked[0] + self.full[0])
            store_element(self.prepass.memory, self.at + _END, int32(self.hi))

    def classify_tiles(self, first: Expr) -> None:
        """Classify the 32 tiles from number `first` on."""
        t, key = let(first + self.lane), let(self.lo + (first + self.lane) * self.size)
        masked, full = alloc_registers(1, "bool"), alloc_registers(1, "bool")
        store_element(masked, 0, tirx.const(False, "bool"))
        store_element(full, 0, tirx.const(False, "bool"))
        with T.If(t < self.count), T.Then():
            end = let(tirx.min(key + self.size, self.hi))
            ends = self.bound.scores.emit_mask_bounds(self.b, self.h, 1, (self.i0, self.i1 - 1), (key, end - 1))
            lowest, highest = (let(end) for end in ends)
            zero, (all_lo, all_hi) = T.float32(0), self.seen_by_all
            shown = tirx.all(tirx.EQ(lowest, zero), tirx.EQ(highest, zero), key >= all_lo, key + self.size <= all_hi)
            store_element(full, 0, shown)
            store_element(masked, 0, tirx.all(highest > self.threshold[0], tirx.Not(full[0])))
            if self.bound.scores.can_skip_finite:
                self.record_tile(t, highest)
        self.append_tiles(masked[0], self.masked, key, lambda n: n)
        self.append_tiles(full[0], self.full, key, lambda n: self.prepass.room - 1 - n)

    def record_tile(self, t: Expr, highest: Expr) -> None:
        """Record whether a finite number hides the tile, or the tile counts."""
        with T.If(highest > self.threshold[0]):
            with T.Then():
                store_element(self.span[0], 0, tirx.min(self.span[0][0], t))
                store_element(self.span[1], 0, tirx.max(self.span[1][0], t + 1))
            with T.Else(), T.If(highest > T.float32(float("-inf"))), T.Then():
                store_element(self.doubtful, 0, tirx.const(1, "int32"))

    def append_tiles(self, is_listed: Expr, count: tirx.Buffer, key: Expr, index: Callable[[Expr], Expr]) -> None:
        """Append the tiles of the lanes where `is_listed` holds, after the `count` present ones."""
        lanes = ballot(is_listed)
        before = T.bitwise_and(lanes, (T.uint32(1) << self.lane.astype("uint32")) - T.uint32(1))
        with T.If(is_listed), T.Then():
            n = let(count[0] + tirx.popcount(before).astype("int32"))
            store_element(self.prepass.memory, self.at + _FIRST + index(n), int32(key))
        store_element(count, 0, count[0] + tirx.popcount(lanes).astype("int32"))

    def has_blind_row(self) -> Expr:
        """Return whether the keys of the listed tiles are all hidden from some row, if only by a finite number."""
        start = let(self.lo + reduce_warp(self.span[0][0], tirx.min) * self.size)
        stop = let(tirx.min(self.lo + reduce_warp(self.span[1][0], tirx.max) * self.size, self.hi))
        is_blind, i, has_better, j = (alloc_registers(1, kind) for kind in ("int32", "int64", "int32", "int64"))
        store_element(is_blind, 0, tirx.const(0, "int32"))
        store_element(i, 0, self.i0)
        with T.While(tirx.all(is_blind[0] == 0, i[0] < self.i1)):
            ((lo, hi),) = self.bound.keys.compute_row_ranges(self.b, i[0])
            lo, hi = let(tirx.max(lo, start)), let(tirx.min(hi, stop))
            store_element(has_better, 0, tirx.const(0, "int32"))
            store_element(j, 0, lo)
            with T.While(tirx.all(has_better[0] == 0, j[0] < hi)):
                better, key = alloc_registers(1, "int32"), let(j[0] + self.lane)
                store_element(better, 0, tirx.const(0, "int32"))
                with T.If(key < hi), T.Then():
                    bias = self.bound.scores.compute_bias(self.b, self.h, i[0], key, inside=True)
                    # Scores up to that bound keep the sum above what `HIDDEN` promises.
                    store_element(better, 0, (bias > T.float32(HIDDEN_BIAS / 4)).astype("int32"))
                store_element(has_better, 0, reduce_warp(better[0], tirx.max))
                store_element(j, 0, j[0] + WARP)
            store_element(is_blind, 0, 1 - has_better[0])
            store_element(i, 0, i[0] + 1)
        return is_blind[0] != 0
