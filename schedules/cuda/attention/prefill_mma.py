"""Attention for many query rows: FlashAttention-2, forward (Dao, arXiv:2307.08691, Algorithm 1), by mma.sync.

    for each tile of B_r query rows of a head, a block:      Q_i [B_r, D]
        m = -inf, l = 0, O = 0                               [B_r], [B_r], [B_r, Dv]; with a sink, m = sink, l = 1
        for each tile of B_c keys that some row sees:        K_j [B_c, D], V_j [B_c, Dv]
            S   = Q_i K_j^T                                  [B_r, B_c]
            m'  = max(m, rowmax S)
            P   = exp(S - m')                                replaces S
            l   = exp(m - m') l + rowsum P
            O   = diag(exp(m - m')) O + P V_j,  m = m'
        Y_i = diag(1 / l) O                                  0 where l = 0: no key was visible

Each warp has 16 or 32 rows of its own, whose O, S, m and l are in registers. P leaves the matmuls of Q K^T in the
layout in which those of P V read it. K_j and V_j come through shared memory by asynchronous copies. Tiles that some row
does not see in full go first, then the others without mask code.

Invisible scores are replaced by -inf, never added to, as they may be NaN. Keys that no row of the tile sees are read as
zeros. Where there are fewer tiles than SMs, keys are split as in decode.py.

A value that only some rows see may be infinite or NaN too, and 0 * NaN = NaN. Then the tile is recomputed without such
values in V, and their effect on the rows that see them is computed separately.
"""

from __future__ import annotations

from contextlib import nullcontext

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.expr.emit import widen_to
from lowering.attention.record.problem import AttentionProblem

from ...rejections import fits
from ..cache import quantized_kv
from ..cache.row_copies import RowCopies
from ..primitives import ptx
from ..primitives.device import Device
from ..primitives.host import bind_on_host, sm_count
from ..primitives.ptx import WARP, alloc_registers, int32, let, store_element, unrolled
from ..primitives.shared_tile import CHUNK, SharedTile
from .attention_tiles import MmaTiles
from .fragments import OnlineSoftmax
from .kv_tiles import HalfPrecisionKvTiles, KvTileRange, KvTiles, QuantizedKvTiles
from .mask_prepass import MaskPrepass
from .partial_results import PartialResults
from .query_fragments import QueryFragments

MAX_BLOCKS_Z = 65535
"""Maximum number of blocks of a grid along z."""

RAW, CLEAN, PLUS, MINUS = range(4)
"""Passes over a tile.

RAW uses V unchanged. Where that gives a non-finite O, CLEAN uses V without non-finite values. PLUS then has 1 where V
is +inf or NaN, else 0, and MINUS has 1 where V is -inf or NaN.
"""


def can_prefill(problem: AttentionProblem) -> bool:
    """Return whether `prefill_mma` serves the problem.

    It accepts half precision in rows of whole chunks, or a quantized cache that `quantized_kv` accepts; no qk output.
    """
    needs = {
        "Q, K and V are of one type of half precision": (
            problem.dtype in ptx.PTX_TYPES and problem.v_dtype == problem.dtype and problem.acc_dtype == "float32"
        ),
        f"sizes of heads are multiples of {CHUNK}": problem.head_dim % CHUNK == problem.v_head_dim % CHUNK == 0,
        "heads have at most 256 elements": max(problem.head_dim, problem.v_head_dim) <= 256,
        "the scores themselves are no output": problem.qk_mode is None,
        "codes are of a kind that tensor cores are fed with": not problem.is_quantized
        or quantized_kv.can_dequantize(problem),
    }
    return fits("mma", needs)


