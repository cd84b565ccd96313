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
expensive ones (late rows, under a causal mask) first, all heads whose K and V fit the second-level cache together.

Keys run from last to first. A tile that every row sees in full runs without mask code. In any other tile invisible
scores are replaced by -inf; and where V is not finite there it is replaced by 0, as 0 * NaN = NaN, while rows that do
see such a value become NaN.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.key_tiles import KeyTiles

from . import wgmma
from .attention_tiles import WgmmaTiles
from .device import Device
from .finite_values import FiniteValues
from .fragments import OnlineSoftmax
from .pipeline import WARPGROUP, Ring, initialise, named_arrive, named_sync, specialise
from .ptx import WARP, fixed, pack, put, registers, synchronise
from .scheduler import Scheduler
from .survey import Survey
from .tma import ROW_WORDS, TensorMap, fence_async

ROWS = 64  # of a consumer
SWIZZLE_ALIGNMENT = 1024
FIRST_OWN, ALL_CONSUMERS = 4, 7  # named barriers, after 0 (the block) and 1 to 3 (turns)


def prefill_wgmma(bound: Bound, tiles: WgmmaTiles, device: Device) -> None:
    """Emits the kernel, with its launch, into the PrimFunc that `bound` has opened.

    Any problem that `prefill_mma` takes, for sm_90a.
    """
    with T.If(T.int64(1) * bound.B * bound.S > 0), T.Then():
        maps = {name: TensorMap.of(bound, name, ROWS if name in "qy" else tiles.kv) for name in "qkvy"}
        scheduler, survey = Scheduler(bound, tiles, device), Survey(bound, tiles.q, tiles.kv, tiles.threads // WARP)
        with (
            T.launch_thread("blockIdx.x", scheduler.blocks) as block,
            T.launch_thread("threadIdx.x", tiles.threads) as thread,
        ):
            _Block(bound, tiles, maps, scheduler, survey, (block, thread)).emit()


class _Block:
    """The code for one thread block."""

    def __init__(
        self,
        bound: Bound,
        tiles: WgmmaTiles,
        maps: dict[str, TensorMap],
        scheduler: Scheduler,
        survey: Survey,
        place: tuple[Expr, Expr],
    ) -> None:
        self.bound, self.problem, self.tiles = bound, bound.problem, tiles
        self.maps, self.scheduler, self.survey = maps, scheduler, survey
        self.block, self.thread = place
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
        self.finite: FiniteValues | None = None
        if bound.rows_differ or bound.keys.hides:
            threads = tiles.consumers * WARPGROUP
            self.finite = FiniteValues(self.memory, self.problem.v_dtype, maps["v"], tiles.stages, threads)

    def Q(self, consumer: Expr | int) -> Ring:
        """Q has a ring of one slot for every consumer, so that one can be a query tile ahead of another."""
        return Ring(self.barriers, 2 * consumer, 1, 1)

    def emit(self) -> None:
        initialise(self.thread, [*map(self.Q, range(self.tiles.consumers)), self.K, self.V])
        if self.finite is not None:
            self.finite.initialise(self.thread, self.tiles.threads)
        synchronise()
        specialise(self.tiles, self.thread, self.produce, lambda w: _Consumer(self, w).emit())

    def produce(self) -> None:
        """One thread: Q, K and V of every query tile on their way."""
        fills = registers(1, "int32")
        put(fills, 0, 0)
        with self.scheduler.query_tiles(self.block) as (turn, b, h, i0):
            keys, hk = self.survey.key_tiles(b, h, i0), fixed(tirx.truncdiv(h, self.problem.group))
            with T.serial(keys.count + 1) as j:
                with T.If(j < keys.count), T.Then():
                    self.fill(self.K, "k", fills[0] + j, (b, hk, keys.first(keys.count - 1 - j)))
                with T.If(tirx.EQ(j, 0)), T.Then():
                    for consumer in range(self.tiles.consumers):
                        Q, q = self.Q(consumer), self.maps["q"]
                        Q.reserve(turn, q.bytes)
                        q.load(self.memory, consumer * self.q_words, (b, h, i0 + consumer * ROWS), Q.full(turn))
                with T.If(j > 0), T.Then():
                    self.fill(self.V, "v", fills[0] + j - 1, (b, hk, keys.first(keys.count - j)))
            put(fills, 0, fills[0] + keys.count)

    def fill(self, ring: Ring, name: str, n: Expr, place: tuple[Expr, Expr, Expr]) -> None:
        start, words = (self.k_at, self.k_words) if name == "k" else (self.v_at, self.v_words)
        ring.reserve(n, self.maps[name].bytes)
        self.maps[name].load(self.memory, start + ring.slot(n) * words, place, ring.full(n))


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
        with self.block.scheduler.query_tiles(self.block.block) as (turn, b, h, i0):
            keys = self.block.survey.key_tiles(b, h, i0)
            row = fixed(i0 + self.w * ROWS + self.warp * 16 + tirx.truncdiv(self.lane, 4))
            softmax = OnlineSoftmax(self.bound, b, ((h, row), (h, fixed(row + 8))), self.lane, tiles.kv)
            with T.unroll(self.problem.v_head_dim // 2) as n:
                put(O, n, T.float32(0))
            self.Q.wait(turn)
            with T.If(keys.count > 0), T.Then():
                self.K.wait(fills[0])
                wgmma.begin(S)
                self.scores(fills[0])
                wgmma.wait(0, S)
                self.release(self.K, fills[0])
                softmax.step(S, *self.tile(keys, T.int32(0)))
                softmax.pack(S, P)
                with T.serial(keys.count - 1) as before:
                    j, fill = before + 1, fills[0] + before
                    self.clean(softmax, keys.full(keys.count - 1 - before), fill)
                    self.K.wait(fill + 1)
                    self.V.wait(fill)
                    self.take_turn()
                    wgmma.begin(S, O, P)
                    self.scores(fill + 1)
                    self.accumulate(fill)
                    self.give_turn()
                    wgmma.wait(1, S)
                    self.release(self.K, fill + 1)
                    softmax.step(S, *self.tile(keys, j))
                    # V has long arrived. Without something that it cannot move across, ptxas waits for O first, and
                    # computes no exponential beside the products.
                    self.V.wait(fill)
                    wgmma.wait(0, O, P)
                    self.release(self.V, fill)
                    softmax.rescale(O, softmax.alpha, self.problem.v_head_dim)
                    softmax.pack(S, P)
                last = fills[0] + keys.count - 1
                self.clean(softmax, keys.full(T.int32(0)), last)
                self.V.wait(last)
                wgmma.begin(O, P)
                self.accumulate(last)
                wgmma.wait(0, O, P)
                self.release(self.V, last)
                put(fills, 0, fills[0] + keys.count)
            self.store_y(softmax, (b, h, i0 + self.w * ROWS))
            with T.If(tirx.EQ(tirx.truncmod(self.block.thread, WARPGROUP), 0)), T.Then():
                self.Q.release(turn)
        self.end_turns()

    def tile(self, keys: KeyTiles, j: Expr) -> tuple[Expr, Expr, Expr]:
        """First key of tile j from the last, whether it needs no mask code, and the number of its range."""
        u = keys.count - 1 - j
        return keys.first(u), keys.full(u), keys.number(u)

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
        """Before V is used: no value of a key that some row does not see may be infinite or NaN. Outside of turns."""
        block, finite = self.block, self.block.finite
        if finite is None:
            return
        with T.If(tirx.Not(full)), T.Then():
            self.V.wait(fill)
            slot = fixed(self.V.slot(fill))
            at = block.v_at + slot * block.v_words
            finite.clean(at, slot, fill, block.thread - WARPGROUP, ALL_CONSUMERS)
            marked, key_marked = finite.marked(slot, fill)
            with T.If(marked), T.Then():
                softmax.invalidate(self.P, key_marked)

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
