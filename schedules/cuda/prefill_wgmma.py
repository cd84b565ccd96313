"""Attention for many query rows on Hopper: FlashAttention-3, forward (Shah et al., arXiv:2407.08608), for sm_90a.

    producer warpgroup                                   consumer warpgroup w of W, 64 query rows each
    for each query tile of this block                    for each query tile of this block
        K_n -> ring, Q -> shared memory                      S = Q K_n^T;  P = softmax(S)
        for j = n-1 .. 1                                     for j = n-1 .. 1
            K_j -> ring, V_j+1 -> ring                           S = Q K_j^T and O += P V_j+1, at once
        V_1 -> ring                                              softmax(S) while O += P V_j+1 runs; O = diag(alpha) O
                                                             O += P V_1;  Y = diag(1 / l) O -> shared memory -> Y

Q [64 W, D], K [B_c, D] and V [B_c, Dv] come by TMA, and so does Y go; S, P and O stay in registers: S = Q K^T has both
operands in shared memory, O += P V takes P from registers. Warpgroups take turns at the tensor cores, so that the
softmax of one runs beside the products of another ("ping-pong"); registers move from the producer to the consumers.

The grid has as many blocks as the machine has multiprocessors, each of which works through its list of query tiles: the
dear ones (late rows, under a causal mask) first, all heads whose K and V fit the second-level cache together.

Keys run from last to first. A tile that every row sees in full runs without mask code. In any other tile invisible
scores are replaced by -inf; and where V is not finite there it is replaced by 0, as 0 * NaN = NaN, while rows that do
see such a value become NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound

from . import wgmma
from .device import Device
from .fragments import OnlineSoftmax
from .host import multiprocessors, on_host
from .pipeline import Ring, named_arrive, named_sync
from .ptx import WARP, fixed, pack, put, registers, synchronise
from .tiles import WgmmaTiles
from .tma import ROW_WORDS, TensorMap, fence_async

ROWS = 64  # of a consumer
WARPGROUP = 128
SWIZZLE_ALIGNMENT = 1024
FIRST_OWN, ALL_CONSUMERS = 4, 7  # named barriers, after 0 (the block) and 1 to 3 (turns)


def prefill_wgmma(bound: Bound, tiles: WgmmaTiles, device: Device) -> None:
    """Emits the kernel, with its launch, into the PrimFunc that `bound` has opened.

    Any problem that `prefill_mma` takes, for sm_90a. Raises ValueError for illegal tiles.
    """
    tiles.check(bound.problem, device)
    with T.If(tirx.all(_int64(bound.B) > 0, _int64(bound.S) > 0)), T.Then():
        maps = {name: TensorMap.of(bound, name, ROWS if name in "qy" else tiles.kv) for name in "qkvy"}
        schedule = _Schedule(bound, tiles, device)
        with (
            T.launch_thread("blockIdx.x", schedule.blocks) as block,
            T.launch_thread("threadIdx.x", tiles.threads) as thread,
        ):
            schedule.block = block
            _Block(bound, tiles, maps, schedule, thread).emit()


class _Schedule:
    """Which query tiles a block works through, and in which order; made by the host, read by a kernel."""

    block: Expr

    def __init__(self, bound: Bound, tiles: WgmmaTiles, device: Device) -> None:
        p = self.problem = bound.problem
        q_tiles = on_host(tirx.truncdiv(_int64(bound.S) + (tiles.q - 1), tiles.q))
        heads = on_host(_int64(bound.B) * p.q_heads)
        kv_bytes = (_int64(bound.T) + 1) * (2 * (p.head_dim + p.v_head_dim))
        cached = tirx.max(tirx.truncdiv(T.int64(device.l2 * 2 // 3), kv_bytes), T.int64(1)) * p.group
        section = on_host(tirx.max(tirx.min(cached, heads), T.int64(1)))
        most = multiprocessors() if tiles.blocks is None else T.int64(tiles.blocks)
        blocks = on_host(tirx.min(most, q_tiles * heads))
        self.q_tiles, self.heads, self.section, self.blocks = map(_int32, (q_tiles, heads, section, blocks))
        self.total = self.q_tiles * self.heads

    @contextmanager
    def query_tiles(self) -> Iterator[tuple[Expr, Expr, Expr, Expr]]:
        """A loop over the block's query tiles: how many came before, batch, query head, first row; int32.

        Every second round runs backwards, so that no block always gets the dearest tile of a round.
        """
        with T.serial(tirx.truncdiv(self.total + self.blocks - 1, self.blocks)) as turn:
            place = tirx.Select(tirx.EQ(T.bitwise_and(turn, 1), 0), self.block, self.blocks - 1 - self.block)
            work = fixed(turn * self.blocks + place)
            with T.If(work < self.total), T.Then():
                per_section = fixed(self.section * self.q_tiles)
                start = fixed(tirx.truncdiv(work, per_section) * self.section)
                rest = fixed(tirx.truncmod(work, per_section))
                width = fixed(tirx.min(self.section, self.heads - start))
                tile = fixed(self.q_tiles - 1 - tirx.truncdiv(rest, width))
                head = fixed(start + tirx.truncmod(rest, width))
                b, h = (fixed(f(head, self.problem.q_heads)) for f in (tirx.truncdiv, tirx.truncmod))
                yield turn, b, h, tile


class _Block:
    """The code for one thread block."""

    def __init__(
        self, bound: Bound, tiles: WgmmaTiles, maps: dict[str, TensorMap], schedule: _Schedule, thread: Expr
    ) -> None:
        self.bound, self.problem, self.tiles = bound, bound.problem, tiles
        self.maps, self.schedule, self.thread = maps, schedule, thread
        self.q_words, self.k_words, self.v_words = (maps[name].bytes // 4 for name in "qkv")
        self.q_words = max(self.q_words, maps["y"].bytes // 4)  # Y_i takes the place of Q_i
        self.k_at = tiles.consumers * self.q_words
        self.v_at = self.k_at + tiles.stages * self.k_words
        self.memory = T.alloc_buffer(
            (self.v_at + tiles.stages * self.v_words,), "uint32", scope="shared.dyn", align=SWIZZLE_ALIGNMENT
        )
        rings = 2 * tiles.consumers + 4 * tiles.stages
        self.barriers = T.alloc_buffer((rings,), "uint64", scope="shared", align=8)
        self.K = Ring(self.barriers, 2 * tiles.consumers, tiles.stages, 4 * tiles.consumers)
        self.V = Ring(self.barriers, self.K.end, tiles.stages, 4 * tiles.consumers)
        self.hides = self.problem.mask is not None or self.problem.window is not None or self.problem.lengths
        if self.hides:
            # Of each key in the ring, and of each tile: the last fill of V, counted from 1, that was not finite there.
            self.marks = T.alloc_buffer((tiles.stages * (tiles.kv + 1),), "int32", scope="shared", align=4)

    def Q(self, consumer: Expr | int) -> Ring:
        """Q has a ring of one slot for every consumer, so that one can be a query tile ahead of another."""
        return Ring(self.barriers, 2 * consumer, 1, 1)

    def emit(self) -> None:
        with T.If(tirx.EQ(self.thread, 0)), T.Then():
            for ring in (*map(self.Q, range(self.tiles.consumers)), self.K, self.V):
                ring.initialise()
            T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
        if self.hides:
            count = int(self.marks.shape[0])
            with T.serial(-(-count // self.tiles.threads)) as turn:
                at = turn * self.tiles.threads + self.thread
                with T.If(at < count), T.Then():
                    put(self.marks, at, 0)
        synchronise()
        warpgroup = fixed(uniform(tirx.truncdiv(self.thread, WARPGROUP)))
        with T.If(tirx.EQ(warpgroup, 0)):
            with T.Then():
                T.evaluate(T.ptx["setmaxnreg.dec.sync.aligned.u32"](self.tiles.producer_registers))
                with T.If(tirx.EQ(self.thread, 0)), T.Then():
                    self.produce()
            with T.Else():
                T.evaluate(T.ptx["setmaxnreg.inc.sync.aligned.u32"](self.tiles.consumer_registers))
                _Consumer(self, fixed(warpgroup - 1)).emit()

    def key_tiles(self, b: Expr, tile: Expr) -> _KeyTiles:
        """The tiles of keys that some row of the query tile sees."""
        rows = fixed(tile * self.tiles.q), fixed((tile + 1) * self.tiles.q)
        ends = (*self.bound.visible_range(b, *rows), *self.bound.full_range(b, *rows))
        lo, hi, full_lo, full_hi = (fixed(_int32(end)) for end in ends)
        count = fixed(tirx.truncdiv(hi - lo + self.tiles.kv - 1, self.tiles.kv))
        return _KeyTiles(lo, count, full_lo, full_hi, self.tiles.kv)

    def produce(self) -> None:
        """One thread: Q, K and V of every query tile on their way."""
        fills = registers(1, "int32")
        put(fills, 0, 0)
        with self.schedule.query_tiles() as (turn, b, h, tile):
            keys, hk = self.key_tiles(b, tile), fixed(tirx.truncdiv(h, self.problem.group))
            with T.serial(keys.count + 1) as j:
                with T.If(j < keys.count), T.Then():
                    self.fill(self.K, "k", fills[0] + j, (b, hk, keys.first(j)))
                with T.If(tirx.EQ(j, 0)), T.Then():
                    for consumer in range(self.tiles.consumers):
                        Q, q = self.Q(consumer), self.maps["q"]
                        Q.reserve(turn, q.bytes)
                        row = tile * self.tiles.q + consumer * ROWS
                        q.load(self.memory, consumer * self.q_words, (b, h, row), Q.full(turn))
                with T.If(j > 0), T.Then():
                    self.fill(self.V, "v", fills[0] + j - 1, (b, hk, keys.first(j - 1)))
            put(fills, 0, fills[0] + keys.count)

    def fill(self, ring: Ring, name: str, n: Expr, place: tuple[Expr, Expr, Expr]) -> None:
        start, words = (self.k_at, self.k_words) if name == "k" else (self.v_at, self.v_words)
        ring.reserve(n, self.maps[name].bytes)
        self.maps[name].load(self.memory, start + ring.slot(n) * words, place, ring.full(n))


@dataclass(frozen=True)
class _KeyTiles:
    """The key tiles of a query tile, counted from the last one: j = 0 has the last keys."""

    lo: Expr
    count: Expr
    full_lo: Expr
    full_hi: Expr
    kv: int

    def first(self, j: Expr | int) -> Expr:
        """The first key of tile j."""
        return self.lo + (self.count - 1 - j) * self.kv

    def full(self, j: Expr | int) -> Expr:
        """Whether every row sees every key of tile j."""
        return tirx.all(self.first(j) >= self.full_lo, self.first(j) + self.kv <= self.full_hi)


class _Consumer:
    """The code for consumer w: query rows [64 w, 64 w + 64) of each tile of the block."""

    def __init__(self, block: _Block, w: Expr) -> None:
        self.block, self.w = block, w
        self.bound, self.problem, self.tiles = block.bound, block.problem, block.tiles
        self.K, self.V, self.Q = block.K, block.V, block.Q(w)
        self.lane = fixed(tirx.truncmod(block.thread, WARP))
        self.warp = fixed(tirx.truncmod(tirx.truncdiv(block.thread, WARP), 4))
        memory = block.memory
        self.q_at = fixed(w * block.q_words)
        self.q_tile = wgmma.descriptor(memory, self.q_at, ROWS)
        self.k_tile = wgmma.descriptor(memory, block.k_at, self.tiles.kv)
        self.v_tile = wgmma.descriptor(memory, block.v_at, self.tiles.kv)
        self.S = registers(self.tiles.kv // 2, "float32")  # S, then P
        self.P = registers(self.tiles.kv // 4, "uint32")  # P in 16 bits
        self.O = registers(self.problem.v_head_dim // 2, "float32")

    def emit(self) -> None:
        tiles, S, P, O = self.tiles, self.S, self.P, self.O
        fills = registers(1, "int32")
        put(fills, 0, 0)
        self.start_turns()
        with self.block.schedule.query_tiles() as (turn, b, h, tile):
            keys = self.block.key_tiles(b, tile)
            row = fixed(tile * tiles.q + self.w * ROWS + self.warp * 16 + tirx.truncdiv(self.lane, 4))
            softmax = OnlineSoftmax(self.bound, b, ((h, row), (h, fixed(row + 8))), self.lane, tiles.kv)
            with T.unroll(self.problem.v_head_dim // 2) as n:
                put(O, n, T.float32(0))
            self.Q.wait(turn)
            with T.If(keys.count > 0), T.Then():
                self.K.wait(fills[0])
                self.scores(fills[0])
                wgmma.wait(0, S)
                self.release(self.K, fills[0])
                softmax.step(S, keys.first(0), keys.full(0))
                softmax.pack(S, P)
                with T.serial(keys.count - 1) as before:
                    j, fill = before + 1, fills[0] + before
                    self.clean(softmax, keys.full(before), fill)
                    self.K.wait(fill + 1)
                    self.V.wait(fill)
                    self.take_turn()
                    self.scores(fill + 1)
                    self.accumulate(fill)
                    self.give_turn()
                    wgmma.wait(1, S)
                    self.release(self.K, fill + 1)
                    softmax.step(S, keys.first(j), keys.full(j))
                    wgmma.wait(0, O, P)
                    self.release(self.V, fill)
                    softmax.rescale(O, softmax.alpha, self.problem.v_head_dim)
                    softmax.pack(S, P)
                last = fills[0] + keys.count - 1
                self.clean(softmax, keys.full(keys.count - 1), last)
                self.V.wait(last)
                self.accumulate(last)
                wgmma.wait(0, O, P)
                self.release(self.V, last)
                put(fills, 0, fills[0] + keys.count)
            self.store_y(softmax, (b, h, tile * tiles.q + self.w * ROWS))
            with T.If(tirx.EQ(tirx.truncmod(self.block.thread, WARPGROUP), 0)), T.Then():
                self.Q.release(turn)
        self.end_turns()

    def scores(self, fill: Expr) -> None:
        """S := Q K^T, begun."""
        p, tiles = self.problem, self.tiles
        at = self.K.slot(fill) * (self.block.k_words * 4 // wgmma.UNIT)
        wgmma.product_ss(
            p.dtype, self.S, self.q_tile, self.k_tile + at.astype("uint64"), (tiles.kv, p.head_dim), (ROWS, tiles.kv)
        )

    def accumulate(self, fill: Expr) -> None:
        """O += P V, begun."""
        p, tiles = self.problem, self.tiles
        at = self.V.slot(fill) * (self.block.v_words * 4 // wgmma.UNIT)
        wgmma.product_rs(p.v_dtype, self.O, self.P, self.v_tile + at.astype("uint64"), (p.v_head_dim, tiles.kv))

    def release(self, ring: Ring, fill: Expr) -> None:
        """Every warp lets go for itself: its share of the products is done, another's may not be."""
        with T.If(tirx.EQ(self.lane, 0)), T.Then():
            ring.release(fill)

    # Turns at the tensor cores: consumer w waits at named barrier 1 + w for consumer w - 1.

    def start_turns(self) -> None:
        if self.tiles.ping_pong and self.tiles.consumers > 1:
            with T.If(tirx.EQ(self.w, self.tiles.consumers - 1)), T.Then():
                named_arrive(1, 2 * WARPGROUP)

    def take_turn(self) -> None:
        if self.tiles.ping_pong and self.tiles.consumers > 1:
            named_sync(1 + self.w, 2 * WARPGROUP)

    def give_turn(self) -> None:
        if self.tiles.ping_pong and self.tiles.consumers > 1:
            named_arrive(1 + tirx.truncmod(self.w + 1, self.tiles.consumers), 2 * WARPGROUP)

    def end_turns(self) -> None:
        """No block ends with a barrier half full."""
        if self.tiles.ping_pong and self.tiles.consumers > 1:
            with T.If(tirx.EQ(self.w, 0)), T.Then():
                named_sync(1, 2 * WARPGROUP)

    def clean(self, softmax: OnlineSoftmax, full: Expr, fill: Expr) -> None:
        """If some row does not see all keys of the fill: what is not finite in V := 0, and l := NaN where P is not 0.

        All consumers share the work, outside of their turns.
        """
        if not self.block.hides:
            return
        block, tiles, marks = self.block, self.tiles, self.block.marks
        with T.If(tirx.Not(full)), T.Then():
            self.V.wait(fill)
            slot = fixed(self.V.slot(fill))
            stamp = fixed(fill + 1)
            marked_tile = tiles.stages * tiles.kv + slot
            chunks, threads = block.v_words // 4, tiles.consumers * WARPGROUP
            start = fixed(block.v_at // 4 + slot * chunks)
            with T.serial(-(-chunks // threads)) as turn:
                chunk = fixed(turn * threads + block.thread - WARPGROUP)
                with T.If(chunk < chunks), T.Then():
                    found = self.clean_chunk(fixed(start + chunk))
                    with T.If(found), T.Then():
                        put(marks, slot * tiles.kv + tirx.truncmod(tirx.truncdiv(chunk, 8), tiles.kv), stamp)
                        put(marks, marked_tile, stamp)
            fence_async()
            named_sync(ALL_CONSUMERS, threads)
            with T.If(tirx.EQ(marks[marked_tile], stamp)), T.Then():
                softmax.condemn(self.P, lambda key: tirx.EQ(marks[slot * tiles.kv + key], stamp))

    def clean_chunk(self, chunk: Expr) -> Expr:
        """Eight elements of V, in four words: those that are not finite := 0; whether there were any."""
        exponent = {"float16": 0x7C00, "bfloat16": 0x7F80}[self.problem.v_dtype]
        memory = self.block.memory
        words, wrong = registers(4, "uint32"), registers(4, "uint32")
        with T.vectorized(4) as n:
            put(words, n, memory[chunk * 4 + n])
        for n in range(4):
            # An exponent of ones, and only that, overflows into the sign.
            exponents = T.bitwise_and(words[n], T.uint32(exponent * 0x10001))
            overflow = exponents + T.uint32((0x8000 - exponent) * 0x10001)
            put(wrong, n, T.bitwise_and(overflow >> T.uint32(15), T.uint32(0x10001)) * T.uint32(0xFFFF))
        found = fixed(T.bitwise_or(T.bitwise_or(wrong[0], wrong[1]), T.bitwise_or(wrong[2], wrong[3])))
        found = tirx.NE(found, T.uint32(0))
        with T.If(found), T.Then():
            for n in range(4):
                put(memory, chunk * 4 + n, T.bitwise_and(words[n], T.bitwise_not(wrong[n])))
        return found

    def store_y(self, softmax: OnlineSoftmax, place: tuple[Expr, Expr, Expr]) -> None:
        """Y_i := diag(1 / l) O, by way of shared memory, in the place of Q_i."""
        barrier, memory = FIRST_OWN + self.w, self.block.memory
        named_sync(barrier, WARPGROUP)  # all warps have read Q_i
        softmax.rescale(self.O, softmax.finish(), self.problem.v_head_dim)
        word = registers(1, "uint32")
        g, t = tirx.truncdiv(self.lane, 4), tirx.truncmod(self.lane, 4)
        for r in range(2):
            start = fixed(self.q_at + (self.warp * 16 + r * 8 + g) * ROW_WORDS + t)
            with T.unroll(self.problem.v_head_dim // 8) as n:
                pack(self.problem.dtype, word[0], self.O[4 * n + 2 * r], self.O[4 * n + 2 * r + 1])
                panel, chunk = n // 8 * (ROWS * ROW_WORDS), T.bitwise_xor(n % 8, g) * 4
                put(memory, start + panel + chunk, word[0])
        fence_async()
        named_sync(barrier, WARPGROUP)
        with T.If(tirx.EQ(tirx.truncmod(self.block.thread, WARPGROUP), 0)), T.Then():
            self.block.maps["y"].store(memory, self.q_at, place)


def uniform(value: Expr) -> Expr:
    """The value, equal in all lanes of a warp, as one that nvcc knows to be equal."""
    return tirx.call_intrin(value.ty, "tirx.cuda.__shfl_sync", T.uint32(0xFFFFFFFF), value, 0, WARP)


def _int64(value: int | Expr) -> Expr:
    return tirx.const(value, "int64") if isinstance(value, int) else value.astype("int64")


def _int32(value: Expr) -> Expr:
    return value.astype("int32")
