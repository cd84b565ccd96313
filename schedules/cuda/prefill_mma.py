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

Each warp has 16 or 32 rows of its own, whose O, S, m and l are in registers: P leaves the matmuls of Q K^T in the
layout in which those of P V take it. K_j and V_j come through shared memory by asynchronous copies. Tiles that some row
does not see in full go first, then the others without mask code.

Invisible scores are replaced by -inf, never added to, as they may be NaN, and keys that no row of the tile sees are
read as zeros. Where there are fewer tiles than SMs, keys are split as in decode.py.

A value that only some rows see may be infinite or NaN too, and 0 * NaN = NaN: then the tile is computed
again, with such values taken out of V, and what they do to the rows that see them computed apart.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.expr.emit import widened
from lowering.attention.problem import AttentionProblem

from ..rejections import fits
from . import kv_codes, ptx
from .attention_tiles import MmaTiles, padded
from .device import Device
from .fragments import OnlineSoftmax
from .host import on_host, sm_count
from .kv_tiles import CodedTiles, HalfTiles, KeyValueTiles, Work
from .mask_prepass import MaskPrepass
from .partial import Partial
from .ptx import WARP, int32, let, put, registers, shared_memory, unrolled
from .row_copies import Rows
from .shared_tile import CHUNK, SharedTile

MOST_BLOCKS = 65535
"""Of a grid, along z."""

RAW, CLEAN, PLUS, MINUS = range(4)
"""Passes over a tile: V as it is; where that gave no finite O, V without what is not finite; then 1 where V is +inf or
NaN, else 0; and 1 where it is -inf or NaN."""


def takes(problem: AttentionProblem) -> bool:
    """Whether `prefill_mma` serves the problem: half precision in rows of whole chunks, or codes that `kv_codes` takes;
    no qk output."""
    needs = {
        "Q, K and V are of one type of half precision": (
            problem.dtype in ptx.SHORT and problem.v_dtype == problem.dtype and problem.acc_dtype == "float32"
        ),
        f"sizes of heads are multiples of {CHUNK}": problem.head_dim % CHUNK == problem.v_head_dim % CHUNK == 0,
        "heads have at most 256 elements": max(problem.head_dim, problem.v_head_dim) <= 256,
        "the scores themselves are no output": problem.qk_mode is None,
        "codes are of a kind that tensor cores are fed with": not problem.coded or kv_codes.takes(problem),
    }
    return fits("mma", needs)


def prefill_mma(bound: Bound, tiles: MmaTiles, gpu: Device, more_than: int = 0) -> None:
    """Emits the kernel and its launch into the PrimFunc that `bound` has opened, for a problem that it `takes`.

    Where batches have packed rows of their own, those with more rows than so many are served.
    """
    batch = on_host(T.int64(1) * bound.B)
    tile_count = on_host(tirx.ceildiv(T.int64(1) * bound.S, tiles.q))
    with T.If(batch * tile_count > 0), T.Then():
        prepass = MaskPrepass(bound, tiles.q, tiles.kv, tiles.warps)
        by_blocks = tirx.truncdiv(sm_count(), batch * tile_count * bound.problem.q_heads)
        by_keys = tirx.ceildiv(T.int64(1) * bound.T, T.int64(tiles.split))
        splits = on_host(tirx.max(tirx.min(by_blocks, by_keys), T.int64(1)))
        partial = Partial(bound, splits, group=1, careful=bound.rows_differ, least=more_than + 1)
        codes = kv_codes.KvCodes(bound, gpu) if bound.problem.coded else None
        _launch(bound, tiles, codes, prepass, partial, (batch, tile_count))
        partial.merge(lambda b: int32(splits))


