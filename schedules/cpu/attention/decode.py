"""Attention for few query rows over long keys: split-KV ("flash decoding"), bound by reading K and V once.

    for each batch, key/value head and split of its visible keys, in parallel:
        m = -inf, l = 0, O = 0                               for each of the R = S G query rows of the head
        for each tile of B_c keys of the split:              K_j [B_c, D], V_j [B_c, Dv]
            online softmax, as in prefill.py
        store (m, l, O) of the split
    for each query row, in parallel:                         s counts the splits; a sink is one more, with O_s = 0
        m = max m_s,  w_s = exp(m_s - m)
        Y = sum w_s O_s / sum w_s l_s                        0 where no key was visible

Vectors run along D: a key is read once, in memory order, and meets all R rows that share it while it is in the
first-level cache. W pairs of a row and a key at a time give W vectors of partial dot products; a transposing reduction
makes them one vector of W scores. The next tile is prefetched while a tile is processed: the hardware prefetcher loses
the stream at each switch from K to V, which halves the bandwidth.

On machines with bfloat16 pair matmuls, Q, K, V and P are packed lanes of two values (kv_tile.py). Rows of K and V must
be at least as long as a vector of packed lanes.

The number of splits follows the longest sequence of the batch, not the capacity of the cache. Each sequence is split
into equal parts, so work is the same for every thread whatever the lengths are.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.key_ranges import count_keys, slice_ranges
from lowering.attention.codegen.key_tiles import KeyTiles
from lowering.attention.codegen.scores import HIDDEN_BIAS

from ..elementwise.loops import split_among_threads
from ..matmul.dot_bf16 import import_dot, pack_vector
from ..primitives.vector import (
    LOG2_E,
    CpuFeatures,
    Register,
    allocate_workspace,
    convert,
    exp2,
    let,
    load,
    ramp_index,
    reduce_lanes,
    splat,
    splat_like,
    store,
    sum_vector_lanes,
    tanh,
)
from .attention_tiles import DecodeTiles
from .kv_form import uses_bf16_pairs
from .kv_tile import KeyValueTile, load_query
from .partial_results import PartialResults


def decode(bound: BoundAttention, tiles: DecodeTiles, cpu: CpuFeatures) -> None:
    """Emit the kernel into the PrimFunc that `bound` has opened.

    It serves any problem without a qk output, with S <= tiles.q_len. If the batch is ragged, batches with at most
    tiles.q_len rows are served, whatever S is.
    """
    p = bound.problem
    max_rows = tirx.min(T.int64(1) * bound.S, T.int64(tiles.q_len)) if p.is_ragged else T.int64(1) * bound.S
    rows = let(max_rows * p.group)
    heads = let(T.int64(1) * bound.B * p.kv_heads)
    splits = _number_of_splits(bound, tiles)
    partial = PartialResults(bound, tiles, cpu)

    def task(index: Expr) -> None:
        head, split = let(index % heads), let(index // heads)  # a thread gets the same splits of every head
        with bound.guard_row_count(let(head // p.kv_heads), 1, tiles.q_len):
            _Split(bound, tiles, cpu, head, rows, split, splits, partial).emit()

    work = heads * rows * bound.T * (p.head_dim + p.v_head_dim)
    with import_dot(uses_bf16_pairs(p, cpu, in_place=True)):
        split_among_threads(splits * heads, work, tiles.parallel_work, task)
    work = heads * rows * splits * len(partial.v_starts)
    split_among_threads(heads * rows, work, tiles.parallel_work, lambda row: partial.merge(let(row), rows, splits))


def _number_of_splits(bound: BoundAttention, tiles: DecodeTiles) -> Expr:
    """Return the number of splits of each sequence: the problem's, or such that the longest has `split` keys each."""
    if bound.problem.splits is not None:
        return T.int64(bound.problem.splits)
    longest = Register(T.int64(0))
    with T.serial(T.int64(1) * bound.B) as b, bound.guard_row_count(b, 1, tiles.q_len):
        keys = count_keys(bound.keys.compute_tile_ranges(b, T.int64(0), bound.S))
        longest.value = tirx.max(longest.value, keys)
    return let(tirx.max(tirx.min(tirx.ceildiv(longest.value, tiles.split), tiles.max_splits), 1))