def prefill_mma(bound: BoundAttention, tiles: MmaTiles, gpu: Device, more_than: int = 0) -> None:
    """Emit the kernel and its launch into the PrimFunc opened by `bound`, for a problem that `can_prefill` accepts.

    In a ragged batch, this serves the sequences with more than `more_than` rows.
    """
    batch = bind_on_host(T.int64(1) * bound.B)
    tile_count = bind_on_host(tirx.ceildiv(T.int64(1) * bound.S, tiles.q))
    with T.If(batch * tile_count > 0), T.Then():
        prepass = MaskPrepass(bound, tiles.q, tiles.kv, tiles.warps)
        by_blocks = tirx.truncdiv(sm_count(), batch * tile_count * bound.problem.q_heads)
        by_keys = tirx.ceildiv(T.int64(1) * bound.T, T.int64(tiles.split))
        splits = bind_on_host(tirx.max(tirx.min(by_blocks, by_keys), T.int64(1)))
        partial = PartialResults(bound, splits, group=1, careful=bound.has_row_dependent_keys, min_rows=more_than + 1)
        dequantizer = quantized_kv.KvDequantizer(bound, gpu) if bound.problem.is_quantized else None
        _launch(bound, tiles, dequantizer, prepass, partial, (batch, tile_count))
        partial.merge(lambda b: int32(splits))


def _launch(
    bound: BoundAttention,
    tiles: MmaTiles,
    dequantizer: quantized_kv.KvDequantizer | None,
    prepass: MaskPrepass,
    partial: PartialResults,
    sizes: tuple[Expr, Expr],
) -> None:
    p, splits, (batch, tile_count) = bound.problem, partial.splits, sizes
    with (
        T.serial(tirx.ceildiv(batch, MAX_BLOCKS_Z)) as batch_chunk,
        T.launch_thread("blockIdx.x", tile_count.astype("int32")) as x,
        T.launch_thread("blockIdx.y", (splits * p.q_heads).astype("int32")) as y,
        T.launch_thread("blockIdx.z", tirx.min(batch - batch_chunk * MAX_BLOCKS_Z, MAX_BLOCKS_Z).astype("int32")) as z,
        T.launch_thread("threadIdx.x", tiles.threads) as thread,
        nullcontext() if dequantizer is None else ptx.all_registers(),
    ):
        b = let(batch_chunk.astype("int32") * MAX_BLOCKS_Z + z)
        h, split = (f(y, p.q_heads) for f in (tirx.truncmod, tirx.truncdiv))
        i0 = let((int32(tile_count) - 1 - x) * tiles.q)  # late rows may see more keys, so they go first
        with partial.if_served(b), bound.guard_row(b, i0):
            position = b, h, let(tirx.truncdiv(h, p.group)), i0
            _QueryTile(bound, tiles, dequantizer, prepass, partial, position, split, thread).emit()


