"""Softmax in the registers of tensor-core matmuls.

The accumulator of a matmul of 16 rows (what each warp holds of m64nN of wgmma) lies in registers in groups of 8
columns: with g = lane // 4 and t = lane % 4, a thread has rows g and g + 8 and, in group n, columns 8 n + 2 t and
8 n + 2 t + 1. Four registers per group: element 4 n + 2 r + x is row g + 8 r, column 8 n + 2 t + x. The four threads of
a quad share two rows, so row maxima and sums are two shuffles away.

Packed in 16 bits, two groups are the operand A of the next matmul: P needs no shuffle and no memory.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.keys import Range

from .mask_words import MaskWords, Span
from .ptx import LOG2_E, exp2, int32, let, pack, put, reciprocal, reduce_quad, registers, tanh

ROWS = 2  # of a thread, in one accumulator
AT_ONCE = 4  # columns for which a mask is computed, which divide those of a thread


class OnlineSoftmax:
    """m, l and what masks ask for, of the two rows that a thread has of S [16, B_c]; see the module's text.

    `rows` are query head and query row of the thread's rows, in int32; rows behind the last one are legal. With `split`
    a sink is left to others. Scores are kept as they come from the matmul where nothing but the scale happens to them:
    `unit` makes exponents of base 2 of them.
    """

    def __init__(
        self,
        bound: Bound,
        b: Expr,
        rows: tuple[tuple[Expr, Expr], tuple[Expr, Expr]],
        lane: Expr,
        keys: int,
        split: Expr | bool = False,
    ) -> None:
        self.bound, self.problem, self.b, self.rows, self.keys = bound, bound.problem, b, rows, keys
        self.column = let(lane % 4 * 2)
        self.biased = bound.scores.has_bias
        self.lowest = self.biased or self.problem.score is not None  # a score may be the lowest number
        scale = self.problem.scale or 0.0  # that is known
        factor = bound.addressing.factor("k")
        self.scale = bound.scores.scale if factor is None else let(bound.scores.scale * factor)
        self.raw = not bound.scores.changes and not self.biased and scale > 0 and factor is None
        self.unit = _f32((scale if self.raw else 1.0) * LOG2_E)
        self.m, self.l, self.alpha = (registers(ROWS, "float32") for _ in range(3))
        self.split = split

    def start(self) -> None:
        """m and l before the first key."""
        for r, (h, _) in enumerate(self.rows):
            m, l = self.bound.scores.before_keys(h)
            if self.problem.sink:
                m, l = (tirx.Select(self.split, n, x) for n, x in ((_f32(float("-inf")), m), (_f32(0), l)))
                m = m / _f32(self.problem.scale or 1.0) if self.raw else m
            put(self.m, r, m)
            put(self.l, r, tirx.Select(tirx.EQ(self.column, 0), l, _f32(0)))  # a sink counts once in a quad

    def step(
        self,
        S: tirx.Buffer,
        kv0: Expr,
        full: Expr,
        number: Expr,
        words: MaskWords | None,
        stop: Expr | None = None,
    ) -> None:
        """S := P = exp(S - m'), alpha = exp(m - m'), l = alpha l + rowsum P, m = m', for the keys from kv0, which is in
        the row's range of that number; keys from `stop` on are left to others. words is what `ask` gave for these keys.

        l is the sum over the thread's own columns.
        """
        if not self.raw:
            for r, (h, i) in enumerate(self.rows):
                with T.unroll(self.keys // 4) as n:
                    at, key = _element(n, r), kv0 + self.column + (n // 2 * 8 + n % 2)
                    s = let(S[at] * self.scale)
                    put(S, at, self.bound.scores.changed(s, self.b, h, i, key, tanh=tanh))
        if words is not None:
            self._under_words(S, words)
        else:
            with T.If(tirx.Not(full)), T.Then():
                for r in range(ROWS):
                    self._mask(S, r, kv0, number, stop)
        m_new = registers(1, "float32")
        for r in range(ROWS):
            put(m_new, 0, self.m[r])
            with T.unroll(self.keys // 4) as n:
                put(m_new, 0, tirx.max(m_new[0], S[_element(n, r)]))
            m = T.bind(reduce_quad(m_new[0], tirx.max))
            # Nothing seen so far: m' = -inf, and S - m' would be NaN.
            shift = T.bind(let(tirx.Select(tirx.EQ(m, _f32(float("-inf"))), _f32(0), self._scaled(m))))
            put(self.alpha, r, self._exponential(self.m[r], shift))
            put(self.m, r, m)
            put(self.l, r, self.l[r] * self.alpha[r])
            with T.unroll(self.keys // 4) as n:
                at = _element(n, r)
                put(S, at, self._exponential(S[at], shift))
                put(self.l, r, self.l[r] + S[at])

    def _scaled(self, m: Expr) -> Expr:
        """What `_exponential` subtracts. Of the lowest number log2(e) times as much is none."""
        return m if self.lowest else m * self.unit

    def _exponential(self, x: Expr, shift: Expr) -> Expr:
        """exp of a score or maximum, relative to the shift."""
        return exp2((x - shift) * self.unit if self.lowest else x * self.unit - shift)

    def maximum(self, r: int) -> Expr:
        """m of the thread's row r, in units of the problem's scores."""
        return self.m[r] * self.scale if self.raw else self.m[r]

    def ask(self, kv0: Expr, number: Expr, stop: Expr | None = None) -> MaskWords:
        """The elements of a mask that is a tensor for the `step` of the keys from kv0: on their way to registers while
        the kernel does something else."""
        first = let(kv0 + self.column)
        rows = [(h, self._inside(i), self._span(i, first, number, stop)) for h, i in self.rows]
        return MaskWords(self.bound.scores, self.b, first, rows, self.keys // 8)

    def _span(self, i: Expr, first: Expr, number: Expr, stop: Expr | None) -> Span:
        """Which keys, counted from `first`, row i may see."""
        lo, hi = self._range(i, number)
        end = let((hi if stop is None else tirx.min(hi, stop)) - first)
        return Span(None if isinstance(lo, tirx.IntImm) else let(lo - first), end)

    def _inside(self, i: Expr) -> Expr:
        """The row, or the last one."""
        return let(tirx.min(i, int32(T.int64(1) * self.bound.rows(self.b)) - 1))

    def _mask(self, S: tirx.Buffer, r: int, kv0: Expr, number: Expr, stop: Expr | None) -> None:
        """S := logits, or -inf where a key is invisible: selected, as what is there may be NaN. Of the thread's row r,
        where the mask is no tensor."""
        # What depends on the row alone is computed here, as it would cost registers in all other tiles.
        first, (h, i) = let(kv0 + self.column), self.rows[r]
        span, row = self._span(i, first, number, stop), self._inside(i)

        def under_mask(s: Expr, n: Expr) -> tuple[Expr, Expr]:
            key = n // 2 * 8 + n % 2
            return self._under_mask(s, span.holds(key, key), (h, row, first + key))

        if self.bound.scores.has_mask and not self.biased:
            self._select(S, r, lambda n: under_mask(_f32(0), n)[1])
            return
        with T.unroll(self.keys // 4) as n:
            s, seen = under_mask(S[_element(n, r)], n)
            put(S, _element(n, r), tirx.Select(seen, s, _f32(float("-inf"))))

    def _select(self, S: tirx.Buffer, r: int, seen: Callable[[Expr], Expr]) -> None:
        """S := -inf where the thread's row r does not see its n-th column, which is asked in a loop that stays one:
        nvcc would else compute so many columns at once that it has no register for values of the whole tile."""
        bits = registers(1, "uint32")
        for start in range(0, self.keys // 4, 32):
            count = min(32, self.keys // 4 - start)
            put(bits, 0, T.uint32(0))
            with T.serial(count, unroll=AT_ONCE) as n:
                bit = T.shift_left(seen(start + n).astype("uint32"), n.astype("uint32"))
                put(bits, 0, T.bitwise_or(bits[0], bit))
            with T.unroll(count) as n:
                at = _element(start + n, r)
                bit = T.bitwise_and(bits[0], T.shift_left(T.uint32(1), n.astype("uint32")))
                put(S, at, tirx.Select(tirx.NE(bit, T.uint32(0)), S[at], _f32(float("-inf"))))

    def _range(self, i: Expr, number: Expr) -> Range:
        """The row's range of keys of that number; int32."""
        ranges = [tuple(map(int32, ends)) for ends in self.bound.keys.of_row(self.b, i)]
        if len(ranges) == 1:
            return ranges[0]
        lo, hi = (tirx.Select(tirx.EQ(number, 0), *ends) for ends in zip(*ranges))
        return lo, hi

    def _under_mask(self, s: Expr, seen: Expr, place: tuple[Expr, Expr, Expr]) -> tuple[Expr, Expr]:
        """s plus what the mask computes, if that is added, and whether the row sees the key. Asked where it may."""
        if not self.bound.scores.has_mask:
            return s, seen
        hidden = _f32(float("-inf")) if self.biased else tirx.const(False, "bool")
        read = self.bound.scores.additive if self.biased else self.bound.scores.unmasked
        register = registers(1, str(hidden.ty))  # a formula may take several statements
        put(register, 0, hidden)
        with T.If(seen), T.Then():
            put(register, 0, read(self.b, *place, inside=True))
        element = register[0]
        return (s + element, tirx.NE(element, hidden)) if self.biased else (s, element)

    def _under_words(self, S: tirx.Buffer, words: MaskWords) -> None:
        """S := logits under the mask's elements, or -inf where a key is invisible, as above."""
        for r in range(ROWS):
            with T.unroll(self.keys // 8) as n:
                for x in range(2):
                    at = _element(n * 2 + x, r)
                    put(S, at, words.under_mask(r, n, x, S[at], self.biased))

    def pack(self, S: tirx.Buffer, P: tirx.Buffer) -> None:
        """P := S in 16 bits: word 2 n + r holds both columns of group n in row r."""
        with T.unroll(self.keys // 4) as n:
            pack(self.problem.v_dtype, P[n], S[2 * n], S[2 * n + 1])

    def rescale(self, O: tirx.Buffer, by: tirx.Buffer, columns: int) -> None:
        """O := diag(by) O, O [16, columns]."""
        with T.unroll(columns // 2) as n:
            put(O, n, O[n] * by[n // 2 % 2])

    def invalidate(self, P: tirx.Buffer, marked: Callable[[Expr], Expr]) -> None:
        """l := NaN in rows that give weight to a marked key; `marked` is asked about keys of the tile."""
        for r in range(ROWS):
            with T.unroll(self.keys // 4) as n:
                half = T.bitwise_and(P[n // 2 * 2 + r], tirx.Select(n % 2 == 0, T.uint32(0xFFFF), T.uint32(0xFFFF0000)))
                weighs = tirx.all(tirx.NE(half, T.uint32(0)), marked(n // 2 * 8 + self.column + n % 2))
                put(self.l, r, tirx.Select(weighs, _f32(float("nan")), self.l[r]))

    def finish(self) -> tirx.Buffer:
        """1 / l of the rows, 0 where l = 0: no key was visible. NaN is no 0 and stays. Stores the lse output."""
        for r in range(ROWS):
            l = let(reduce_quad(self.l[r], lambda x, y: x + y))
            put(self.alpha, r, tirx.Select(tirx.EQ(l, _f32(0)), _f32(0), reciprocal(l)))
            if self.problem.lse or self.problem.max:
                h, i = self.rows[r]
                with T.If(tirx.all(tirx.EQ(self.column, 0), i < self.bound.rows(self.b))), T.Then():
                    self.bound.addressing.store_ends(self.b, h, i, self.maximum(r), l)
        return self.alpha


def _element(n: Expr, r: int) -> Expr:
    """Index in the accumulator of the n-th column that a thread has in its row r."""
    return n // 2 * 4 + r * 2 + n % 2


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")
