"""Attention for many query rows: FlashAttention-2, forward (Dao, arXiv:2307.08691, Algorithm 1), in CPU registers.

    for each tile of B_r query rows, in parallel:            Q_i [B_r, D]
        m = -inf, l = 0, O = 0                               [B_r], [B_r], [B_r, Dv]; with a sink, m = sink, l = 1
        for each tile of B_c keys that some row sees:        K_j [B_c, D], V_j [B_c, Dv]
            S   = Q_i K_j^T                                  [B_r, B_c], stored transposed
            m'  = max(m, rowmax S)
            P   = exp(S - m')                                in the memory of S
            l   = exp(m - m') l + rowsum P
            O   = diag(exp(m - m')) O + P V_j,  m = m'
        Y_i = diag(1 / l) O                                  0 where l = 0: no key was visible

S is stored transposed, one vector of W query rows per key. K is broadcast from memory, row maxima and row sums need no
reduction across lanes, and P is broadcast for P V, whose vectors run along Dv. A tile holds rows of all G query heads
of one key/value head, row r being query row r // G of head r % G: they share K and V, and few query rows fill it.

A tile that every row sees in full runs without mask code. In any other tile invisible scores are replaced by -inf,
never added to, as they may be NaN. If V is not finite, keys with P = 0 are skipped in P V, as 0 * NaN = NaN.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.key_tiles import KeyTiles
from lowering.attention.codegen.scores import HIDDEN_BIAS
from lowering.attention.expr.interval import Interval

from ..elementwise.loops import split_among_threads
from ..matmul.dot_bf16 import import_dot, pack_rounded
from ..primitives.vector import (
    LOG2_E,
    CpuFeatures,
    Register,
    exp2,
    let,
    load,
    prefetch,
    reduce_lanes,
    reduce_registers,
    reinterpret,
    splat,
    splat_like,
    store,
    tanh,
    transpose,
)
from .attention_tiles import PrefillTiles
from .kv_form import uses_bf16_pairs
from .query_rows import QueryRows

_PARALLEL_WORK = 1 << 16


def prefill(bound: BoundAttention, tiles: PrefillTiles, cpu: CpuFeatures, more_than: int = 0) -> None:
    """Emit the kernel into the PrimFunc that `bound` has opened, for any problem without a qk output.

    If the batch is ragged, only batches with more than `more_than` rows are served.
    """
    heads, group = bound.problem.kv_heads, bound.problem.group
    row_count = let(T.int64(1) * bound.S * group)
    count = let(tirx.max(tirx.ceildiv(row_count, tiles.q), T.int64(1)))

    def task(index: Expr) -> None:
        b, hk, position = let(index // (heads * count)), let(index // count % heads), let(index % count)
        # Order: first, last, second, last but one. Late rows cost more under a causal mask, and threads take neighbors.
        tile = T.bind(tirx.Select(position % 2 == 0, position // 2, count - 1 - position // 2))
        r0 = let(tile * tiles.q)
        if not bound.problem.is_ragged:
            _QueryTile(bound, tiles, cpu, b, hk, r0, row_count).emit()
            return
        with bound.guard_row_count(b, more_than + 1, None), bound.guard_row(b, let(r0 // group)):
            _QueryTile(bound, tiles, cpu, b, hk, r0, let(bound.rows(b) * group)).emit()

    all_heads = T.int64(heads) * bound.B
    work = all_heads * row_count * bound.T * (bound.problem.head_dim + bound.problem.v_head_dim)
    with import_dot(uses_bf16_pairs(bound.problem, cpu)):
        split_among_threads(all_heads * count, work, _PARALLEL_WORK, task)


class _QueryTile(QueryRows):
    """The code for one tile: packed rows [r0, r0 + B_r) of key/value head hk in batch b."""

    def emit(self) -> None:
        self.load_queries()
        is_nan_safe = tirx.const(0, "int32")
        if not self.bound.has_row_dependent_keys:
            self.emit_pass(is_nan_safe)
        else:
            needs_retry = Register(tirx.const(1, "int32"))
            with T.serial(2) as iteration, T.If(needs_retry.value != 0), T.Then():
                is_nan_safe = let(iteration.astype("int32"))
                skipped = self.emit_pass(is_nan_safe)
                needs_retry.value = tirx.Select(
                    tirx.any(self.has_lost_rows(skipped), self.is_not_finite()), 1 - is_nan_safe, 0
                )
        self.store_y()

    def has_lost_rows(self, skipped: Register) -> Expr:
        """Return whether skipped keys matter: if finite masks hide all keys of a row, these have equal weights."""
        worst = Register(tirx.const(0, self.acc))
        with T.serial(self.here) as r:
            worst.value = tirx.min(worst.value, self.m[r])
        return let(tirx.all(skipped.value != 0, worst.value <= tirx.const(HIDDEN_BIAS / 2, self.acc)))

    def is_not_finite(self) -> Expr:
        """Return whether O holds a NaN or an infinity, perhaps from an invisible value, times P = 0."""
        integer, infinity = {"float32": ("int32", 0x7F800000), "float64": ("int64", 0x7FF0000000000000)}[self.acc]
        largest = Register(splat(0, self.Wv, integer))
        with T.serial(self.here * self.vectors) as n:
            bits = reinterpret(load(self.O, self.Wv, n * self.Wv), integer)
            magnitude = T.bind(T.bitwise_and(bits, splat_like(2 ** (32 if integer == "int32" else 64) // 2 - 1, bits)))
            largest.value = T.max(largest.value, magnitude)
        return let(reduce_lanes(largest.value, lambda x, y: T.max(x, y)) >= tirx.const(infinity, integer))

    def emit_pass(self, is_nan_safe: Expr) -> Register:
        """Compute O, m and l of the tile; return 1 if keys hidden by finite masks were skipped (weight 0 in most rows).

        With `is_nan_safe` it skips no such keys, and reads no value with weight 0, which may be infinite.
        """
        self.is_nan_safe = is_nan_safe
        self.initialize()
        hidden = (tirx.const(x, self.acc) for x in (HIDDEN_BIAS, float("-inf")))
        threshold = let(tirx.Select(is_nan_safe == 0, *hidden))
        skipped = Register(tirx.const(0, "int32"))
        i0, i1 = self.r0 // self.problem.group, (self.r0 + self.here - 1) // self.problem.group + 1
        keys = self.bound.keys
        tiles = KeyTiles(
            keys.compute_tile_ranges(self.b, i0, i1), keys.compute_common_ranges(self.b, i0, i1), self.tiles.kv, let
        )
        with T.serial(tiles.count) as t:
            self.kv0, self.end = let(tiles.first(t)), let(tiles.end(t))
            self.range = let(tiles.number(t) * self.tiles.q)  # the offset of the range in the rows' `lo` and `hi`
            full = tiles.full(t)
            if not self.bound.scores.has_mask:
                self.attend(full)
            else:
                self.attend_under_mask((i0, i1 - 1), let(full), threshold, skipped)
        return skipped

    def attend_under_mask(self, rows: Interval, full: Expr, threshold: Expr, skipped: Register) -> None:
        lowest, highest = self.mask_of_tile(rows, full, threshold)
        with T.If(highest <= threshold):
            with T.Then():
                finite = highest > tirx.const(float("-inf"), self.acc)
                skipped.value = tirx.Select(finite, tirx.const(1, "int32"), skipped.value)
            with T.Else():
                zero = tirx.const(0, self.acc)
                self.attend(tirx.all(full, lowest == zero, highest == zero))

    def mask_of_tile(self, rows: Interval, full: Expr, threshold: Expr) -> tuple[Expr, Expr]:
        """Return bounds of the mask in the tile; if they decide nothing, evaluate it into M first."""
        if self.bound.scores.formula is None:
            return self.load_mask()
        h, group = self.hk * self.problem.group, self.problem.group
        ends = self.bound.scores.emit_mask_bounds(self.b, h, group, rows, (self.kv0, self.end - 1))
        lowest, highest = Register(ends[0]), Register(ends[1])
        zero = tirx.const(0, self.acc)
        with T.If(tirx.any(highest.value <= threshold, tirx.all(full, lowest.value == zero, highest.value == zero))):
            with T.Then():
                T.evaluate(0)
            with T.Else():
                lowest.value, highest.value = self.load_mask()
        return lowest.value, highest.value

    def attend(self, full: Expr) -> None:
        self.kv.open(self.kv0, self.end, self.memory)
        with T.If(full):
            with T.Then():
                self.attend_full()
            with T.Else():
                self.attend_masked()

    def attend_full(self) -> None:
        """Emit a tile of B_c keys that every row sees."""
        self.scores(self.tiles.kv)
        self.softmax(self.tiles.kv)
        self.accumulate(self.tiles.kv)

    def attend_masked(self) -> None:
        """Emit a tile that some row does not see in full, or that is shorter than B_c."""
        keys = let(self.end - self.kv0)
        steps = let(tirx.ceildiv(keys, self.tiles.qk_keys))
        self.scores(steps * self.tiles.qk_keys, masked=True)
        self.softmax(steps * self.tiles.qk_keys)
        if not self.bound.has_row_dependent_keys:
            self.accumulate(keys)
            return
        with T.If(self.is_nan_safe == 0):
            with T.Then():
                self.accumulate(keys)
            with T.Else():
                self.accumulate(keys, leave_out=True)

    # The mask tensor.

    def load_mask(self) -> tuple[Expr, Expr]:
        """Load the mask transposed into M, additive with -inf where it hides a key; return its lowest and highest
        value.

        It is read along the keys, in memory order. If all rows share a mask, M holds one value per key.
        """
        W, keys = self.W, self.end - self.kv0
        lowest = Register(splat(float("inf"), W, self.acc))
        highest = Register(splat(float("-inf"), W, self.acc))
        row_blocks = tirx.ceildiv(self.here, W) if self.bound.scores.mask_per_row else 1

        def block(j: Expr, rows: list[tuple[Expr, Expr, Expr]], inside: bool) -> list[Expr]:
            vectors = [self.mask_vector(*row, self.kv0 + j, inside) for row in rows]
            for x in vectors:
                # NaN hides nothing, and must not make the maximum forget earlier values.
                infinity = splat(float("inf"), W, self.acc)
                number = tirx.Select(x <= infinity, x, infinity)
                lowest.value, highest.value = T.min(lowest.value, x), T.max(highest.value, number)
            return vectors

        def load_block(j: Expr, r: Expr, inside: bool) -> None:
            if not self.bound.scores.mask_per_row:
                store(self.memory["M"], block(j, [(r, *self.head_and_row(self.r0))], inside)[0], j)
                return
            rows = []
            for k in range(W):
                row = let(tirx.min(r + k, self.here - 1))
                rows.append((row, *self.head_and_row(self.r0 + row)))
            for k, x in enumerate(transpose(block(j, rows, inside))):
                store(self.memory["M"], x, (j + k) * self.tiles.q + r)

        with T.serial(row_blocks) as r_block, T.serial(tirx.ceildiv(keys, W)) as j_block:
            j, r = let(j_block * W), let(r_block * W)
            with T.If(j + W <= keys):
                with T.Then():
                    load_block(j, r, inside=True)
                with T.Else():
                    load_block(j, r, inside=False)
        lowest, highest = reduce_lanes(lowest.value, tirx.min), reduce_lanes(highest.value, tirx.max)
        return lowest, highest

    def mask_vector(self, r: Expr, h: Expr, i: Expr, j: Expr, inside: bool) -> Expr:
        """Return the additive mask of row r of the tile for the W keys from j; inside promises that all are below
        `end`.

        If each row has its own mask, the window is folded into it.
        """
        keys = T.ramp(j, 1, self.W)
        hidden = splat(float("-inf"), self.W, self.acc)
        bias = self.bound.scores.compute_bias(self.b, h, i, keys, inside=inside)
        if self.bound.scores.formula is None:  # rows are far apart, and the hardware prefetcher follows few streams
            buffer, indices = self.bound.scores.mask_at(self.b, h, i, j + self.tiles.kv, inside=True)
            prefetch(buffer, *indices)
        if not inside:
            bias = tirx.Select(keys < splat_like(self.end, keys), bias, hidden)
        if self.bound.keys.is_row_dependent and self.bound.scores.mask_per_row:
            lo, hi = (splat_like(self.memory[name][self.range + r].astype("int64"), keys) for name in ("lo", "hi"))
            bias = tirx.Select(tirx.all(keys >= lo, keys < hi), bias, hidden)
        return Register(bias).value

    # The three steps.

    def scores(self, keys: Expr | int, masked: bool = False) -> None:
        """Emit S^T = K Q^T in register tiles of qk_keys x qk_vectors, and m' = max(m, rowmax S).

        S gets its soft cap and, if masked, -inf where a key is invisible; the last tile may reach past the last key.
        """
        t, W, D = self.tiles, self.W, self.kv.D
        m_new, scale = self.memory["m_new"], self.bound.scores.scale
        with T.serial(keys // t.qk_keys) as block, T.serial(self.panels) as panel:
            j = [T.bind(block * t.qk_keys + k) for k in range(t.qk_keys)]
            row = [let(tirx.min(x, self.end - 1 - self.kv0)) for x in j] if masked else j
            s = [[Register(splat(0.0, W, self.acc)) for _ in range(t.qk_vectors)] for _ in j]
            with T.serial(D) as d:
                q = [T.bind(load(self.Q, W, (panel * D + d) * self.panel + c * W)) for c in range(t.qk_vectors)]
                for k in range(t.qk_keys):
                    key = T.bind(splat(self.kv.k(row[k], d), W, self.acc))
                    for c in range(t.qk_vectors):
                        s[k][c].value = self.kv.add_matmul(s[k][c].value, key, q[c], leave_out=False)
            for c in range(t.qk_vectors):
                r = let(panel * self.panel + c * W)
                largest = []
                for k in range(t.qk_keys):
                    scaled = s[k][c].value * splat(scale, W, self.acc) if self.kv.pairs else s[k][c].value
                    position = self.b, *self.heads_and_rows(r), self.kv0 + j[k]
                    x = T.bind(self.bound.scores.apply_score_mod(let(scaled), *position, tanh=tanh))
                    largest.append(Register(self.apply_mask(x, r, j[k]) if masked else x))
                    store(self.S, largest[-1].value, j[k] * t.q + r)
                store(m_new, T.max(load(m_new, W, r), reduce_registers(tirx.max, largest)), r)

    def softmax(self, keys: Expr | int) -> None:
        """Emit P = exp(S - m'), alpha = exp(m - m'), l = alpha l + rowsum P, m = m'."""
        W, log2_e = self.W, splat(LOG2_E, self.W, self.acc)
        with T.serial(self.panels * self.tiles.qk_vectors) as v:
            r = T.bind(v * W)
            m_old, m_new = (T.bind(load(self.memory[name], W, r)) for name in ("m", "m_new"))
            # No key so far: m' = -inf, and S - m' would be NaN.
            shift = T.bind(tirx.Select(m_new == splat_like(float("-inf"), m_new), splat_like(0.0, m_new), m_new))
            alpha = exp2((m_old - shift) * log2_e)
            l = [Register(splat_like(0.0, m_old)) for _ in range(self.tiles.chains)]
            with T.serial(keys // self.tiles.chains) as block:
                p = []
                for chain in range(self.tiles.chains):
                    j = T.bind(block * self.tiles.chains + chain)
                    p.append(exp2((load(self.S, W, j * self.tiles.q + r) - shift) * log2_e))
                    l[chain].value += p[-1]
                    if not self.kv.pairs:
                        store(self.S, p[-1], j * self.tiles.q + r)
                for n in range(0, self.tiles.chains if self.kv.pairs else 0, 2):
                    store(
                        self.S,
                        pack_rounded(p[n], p[n + 1]),
                        (block * (self.tiles.chains // 2) + n // 2) * self.tiles.q + r,
                    )
            store(self.l, load(self.l, W, r) * alpha + reduce_registers(lambda x, y: x + y, l), r)
            store(self.m, m_new, r)
            store(self.alpha, alpha, r)

    def apply_mask(self, s: Expr, r: Expr, j: Expr) -> Expr:
        """Return s, or -inf where key kv0 + j is invisible to its row, for the vector at row r of the tile."""
        visible = []
        if not self.bound.scores.has_mask or (self.bound.keys.is_row_dependent and not self.bound.scores.mask_per_row):
            key = splat((self.kv0 + j).astype("int32"), self.W, "int32")
            lo, hi = (load(self.memory[name], self.W, self.range + r) for name in ("lo", "hi"))
            visible += [key >= lo, key < hi]
        hidden = splat_like(float("-inf"), s)
        if self.bound.scores.has_mask:
            M = self.memory["M"]
            per_row = self.bound.scores.mask_per_row
            bias = T.bind(load(M, self.W, j * self.tiles.q + r) if per_row else splat(M[j], self.W, self.acc))
            visible.append(bias > hidden)
            s = s + bias
        return tirx.Select(tirx.all(*visible), s, hidden)

    def accumulate(self, keys: Expr | int, leave_out: bool = False) -> None:
        """Emit O = diag(alpha) O + P V. leave_out skips pairs with P = 0, whatever V holds."""
        t, vectors = self.tiles, self.vectors
        groups = -(-vectors // t.pv_vectors)
        for index in range(groups):
            columns = range(index * vectors // groups, (index + 1) * vectors // groups)
            with T.serial(tirx.ceildiv(self.here, t.pv_rows)) as block:
                rows = [T.bind(block * t.pv_rows + k) for k in range(t.pv_rows)]
                self.kv.add_pv(rows, columns, keys, (self.O, self.alpha), lambda r, j: self.S[j * t.q + r], leave_out)