def _launch(
    bound: Bound,
    tiles: MmaTiles,
    codes: kv_codes.KvCodes | None,
    prepass: MaskPrepass,
    partial: Partial,
    sizes: tuple[Expr, Expr],
) -> None:
    p, splits, (batch, tile_count) = bound.problem, partial.splits, sizes
    with (
        T.serial(tirx.ceildiv(batch, MOST_BLOCKS)) as part,
        T.launch_thread("blockIdx.x", tile_count.astype("int32")) as x,
        T.launch_thread("blockIdx.y", (splits * p.q_heads).astype("int32")) as y,
        T.launch_thread("blockIdx.z", tirx.min(batch - part * MOST_BLOCKS, MOST_BLOCKS).astype("int32")) as z,
        T.launch_thread("threadIdx.x", tiles.threads) as thread,
        nullcontext() if codes is None else ptx.all_registers(),
    ):
        b = let(part.astype("int32") * MOST_BLOCKS + z)
        h, split = (f(y, p.q_heads) for f in (tirx.truncmod, tirx.truncdiv))
        i0 = let((int32(tile_count) - 1 - x) * tiles.q)  # late rows may see more, so they go first
        with partial.if_served(b), bound.if_there(b, i0):
            place = b, h, let(tirx.truncdiv(h, p.group)), i0
            _QueryTile(bound, tiles, codes, prepass, partial, place, split, thread).emit()


Reader = Callable[[Expr | int, Expr | int], ptx.Element]


