"""Attention for many query rows: FlashAttention-2, forward (Dao, arXiv:2307.08691, Algorithm 1), by mma.sync.

    for each tile of B_r query rows of a head, a block:      Q_i [B_r, D]
        m = -inf, l = 0, O = 0                               [B_r], [B_r], [B_r, Dv]; with a sink, m = sink, l = 1
        for each tile of B_c keys that some row sees:        K_j [B_c, D], V_j [B_c, Dv]
            S   = Q_i K_j^T                                  [B_r, B_c]
            m'  = max(m, rowmax S)
            P   = exp(S - m')                                takes the place of S
            l   = exp(m - m') l + rowsum P
            O   = diag(exp(m - m')) O + P V_j,  m = m'
        Y_i = diag(1 / l) O                                  0 where l = 0: no key was visible

Each warp has 16 or 32 rows of its own, whose O, S, m and l are in registers: P leaves the products of Q K^T in the
layout in which those of P V take it. K_j and V_j come through shared memory by asynchronous copies. Tiles that some row
does not see in full go first, then the others without mask code.

Invisible scores are replaced by -inf, never added to, as they may be NaN, and keys that no row of the tile sees are
read as zeros. A value that only some rows see may be infinite or NaN too, and 0 * NaN = NaN: then the tile is computed
again, with such values taken out of V, and what they do to the rows that see them computed apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.formula import widened
from lowering.attention.problem import AttentionProblem

from . import ptx
from .device import Device
from .host import on_host
from .ptx import LOG2_E, WARP, fixed, put, registers, unrolled
from .shared_tile import CHUNK, SharedTile
from .tiles import MmaTiles, padded

RAW, CLEAN, PLUS, MINUS = range(4)
"""Passes over a tile: V as it is; where that gave no finite O, V without what is not finite; then 1 where V is +inf or
NaN, else 0; and 1 where it is -inf or NaN."""


def takes(problem: AttentionProblem) -> bool:
    """Whether `prefill_mma` serves the problem: half precision in rows of whole chunks, no qk output."""
    return (
        problem.dtype in ptx.SHORT
        and problem.v_dtype == problem.dtype
        and problem.acc_dtype == "float32"
        and problem.head_dim % CHUNK == problem.v_head_dim % CHUNK == 0
        and max(problem.head_dim, problem.v_head_dim) <= 256
        and problem.qk_mode is None
    )


def prefill_mma(bound: Bound, tiles: MmaTiles, device: Device) -> None:
    """Emits the kernel and its launch into the PrimFunc that `bound` has opened, for a problem that it `takes`."""
    p = bound.problem
    tiles.check(p, device)
    count = on_host(tirx.ceildiv(T.int64(1) * bound.S, tiles.q))
    pairs = on_host(T.int64(1) * bound.B * p.kv_heads)
    # Blocks that run together shall find their K and V in the second-level cache.
    kv_bytes = tirx.max(T.int64(2) * bound.T * (p.head_dim + p.v_head_dim), T.int64(1))
    section = on_host(tirx.max(tirx.min(T.int64(device.l2) // kv_bytes, pairs), T.int64(1)))
    blocks = pairs * p.group * count
    with (
        T.If(blocks > 0),
        T.Then(),
        T.launch_thread("blockIdx.x", blocks.astype("int32")) as block,
        T.launch_thread("threadIdx.x", tiles.threads) as thread,
    ):
        count, pairs, section = (fixed(size.astype("int32")) for size in (count, pairs, section))
        first = fixed(tirx.truncdiv(block, section * p.group * count) * section)
        turn = fixed(block - first * p.group * count)
        heads = fixed(tirx.min(section, pairs - first) * p.group)
        tile, head = fixed(count - 1 - tirx.truncdiv(turn, heads)), fixed(tirx.truncmod(turn, heads))
        pair = fixed(first + tirx.truncdiv(head, p.group))
        b, hk = fixed(tirx.truncdiv(pair, p.kv_heads)), fixed(tirx.truncmod(pair, p.kv_heads))
        h = fixed(hk * p.group + tirx.truncmod(head, p.group))
        # Late rows see more, so they go first.
        _QueryTile(bound, tiles, (b, h, hk, fixed(tile * tiles.q)), fixed(thread)).emit()


Reader = Callable[[Expr | int, Expr | int], ptx.Element]


class _QueryTile:
    """The code of one block: rows [i0, i0 + B_r) of query head h in batch b. M blocks of 16 rows are a warp's own."""

    def __init__(self, bound: Bound, tiles: MmaTiles, place: tuple[Expr, Expr, Expr, Expr], thread: Expr) -> None:
        self.bound, self.tiles, self.problem = bound, tiles, bound.problem
        self.b, self.h, self.hk, self.i0 = place
        self.thread, self.lane = thread, fixed(thread % WARP)
        p, self.M = self.problem, tiles.row_blocks
        self.row0 = fixed(thread // WARP * (16 * self.M))  # the warp's first row in the tile
        d, dv = padded(p.head_dim) // CHUNK, p.v_head_dim // CHUNK
        self.d_steps, self.s_columns, self.o_columns = d // 2, tiles.kv // 8, dv
        self.memory = T.alloc_buffer((tiles.shared_memory(p) // 2,), p.dtype, scope="shared.dyn", align=128)
        self.k_start = tiles.q * max(d, dv) * CHUNK
        self.v_start = self.k_start + tiles.stages * tiles.kv * d * CHUNK
        self.Q, self.Y = SharedTile(self.memory, 0, d), SharedTile(self.memory, 0, dv)
        self.S, self.O = (registers(self.M * n * 4, "float32") for n in (self.s_columns, self.o_columns))
        self.m, self.l = (registers(self.M * 2, "float32") for _ in range(2))
        self.q = registers(self.M * 4 * (self.d_steps if tiles.q_in_registers else 1), "uint32")
        self.p, self.kv = registers(self.M * 4, "uint32"), registers(4, "uint32")
        self.is_biased = p.mask is not None and p.mask.dtype != "bool"
        self.is_raw = (
            p.softcap == 0 and p.scale > 0 and not self.is_biased
        )  # S is Q K^T, and its maximum scales with it
        self.unit = p.scale if self.is_raw else 1.0  # what a unit of S and m is worth
        self.find_tiles()

    def find_tiles(self) -> None:
        """The keys [lo, hi) in `count` tiles, of which `full` need no mask code, and `behind` come after those."""
        size = self.tiles.kv
        lo, hi = self.bound.visible_range(self.b, self.i0, self.i0 + self.tiles.q)
        full_lo, full_hi = self.bound.full_range(self.b, self.i0, self.i0 + self.tiles.q)
        self.lo, self.hi = fixed(lo.astype("int32")), fixed(hi.astype("int32"))
        self.count = fixed((self.hi - self.lo + size - 1) // size)
        before = fixed((full_lo.astype("int32") - self.lo + size - 1) // size)
        self.full = fixed(tirx.max((full_hi.astype("int32") - self.lo) // size - before, 0))
        self.behind = fixed(self.count - self.full - before)

    def emit(self) -> None:
        if self.problem.mask is None and self.problem.window is None:
            self.attend(None)
            ptx.synchronise()
            self.store_y(None)
            return
        poisoned = registers(1, "bool")
        put(poisoned, 0, tirx.const(True, "bool"))
        with T.serial(4) as turn, T.If(poisoned[0]), T.Then():
            turn = fixed(turn)
            self.attend(turn)
            with T.If(turn == RAW), T.Then():
                put(poisoned, 0, ptx.any_thread(self.is_not_finite()))
            with T.If(tirx.any(turn != RAW, tirx.Not(poisoned[0]))), T.Then():
                ptx.synchronise()
                self.store_y(turn)
            ptx.synchronise()

    def is_not_finite(self) -> Expr:
        """Whether this thread's part of O holds a NaN or an infinity: perhaps an invisible one, times P = 0."""
        largest = registers(1, "int32")
        put(largest, 0, tirx.const(0, "int32"))
        with unrolled(self.M * self.o_columns * 4) as n:
            put(largest, 0, tirx.max(largest[0], T.bitwise_and(T.reinterpret("int32", self.O[n]), 0x7FFFFFFF)))
        return largest[0] >= 0x7F800000

    def attend(self, turn: Expr | None) -> None:
        """O, m and l of the tile, in a pass of that kind."""
        stages = self.tiles.stages
        self.initialise()
        self.load_rows("q", self.Q, self.h, self.i0, self.tiles.q, tirx.Cast("int32", T.int64(1) * self.bound.S))
        for u in range(stages):
            self.load_keys(tirx.const(u, "int32"))
            if u < stages - 1:
                self.load_values(tirx.const(u, "int32"))
        if self.tiles.q_in_registers:
            self.wait()
            q = self.q_reader()
            with unrolled(self.d_steps) as step:
                self.load_q(q, step)
        masked = self.count - self.full
        if turn is not None:
            masked = tirx.Select(turn == RAW, masked, self.count)
        masked = fixed(masked)
        with T.serial(masked) as u:
            self.step(u, turn, masked=True)
        if self.problem.mask is None:
            with T.serial(masked, self.count) as u:
                self.step(u, None, masked=False)
        ptx.wait_for_copies(0)  # of Q, which nobody waits for where no key is visible; Y takes its place

    def step(self, u: Expr, turn: Expr | None, *, masked: bool) -> None:
        """One tile of keys. What is free for the tiles to come is asked for first."""
        stages = self.tiles.stages
        self.wait()
        self.load_values(u + (stages - 1), checked=masked)
        self.scores(u)
        self.wait()
        self.load_keys(u + stages, checked=masked)
        if masked:
            self.logits_under_mask(fixed(self.start(u, checked=True)))
        elif not self.is_raw:
            self.logits()
        self.softmax()
        if turn is not None:
            with T.If(turn != RAW), T.Then():
                self.replace_values(u, turn)
        self.accumulate(u)

    # Tiles of K and V in shared memory: K_0 (with Q), V_0, K_1, V_1, ... are groups of copies, empty behind the last.

    def start(self, u: Expr, checked: bool) -> Expr:
        """The first key of tile number u in the order of work: those behind the full ones, those before, full ones."""
        t = u - self.behind
        if checked:
            t = tirx.Select(t < 0, t + self.count, t)
        return self.lo + t * self.tiles.kv

    def key_tile(self, u: Expr) -> SharedTile:
        size = self.tiles.kv * self.Q.chunks
        return SharedTile(self.memory, self.k_start + u % self.tiles.stages * (size * CHUNK), self.Q.chunks)

    def value_tile(self, u: Expr) -> SharedTile:
        size = self.tiles.kv * self.Y.chunks
        return SharedTile(self.memory, self.v_start + u % self.tiles.stages * (size * CHUNK), self.Y.chunks)

    def load_keys(self, u: Expr, checked: bool = True) -> None:
        self.load_tile("k", self.key_tile(u), u, checked)

    def load_values(self, u: Expr, checked: bool = True) -> None:
        self.load_tile("v", self.value_tile(u), u, checked)

    def load_tile(self, name: str, tile: SharedTile, u: Expr, checked: bool) -> None:
        with T.If(u < self.count), T.Then():
            self.load_rows(name, tile, self.hk, self.start(u, checked), self.tiles.kv, self.hi if checked else None)
        ptx.commit_copies()

    def load_rows(self, name: str, tile: SharedTile, h: Expr, first: Expr, rows: int, end: Expr | None) -> None:
        """Copies rows from `first` on to a tile; rows from `end` on are zeros."""
        chunks = (self.problem.v_head_dim if name == "v" else self.problem.head_dim) // CHUNK
        across = math.gcd(chunks, self.tiles.threads)  # threads along a row
        at_once = self.tiles.threads // across
        row0, chunk0 = fixed(self.thread // across), fixed(self.thread % across)
        index0 = fixed((first + row0).astype("int64"))

        def load_row(step: Expr) -> None:
            row = row0 + step * at_once
            with unrolled(chunks // across) as n:
                element = (n * across + chunk0) * CHUNK
                buffer, indices = self.bound.at(name, self.b, h, index0 + T.int64(at_once) * step, element)
                exists = None if end is None else first + row < end
                ptx.copy_chunk(tile.at(row, n * across + chunk0), buffer[tuple(indices)], exists)

        with unrolled(-(-rows // at_once)) as step:
            if rows % at_once:
                with T.If(row0 + step * at_once < rows), T.Then():
                    load_row(step)
            else:
                load_row(step)

    def wait(self) -> None:
        """The tile that comes next is there, and no warp reads any longer the one that came before."""
        ptx.wait_for_copies(2 * self.tiles.stages - 2)
        ptx.synchronise()

    def replace_values(self, u: Expr, turn: Expr) -> None:
        """V_j := what a pass other than RAW makes of it."""
        one, infinity = {"float16": (0x3C00, 0x7C00), "bfloat16": (0x3F80, 0x7F80)}[self.problem.dtype]
        start, size = self.value_tile(u).start, self.tiles.kv * self.problem.v_head_dim
        with T.serial(size // WARP // self.tiles.warps) as n:
            at = fixed(start + n * self.tiles.threads + self.thread)
            bits = fixed(T.reinterpret("uint16", self.memory[at]).astype("int32"))
            magnitude = T.bitwise_and(bits, 0x7FFF)
            clean = tirx.Select(magnitude >= infinity, 0, bits)
            sign = tirx.Select(turn == PLUS, 0, 0x8000)
            marked = tirx.any(magnitude > infinity, bits == infinity + sign)
            new = tirx.Select(turn == CLEAN, clean, tirx.Select(marked, one, 0))
            T.buffer_store(self.memory, T.reinterpret(self.problem.dtype, new.astype("uint16")), [at])
        ptx.synchronise()

    # The parts of a step.

    def initialise(self) -> None:
        """m, l and O before the first key. The thread's part of l is a sum over its own columns: one of four begins."""
        m, l = self.bound.before_keys(self.h)
        m, l = m * tirx.const(1 / self.unit, "float32"), tirx.Select(self.lane % 4 == 0, l, T.float32(0))
        with unrolled(self.M * 2) as r:
            put(self.m, r, m)
            put(self.l, r, l)
        with unrolled(self.M * self.o_columns * 4) as n:
            put(self.O, n, T.float32(0))
        if self.problem.head_dim % 16:
            self.pad()

    def pad(self) -> None:
        """Zeros behind the rows of Q and K, whose dot products come in steps of 16."""
        rows = self.tiles.q + self.tiles.stages * self.tiles.kv
        with T.serial(-(-rows // self.tiles.threads)) as n:
            row = fixed(n * self.tiles.threads + self.thread)
            with T.If(row < rows), T.Then(), T.serial(CHUNK) as d:
                k_row = row - self.tiles.q
                tile = SharedTile(self.memory, self.k_start, self.Q.chunks)
                q = self.Q.at(row, self.Q.chunks - 1)
                k = tile.at(k_row, self.Q.chunks - 1)
                at = tirx.Select(row < self.tiles.q, q.indices[0], k.indices[0])
                T.buffer_store(self.memory, tirx.const(0, self.problem.dtype), [at + d])

    def q_reader(self) -> Reader:
        return self.Q.reader(self.row0 + self.lane % 16, self.lane // 16)

    def load_q(self, q: Reader, step: Expr) -> None:
        """The fragments of Q_i for one step of 16 along D."""
        with unrolled(self.M) as m:
            ptx.load_matrices([self.q[self.q_at(m, step) + x] for x in range(4)], q(m * 16, step * 2))

    def q_at(self, m: Expr, step: Expr) -> Expr:
        return (m * self.d_steps + step) * 4 if self.tiles.q_in_registers else m * 4

    def scores(self, u: Expr) -> None:
        """S = Q_i K_j^T"""
        k = self.key_tile(u).reader(self.lane // 16 * 8 + self.lane % 8, self.lane // 8 % 2)
        q = None if self.tiles.q_in_registers else self.q_reader()
        with unrolled(self.M * self.s_columns * 4) as n:
            put(self.S, n, T.float32(0))
        with unrolled(self.d_steps) as step:
            if q is not None:
                self.load_q(q, step)
            with unrolled(self.s_columns // 2) as pair:
                ptx.load_matrices([self.kv[x] for x in range(4)], k(pair * 16, step * 2))
                with unrolled(self.M) as m:
                    for x in range(2):
                        at = (m * self.s_columns + pair * 2 + x) * 4
                        s, q = ([self.S[at + y] for y in range(4)], [self.q[self.q_at(m, step) + y] for y in range(4)])
                        ptx.multiply_add(self.problem.dtype, s, q, [self.kv[2 * x], self.kv[2 * x + 1]])

    def logits(self) -> None:
        """S := the logits of a tile that every row sees in full."""
        with unrolled(self.M * self.s_columns * 4) as n:
            put(self.S, n, self.capped(self.S[n]))

    def capped(self, s: Expr) -> Expr:
        return s if self.is_raw else self.bound.capped(s * tirx.const(self.problem.scale, "float32"), ptx.tanh)

    def row(self, r: Expr) -> Expr:
        """The number in Q of the thread's row r."""
        return self.i0 + self.row0 + r // 2 * 16 + r % 2 * 8 + self.lane // 4

    def logits_under_mask(self, kv0: Expr) -> None:
        """S := the logits of a tile of keys from kv0 on, -inf where a row does not see a key."""
        thread0 = fixed(kv0 + self.lane % 4 * 2)  # the thread's first key
        with unrolled(self.M * 2) as r:
            i = fixed(self.row(r))
            lo, hi = self.bound.keys_of(self.b, i)
            below = fixed(hi.astype("int32") - thread0)
            above = None if isinstance(lo, tirx.IntImm) else fixed(lo.astype("int32") - thread0)
            inside = fixed(tirx.min(i, tirx.Cast("int32", T.int64(1) * self.bound.S) - 1))
            with unrolled(self.s_columns) as column:
                for x in range(2):
                    j = column * 8 + x
                    at = (r // 2 * self.s_columns + column) * 4 + r % 2 * 2 + x
                    s, visible = self.capped(self.S[at]), [j < below]
                    if above is not None:
                        visible.append(j >= above)
                    if self.problem.mask is not None:
                        s, shown = self.biased(s, inside, fixed(tirx.min(thread0 + j, self.hi - 1)))
                        visible.append(shown)
                    put(self.S, at, tirx.Select(tirx.all(*visible), s, T.float32(float("-inf"))))

    def biased(self, s: Expr, i: Expr, j: Expr) -> tuple[Expr, Expr]:
        """s plus the mask's element, if it is added, and whether it shows the key."""
        if not self.is_biased:
            return s, fixed(self.bound.unmasked(self.b, self.h, i, j, inside=True))
        bias = fixed(self.bound.additive(self.b, self.h, i, j, inside=True))
        return s + bias, bias != T.float32(float("-inf"))

    def softmax(self) -> None:
        """m' = max(m, rowmax S), P = exp(S - m'), alpha = exp(m - m'), l = alpha l + rowsum P, m = m', O = alpha O."""
        factor = tirx.const(self.unit * LOG2_E, "float32")
        nothing = T.float32(float("-inf"))
        with unrolled(self.M * 2) as r:
            m = registers(1, "float32")
            put(m, 0, self.m[r])
            self.each_score(r, lambda at: put(m, 0, tirx.max(m[0], self.S[at])))
            put(m, 0, ptx.reduce_quad(m[0], tirx.max))
            # Nothing seen so far: m' = -inf, and S - m' would be NaN.
            shift = fixed(tirx.Select(tirx.EQ(m[0], nothing), T.float32(0), m[0]))
            if self.is_biased:  # the lowest number is a legal logit, and log2(e) times it is none

                def exponential(x: Expr, shift: Expr = shift) -> Expr:
                    return ptx.exp2((x - shift) * factor)
            else:
                scaled = fixed(shift * factor)

                def exponential(x: Expr, scaled: Expr = scaled) -> Expr:
                    return ptx.exp2(x * factor - scaled)

            alpha = fixed(exponential(self.m[r]))
            put(self.m, r, m[0])
            put(self.l, r, self.l[r] * alpha)

            def weigh(at: Expr, r: Expr = r) -> None:
                put(self.S, at, exponential(self.S[at]))
                put(self.l, r, self.l[r] + self.S[at])

            self.each_score(r, weigh)
            with unrolled(self.o_columns) as column:
                for x in range(2):
                    at = (r // 2 * self.o_columns + column) * 4 + r % 2 * 2 + x
                    put(self.O, at, self.O[at] * alpha)

    def each_score(self, r: Expr, body: Callable[[Expr], None]) -> None:
        """body(index in S) for the elements of the thread's row r."""
        with unrolled(self.s_columns) as column:
            for x in range(2):
                body((r // 2 * self.s_columns + column) * 4 + r % 2 * 2 + x)

    def accumulate(self, u: Expr) -> None:
        """O += P V_j"""
        v = self.value_tile(u).reader(self.lane % 16, self.lane // 16)
        with unrolled(self.tiles.kv // 16) as step:
            with unrolled(self.M) as m, unrolled(4) as x:
                at = (m * self.s_columns + step * 2) * 4 + x * 2
                ptx.pack(self.problem.dtype, self.p[m * 4 + x], self.S[at], self.S[at + 1])
            with unrolled(self.o_columns // 2) as pair:
                ptx.load_matrices([self.kv[x] for x in range(4)], v(step * 16, pair * 2), transposed=True)
                self.add_products(pair * 2, 2)
            if self.o_columns % 2:
                last = v(step * 16, self.o_columns - 1)
                ptx.load_matrices([self.kv[x] for x in range(2)], last, transposed=True)
                self.add_products(self.o_columns - 1, 1)

    def add_products(self, column: Expr | int, count: int) -> None:
        """The products of the fragments of P with those of V at so many columns of 8 of O."""
        with unrolled(self.M) as m:
            for x in range(count):
                at = (m * self.o_columns + column + x) * 4
                o, p = [self.O[at + y] for y in range(4)], [self.p[m * 4 + y] for y in range(4)]
                ptx.multiply_add(self.problem.dtype, o, p, [self.kv[2 * x], self.kv[2 * x + 1]])

    # The result.

    def store_y(self, turn: Expr | None) -> None:
        """Y_i := O / l, or 0 where l = 0. A NaN in l is no 0 and stays. In PLUS and MINUS, infinities are added to Y_i.

        It goes through shared memory, where each warp has its rows to itself, to be written in chunks.
        """
        if turn is not None:
            with T.If(turn >= PLUS), T.Then():
                infinity = fixed(tirx.Select(turn == PLUS, *(T.float32(float(x)) for x in ("inf", "-inf"))))
                with unrolled(self.M * self.o_columns * 4) as n:
                    put(self.O, n, tirx.Select(self.O[n] > T.float32(0), infinity, T.float32(0)))
        with unrolled(self.M * 2) as r:
            l = ptx.reduce_quad(self.l[r], lambda x, y: x + y)
            inverse = fixed(tirx.Select(tirx.EQ(l, T.float32(0)), T.float32(0), T.float32(1) / l))
            if self.problem.lse:
                i = fixed(self.row(r))
                exists = i < tirx.Cast("int32", T.int64(1) * self.bound.S)
                with T.If(tirx.all(self.lane % 4 == 0, exists)), T.Then():
                    m = self.m[r] * tirx.const(self.unit, "float32")
                    self.bound.store_lse(self.b, self.h, i.astype("int64"), m, l)
            with unrolled(self.o_columns) as column:
                at = (r // 2 * self.o_columns + column) * 4 + r % 2 * 2
                ptx.pack(self.problem.dtype, self.p[0], *(self.O[at + x] * inverse for x in range(2)))
                place = self.Y.at(fixed(self.row(r) - self.i0), column)
                ptx.store_shared(self.memory[place.indices[0] + self.lane % 4 * 2], self.p[0])
        ptx.synchronise_warp()
        chunks = 16 * self.M * self.o_columns
        with T.serial(-(-chunks // WARP), unroll=4) as n:
            chunk = fixed(n * WARP + self.lane)
            row, column = fixed(self.row0 + chunk // self.o_columns), fixed(chunk % self.o_columns)
            i = fixed(self.i0 + row)
            exists = i < tirx.Cast("int32", T.int64(1) * self.bound.S)
            if chunks % WARP:
                exists = tirx.all(chunk < chunks, exists)
            with T.If(exists), T.Then():
                place = self.Y.at(row, column)
                buffer, indices = self.bound.at("y", self.b, self.h, i.astype("int64"), column * CHUNK)
                if turn is None:
                    ptx.copy_from_shared(buffer[tuple(indices)], place)
                    return
                with T.If(turn < PLUS):
                    with T.Then():
                        ptx.copy_from_shared(buffer[tuple(indices)], place)
                    with T.Else(), T.serial(CHUNK) as d:
                        indices[-1] = indices[-1] + d
                        y = [widened(x, "float32") for x in (buffer[tuple(indices)], self.memory[place.indices[0] + d])]
                        self.bound.store_y(self.b, self.h, i.astype("int64"), column * CHUNK + d, y[0] + y[1])
