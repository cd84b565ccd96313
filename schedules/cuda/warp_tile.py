"""What a warp has in registers of an attention on tensor cores: O, m and l of 16 query rows, and their S with a tile.

Thread t of the warp holds rows t / 4 and t / 4 + 8. P leaves the products of Q K^T in the layout in which those of P V
take it, so that S becomes P where it is.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound

from . import ptx
from .ptx import LOG2_E, fixed, put, registers, unrolled
from .shared_tile import SharedTile
from .tiles import padded

ROWS = 16


class WarpTile:
    """The online softmax of 16 query rows of batch b over tiles of so many keys.

    row_of(r) gives query head and query row of the thread's row r, 0 or 1, within bounds; keys from `stop` on are left
    out.
    """

    def __init__(
        self, bound: Bound, b: Expr, lane: Expr, keys: int, row_of: Callable[[int], tuple[Expr, Expr]], stop: Expr
    ) -> None:
        self.bound, self.problem = bound, bound.problem
        self.b, self.lane, self.keys = b, lane, keys
        p = self.problem
        self.rows = [row_of(r) for r in range(2)]
        self.d_steps, self.s_columns, self.o_columns = padded(p.head_dim) // 16, keys // 8, p.v_head_dim // 8
        self.S, self.O = (registers(n * 4, "float32") for n in (self.s_columns, self.o_columns))
        self.m, self.l = (registers(2, "float32") for _ in range(2))
        self.q, self.kv, self.p = registers(4, "uint32"), registers(4, "uint32"), registers(keys // 4, "uint32")
        self.is_biased = p.mask is not None and p.mask.dtype != "bool"
        # Whether S stays Q K^T, whose maximum scales with it.
        self.is_raw = p.softcap == 0 and p.scale > 0 and not self.is_biased
        self.unit = p.scale if self.is_raw else 1.0  # what a unit of S and m is worth
        self.ends = []  # which keys a row sees before the mask
        for _, i in self.rows:
            lo, hi = bound.keys_of(b, i)
            self.ends.append((fixed(lo.astype("int32")), fixed(tirx.min(hi.astype("int32"), stop))))

    def initialise(self) -> None:
        """m, l, O before the first key."""
        for r in range(2):
            put(self.m, r, T.float32(float("-inf")))
            put(self.l, r, T.float32(0))
        with unrolled(self.o_columns * 4) as n:
            put(self.O, n, T.float32(0))

    def attend(self, q: SharedTile, k: SharedTile, v: SharedTile, kv0: Expr, masked: Expr) -> None:
        """The keys from kv0 on, of which some row may not see some if `masked`."""
        self.scores(q, k)
        self.logits(kv0, masked)
        self.softmax()
        self.accumulate(v)

    def scores(self, q: SharedTile, k: SharedTile) -> None:
        """S = Q K_j^T"""
        q_at = q.reader(self.lane % 16, self.lane // 16)
        k_at = k.reader(self.lane // 16 * 8 + self.lane % 8, self.lane // 8 % 2)
        with unrolled(self.s_columns * 4) as n:
            put(self.S, n, T.float32(0))
        with unrolled(self.d_steps) as step:
            ptx.load_matrices([self.q[x] for x in range(4)], q_at(0, step * 2))
            with unrolled(self.s_columns // 2) as pair:
                ptx.load_matrices([self.kv[x] for x in range(4)], k_at(pair * 16, step * 2))
                for x in range(2):
                    s = [self.S[(pair * 2 + x) * 4 + y] for y in range(4)]
                    a, b = [self.q[y] for y in range(4)], [self.kv[2 * x], self.kv[2 * x + 1]]
                    ptx.multiply_add(self.problem.dtype, s, a, b)

    def logits(self, kv0: Expr, masked: Expr) -> None:
        """S := the logits, -inf where a row does not see a key."""
        if not self.is_raw:
            scale = tirx.const(self.problem.scale, "float32")
            with unrolled(self.s_columns * 4) as n:
                put(self.S, n, fixed(self.bound.capped(fixed(self.S[n] * scale), ptx.tanh)))
        with T.If(masked), T.Then():
            for r in range(2):
                self.mask_row(r, fixed(kv0 + self.lane % 4 * 2))

    def mask_row(self, r: int, first: Expr) -> None:
        """S of the thread's row r, whose first key is `first`."""
        (h, i), (lo, hi) = self.rows[r], self.ends[r]
        with unrolled(self.s_columns) as column:
            for x in range(2):
                at, j = column * 4 + r * 2 + x, first + column * 8 + x
                s, visible = self.S[at], [j >= lo, j < hi]
                if self.problem.mask is not None:
                    inside = fixed(tirx.max(tirx.min(j, hi - 1), 0))
                    bias = fixed(self.bound.additive(self.b, h, i, inside, inside=True))
                    visible.append(bias > T.float32(float("-inf")))
                    s = s + bias if self.is_biased else s
                put(self.S, at, tirx.Select(tirx.all(*visible), s, T.float32(float("-inf"))))

    def softmax(self) -> None:
        """m' = max(m, rowmax S), P = exp(S - m'), alpha = exp(m - m'), l = alpha l + rowsum P, m = m', O = alpha O.

        A thread adds up only what it holds of a row: l is to be reduced over quads in the end.
        """
        for r in range(2):
            m = registers(1, "float32")
            put(m, 0, self.m[r])

            def raise_m(at: Expr, m: tirx.Buffer = m) -> None:
                put(m, 0, tirx.max(m[0], self.S[at]))

            self.each_score(r, raise_m)
            put(m, 0, ptx.reduce_quad(m[0], tirx.max))
            # Nothing seen so far: m' = -inf, and S - m' would be NaN.
            shift = fixed(tirx.Select(tirx.EQ(m[0], T.float32(float("-inf"))), T.float32(0), m[0]))
            alpha = fixed(self.exponential(self.m[r], shift))
            put(self.m, r, m[0])
            put(self.l, r, self.l[r] * alpha)

            def weigh(at: Expr, r: int = r, shift: Expr = shift) -> None:
                put(self.S, at, self.exponential(self.S[at], shift))
                put(self.l, r, self.l[r] + self.S[at])

            self.each_score(r, weigh)
            with unrolled(self.o_columns) as column:
                for x in range(2):
                    put(self.O, column * 4 + r * 2 + x, self.O[column * 4 + r * 2 + x] * alpha)
        with unrolled(self.keys // 4) as n:
            ptx.pack(self.problem.dtype, self.p[n], self.S[n * 2], self.S[n * 2 + 1])

    def exponential(self, x: Expr, shift: Expr) -> Expr:
        """exp(x - shift). The difference comes first: the lowest number is a legal logit, log2(e) times it is none."""
        return ptx.exp2((x - shift) * tirx.const(self.unit * LOG2_E, "float32"))

    def each_score(self, r: int, body: Callable[[Expr], None]) -> None:
        """body(index in S) for the elements of the thread's row r."""
        with unrolled(self.s_columns) as column:
            for x in range(2):
                body(column * 4 + r * 2 + x)

    def accumulate(self, v: SharedTile) -> None:
        """O += P V_j"""
        v_at = v.reader(self.lane % 16, self.lane // 16)
        with unrolled(self.keys // 16) as step:
            with unrolled(self.o_columns // 2) as pair:
                ptx.load_matrices([self.kv[x] for x in range(4)], v_at(step * 16, pair * 2), transposed=True)
                self.add_products(step, pair * 2, 2)
            if self.o_columns % 2:
                last = v_at(step * 16, self.o_columns - 1)
                ptx.load_matrices([self.kv[x] for x in range(2)], last, transposed=True)
                self.add_products(step, self.o_columns - 1, 1)

    def add_products(self, step: Expr, column: Expr | int, count: int) -> None:
        """The products of the fragments of P with those of V at so many columns of 8 of O."""
        for x in range(count):
            o = [self.O[(column + x) * 4 + y] for y in range(4)]
            p = [self.p[step * 4 + y] for y in range(4)]
            ptx.multiply_add(self.problem.dtype, o, p, [self.kv[2 * x], self.kv[2 * x + 1]])
