"""Attention for few query rows over long keys: split-KV over thread blocks (Flash-Decoding; Dao, Haziza, Massa, Sizov
2023), which is bound by reading K and V once.

    a block for each key/value head, 16 of its R = S G packed query rows, and split of the visible keys:
        each of its warps, for every W-th tile of B_c keys of the split:     K_j [B_c, D], V_j [B_c, Dv]
            online softmax in registers, as in prefill_mma.py                m, l [16], O [16, Dv]
        the warps' (m, l, O) become one, which is kept
    a warp for each query row:                               s counts the splits; a sink is one more, with O_s = 0
        m = max m_s,  w_s = exp(m_s - m)
        Y = sum w_s O_s / sum w_s l_s                        0 where no key was visible

Warps share nothing but Q until the end: each has a ring of tiles of its own in shared memory and waits for nobody.
Queries are packed so that all heads that share keys meet them in one tile; row r is query row r // G of head r % G.

The host chooses the number of splits by the capacity of the cache, the device cuts the valid length into so many:
blocks that are left without keys end at once. The second launch costs less than what would replace it: counters that
are zeroed before, and a last block that merges alone while the others have left.

Where rows differ in what they see, a value that one of them does not see may still be infinite or NaN, and 0 * NaN =
NaN. Rows that come out so are computed again one by one, and so are rows whose keys are all hidden by finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import HIDDEN, Bound

from . import ptx
from .device import Device
from .host import on_host
from .plain import WarpRow
from .ptx import LOG2_E, WARP, fixed, put, registers, unrolled
from .shared_tile import CHUNK, SharedTile
from .tiles import DecodeTiles, padded
from .warp_tile import ROWS, WarpTile

MERGE_WARPS = 4  # per block of the second launch
AHEAD = 4  # partial results that a thread of it asks for at once


def decode(bound: Bound, tiles: DecodeTiles, device: Device) -> None:
    """Emits the kernels and their launches into the PrimFunc that `bound` has opened, for what `prefill_mma` takes."""
    p = bound.problem
    tiles.check(p, device)
    rows = on_host(T.int64(1) * bound.S * p.group)
    heads = on_host(T.int64(1) * bound.B * p.kv_heads)
    row_blocks = on_host(tirx.ceildiv(rows, ROWS))
    with T.If(heads * row_blocks > 0), T.Then():
        most = tirx.truncdiv(T.int64(tiles.blocks), heads * row_blocks)
        most = tirx.min(most, tirx.truncdiv(T.int64(1) * bound.T + (tiles.split - 1), T.int64(tiles.split)))
        splits = on_host(tirx.max(most, T.int64(1)))
        partial = _Partial(bound, tiles, heads * rows, rows, splits)
        with (
            T.launch_thread("blockIdx.x", (heads * splits * row_blocks).astype("int32")) as block,
            T.launch_thread("threadIdx.x", tiles.threads) as thread,
        ):
            row_blocks, parts = (fixed(size.astype("int32")) for size in (row_blocks, splits))
            row_block, work = fixed(tirx.truncmod(block, row_blocks)), fixed(tirx.truncdiv(block, row_blocks))
            head, split = fixed(tirx.truncdiv(work, parts)), fixed(tirx.truncmod(work, parts))
            _Split(bound, tiles, partial, head, split, row_block, fixed(thread)).emit()
        with (
            T.launch_thread("blockIdx.x", tirx.ceildiv(heads * rows, MERGE_WARPS).astype("int32")) as block,
            T.launch_thread("threadIdx.x", MERGE_WARPS * WARP) as thread,
        ):
            row = fixed(block * MERGE_WARPS + thread // WARP)
            with T.If(row < heads * rows), T.Then():
                partial.merge(row, fixed(thread % WARP))


class _Partial:
    """(m, l, O) of every packed query row and split, in the device's memory; and how they become Y."""

    def __init__(self, bound: Bound, tiles: DecodeTiles, count: Expr, rows: Expr, splits: Expr) -> None:
        self.bound, self.problem, self.tiles, self.rows, self.splits = bound, bound.problem, tiles, rows, splits
        self.m, self.l = (T.alloc_buffer((count * splits,), "float32") for _ in range(2))
        self.O = T.alloc_buffer((count * splits * self.problem.v_head_dim,), "float32")

    def keys(self, b: Expr) -> tuple[Expr, Expr, Expr]:
        """The keys [lo, hi) of batch b that some query may see, and how many of them a split has; int32."""
        lo, hi = (
            fixed(end.astype("int32")) for end in self.bound.visible_range(b, T.int64(0), T.int64(1) * self.bound.S)
        )
        whole = self.tiles.keys * self.tiles.warps
        parts = fixed(self.splits.astype("int32"))
        tiles = fixed(tirx.truncdiv(hi - lo + (whole - 1), whole))
        return lo, hi, fixed(tirx.max(tirx.truncdiv(tiles + parts - 1, parts), 1) * whole)

    def row_of(self, head: Expr, r: Expr) -> tuple[Expr, Expr, Expr]:
        """Batch, query head and query row of packed row r of a key/value head, counted over all batches."""
        p = self.problem
        b, hk = fixed(tirx.truncdiv(head, p.kv_heads)), tirx.truncmod(head, p.kv_heads)
        return b, fixed(hk * p.group + tirx.truncmod(r, p.group)), fixed(tirx.truncdiv(r, p.group))

    def place(self, head: Expr, r: Expr, split: Expr) -> Expr:
        """Where a row's (m, l, O) of a split lies; int64."""
        return fixed((head.astype("int64") * self.rows + r) * self.splits + split)

    def merge(self, row: Expr, lane: Expr) -> None:
        """Y of row `row`, counted over all batches and key/value heads, by a warp."""
        rows = fixed(self.rows.astype("int32"))
        head, r = fixed(tirx.truncdiv(row, rows)), fixed(tirx.truncmod(row, rows))
        b, h, i = self.row_of(head, r)
        lo, hi, part = self.keys(b)
        first = self.place(head, r, T.int32(0))
        used = fixed(tirx.truncdiv(hi - lo + part - 1, part))
        dim = self.problem.v_head_dim
        state = _merged(
            (used, AHEAD),
            lambda s: (self.m[first + s], self.l[first + s]),
            lambda s, d: self.O[(first + s) * dim + d],
            self.bound.before_keys(h),
            (dim, lane),
        )
        if self.problem.mask is None and self.problem.window is None:
            self.store(b, h, i, lane, state)
            return
        with T.If(self.is_doubtful(state)):
            with T.Then():
                WarpRow(self.bound, b, h, i, lane).emit()
            with T.Else():
                self.store(b, h, i, lane, state)

    def is_doubtful(self, state: tuple[Expr, Expr, tirx.Buffer]) -> Expr:
        """Whether the row has no finite O, or saw nothing but keys that a finite number hides, which may have been
        left out."""
        m, _, O = state
        largest = registers(1, "int32")
        put(largest, 0, tirx.const(0, "int32"))
        with unrolled(O.shape[0]) as n:
            put(largest, 0, tirx.max(largest[0], T.bitwise_and(T.reinterpret("int32", O[n]), 0x7FFFFFFF)))
        doubtful = ptx.reduce_warp(largest[0], tirx.max) >= 0x7F800000
        formula = self.bound.formula
        if formula is None or formula.dtype == "bool":
            return doubtful
        return tirx.any(doubtful, m <= T.float32(HIDDEN / 2))

    def store(self, b: Expr, h: Expr, i: Expr, lane: Expr, state: tuple[Expr, Expr, tirx.Buffer]) -> None:
        """Y := O / l, or 0 where l = 0. A NaN in l is no 0 and stays."""
        m, l, O = state
        inverse = fixed(tirx.Select(tirx.EQ(l, T.float32(0)), T.float32(0), T.float32(1) / l))
        _each_element(self.problem.v_head_dim, lane, lambda n, d: self.bound.store_y(b, h, i, d, O[n] * inverse))
        with T.If(lane == 0), T.Then():
            self.bound.store_lse(b, h, i, m, l)


