"""Which keys a tile of query rows has to do with: the ranges of the record, or what a formula leaves of them, which a
launch before finds out.

Tiles of keys that the formula hides from all rows are not worked on, wherever they are, and those that it shows in full
need no mask code. So a causal mask, a window, documents or blocks cost what they show, whatever nodes made them.

A warp bounds a tile of rows: a lane bounds the formula (interval analysis) in every 32nd tile of keys, and the warp
lists those that are left. Where a finite number hides keys, a row that sees nothing better gives them weight: then only
what -inf hides is left out. A list takes four bytes for each tile of keys that there could be.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.key_tiles import KeyTiles
from lowering.attention.scores import HIDDEN

from .host import on_host
from .ptx import WARP, all_registers, ballot, int32, let, put, reduce_warp, registers

_MASKED, _ALL, _END, _FIRST = range(4)
"""Of a list: how many of its tiles need mask code, how many there are, the key behind the last one, and from there on
the first key of each tile. Those that need mask code stand at the front, the others end with the room of the list."""


class MaskPrepass:
    """Made by the host before the launch of a kernel with tiles of `rows` query rows and `keys` keys, which asks it.

    There are query rows. Blocks of the pre-pass have `warps` warps.
    """

    def __init__(self, bound: Bound, rows: int, keys: int, warps: int) -> None:
        self.bound, self.rows, self.keys = bound, rows, keys
        self.lists = bound.scores.formula is not None and bound.keys.parts == 1
        if not self.lists:
            return
        self.heads = bound.problem.q_heads if bound.problem.formula_per_head else 1
        self.count = on_host(tirx.ceildiv(T.int64(1) * bound.S, rows))
        self.room = on_host(tirx.ceildiv(T.int64(1) * bound.T, keys))
        total = on_host(T.int64(1) * bound.B * self.heads * self.count)
        self.memory = T.alloc_buffer((total * (self.room + _FIRST),), "int32")
        with (
            T.launch_thread("blockIdx.x", tirx.ceildiv(total, warps).astype("int32")) as block,
            T.launch_thread("threadIdx.x", warps * WARP) as thread,
            all_registers(),
        ):
            place = let(block.astype("int64") * warps + thread // WARP)
            with T.If(place < total), T.Then():
                head, tile = let(tirx.truncdiv(place, self.count)), let(tirx.truncmod(place, self.count))
                b, h = let(tirx.truncdiv(head, self.heads)), let(tirx.truncmod(head, self.heads))
                i0 = let(tile * rows)
                with bound.if_there(b, i0):
                    _QueryTile(self, (b, h, i0), let(thread % WARP), self.list_at(place)).write()

    def list_at(self, place: Expr) -> Expr:
        """Where the list of that number begins."""
        return let(place * (self.room + _FIRST))

    def key_tiles(self, b: Expr, h: Expr, i0: Expr) -> KeyTiles:
        """The tiles of keys that some row of the tile from row i0 of query head h sees; int32."""
        if not self.lists:
            rows = i0, let(i0 + self.rows)
            ranges, whole = self.bound.keys.of_tile(b, *rows), self.bound.without_mask_code(b, *rows)
            return KeyTiles(ranges, whole, self.keys, lambda value: let(int32(value)))
        head = b.astype("int64") * self.heads + (h if self.heads > 1 else 0)
        return _Listed(self, self.list_at(head * self.count + tirx.truncdiv(i0.astype("int64"), self.rows)))


class _Listed(KeyTiles):
    """Tiles of a list, those that need mask code first. Ranges are of the list's places, `size` for each tile."""

    def __init__(self, prepass: MaskPrepass, at: Expr) -> None:
        self.memory, self.tiles = prepass.memory, let(at + _FIRST)
        self.masked, count, self.last = (let(prepass.memory[at + n]) for n in (_MASKED, _ALL, _END))
        self.gap = let(prepass.room - count)
        size = prepass.keys
        super().__init__([(T.int32(0), count * size)], [(self.masked * size, count * size)], size, let)

    def first(self, u: Expr) -> Expr:
        place = self.tiles + u + tirx.Select(u < self.masked, T.int64(0), self.gap)
        return let(self.memory[place])

    def end(self, u: Expr) -> Expr:
        return tirx.min(self.first(u) + self.size, self.last)

    def stop(self, u: Expr) -> Expr:
        return self.last

    def full(self, u: Expr) -> Expr:
        return u >= self.masked

    def masked_first(self) -> tuple[Expr, Callable[[Expr], Expr]]:
        return self.masked, lambda u: u