class _Split:
    """The code for one split of the keys of one key/value head. Packed row r is query row r // G of its head r % G."""

    def __init__(
        self,
        bound: BoundAttention,
        tiles: DecodeTiles,
        cpu: CpuFeatures,
        head: Expr,
        rows: Expr,
        split: Expr,
        splits: Expr,
        partial: PartialResults,
    ) -> None:
        self.bound, self.problem, self.tiles, self.cpu = bound, bound.problem, tiles, cpu
        self.partial, self.head, self.split, self.splits = partial, head, split, splits
        p, self.acc = self.problem, self.problem.acc_dtype
        self.b, self.hk = let(head // p.kv_heads), let(head % p.kv_heads)
        self.max_rows, self.rows = rows, let(bound.rows(self.b) * p.group) if p.is_ragged else rows
        self.kv = KeyValueTile(bound, cpu, 0, tiles.kv, self.b, self.hk)
        self.Wk, self.Wv, self.vectors = self.kv.Wk, self.kv.Wv, self.kv.vectors
        self.chunks = len(self.kv.k_starts)
        max_rows = tiles.q_len * p.group
        self.memory = allocate_workspace(
            Q=(max_rows * self.chunks * self.Wk, self.acc),  # scale Q (packed lanes: Q): [row][vector][lane]
            S=(max_rows * tiles.kv, self.acc),  # S, then P: [row][key] (packed lanes: [row][pair of keys])
            O=(max_rows * self.vectors * self.Wv, self.acc),  # [row][vector][lane]
            m=(max_rows, self.acc),
            l=(max_rows * self.Wk, self.acc),  # a partial row sum for each lane
            alpha=(max_rows, self.acc),
            **self.kv.scratch,
        )
        self.Q, self.S, self.O = (self.memory[name] for name in "QSO")
        self.m, self.l, self.alpha = (self.memory[name] for name in ("m", "l", "alpha"))

    def emit(self) -> None:
        self.load_queries()
        self.initialize()
        bounds = self.bound.keys.compute_tile_ranges(self.b, T.int64(0), self.bound.S)
        ranges = [(let(lo), let(hi)) for lo, hi in bounds]
        total = let(count_keys(ranges))
        keys_of_split = let(tirx.ceildiv(tirx.ceildiv(total, self.splits), self.Wk) * self.Wk)
        start = let(tirx.min(self.split * keys_of_split, total))
        split_ranges = slice_ranges(ranges, start, let(tirx.min(start + keys_of_split, total)))
        self.key_tiles = KeyTiles(split_ranges, split_ranges, self.tiles.kv, let)
        with T.serial(self.key_tiles.count) as t:
            self.kv0 = let(self.key_tiles.first(t))
            self.keys = let(self.key_tiles.end(t) - self.kv0)
            if self.bound.scores.formula is None:
                self.attend(t)
            else:
                self.attend_if_visible(t)
        self.store_partial()

    def attend_if_visible(self, t: Expr) -> None:
        """Attend one tile of keys, unless the formula hides it from all rows."""
        rows = T.int64(0), T.int64(1) * self.bound.rows(self.b) - 1
        keys = self.kv0, self.kv0 + self.keys - 1
        h, group = self.hk * self.problem.group, self.problem.group
        _, highest = self.bound.scores.emit_mask_bounds(self.b, h, group, rows, keys)
        with T.If(highest <= tirx.const(HIDDEN_BIAS, self.acc)):
            with T.Then():
                T.evaluate(0)
            with T.Else():
                self.attend(t)

    def attend(self, t: Expr) -> None:
        """Attend one tile of keys."""
        self.kv.open(self.kv0, self.kv0 + self.keys, self.memory, self.next_tile(t))
        self.scores()
        self.softmax()
        self.accumulate()

    def next_tile(self, t: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the batch, head and first key of the tile that this thread likely reads `ahead` tiles after tile t."""
        p, count, later = self.problem, self.key_tiles.count, let(t + self.tiles.ahead)
        head = tirx.min(self.head + 1, self.bound.B * p.kv_heads - 1)
        head = let(tirx.Select(later >= count, head, self.head))
        start = self.key_tiles.first(let(tirx.Select(later >= count, tirx.min(later - count, count - 1), later)))
        return let(head // p.kv_heads), let(head % p.kv_heads), let(start)

    def head_and_row(self, r: Expr) -> tuple[Expr, Expr]:
        """Return the query head and query row of packed row r."""
        return self.hk * self.problem.group + r % self.problem.group, r // self.problem.group

    def load_queries(self) -> None:
        """Compute Q := scale Q, or packed lanes of Q."""
        factor = self.kv.tensor_scale("k")
        scale = splat(self.bound.scores.scale * (1.0 if factor is None else factor), self.Wk, self.acc)

        def vector(h: Expr, i: Expr, d: int) -> Expr:
            if not self.kv.pairs:
                return load_query(self.bound, self.cpu, (self.b, h, i), d, self.Wk) * scale
            buffer, indices = self.bound.addressing.at("q", self.b, h, i, T.int64(2 * d))
            return pack_vector(load(buffer, 2 * self.Wk, *indices))

        with T.serial(self.rows) as r:
            h, i = (let(x) for x in self.head_and_row(r))
            for n, d in enumerate(self.kv.k_starts):
                store(self.Q, vector(h, i, d), (r * self.chunks + n) * self.Wk)

    def initialize(self) -> None:
        with T.serial(self.rows) as r:
            T.buffer_store(self.m, tirx.const(float("-inf"), self.acc), [r])
            store(self.l, splat(0.0, self.Wk, self.acc), r * self.Wk)
            for n in range(self.vectors):
                store(self.O, splat(0.0, self.Wv, self.acc), (r * self.vectors + n) * self.Wv)

    def scores(self) -> None:
        """Emit S = Q K^T in register tiles of W pairs: first rows that share the loads of a key, then single rows."""
        W, kv = self.Wk, self.tiles.kv
        height = max(1, W // 4)
        with T.serial(self.keys // W) as block:
            if height > 1:
                with T.serial(height) as key_block, T.serial(self.rows // height) as rows:
                    j, r = let(block * W + key_block * (W // height)), let(rows * height)
                    self.emit_score_tile([r + n for n in range(height)], [j + n for n in range(W // height)])
            if self.problem.group % height or height == 1:
                with T.serial(self.rows % height if height > 1 else self.rows) as r:
                    j = let(block * W)
                    row = let(self.rows // height * height + r) if height > 1 else r
                    self.emit_score_tile([row], [j + n for n in range(W)])
        with T.serial(self.keys % W) as k, T.serial(self.rows) as r:
            j = let(self.keys // W * W + k)
            ((last,),) = self.accumulate_scores([r], [j])
            T.buffer_store(self.S, reduce_lanes(last.value, lambda x, y: x + y), [r * kv + j])

    def emit_score_tile(self, rows: list[Expr], keys: list[Expr]) -> None:
        """Emit S of as many pairs as a vector has lanes."""
        accumulators = self.accumulate_scores(rows, keys)
        totals = let(sum_vector_lanes([x.value for row in accumulators for x in row]))
        for n, r in enumerate(rows):
            lanes = list(range(n * len(keys), (n + 1) * len(keys)))
            s = totals if len(rows) == 1 else tirx.Shuffle([totals], lanes)
            store(self.S, s, r * self.tiles.kv + keys[0])

    def accumulate_scores(self, rows: list[Expr], keys: list[Expr]) -> list[list[Register]]:
        """Return, for each row and key, a vector whose lanes add up to Q_r . K_j."""
        W, full = self.Wk, self.kv.D // self.Wk
        s = [[Register(splat(0.0, W, self.acc)) for _ in keys] for _ in rows]
        row_offsets = [self.kv.row_offset("k", j) for j in keys]

        def add(n: Expr | int, d: Expr | int, is_new: Expr | None) -> None:
            def select_new(x: Expr) -> Expr:
                return x if is_new is None else let(tirx.Select(is_new, x, splat_like(0.0, x)))

            for j in keys:
                self.kv.prefetch("k", j, d)
            k = [select_new(self.kv.k(j, d, W, row_offset)) for j, row_offset in zip(keys, row_offsets)]
            k = [T.bind(key) for key in k] if len(rows) > 1 else k
            for r, accumulators in zip(rows, s):
                q = T.bind(select_new(load(self.Q, W, (r * self.chunks + n) * W)))
                for x, key in zip(accumulators, k):
                    x.value = self.kv.add_matmul(x.value, q, key, leave_out=False)

        with T.serial(full) as n:
            add(n, let(n.astype("int64") * W), None)
        if full < self.chunks:  # the last vector overlaps the previous one: each element counts once
            d = self.kv.k_starts[-1]
            add(full, T.int64(d), ramp_index(T.int32(d), W) >= splat(full * W, W, "int32"))
        return s

    def softmax(self) -> None:
        """Emit m' = max(m, max S), P = exp(S - m'), alpha = exp(m - m'), l = alpha l + P, m = m'."""
        W, kv = self.Wk, self.tiles.kv
        blocks = let(tirx.ceildiv(self.keys, W))
        log2_e = splat(LOG2_E, W, self.acc)
        with T.serial(self.rows) as r:
            h, i = (let(x) for x in self.head_and_row(r))
            m_old = T.bind(self.m[r])
            maximum = Register(splat(m_old, W, self.acc))
            with T.serial(blocks) as block:
                position = let(r * kv + block * W)
                s = self.finish_scores(load(self.S, W, position), h, i, block * W)
                store(self.S, s, position)
                maximum.value = tirx.max(maximum.value, s)
            m = let(reduce_lanes(maximum.value, tirx.max))
            # No key so far: m' = -inf, and S - m' would be NaN.
            shift = let(tirx.Select(m == tirx.const(float("-inf"), self.acc), tirx.const(0, self.acc), m))
            alpha = exp2((m_old - shift) * tirx.const(LOG2_E, self.acc))
            l = Register(load(self.l, W, r * W) * splat(alpha, W, self.acc))
            with T.serial(blocks) as block:
                position = let(r * kv + block * W)
                p = exp2((load(self.S, W, position) - splat(shift, W, self.acc)) * log2_e)
                if self.kv.pairs:
                    store(self.S, pack_vector(convert(p, "bfloat16", self.cpu)), let(r * kv + block * (W // 2)))
                else:
                    store(self.S, p, position)
                l.value += p
            store(self.l, l.value, r * W)
            T.buffer_store(self.m, m, [r])
            T.buffer_store(self.alpha, alpha, [r])

    def finish_scores(self, s: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        """Return the scores s of row i with the Wk keys from kv0 + j, capped and biased; -inf where invisible."""
        W = self.Wk
        scaled = s * splat(self.bound.scores.scale, W, self.acc) if self.kv.pairs else s
        changed = self.bound.scores.apply_score_mod(
            let(scaled), self.b, h, i, ramp_index(let(self.kv0 + j), W), tanh=tanh
        )
        result = Register(changed)

        def mask(inside: bool) -> None:
            key = ramp_index(let(self.kv0 + j), W)
            bias = None
            if self.bound.scores.has_mask:
                bias = Register(self.bound.scores.compute_bias(self.b, h, i, key, inside=inside)).value
            visible = self.bound.is_visible(self.b, h, i, key, inside=inside, bias=bias)
            if not inside:  # a key of the next range may follow
                visible = tirx.all(visible, key < splat(self.kv0 + self.keys, W, "int64"))
            s = result.value if bias is None else result.value + bias
            result.value = tirx.Select(visible, s, splat(float("-inf"), W, self.acc))

        with T.If(j + W <= self.keys):
            with T.Then():
                mask(inside=True)
            with T.Else():
                mask(inside=False)
        return T.bind(result.value)

    def accumulate(self) -> None:
        """Emit O = alpha O + P V, for register tiles of `pv_rows` rows x `pv_vectors` vectors, then single rows."""
        height, rows = self.tiles.pv_rows, self.rows
        with T.serial(rows // height) as block:
            self.add_pv([let(block * height + n) for n in range(height)])
        if self.problem.group % height:
            with T.serial(rows % height) as r:
                self.add_pv([let(rows // height * height + r)])

    def add_pv(self, rows: list[Expr]) -> None:
        """Emit O = alpha O + P V of these rows, at most `pv_vectors` vectors at a time."""
        # If rows see different keys, 0 * NaN = NaN would leak an invisible value.
        leave_out = self.bound.has_row_dependent_keys
        groups = -(-self.vectors // self.tiles.pv_vectors)
        for n in range(groups):
            columns = range(n * self.vectors // groups, (n + 1) * self.vectors // groups)
            state = self.O, self.alpha
            self.kv.add_pv(rows, columns, self.keys, state, lambda r, j: self.S[r * self.tiles.kv + j], leave_out)

    def store_partial(self) -> None:
        """Store (m, l, O) in the partial results."""
        to = self.partial
        with T.serial(self.rows) as r:
            index = let((self.head * self.max_rows + r) * self.splits + self.split)
            T.buffer_store(to.m, self.m[r], [index])
            l = reduce_lanes(load(self.l, self.Wk, r * self.Wk), lambda x, y: x + y)
            T.buffer_store(to.l, l, [index])
            o = [load(self.O, self.Wv, (r * self.vectors + n) * self.Wv) for n in range(self.vectors)]
            for n, vector in enumerate(self.kv.restore_order(self.kv.apply_factor(o))):
                store(to.O, vector, index * to.stride + n * self.Wv)