def _merged(
    parts: tuple[Expr, int],
    ends: Callable[[Expr], tuple[Expr, Expr]],
    element: Callable[[Expr, Expr], Expr],
    before: tuple[Expr, Expr],
    vector: tuple[int, Expr],
) -> tuple[Expr, Expr, tirx.Buffer]:
    """(m, l, O) of a row from so many parts, of which a warp reads several at once; O is spread over its lanes.

    ends gives m and l of a part and `element` one of its O, `before` is m and l before all parts, `vector` the length
    of O and the thread's lane.
    """
    (count, ahead), (dim, lane) = parts, vector
    m_0, l_0 = (fixed(x) for x in before)
    m, l, O = registers(1, "float32"), registers(1, "float32"), registers(-(-dim // WARP), "float32")
    blocks = fixed(tirx.truncdiv(count + (WARP - 1), WARP))
    put(m, 0, m_0)
    with T.serial(blocks) as n:
        s = fixed(n * WARP + lane)
        with T.If(s < count), T.Then():
            put(m, 0, tirx.max(m[0], ends(s)[0]))
    put(m, 0, ptx.reduce_warp(m[0], tirx.max))
    # Nothing seen: m = -inf, and m_s - m would be NaN.
    shift = fixed(tirx.Select(tirx.EQ(m[0], T.float32(float("-inf"))), T.float32(0), m[0]))

    def weight(m_s: Expr) -> Expr:
        return fixed(ptx.exp2((m_s - shift) * T.float32(LOG2_E)))

    put(l, 0, T.float32(0))
    with T.serial(blocks) as n:
        s = fixed(n * WARP + lane)
        with T.If(s < count), T.Then():
            m_s, l_s = ends(s)
            put(l, 0, l[0] + weight(m_s) * l_s)
    put(l, 0, l_0 * weight(m_0) + ptx.reduce_warp(l[0], lambda x, y: x + y))
    with unrolled(-(-dim // WARP)) as n:
        put(O, n, T.float32(0))
    with T.serial(tirx.truncdiv(count + (ahead - 1), ahead)) as block:
        w, o = registers(ahead, "float32"), registers(ahead * (-(-dim // WARP)), "float32")
        with unrolled(ahead) as k:
            s = fixed(block * ahead + k)
            put(w, k, T.float32(0))
            with T.If(s < count), T.Then():
                put(w, k, weight(ends(s)[0]))

            def load(n: Expr, d: Expr, s: Expr = s, k: Expr = k) -> None:
                there = tirx.if_then_else(w[k] > T.float32(0), element(s, d), T.float32(0))
                put(o, k * (-(-dim // WARP)) + n, there)

            _each_element(dim, lane, load)
        with unrolled(ahead) as k, unrolled(-(-dim // WARP)) as n:
            put(O, n, O[n] + w[k] * o[k * (-(-dim // WARP)) + n])
    return m[0], l[0], O


def _each_element(dim: int, lane: Expr, body: Callable[[Expr, Expr], None]) -> None:
    """body(n, d) for the n-th element of a lane, which is element d of the vector."""
    with unrolled(-(-dim // WARP)) as n:
        d = fixed(n * WARP + lane)
        if dim % WARP:
            with T.If(d < dim), T.Then():
                body(n, d)
        else:
            body(n, d)


class _Split:
    """The code of one block of the first launch: 16 packed rows of a key/value head with the keys of a split."""

    def __init__(
        self,
        bound: Bound,
        tiles: DecodeTiles,
        partial: _Partial,
        head: Expr,
        split: Expr,
        row_block: Expr,
        thread: Expr,
    ) -> None:
        self.bound, self.tiles, self.problem, self.partial = bound, tiles, bound.problem, partial
        self.head, self.split, self.thread = head, split, thread
        self.warp, self.lane = fixed(thread // WARP), fixed(thread % WARP)
        self.rows, self.r0 = fixed(partial.rows.astype("int32")), fixed(row_block * ROWS)
        self.b, self.hk = (f(head, self.problem.kv_heads) for f in (tirx.truncdiv, tirx.truncmod))
        self.b, self.hk = fixed(self.b), fixed(self.hk)
        self.chunks = {"q": padded(self.problem.head_dim) // CHUNK, "v": self.problem.v_head_dim // CHUNK}
        self.chunks["k"] = self.chunks["q"]
        size = tiles.shared_memory(self.problem) // 2
        self.memory = T.alloc_buffer((size,), self.problem.dtype, scope="shared.dyn", align=128)
        self.Q = SharedTile(self.memory, 0, self.chunks["q"])

    def emit(self) -> None:
        lo, hi, part = self.partial.keys(self.b)
        self.start = fixed(lo + self.split * part)
        self.stop = fixed(tirx.min(self.start + part, hi))
        with T.If(self.start < self.stop), T.Then():
            if self.bound.formula is None:
                self.attend()
                return
            # One look at the formula is worth it: masks of a whole cache hide most of it.
            rows, keys = (T.int64(0), T.int64(1) * self.bound.S - 1), (self.start, self.stop - 1)
            keys = tuple(fixed(key.astype("int64")) for key in keys)
            _, highest = self.bound.mask_extremes(self.b.astype("int64"), self.hk.astype("int64"), rows, keys)
            with T.If(highest <= T.float32(HIDDEN)):
                with T.Then():
                    self.keep_nothing()
                with T.Else():
                    self.attend()

    def attend(self) -> None:
        tiles = self.tiles
        whole = tiles.keys * tiles.warps
        self.first = fixed(self.start + self.warp * tiles.keys)
        self.steps = fixed(tirx.truncdiv(tirx.max(self.stop - self.first, 0) + whole - 1, whole))
        self.load_queries()
        ptx.commit_copies()
        for u in range(tiles.stages - 1):
            self.load(tirx.const(u, "int32"))
        warp = WarpTile(self.bound, self.b, self.lane, tiles.keys, self.row_of, self.stop)
        warp.initialise()
        full_lo, full_hi = self.full_range()
        ptx.wait_for_copies(tiles.stages - 1)
        ptx.synchronise()
        with T.serial(self.steps) as u:
            ptx.wait_for_copies(tiles.stages - 2)
            ptx.synchronise_warp()
            self.load(u + (tiles.stages - 1))
            kv0 = fixed(self.first + u * whole)
            some = tirx.any(kv0 < full_lo, kv0 + tiles.keys > full_hi)
            masked = some if self.problem.mask is None else tirx.const(True, "bool")
            warp.attend(self.Q, self.tile("k", u), self.tile("v", u), kv0, masked)
        ptx.wait_for_copies(0)
        ptx.synchronise()
        self.keep(warp)

    # Rows.

    def row_of(self, r: int) -> tuple[Expr, Expr]:
        """Query head and query row of the thread's row r; rows that do not exist repeat the last one."""
        row = fixed(tirx.min(self.r0 + (self.lane // 4 + 8 * r), self.rows - 1))
        _, h, i = self.partial.row_of(self.head, row)
        return h, i

    def load_queries(self) -> None:
        """Q: rows that do not exist are zeros."""
        chunks, threads = self.chunks["q"], self.tiles.threads
        with unrolled(-(-ROWS * chunks // threads)) as n:
            c = fixed(n * threads + self.thread)
            with T.If(c < ROWS * chunks), T.Then():
                row, chunk = fixed(tirx.truncdiv(c, chunks)), fixed(tirx.truncmod(c, chunks))
                _, h, i = self.partial.row_of(self.head, fixed(self.r0 + row))
                exists = tirx.all(self.r0 + row < self.rows, chunk < self.problem.head_dim // CHUNK)
                buffer, indices = self.bound.at("q", self.b, h, i.astype("int64"), chunk * CHUNK)
                ptx.copy_chunk(self.Q.at(row, chunk), buffer[tuple(indices)], exists)

    # Keys and values.

    def full_range(self) -> tuple[Expr, Expr]:
        """The keys that need no mask code; none where there is a mask."""
        i0, i1 = (fixed(tirx.truncdiv(r, self.problem.group)) for r in (self.r0, self.r0 + ROWS - 1))
        lo, hi = self.bound.full_range(self.b, i0.astype("int64"), i1.astype("int64") + 1)
        return fixed(lo.astype("int32")), fixed(tirx.min(hi.astype("int32"), self.stop))

    def tile(self, name: str, u: Expr) -> SharedTile:
        """Where the warp's tile number u of K or V lies: K before V in each stage of its ring."""
        tiles, k, v = self.tiles, self.chunks["k"], self.chunks["v"]
        stage = self.warp * tiles.stages + tirx.truncmod(u, tiles.stages)
        start = (
            ROWS * k * CHUNK + stage * (tiles.keys * (k + v) * CHUNK) + (tiles.keys * k * CHUNK if name == "v" else 0)
        )
        return SharedTile(self.memory, fixed(start), self.chunks[name])

    def load(self, u: Expr) -> None:
        """Asks for the warp's tile number u, if there is one."""
        with T.If(u < self.steps), T.Then():
            kv0 = fixed(self.first + u * (self.tiles.keys * self.tiles.warps))
            for name in ("k", "v"):
                self.load_rows(name, self.tile(name, u), kv0)
        ptx.commit_copies()

    def load_rows(self, name: str, tile: SharedTile, kv0: Expr) -> None:
        """K_j or V_j: a warp's lanes go along rows as far as these divide. Keys from `stop` on are zeros."""
        keys, chunks = self.tiles.keys, self.chunks[name]
        whole = (self.problem.head_dim if name == "k" else self.problem.v_head_dim) // CHUNK
        across = math.gcd(chunks, WARP)
        at_once = WARP // across
        row0, chunk0 = fixed(self.lane // across), fixed(self.lane % across)

        def load_row(step: Expr) -> None:
            row = row0 + step * at_once
            j = fixed((kv0 + row).astype("int64"))
            with unrolled(chunks // across) as n:
                exists = kv0 + row < self.stop
                if chunks > whole:
                    exists = tirx.all(exists, n * across + chunk0 < whole)
                buffer, indices = self.bound.at(name, self.b, self.hk, j, (n * across + chunk0) * CHUNK)
                ptx.copy_chunk(tile.at(row, n * across + chunk0), buffer[tuple(indices)], exists)

        with unrolled(-(-keys // at_once)) as step:
            if keys % at_once:
                with T.If(row0 + step * at_once < keys), T.Then():
                    load_row(step)
            else:
                load_row(step)

    # The result of the split.

    def keep(self, warp: WarpTile) -> None:
        """The warps' (m, l, O), through shared memory, as one."""
        W, dim = self.tiles.warps, self.problem.v_head_dim
        memory = T.decl_buffer((W * ROWS * (2 + dim),), "float32", data=self.memory.data, scope="shared.dyn")
        m_start, l_start, o_start = 0, W * ROWS, 2 * W * ROWS
        for r in range(2):
            place = fixed(self.warp * ROWS + self.lane // 4 + 8 * r)
            l = ptx.reduce_quad(warp.l[r], lambda x, y: x + y)
            with T.If(self.lane % 4 == 0), T.Then():
                put(memory, m_start + place, warp.m[r] * tirx.const(warp.unit, "float32"))
                put(memory, l_start + place, l)
            with unrolled(warp.o_columns) as column:
                for x in range(2):
                    d = column * 8 + self.lane % 4 * 2 + x
                    put(memory, o_start + place * dim + d, warp.O[column * 4 + r * 2 + x])
        ptx.synchronise()
        with T.serial(-(-ROWS // W)) as n:
            row = fixed(n * W + self.warp)
            r = fixed(self.r0 + row)
            with T.If(tirx.all(row < ROWS, r < self.rows)), T.Then():
                m, l, O = _merged(
                    (tirx.const(W, "int32"), W),
                    lambda w: (memory[m_start + w * ROWS + row], memory[l_start + w * ROWS + row]),
                    lambda w, d: memory[o_start + (w * ROWS + row) * dim + d],
                    (T.float32(float("-inf")), T.float32(0)),
                    (dim, self.lane),
                )
                place = self.keep_ends(r, m, l)
                _each_element(dim, self.lane, lambda n, d: put(self.partial.O, place * dim + d, O[n]))

    def keep_nothing(self) -> None:
        """No key of the split counts."""
        with T.If(self.thread < ROWS), T.Then():
            r = fixed(self.r0 + self.thread)
            with T.If(r < self.rows), T.Then():
                self.keep_ends(r, T.float32(float("-inf")), T.float32(0))

    def keep_ends(self, r: Expr, m: Expr, l: Expr) -> Expr:
        """m and l of row r; its place."""
        place = self.partial.place(self.head, r, self.split)
        put(self.partial.m, place, m)
        put(self.partial.l, place, l)
        return place