class _QueryTile(QueryFragments):
    """The code of one block: rows [i0, i0 + B_r) of query head h in batch b. Each warp has M blocks of 16 rows."""

    def __init__(
        self,
        bound: BoundAttention,
        tiles: MmaTiles,
        dequantizer: quantized_kv.KvDequantizer | None,
        prepass: MaskPrepass,
        partial: PartialResults,
        position: tuple[Expr, Expr, Expr, Expr],
        split: Expr,
        thread: Expr,
    ) -> None:
        super().__init__(bound, tiles, thread)
        self.partial, self.dequantizer = partial, dequantizer
        (self.b, self.h, self.hk, self.i0), self.split = position, split
        self.rows = tirx.Cast("int32", T.int64(1) * bound.rows(self.b))
        self.keys = prepass.key_tiles(self.b, self.h, self.i0)
        self.find_tiles()
        key_range = KvTileRange(self.b, self.hk, thread, self.keys_of, self.stop)
        self.kv: KvTiles
        if dequantizer is None:
            self.kv = HalfPrecisionKvTiles(bound, tiles, self.memory, key_range)
        else:
            self.kv = QuantizedKvTiles(bound, tiles, self.memory, key_range, dequantizer)
        self.softmax = [self.online_softmax(m) for m in range(self.M)]

    def find_tiles(self) -> None:
        """Order the key tiles: those that need mask code come first; `start` to `stop` are processed here."""
        self.masked, self.tile = self.keys.order_masked_first()
        splits = int32(self.partial.splits)
        split_size = let(tirx.truncdiv(self.keys.count + splits - 1, splits))
        self.start = let(tirx.min(self.split * split_size, self.keys.count))
        self.stop = let(tirx.min(self.start + split_size, self.keys.count))

    def keys_of(self, u: Expr) -> tuple[Expr, Expr]:
        """Return the first key of the tile that is processed as number u, and the one after its range."""
        t = self.tile(u)
        return self.keys.first(t), self.keys.stop(t)

    def online_softmax(self, m: int) -> OnlineSoftmax:
        """Return the softmax of the warp's rows number 16 m to 16 m + 15."""
        i = self.i0 + self.row0 + m * 16 + self.lane // 4
        rows, split = ((self.h, i), (self.h, i + 8)), tirx.Not(self.has_all_keys)
        return OnlineSoftmax(self.bound, self.b, rows, self.lane, self.tiles.kv, split)

    @property
    def has_all_keys(self) -> Expr:
        """Whether this block has all keys of the tile. Not kept in a register."""
        return tirx.EQ(self.partial.splits, T.int64(1))

    def emit(self) -> None:
        if self.bound.has_row_dependent_keys:
            self.attend_carefully()
        else:
            self.attend(None)
            with T.If(self.has_all_keys), T.Then():
                self.store_y(None)
        with T.If(tirx.Not(self.has_all_keys)), T.Then():
            self.store_partial()

    def attend_carefully(self) -> None:
        """Run `attend` and `store_y`, and again where that gave no finite O.

        With splits of the keys, the merge does that.
        """
        pass_register = alloc_registers(1, "int32")
        store_element(pass_register, 0, tirx.const(RAW, "int32"))
        with T.While(pass_register[0] <= MINUS):
            current = let(pass_register[0])
            self.attend(current)
            store_element(pass_register, 0, current + 1)
            with T.If(current == RAW), T.Then():
                is_repeated = tirx.all(ptx.any_thread(self.is_not_finite()), self.has_all_keys)
                store_element(
                    pass_register,
                    0,
                    tirx.Select(is_repeated, tirx.const(CLEAN, "int32"), tirx.const(MINUS + 1, "int32")),
                )
            with T.If(tirx.all(pass_register[0] != CLEAN, self.has_all_keys)), T.Then():
                self.store_y(current)
                ptx.synchronize()

    def attend(self, pass_index: Expr | None) -> None:
        """Compute O, m and l of the tile, in a pass of that kind."""
        self.initialize()
        q = RowCopies(self.bound, "q", self.b, self.h, self.thread, self.tiles.threads)
        q.copy(self.Q, self.i0, self.tiles.q, self.rows)
        self.kv.begin(self.start)
        if self.dequantizer is not None and self.dequantizer.in_query:
            self.scale_query(q, self.dequantizer)
        if self.tiles.q_in_registers:
            self.kv.wait()
            read_q = self.make_q_reader()
            with unrolled(self.d_steps) as step:
                self.load_q(read_q, step)
        masked = self.masked
        if pass_index is not None:
            masked = let(tirx.Select(pass_index == RAW, masked, self.keys.count))
        with T.serial(self.start, self.stop) as u:
            self.step(u, pass_index, masked)

    def scale_query(self, q: RowCopies, dequantizer: quantized_kv.KvDequantizer) -> None:
        """Multiply Q_i by the scales of K. A thread scales the chunks that it has copied."""
        ptx.wait_for_copies(self.kv.pending)
        q.visit_chunks(self.tiles.q, lambda row, chunk: dequantizer.scale_query(self.Q.at(row, chunk), self.hk, chunk))

    def step(self, u: Expr, pass_index: Expr | None, masked: Expr) -> None:
        """Process one tile of keys."""
        self.kv.await_keys(u)
        self.scores(self.kv.tile("k", u))
        self.kv.await_values(u)
        for m, softmax in enumerate(self.softmax):
            t = self.tile(u)
            first, number = let(self.keys.first(t)), self.keys.number(t)
            mask = softmax.load_mask(first, number) if self.bound.scores.has_tensor else None
            softmax.step(self.S[m], first, u >= masked, number, mask)
            softmax.rescale(self.O[m], softmax.alpha, self.problem.v_head_dim)
        values = self.kv.tile("v", u)
        if pass_index is not None:
            with T.If(pass_index != RAW), T.Then():
                self.replace_values(values, pass_index)
        self.accumulate(values)

    def replace_values(self, values: SharedTile, pass_index: Expr) -> None:
        """Replace V_j by the values of a pass other than RAW."""
        unit, infinity = {"float16": (0x3C00, 0x7C00), "bfloat16": (0x3F80, 0x7F80)}[self.problem.dtype]
        with T.serial(self.kv.sizes["v"] // self.tiles.threads) as n:
            at = let(values.start + n * self.tiles.threads + self.thread)
            bits = let(T.reinterpret("uint16", self.memory[at]).astype("int32"))
            magnitude = T.bitwise_and(bits, 0x7FFF)
            clean = tirx.Select(magnitude >= infinity, 0, bits)
            sign = tirx.Select(pass_index == PLUS, 0, 0x8000)
            marked = tirx.any(magnitude > infinity, bits == infinity + sign)
            new = tirx.Select(pass_index == CLEAN, clean, tirx.Select(marked, unit, 0))
            T.buffer_store(self.memory, T.reinterpret(self.problem.dtype, new.astype("uint16")), [at])
        ptx.synchronize()

    # The parts of a step.

    def initialize(self) -> None:
        """Initialize m, l and O before the first key."""
        for O, softmax in zip(self.O, self.softmax):
            softmax.start()
            with unrolled(self.o_columns * 4) as n:
                store_element(O, n, T.float32(0))
        if self.problem.head_dim % 16:
            self.pad()

    def pad(self) -> None:
        """Write zeros after the rows of Q and K, whose dot products come in steps of 16."""
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

    # The result.

    def scale_values(self) -> None:
        """Multiply O by the scales of V that all keys share."""
        if self.dequantizer is None:
            return
        for O in self.O:
            self.dequantizer.scale_values(O, self.hk, self.lane)

    def store_partial(self) -> None:
        """Store m, l and O with a split of the keys."""
        ptx.wait_for_copies(0)
        self.scale_values()
        for m, (O, softmax) in enumerate(zip(self.O, self.softmax)):
            i = let(self.i0 + self.row0 + m * 16 + self.lane // 4)
            self.partial.store_fragment(
                softmax, O, self.b * self.problem.q_heads + self.h, [i, i + 8], self.split, self.lane
            )

    def store_y(self, pass_index: Expr | None) -> None:
        """Store Y_i := O / l, or 0 where l = 0. A NaN in l is not 0, so it stays.

        PLUS and MINUS add infinities to Y_i. It goes through shared memory, where each warp has its rows to itself, to
        be written in chunks. It reuses the memory of Q_i, which may still be in flight if no key was visible.
        """
        ptx.wait_for_copies(0)
        ptx.synchronize()
        h = ptx.launder(self.h)
        if pass_index is not None:
            with T.If(pass_index >= PLUS), T.Then():
                infinity = let(tirx.Select(pass_index == PLUS, *(T.float32(float(x)) for x in ("inf", "-inf"))))
                for O in self.O:
                    with unrolled(self.o_columns * 4) as n:
                        store_element(O, n, tirx.Select(O[n] > T.float32(0), infinity, T.float32(0)))
        self.scale_values()
        for m, (O, softmax) in enumerate(zip(self.O, self.softmax)):
            softmax.rescale(O, softmax.finish(), self.problem.v_head_dim)
            row = self.row0 + m * 16 + self.lane // 4
            with unrolled(self.o_columns) as column:
                for r in range(2):
                    register, at = self.operand[r], column * 4 + r * 2
                    ptx.pack(self.problem.dtype, register, O[at], O[at + 1])
                    shared = self.Y.at(row + r * 8, column)
                    ptx.store_shared(self.memory[shared.indices[0] + self.lane % 4 * 2], register)
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
                shared = self.Y.at(row, column)
                buffer, indices = self.bound.addressing.at("y", self.b, h, i.astype("int64"), column * CHUNK)
                if pass_index is None:
                    ptx.copy_from_shared(buffer[tuple(indices)], shared)
                    return
                with T.If(pass_index < PLUS):
                    with T.Then():
                        ptx.copy_from_shared(buffer[tuple(indices)], shared)
                    with T.Else(), T.serial(CHUNK) as d:
                        indices[-1] = indices[-1] + d
                        y = [
                            widen_to(x, "float32") for x in (buffer[tuple(indices)], self.memory[shared.indices[0] + d])
                        ]
                        self.bound.addressing.store_y(self.b, h, i.astype("int64"), column * CHUNK + d, y[0] + y[1])
