"""Which keys a tile of query rows has to do with: the ranges of the record, narrowed by a formula in a launch before.

Tiles of keys that the formula hides from all rows, at the begin and at the end of a range, are not worked on, and the
longest run of tiles that it shows in full needs no mask code. So a causal mask, a window, a prefix or padding costs
what it would cost as one of the record's own, whatever nodes made it.

A warp surveys a tile of rows: a lane bounds the formula (interval analysis) in every 32nd tile of keys. Where a finite
number hides keys, a row that sees nothing better gives them weight: then only what -inf hides is left out.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.key_tiles import KeyTiles
from lowering.attention.scores import HIDDEN

from .host import on_host
from .ptx import WARP, fixed, int32, put, reduce_warp, registers

_ENDS = 4  # of a tile of rows: lo, hi, and those of the keys that need no mask code


class Survey:
    """Made by the host before the launch of a kernel with tiles of `rows` query rows and `keys` keys, which asks it.

    There are query rows. Blocks of the survey have `warps` warps.
    """

    def __init__(self, bound: Bound, rows: int, keys: int, warps: int) -> None:
        self.bound, self.rows, self.keys = bound, rows, keys
        self.narrows = bound.scores.formula is not None and bound.keys.parts == 1
        if not self.narrows:
            return
        self.heads = bound.problem.q_heads if bound.scores.formula_per_head else 1
        self.count = on_host(tirx.ceildiv(T.int64(1) * bound.S, rows))
        total = on_host(T.int64(1) * bound.B * self.heads * self.count)
        self.ends = T.alloc_buffer((total * _ENDS,), "int32")
        with (
            T.launch_thread("blockIdx.x", tirx.ceildiv(total, warps).astype("int32")) as block,
            T.launch_thread("threadIdx.x", warps * WARP) as thread,
        ):
            place = fixed(block.astype("int64") * warps + thread // WARP)
            with T.If(place < total), T.Then():
                head, tile = fixed(tirx.truncdiv(place, self.count)), fixed(tirx.truncmod(place, self.count))
                b, h = fixed(tirx.truncdiv(head, self.heads)), fixed(tirx.truncmod(head, self.heads))
                i0 = fixed(tile * rows)
                with bound.if_there(b, i0):
                    _QueryTile(self, (b, h, i0), fixed(thread % WARP)).write(fixed(place * _ENDS))

    def key_tiles(self, b: Expr, h: Expr, i0: Expr) -> KeyTiles:
        """The tiles of keys that some row of the tile from row i0 of query head h sees; int32."""
        if not self.narrows:
            rows = i0, fixed(i0 + self.rows)
            ranges, whole = self.bound.keys.of_tile(b, *rows), self.bound.without_mask_code(b, *rows)
        else:
            head = b.astype("int64") * self.heads + (h if self.heads > 1 else 0)
            place = fixed((head * self.count + tirx.truncdiv(i0.astype("int64"), self.rows)) * _ENDS)
            lo, hi, full_lo, full_hi = (fixed(self.ends[place + n]) for n in range(_ENDS))
            ranges, whole = ((lo, hi),), ((full_lo, full_hi),)
        return KeyTiles(ranges, whole, self.keys, lambda value: fixed(int32(value)))


class _QueryTile:
    """The code of one warp. Tiles of keys have numbers from the first one that the record lets some row see."""

    def __init__(self, survey: Survey, place: tuple[Expr, Expr, Expr], lane: Expr) -> None:
        self.survey, self.bound, self.size, self.lane = survey, survey.bound, survey.keys, lane
        self.b, self.h, self.i0 = place
        self.i1 = fixed(tirx.min(self.i0 + survey.rows, T.int64(1) * self.bound.rows(self.b)))
        ((lo, hi),) = self.bound.keys.of_tile(self.b, self.i0, self.i1)
        ((all_lo, all_hi),) = self.bound.keys.of_all(self.b, self.i0, self.i1)
        self.lo, self.hi, self.seen_by_all = fixed(lo), fixed(hi), (fixed(all_lo), fixed(all_hi))
        self.count = fixed(tirx.ceildiv(self.hi - self.lo, T.int64(self.size)))

    def write(self, place: Expr) -> None:
        """Puts the ends there."""
        counting, showing = _Span(self.count), _Span(self.count)
        self.run, self.best, self.best_end = (registers(1, "int32") for _ in range(3))
        for register in (self.run, self.best, self.best_end):
            put(register, 0, tirx.const(0, "int32"))
        with T.serial(tirx.ceildiv(self.count, T.int64(WARP))) as n:
            self.look(fixed(n * WARP), counting, showing)
        counting.agree()
        showing.agree()
        if self.bound.scores.skips_numbers:
            more = tirx.any(showing.first[0] < counting.first[0], showing.end[0] > counting.end[0])
            with T.If(fixed(more)), T.Then(), T.If(self.some_row_sees_nothing(counting)), T.Then():
                counting.become(showing)
        start = self.lo + counting.first[0] * self.size
        stop = tirx.max(tirx.min(self.lo + counting.end[0] * self.size, self.hi), start)
        full_stop = self.lo + self.best_end[0] * T.int64(self.size)
        ends = (start, stop, full_stop - self.best[0] * T.int64(self.size), full_stop)
        with T.If(self.lane == 0), T.Then():
            for n, end in enumerate(ends):
                put(self.survey.ends, place + n, int32(end))

    def look(self, first: Expr, counting: _Span, showing: _Span) -> None:
        """At 32 tiles from number `first` on."""
        t, full = fixed(first + self.lane), registers(1, "int32")
        put(full, 0, tirx.const(0, "int32"))
        with T.If(t < self.count), T.Then():
            k0 = fixed(self.lo + t * self.size)
            k1 = fixed(tirx.min(k0 + self.size, self.hi))
            ends = self.bound.scores.mask_extremes(self.b, self.h, 1, (self.i0, self.i1 - 1), (k0, k1 - 1))
            lowest, highest = (fixed(end) for end in ends)
            counting.take(t, highest > T.float32(HIDDEN))
            showing.take(t, highest > T.float32(float("-inf")))
            zero, (all_lo, all_hi) = T.float32(0), self.seen_by_all
            shown = tirx.all(tirx.EQ(lowest, zero), tirx.EQ(highest, zero), k0 >= all_lo, k0 + self.size <= all_hi)
            put(full, 0, shown.astype("int32"))
        flag = fixed(full[0])
        with T.serial(WARP) as k:
            of_tile = fixed(tirx.call_intrin("int32", "tirx.cuda.__shfl_sync", T.uint32(0xFFFFFFFF), flag, k, WARP))
            put(self.run, 0, tirx.Select(of_tile != 0, self.run[0] + 1, 0))
            with T.If(self.run[0] > self.best[0]), T.Then():
                put(self.best, 0, self.run[0])
                put(self.best_end, 0, (first + k + 1).astype("int32"))

    def some_row_sees_nothing(self, span: _Span) -> Expr:
        """Whether the keys of the span are all hidden from some row, if only by a number."""
        start = fixed(self.lo + span.first[0] * self.size)
        stop = fixed(tirx.min(self.lo + span.end[0] * self.size, self.hi))
        hopeless, i, found, j = (registers(1, kind) for kind in ("int32", "int64", "int32", "int64"))
        put(hopeless, 0, tirx.const(0, "int32"))
        put(i, 0, self.i0)
        with T.While(tirx.all(hopeless[0] == 0, i[0] < self.i1)):
            ((lo, hi),) = self.bound.keys.of_row(self.b, i[0])
            lo, hi = fixed(tirx.max(lo, start)), fixed(tirx.min(hi, stop))
            put(found, 0, tirx.const(0, "int32"))
            put(j, 0, lo)
            with T.While(tirx.all(found[0] == 0, j[0] < hi)):
                better, key = registers(1, "int32"), fixed(j[0] + self.lane)
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


class _Span:
    """Numbers [first, end) of the tiles that were taken, in registers of each lane until the warp agrees."""

    def __init__(self, count: Expr) -> None:
        self.first, self.end = registers(1, "int64"), registers(1, "int64")
        put(self.first, 0, count)
        put(self.end, 0, tirx.const(0, "int64"))

    def take(self, t: Expr, condition: Expr) -> None:
        with T.If(condition), T.Then():
            put(self.first, 0, tirx.min(self.first[0], t))
            put(self.end, 0, tirx.max(self.end[0], t + 1))

    def agree(self) -> None:
        """An empty one is [0, 0)."""
        put(self.end, 0, reduce_warp(self.end[0], tirx.max))
        put(self.first, 0, tirx.min(reduce_warp(self.first[0], tirx.min), self.end[0]))

    def become(self, other: _Span) -> None:
        put(self.first, 0, other.first[0])
        put(self.end, 0, other.end[0])