class _QueryTile:
    """The code of one warp. Tiles of keys have numbers from the first one that the record lets some row see."""

    def __init__(self, prepass: MaskPrepass, place: tuple[Expr, Expr, Expr], lane: Expr, at: Expr) -> None:
        self.prepass, self.bound, self.size, self.lane, self.at = prepass, prepass.bound, prepass.keys, lane, at
        self.b, self.h, self.i0 = place
        self.i1 = let(tirx.min(self.i0 + prepass.rows, T.int64(1) * self.bound.rows(self.b)))
        ((lo, hi),) = self.bound.keys.of_tile(self.b, self.i0, self.i1)
        ((all_lo, all_hi),) = self.bound.keys.of_all(self.b, self.i0, self.i1)
        self.lo, self.hi, self.seen_by_all = let(lo), let(hi), (let(all_lo), let(all_hi))
        self.count = let(tirx.ceildiv(self.hi - self.lo, T.int64(self.size)))

    def write(self) -> None:
        """Puts the list there."""
        self.least = registers(1, "float32")  # tiles whose numbers are all at most that are left out
        put(self.least, 0, T.float32(HIDDEN))
        if not self.bound.scores.skips_numbers:
            self.list_tiles()
            return
        unsettled = registers(1, "int32")
        put(unsettled, 0, tirx.const(1, "int32"))
        with T.While(unsettled[0] != 0):
            self.list_tiles()
            put(unsettled, 0, tirx.const(0, "int32"))
            hidden_by_numbers = reduce_warp(self.doubtful[0], tirx.max) != 0
            with T.If(hidden_by_numbers), T.Then(), T.If(self.some_row_sees_nothing()), T.Then():
                put(self.least, 0, T.float32(float("-inf")))
                put(unsettled, 0, tirx.const(1, "int32"))

    def list_tiles(self) -> None:
        self.masked, self.full = registers(1, "int32"), registers(1, "int32")
        self.doubtful, self.span = registers(1, "int32"), (registers(1, "int64"), registers(1, "int64"))
        for register in (self.masked, self.full, self.doubtful):
            put(register, 0, tirx.const(0, "int32"))
        put(self.span[0], 0, self.count)
        put(self.span[1], 0, tirx.const(0, "int64"))
        with T.serial(tirx.ceildiv(self.count, T.int64(WARP))) as n:
            self.look(let(n * WARP))
        with T.If(self.lane == 0), T.Then():
            put(self.prepass.memory, self.at + _MASKED, self.masked[0])
            put(self.prepass.memory, self.at + _ALL, self.masked[0] + self.full[0])
            put(self.prepass.memory, self.at + _END, int32(self.hi))

    def look(self, first: Expr) -> None:
        """At 32 tiles from number `first` on."""
        t, key = let(first + self.lane), let(self.lo + (first + self.lane) * self.size)
        masked, full = registers(1, "bool"), registers(1, "bool")
        put(masked, 0, tirx.const(False, "bool"))
        put(full, 0, tirx.const(False, "bool"))
        with T.If(t < self.count), T.Then():
            end = let(tirx.min(key + self.size, self.hi))
            ends = self.bound.scores.mask_extremes(self.b, self.h, 1, (self.i0, self.i1 - 1), (key, end - 1))
            lowest, highest = (let(end) for end in ends)
            zero, (all_lo, all_hi) = T.float32(0), self.seen_by_all
            shown = tirx.all(tirx.EQ(lowest, zero), tirx.EQ(highest, zero), key >= all_lo, key + self.size <= all_hi)
            put(full, 0, shown)
            put(masked, 0, tirx.all(highest > self.least[0], tirx.Not(full[0])))
            if self.bound.scores.skips_numbers:
                self.remember(t, highest)
        self.append(masked[0], self.masked, key, lambda n: n)
        self.append(full[0], self.full, key, lambda n: self.prepass.room - 1 - n)

    def remember(self, t: Expr, highest: Expr) -> None:
        """Whether a number hides the tile, or else that it counts."""
        with T.If(highest > self.least[0]):
            with T.Then():
                put(self.span[0], 0, tirx.min(self.span[0][0], t))
                put(self.span[1], 0, tirx.max(self.span[1][0], t + 1))
            with T.Else(), T.If(highest > T.float32(float("-inf"))), T.Then():
                put(self.doubtful, 0, tirx.const(1, "int32"))

    def append(self, wanted: Expr, count: tirx.Buffer, key: Expr, place: Callable[[Expr], Expr]) -> None:
        """The tiles of the lanes that want it, behind so many."""
        lanes = ballot(wanted)
        before = T.bitwise_and(lanes, (T.uint32(1) << self.lane.astype("uint32")) - T.uint32(1))
        with T.If(wanted), T.Then():
            n = let(count[0] + tirx.popcount(before).astype("int32"))
            put(self.prepass.memory, self.at + _FIRST + place(n), int32(key))
        put(count, 0, count[0] + tirx.popcount(lanes).astype("int32"))

    def some_row_sees_nothing(self) -> Expr:
        """Whether the keys of the listed tiles are all hidden from some row, if only by a number."""
        start = let(self.lo + reduce_warp(self.span[0][0], tirx.min) * self.size)
        stop = let(tirx.min(self.lo + reduce_warp(self.span[1][0], tirx.max) * self.size, self.hi))
        hopeless, i, found, j = (registers(1, kind) for kind in ("int32", "int64", "int32", "int64"))
        put(hopeless, 0, tirx.const(0, "int32"))
        put(i, 0, self.i0)
        with T.While(tirx.all(hopeless[0] == 0, i[0] < self.i1)):
            ((lo, hi),) = self.bound.keys.of_row(self.b, i[0])
            lo, hi = let(tirx.max(lo, start)), let(tirx.min(hi, stop))
            put(found, 0, tirx.const(0, "int32"))
            put(j, 0, lo)
            with T.While(tirx.all(found[0] == 0, j[0] < hi)):
                better, key = registers(1, "int32"), let(j[0] + self.lane)
                put(better, 0, tirx.const(0, "int32"))
                with T.If(key < hi), T.Then():
                    bias = self.bound.scores.additive(self.b, self.h, i[0], key, inside=True)
                    # Scores that are not larger than that bound leave it above what `HIDDEN` promises.
                    put(better, 0, (bias > T.float32(HIDDEN / 4)).astype("int32"))
                put(found, 0, reduce_warp(better[0], tirx.max))
                put(j, 0, j[0] + WARP)
            put(hopeless, 0, 1 - found[0])
            put(i, 0, i[0] + 1)
        return hopeless[0] != 0
