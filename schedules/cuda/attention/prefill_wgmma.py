"""Attention for many query rows on Hopper: FlashAttention-3, forward (Shah et al., arXiv:2407.08608), for sm_90a.

    producer warpgroup                                   consumer warpgroup w of W, 64 query rows each
    for each query tile of this block                    for each query tile of this block
        K_n -> ring, Q -> shared memory                      S = Q K_n^T;  P = softmax(S)
        for j = n-1 .. 1                                     for j = n-1 .. 1
            K_j -> ring, V_j+1 -> ring                           S = Q K_j^T and O += P V_j+1, at once
        V_1 -> ring                                              softmax(S) while O += P V_j+1 runs; O = diag(alpha) O
                                                             O += P V_1;  Y = diag(1 / l) O -> shared memory -> Y

Q [64 W, D], K [B_c, D] and V [B_c, Dv] are loaded by TMA, which also stores Y. S, P and O stay in registers: S = Q K^T
has both operands in shared memory, O += P V takes P from registers. Warpgroups alternate at the tensor cores, so that
the softmax of one overlaps the matmuls of another ("ping-pong"). Registers move from the producer to the consumers.

All heads that share keys are in one tile: its rows interleave those of G heads, which TMA gathers. The grid is
persistent: it has as many blocks as the GPU has SMs, each of which processes its work list of query tiles. Expensive
tiles (late rows, under a causal mask) go first, and all heads whose K and V fit the second-level cache run together.
Where that leaves SMs idle, keys are split as in decode.py, and a second launch merges the partial (m, l, O).

Keys run from last to first. A tile that every row sees in full runs without mask code. In any other tile invisible
scores are replaced by -inf. Where V is not finite there, it is replaced by 0, as 0 * NaN = NaN, while rows that do see
such a value become NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention

from ..primitives import wgmma
from ..primitives.device import Device
from ..primitives.ping_pong import PingPong
from ..primitives.pipeline import (
    WARPGROUP,
    MbarrierRing,
    initialize_rings,
    named_sync,
    specialize_warpgroups,
)
from ..primitives.ptx import (
    WARP,
    alloc_registers,
    alloc_shared_memory,
    int32,
    launder,
    let,
    pack,
    store_element,
    synchronize,
)
from ..primitives.tma import ROW_WORDS, TensorMap, fence_async, wait_for_stores
from .attention_tiles import WgmmaTiles, count_packed_heads
from .finite_values import FiniteValues
from .fragments import OnlineSoftmax
from .mask_fragment import MaskFragment
from .mask_prepass import MaskPrepass
from .partial_results import PartialResults
from .scheduler import KeyShare, Scheduler

ROWS = 64  # of a consumer
SWIZZLE_ALIGNMENT = 1024
FIRST_OWN, ALL_CONSUMERS = 4, 7  # named barriers, after 0 (the block) and 1 to 3 (ping-pong)


def prefill_wgmma(bound: BoundAttention, tiles: WgmmaTiles, device: Device) -> None:
    """Emit the kernel and its launch into the PrimFunc opened by `bound`.

    It accepts any problem that `prefill_mma` accepts, for sm_90a.
    """
    with T.If(T.int64(1) * bound.B * bound.S > 0), T.Then():
        group = count_packed_heads(bound.problem)
        maps = {name: TensorMap.encode(bound, name, tiles.kv) for name in "kv"}
        maps |= {name: TensorMap.encode(bound, name, ROWS, group) for name in "qy"}
        scheduler = Scheduler(bound, tiles, device, group)
        prepass = MaskPrepass(bound, tiles.q // group, tiles.kv, tiles.threads // WARP)
        partial = PartialResults(bound, scheduler.splits, group=group, careful=False)
        with (
            T.launch_thread("blockIdx.x", scheduler.blocks) as block,
            T.launch_thread("threadIdx.x", tiles.threads) as thread,
        ):
            _Block(bound, tiles, maps, scheduler, prepass, partial, (block, thread)).emit()
        partial.merge(lambda b: int32(scheduler.splits))


class _Block:
    """The code for one thread block."""

    def __init__(
        self,
        bound: BoundAttention,
        tiles: WgmmaTiles,
        maps: dict[str, TensorMap],
        scheduler: Scheduler,
        prepass: MaskPrepass,
        partial: PartialResults,
        position: tuple[Expr, Expr],
    ) -> None:
        self.bound, self.problem, self.tiles = bound, bound.problem, tiles
        self.maps, self.scheduler, self.prepass, self.partial = maps, scheduler, prepass, partial
        self.block, self.thread = position
        self.q_size, self.k_size, self.v_size, self.y_size = (maps[name].bytes // 4 for name in "qkvy")
        if not tiles.y_apart:  # Y_i reuses the memory of Q_i
            self.q_size = self.y_size = max(self.q_size, self.y_size)
        self.y_at = tiles.consumers * self.q_size if tiles.y_apart else 0
        self.k_at = self.y_at + tiles.consumers * self.y_size
        self.v_at = self.k_at + tiles.stages * self.k_size
        self.memory = alloc_shared_memory(self.v_at + tiles.stages * self.v_size, "uint32", SWIZZLE_ALIGNMENT)
        rings = 2 * tiles.consumers + 4 * tiles.stages
        self.barriers = T.alloc_buffer((rings,), "uint64", scope="shared", align=8)
        self.K = MbarrierRing(self.barriers, 2 * tiles.consumers, tiles.stages, 4 * tiles.consumers)
        self.V = MbarrierRing(self.barriers, self.K.end, tiles.stages, 4 * tiles.consumers)
        self.finite: FiniteValues | None = None
        if bound.has_row_dependent_keys or bound.keys.can_hide_keys:
            threads = tiles.consumers * WARPGROUP
            self.finite = FiniteValues(self.memory, self.problem.v_dtype, maps["v"], tiles.stages, threads)

    def Q(self, consumer: Expr | int) -> MbarrierRing:
        """Return the ring of Q for a consumer: one slot each, so that a consumer can be a query tile ahead of
        another.
        """
        return MbarrierRing(self.barriers, 2 * consumer, 1, 4)

    def find_share(self, position: tuple[Expr, Expr, Expr], split: Expr) -> KeyShare:
        """Return the key tiles of a split of the query tile at (batch, pack, packed row)."""
        b, pack, r0 = position
        group = self.partial.group
        tiles = self.prepass.key_tiles(b, let(pack * group), let(tirx.truncdiv(r0, group)))
        splits = let(int32(self.scheduler.splits))
        split_size = let(tirx.truncdiv(tiles.count + splits - 1, splits))
        first = tirx.min(split * split_size, tiles.count)
        count = let(tirx.min(tiles.count - first, split_size))
        return KeyShare(tiles, let(first + count - 1), count)

    def emit(self) -> None:
        initialize_rings(self.thread, [*map(self.Q, range(self.tiles.consumers)), self.K, self.V])
        if self.finite is not None:
            self.finite.initialize(self.thread, self.tiles.threads)
        synchronize()
        specialize_warpgroups(self.tiles, self.thread, self.produce, lambda w: _Consumer(self, w).emit())

    def produce(self) -> None:
        """Load Q, K and V of every query tile, by one thread."""
        fills = alloc_registers(1, "int32")
        store_element(fills, 0, 0)
        with self.scheduler.work(self.block) as (iteration, b, pack, r0, split):
            share = self.find_share((b, pack, r0), split)
            hk = let(tirx.truncdiv(pack * self.partial.group, self.problem.group))
            with T.serial(share.count + 1) as j:
                with T.If(j < share.count), T.Then():
                    self.fill(self.K, "k", fills[0] + j, (b, hk, share.tiles.first(share.back(j))))
                with T.If(tirx.EQ(j, 0)), T.Then():
                    for consumer in range(self.tiles.consumers):
                        Q, q = self.Q(consumer), self.maps["q"]
                        Q.reserve(iteration, q.bytes)
                        q.load(self.memory, consumer * self.q_size, (b, pack, r0 + consumer * ROWS), Q.full(iteration))
                with T.If(j > 0), T.Then():
                    self.fill(self.V, "v", fills[0] + j - 1, (b, hk, share.tiles.first(share.back(j - 1))))
            store_element(fills, 0, fills[0] + share.count)

    def fill(self, ring: MbarrierRing, name: str, n: Expr, position: tuple[Expr, Expr, Expr]) -> None:
        start, size = (self.k_at, self.k_size) if name == "k" else (self.v_at, self.v_size)
        ring.reserve(n, self.maps[name].bytes)
        self.maps[name].load(self.memory, start + ring.slot(n) * size, position, ring.full(n))


class _Consumer:
    """The code for consumer w: query rows [64 w, 64 w + 64) of each tile of the block."""

    def __init__(self, block: _Block, w: Expr) -> None:
        self.block, self.w = block, w
        self.bound, self.problem, self.tiles = block.bound, block.problem, block.tiles
        self.K, self.V, self.Q = block.K, block.V, block.Q(w)
        self.lane = let(tirx.truncmod(block.thread, WARP))
        self.warp = let(tirx.truncmod(tirx.truncdiv(block.thread, WARP), 4))
        memory = block.memory
        self.q_tile = wgmma.encode_descriptor(memory, let(w * block.q_size), ROWS)
        self.k_tile = wgmma.encode_descriptor(memory, block.k_at, self.tiles.kv)
        self.v_tile = wgmma.encode_descriptor(memory, block.v_at, self.tiles.kv)
        self.S = alloc_registers(self.tiles.kv // 2, "float32")  # S, then P
        self.P = alloc_registers(self.tiles.kv // 4, "uint32")  # P in 16 bits
        self.O = alloc_registers(self.problem.v_head_dim // 2, "float32")
        consumers = self.tiles.consumers
        self.ping_pong = PingPong(self.tiles.ping_pong and consumers > 1, consumers, w)

    @property
    def has_all_keys(self) -> Expr:
        """Whether query tiles have all of their keys here. Not kept in a register."""
        return tirx.EQ(self.block.scheduler.splits, T.int64(1))

    @property
    def y_at(self) -> Expr:
        """The offset where Y_i is assembled. Not kept in a register."""
        return self.block.y_at + self.w * self.block.y_size

    def emit(self) -> None:
        fills = alloc_registers(1, "int32")
        store_element(fills, 0, 0)
        self.ping_pong.start()
        with self.block.scheduler.work(self.block.block) as (iteration, b, pack, r0, split):
            share = self.block.find_share((b, pack, r0), split)
            first = let(r0 + self.w * ROWS)  # of the consumer's packed rows
            row = let(first + self.warp * 16 + tirx.truncdiv(self.lane, 4))
            positions, is_split = self.locate_rows(pack, row), tirx.Not(self.has_all_keys)
            softmax = OnlineSoftmax(self.bound, b, positions, self.lane, self.tiles.kv, split=is_split)
            softmax.start()
            with T.unroll(self.problem.v_head_dim // 2) as n:
                store_element(self.O, n, T.float32(0))
            self.Q.wait(iteration)
            with T.If(share.count > 0):
                with T.Then():
                    self.attend(softmax, share, fills, iteration)
                with T.Else():
                    self.release_q(iteration)
            self.store_result(softmax, (b, pack, first), split)
            if not self.tiles.y_apart:
                self.release(self.Q, iteration)
        self.ping_pong.end()
        if self.tiles.y_apart:
            self.wait_for_y()

    def attend(self, softmax: OnlineSoftmax, share: KeyShare, fills: tirx.Buffer, iteration: Expr) -> None:
        """Compute m, l and O of a query tile from its share of the keys, the last tile first.

        fills[0] is the number of fills of K and of V so far.
        """
        S, P, O = self.S, self.P, self.O
        self.K.wait(fills[0])
        wgmma.begin_matmuls(S)
        self.scores(fills[0])
        mask = self.load_mask(softmax, share, T.int32(0))
        wgmma.wait_for_matmuls(0, S)
        self.release(self.K, fills[0])
        softmax.step(S, *self.tile(share, T.int32(0)), mask)
        softmax.pack(S, P)
        with T.serial(share.count - 1) as before:
            self.attend_tile(softmax, share, before, fills[0] + before)
        self.release_q(iteration)
        last = fills[0] + share.count - 1
        self.clean(softmax, share.tiles.full(share.back(share.count - 1)), last)
        self.V.wait(last)
        wgmma.begin_matmuls(O, P)
        self.accumulate(last)
        wgmma.wait_for_matmuls(0, O, P)
        self.release(self.V, last)
        store_element(fills, 0, fills[0] + share.count)

    def attend_tile(self, softmax: OnlineSoftmax, share: KeyShare, before: Expr, fill: Expr) -> None:
        """Issue S = Q K^T of a tile and O += P V of the one before it, at once.

        `before` is the number of that one from the last, and `fill` that of its fill of V.
        """
        S, P, O, j = self.S, self.P, self.O, before + 1
        self.clean(softmax, share.tiles.full(share.back(before)), fill)
        self.K.wait(fill + 1)
        self.V.wait(fill)
        self.ping_pong.wait_for_turn()
        wgmma.begin_matmuls(S, O, P)
        self.scores(fill + 1)
        self.accumulate(fill)
        self.ping_pong.signal_turn()
        mask = self.load_mask(softmax, share, j)
        wgmma.wait_for_matmuls(1, S)
        self.release(self.K, fill + 1)
        softmax.step(S, *self.tile(share, j), mask)
        # V arrived long ago. Without this barrier, which ptxas cannot move code across, it waits for O first, and
        # overlaps no exponential with the matmuls.
        self.V.wait(fill)
        wgmma.wait_for_matmuls(0, O, P)
        self.release(self.V, fill)
        softmax.rescale(O, softmax.alpha, self.problem.v_head_dim)
        softmax.pack(S, P)

    def locate_rows(self, pack: Expr, row: Expr) -> tuple[tuple[Expr, Expr], tuple[Expr, Expr]]:
        """Return query head and query row of a thread's packed rows, of which the first is one of the first eight of
        16.
        """
        group = self.block.partial.group
        h, i = let(pack * group + tirx.truncmod(row, group)), let(tirx.truncdiv(row, group))
        return (h, i), ((h, i + 8 // group) if group <= 8 else (h + 8, i))

    def release_q(self, iteration: Expr) -> None:
        """Release Q after the last scores."""
        if self.tiles.y_apart:
            self.release(self.Q, iteration)

    def tile(self, share: KeyShare, j: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the first key of tile j from the last, whether it needs no mask code, and the index of its range."""
        u = share.back(j)
        return share.tiles.first(u), share.tiles.full(u), share.tiles.number(u)

    def load_mask(self, softmax: OnlineSoftmax, share: KeyShare, j: Expr) -> MaskFragment | None:
        """Load the elements of a mask tensor for tile j from the last, while the matmuls run."""
        if not self.bound.scores.has_tensor:
            return None
        u = share.back(j)
        return softmax.load_mask(share.tiles.first(u), share.tiles.number(u))

    def scores(self, fill: Expr) -> None:
        """Issue S := Q K^T."""
        p, tiles = self.problem, self.tiles
        at = self.K.slot(fill) * (self.block.k_size * 4 // wgmma.UNIT)
        wgmma.mma_ss(
            p.dtype, self.S, self.q_tile, self.k_tile + at.astype("uint64"), (tiles.kv, p.head_dim), (ROWS, tiles.kv)
        )

    def accumulate(self, fill: Expr) -> None:
        """Issue O += P V."""
        p, tiles = self.problem, self.tiles
        at = self.V.slot(fill) * (self.block.v_size * 4 // wgmma.UNIT)
        wgmma.mma_rs(p.v_dtype, self.O, self.P, self.v_tile + at.astype("uint64"), (p.v_head_dim, tiles.kv))

    def release(self, ring: MbarrierRing, fill: Expr) -> None:
        """Release the slot, by every warp for itself: its share of the matmuls is done, another's may not be."""
        ring.release(fill, self.lane)

    def clean(self, softmax: OnlineSoftmax, full: Expr, fill: Expr) -> None:
        """Mask non-finite values before V is used: no value of a key that some row does not see may be infinite or NaN.

        This runs outside of the ping-pong order.
        """
        block, finite = self.block, self.block.finite
        if finite is None:
            return
        with T.If(tirx.Not(full)), T.Then():
            self.V.wait(fill)
            slot = let(self.V.slot(fill))
            at = block.v_at + slot * block.v_size
            finite.clean(at, slot, fill, block.thread - WARPGROUP, ALL_CONSUMERS)
            has_marks, is_marked = finite.read_marks(slot, fill)
            with T.If(has_marks), T.Then():
                softmax.invalidate(self.P, is_marked)

    # The result.

    def store_result(self, softmax: OnlineSoftmax, position: tuple[Expr, Expr, Expr], split: Expr) -> None:
        """Store Y_i at (batch, pack, packed row), or m, l and O with a split of the keys."""
        b, pack, first = position
        with T.If(self.has_all_keys):
            with T.Then():
                self.store_y(softmax, position)
            with T.Else():
                partial, lane = self.block.partial, launder(self.lane)
                row = let(first + self.warp * 16 + tirx.truncdiv(lane, 4))
                partial.store_fragment(softmax, self.O, b * partial.packs + pack, [row, row + 8], split, lane)

    def store_y(self, softmax: OnlineSoftmax, position: tuple[Expr, Expr, Expr]) -> None:
        """Store Y_i := diag(1 / l) O through shared memory."""
        memory = self.block.memory
        if self.tiles.y_apart:
            self.wait_for_y()  # the previous Y
        self.sync_consumer()  # it reuses the memory of Q_i: all warps have read it
        softmax.rescale(self.O, softmax.finish(), self.problem.v_head_dim)
        register = alloc_registers(1, "uint32")
        lane = launder(self.lane)
        g, t = tirx.truncdiv(lane, 4), tirx.truncmod(lane, 4)
        for r in range(2):
            start = let(self.y_at + (self.warp * 16 + r * 8 + g) * ROW_WORDS + t)
            with T.unroll(self.problem.v_head_dim // 8) as n:
                pack(self.problem.dtype, register[0], self.O[4 * n + 2 * r], self.O[4 * n + 2 * r + 1])
                panel, chunk = n // 8 * (ROWS * ROW_WORDS), T.bitwise_xor(n % 8, g) * 4
                store_element(memory, start + panel + chunk, register[0])
        fence_async()
        self.sync_consumer()
        with self.if_first():
            self.block.maps["y"].store(memory, self.y_at, position)
        if not self.tiles.y_apart:
            self.wait_for_y()

    def sync_consumer(self) -> None:
        """Synchronize the consumer's threads."""
        named_sync(FIRST_OWN + self.w, WARPGROUP)

    def wait_for_y(self) -> None:
        """Wait, in the thread that stored Y_i, until it has left shared memory."""
        with self.if_first():
            wait_for_stores()

    @contextmanager
    def if_first(self) -> Iterator[None]:
        """Run the enclosed code in one thread of the consumer, which stores."""
        with T.If(tirx.EQ(tirx.truncmod(self.block.thread, WARPGROUP), 0)), T.Then():
            yield