class _QueryTile:
    """The code of one block: rows [i0, i0 + B_r) of query head h in batch b. M blocks of 16 rows are a warp's own."""

    def __init__(
        self,
        bound: Bound,
        tiles: MmaTiles,
        codes: kv_codes.KvCodes | None,
        prepass: MaskPrepass,
        partial: Partial,
        place: tuple[Expr, Expr, Expr, Expr],
        split: Expr,
        thread: Expr,
    ) -> None:
        self.bound, self.tiles, self.problem, self.partial, self.codes = bound, tiles, bound.problem, partial, codes
        (self.b, self.h, self.hk, self.i0), self.split = place, split
        self.thread, self.lane = thread, let(thread % WARP)
        p, self.M = self.problem, tiles.row_blocks
        self.row0 = let(thread // WARP * (16 * self.M))  # the warp's first row in the tile
        d, dv = padded(p.head_dim) // CHUNK, p.v_head_dim // CHUNK
        self.d_steps, self.s_columns, self.o_columns = d // 2, tiles.kv // 8, dv
        self.memory = shared_memory(tiles.shared_memory(p) // 2, p.dtype, 128)
        self.Q, self.Y = SharedTile(self.memory, 0, d), SharedTile(self.memory, 0, dv)
        self.S, self.O = ([registers(n * 4, "float32") for _ in range(self.M)] for n in (self.s_columns, dv))
        self.q = registers(self.M * 4 * (self.d_steps if tiles.q_in_registers else 1), "uint32")
        self.P, self.operand = [registers(4, "uint32") for _ in range(self.M)], registers(4, "uint32")
        self.rows = tirx.Cast("int32", T.int64(1) * bound.rows(self.b))
        self.keys = prepass.key_tiles(self.b, self.h, self.i0)
        self.find_tiles()
        work = Work(self.b, self.hk, thread, self.keys_of, self.stop)
        self.kv: KeyValueTiles
        if codes is None:
            self.kv = HalfTiles(bound, tiles, self.memory, work)
        else:
            self.kv = CodedTiles(bound, tiles, self.memory, work, codes)
        self.softmax = [self.online_softmax(m) for m in range(self.M)]

    def find_tiles(self) -> None:
        """Of the tiles of keys, those that need mask code come first; `start` to `stop` are worked on here."""
        self.masked, self.tile = self.keys.masked_first()
        splits = int32(self.partial.splits)
        each = let(tirx.truncdiv(self.keys.count + splits - 1, splits))
        self.start = let(tirx.min(self.split * each, self.keys.count))
        self.stop = let(tirx.min(self.start + each, self.keys.count))

    def keys_of(self, u: Expr) -> tuple[Expr, Expr]:
        """The first key of the tile that is worked on as number u, and the one behind its range."""
        t = self.tile(u)
        return self.keys.first(t), self.keys.stop(t)

    def online_softmax(self, m: int) -> OnlineSoftmax:
        """Of the warp's rows number 16 m to 16 m + 15."""
        i = self.i0 + self.row0 + m * 16 + self.lane // 4
        rows, split = ((self.h, i), (self.h, i + 8)), tirx.Not(self.alone)
        return OnlineSoftmax(self.bound, self.b, rows, self.lane, self.tiles.kv, split)

    @property
    def alone(self) -> Expr:
        """Whether the tile has all of its keys here. Not kept in a register."""
        return tirx.EQ(self.partial.splits, T.int64(1))

    def emit(self) -> None:
        if self.bound.rows_differ:
            self.attend_carefully()
        else:
            self.attend(None)
            with T.If(self.alone), T.Then():
                self.store_y(None)
        with T.If(tirx.Not(self.alone)), T.Then():
            self.keep()

    def attend_carefully(self) -> None:
        """As `attend` and `store_y`, once more where that gave no finite O. With parts of the keys, whoever puts them
        together sees to that."""
        turn = registers(1, "int32")
        put(turn, 0, tirx.const(RAW, "int32"))
        with T.While(turn[0] <= MINUS):
            now = let(turn[0])
            self.attend(now)
            put(turn, 0, now + 1)
            with T.If(now == RAW), T.Then():
                again = tirx.all(ptx.any_thread(self.is_not_finite()), self.alone)
                put(turn, 0, tirx.Select(again, tirx.const(CLEAN, "int32"), tirx.const(MINUS + 1, "int32")))
            with T.If(tirx.all(turn[0] != CLEAN, self.alone)), T.Then():
                self.store_y(now)
                ptx.synchronize()

    def is_not_finite(self) -> Expr:
        """Whether this thread's part of O holds a NaN or an infinity: perhaps an invisible one, times P = 0."""
        largest = registers(1, "int32")
        put(largest, 0, tirx.const(0, "int32"))
        for O in self.O:
            with unrolled(self.o_columns * 4) as n:
                put(largest, 0, tirx.max(largest[0], T.bitwise_and(T.reinterpret("int32", O[n]), 0x7FFFFFFF)))
        return largest[0] >= 0x7F800000

    def attend(self, turn: Expr | None) -> None:
        """O, m and l of the tile, in a pass of that kind."""
        self.initialize()
        q = Rows(self.bound, "q", self.b, self.h, self.thread, self.tiles.threads)
        q.copy(self.Q, self.i0, self.tiles.q, self.rows)
        self.kv.begin(self.start)
        if self.codes is not None and self.codes.in_query:
            self.scale_query(q, self.codes)
        if self.tiles.q_in_registers:
            self.kv.wait()
            read = self.q_reader()
            with unrolled(self.d_steps) as step:
                self.load_q(read, step)
        masked = self.masked
        if turn is not None:
            masked = let(tirx.Select(turn == RAW, masked, self.keys.count))
        with T.serial(self.start, self.stop) as u:
            self.step(u, turn, masked)

    def scale_query(self, q: Rows, codes: kv_codes.KvCodes) -> None:
        """Q_i := Q_i times the scales of K; a thread what it has copied."""
        ptx.wait_for_copies(self.kv.pending)
        q.each(self.tiles.q, lambda row, chunk: codes.scale_query(self.Q.at(row, chunk), self.hk, chunk))

    def step(self, u: Expr, turn: Expr | None, masked: Expr) -> None:
        """One tile of keys."""
        self.kv.await_keys(u)
        self.scores(self.kv.tile("k", u))
        self.kv.await_values(u)
        for m, softmax in enumerate(self.softmax):
            t = self.tile(u)
            first, number = let(self.keys.first(t)), self.keys.number(t)
            words = softmax.ask(first, number) if self.bound.scores.has_tensor else None
            softmax.step(self.S[m], first, u >= masked, number, words)
            softmax.rescale(self.O[m], softmax.alpha, self.problem.v_head_dim)
        values = self.kv.tile("v", u)
        if turn is not None:
            with T.If(turn != RAW), T.Then():
                self.replace_values(values, turn)
        self.accumulate(values)

    def replace_values(self, values: SharedTile, turn: Expr) -> None:
        """V_j := what a pass other than RAW makes of it."""
        one, infinity = {"float16": (0x3C00, 0x7C00), "bfloat16": (0x3F80, 0x7F80)}[self.problem.dtype]
        with T.serial(self.kv.sizes["v"] // self.tiles.threads) as n:
            at = let(values.start + n * self.tiles.threads + self.thread)
            bits = let(T.reinterpret("uint16", self.memory[at]).astype("int32"))
            magnitude = T.bitwise_and(bits, 0x7FFF)
            clean = tirx.Select(magnitude >= infinity, 0, bits)
            sign = tirx.Select(turn == PLUS, 0, 0x8000)
            marked = tirx.any(magnitude > infinity, bits == infinity + sign)
            new = tirx.Select(turn == CLEAN, clean, tirx.Select(marked, one, 0))
            T.buffer_store(self.memory, T.reinterpret(self.problem.dtype, new.astype("uint16")), [at])
        ptx.synchronize()

    # The parts of a step.

    def initialize(self) -> None:
        """m, l and O before the first key."""
        for O, softmax in zip(self.O, self.softmax):
            softmax.start()
            with unrolled(self.o_columns * 4) as n:
                put(O, n, T.float32(0))
        if self.problem.head_dim % 16:
            self.pad()

    def pad(self) -> None:
        """Zeros behind the rows of Q and K, whose dot products come in steps of 16."""
        rows = self.tiles.q + self.tiles.stages * self.tiles.kv
        with T.serial(-(-rows // self.tiles.threads)) as n:
            row = let(n * self.tiles.threads + self.thread)
            with T.If(row < rows), T.Then(), T.serial(CHUNK) as d:
                k_row = row - self.tiles.q
                tile = SharedTile(self.memory, self.kv.starts["k"], self.Q.chunks)
                q = self.Q.at(row, self.Q.chunks - 1)
                k = tile.at(k_row, self.Q.chunks - 1)
                at = tirx.Select(row < self.tiles.q, q.indices[0], k.indices[0])
                T.buffer_store(self.memory, tirx.const(0, self.problem.dtype), [at + d])

    def q_reader(self) -> Reader:
        return self.Q.reader(self.row0 + self.lane % 16, self.lane // 16)

    def load_q(self, read: Reader, step: Expr) -> None:
        """The fragments of Q_i for one step of 16 along D."""
        for m in range(self.M):
            ptx.load_matrices(self.q_fragment(m, step), read(m * 16, step * 2))

    def q_fragment(self, m: int, step: Expr) -> list[ptx.Element]:
        first = (m * self.d_steps + step) * 4 if self.tiles.q_in_registers else m * 4
        return [self.q[first + x] for x in range(4)]

    def scores(self, keys: SharedTile) -> None:
        """S = Q_i K_j^T"""
        read_k = keys.reader(self.lane // 16 * 8 + self.lane % 8, self.lane // 8 % 2)
        read_q = None if self.tiles.q_in_registers else self.q_reader()
        for S in self.S:
            with unrolled(self.s_columns * 4) as n:
                put(S, n, T.float32(0))
        with unrolled(self.d_steps) as step:
            if read_q is not None:
                self.load_q(read_q, step)
            with unrolled(self.s_columns // 2) as pair:
                ptx.load_matrices([self.operand[x] for x in range(4)], read_k(pair * 16, step * 2))
                for m, S in enumerate(self.S):
                    for x in range(2):
                        self.multiply_add(S, pair * 2 + x, self.q_fragment(m, step), x)

    def accumulate(self, values: SharedTile) -> None:
        """O += P V_j"""
        read = values.reader(self.lane % 16, self.lane // 16)
        with unrolled(self.tiles.kv // 16) as step:
            for P, S in zip(self.P, self.S):
                with unrolled(4) as x:
                    ptx.pack(self.problem.dtype, P[x], S[step * 8 + x * 2], S[step * 8 + x * 2 + 1])
            with unrolled(self.o_columns // 2) as pair:
                ptx.load_matrices([self.operand[x] for x in range(4)], read(step * 16, pair * 2), transposed=True)
                self.add_matmuls(pair * 2, 2)
            if self.o_columns % 2:
                last = read(step * 16, self.o_columns - 1)
                ptx.load_matrices([self.operand[x] for x in range(2)], last, transposed=True)
                self.add_matmuls(self.o_columns - 1, 1)

    def add_matmuls(self, column: Expr | int, count: int) -> None:
        """O += the matmuls of the fragments of P with those of V for so many groups of 8 columns."""
        for P, O in zip(self.P, self.O):
            for x in range(count):
                self.multiply_add(O, column + x, [P[y] for y in range(4)], x)

    def multiply_add(self, D: tirx.Buffer, column: Expr | int, a: list[ptx.Element], x: int) -> None:
        """Eight columns of D += a B, where B is half x of the fragments of K or V."""
        d, b = [D[column * 4 + y] for y in range(4)], [self.operand[2 * x], self.operand[2 * x + 1]]
        ptx.multiply_add(self.problem.dtype, d, a, b)

    # The result.

    def scale_values(self) -> None:
        """O := O times the scales of V that all keys share."""
        if self.codes is None:
            return
        for O in self.O:
            self.codes.scale_values(O, self.hk, self.lane)

    def keep(self) -> None:
        """m, l and O with a part of the keys."""
        ptx.wait_for_copies(0)
        self.scale_values()
        for m, (O, softmax) in enumerate(zip(self.O, self.softmax)):
            i = let(self.i0 + self.row0 + m * 16 + self.lane // 4)
            self.partial.keep_fragment(
                softmax, O, self.b * self.problem.q_heads + self.h, [i, i + 8], self.split, self.lane
            )

    def store_y(self, turn: Expr | None) -> None:
        """Y_i := O / l, or 0 where l = 0. A NaN in l is no 0 and stays. In PLUS and MINUS, infinities are added to Y_i.

        It goes through shared memory, where each warp has its rows to itself, to be written in chunks; in the place of
        Q_i, which may still be on its way if no key was visible.
        """
        ptx.wait_for_copies(0)
        ptx.synchronize()
        h = ptx.fresh(self.h)
        if turn is not None:
            with T.If(turn >= PLUS), T.Then():
                infinity = let(tirx.Select(turn == PLUS, *(T.float32(float(x)) for x in ("inf", "-inf"))))
                for O in self.O:
                    with unrolled(self.o_columns * 4) as n:
                        put(O, n, tirx.Select(O[n] > T.float32(0), infinity, T.float32(0)))
        self.scale_values()
        for m, (O, softmax) in enumerate(zip(self.O, self.softmax)):
            softmax.rescale(O, softmax.finish(), self.problem.v_head_dim)
            row = self.row0 + m * 16 + self.lane // 4
            with unrolled(self.o_columns) as column:
                for r in range(2):
                    word, at = self.operand[r], column * 4 + r * 2
                    ptx.pack(self.problem.dtype, word, O[at], O[at + 1])
                    place = self.Y.at(row + r * 8, column)
                    ptx.store_shared(self.memory[place.indices[0] + self.lane % 4 * 2], word)
        ptx.synchronize_warp()
        chunks = 16 * self.M * self.o_columns
        with T.serial(-(-chunks // WARP), unroll=4) as n:
            chunk = let(n * WARP + self.lane)
            row, column = let(self.row0 + chunk // self.o_columns), let(chunk % self.o_columns)
            i = let(self.i0 + row)
            exists = i < self.rows
            if chunks % WARP:
                exists = tirx.all(chunk < chunks, exists)
            with T.If(exists), T.Then():
                place = self.Y.at(row, column)
                buffer, indices = self.bound.addressing.at("y", self.b, h, i.astype("int64"), column * CHUNK)
                if turn is None:
                    ptx.copy_from_shared(buffer[tuple(indices)], place)
                    return
                with T.If(turn < PLUS):
                    with T.Then():
                        ptx.copy_from_shared(buffer[tuple(indices)], place)
                    with T.Else(), T.serial(CHUNK) as d:
                        indices[-1] = indices[-1] + d
                        y = [widened(x, "float32") for x in (buffer[tuple(indices)], self.memory[place.indices[0] + d])]
                        self.bound.addressing.store_y(self.b, h, i.astype("int64"), column * CHUNK + d, y[0] + y[1])
