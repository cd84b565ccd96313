"""Softmax in the registers of tensor-core matmuls.

The accumulator of a matmul of 16 rows (each warp's share of m64nN of wgmma) is in registers in groups of 8 columns.
With g = lane // 4 and t = lane % 4, a thread has rows g and g + 8 and, in group n, columns 8 n + 2 t and 8 n + 2 t + 1.
There are four registers per group: element 4 n + 2 r + x is row g + 8 r, column 8 n + 2 t + x. The four threads of a
quad share two rows, so a row maximum or row sum takes two shuffles.

Packed in 16 bits, two groups are the operand A of the next matmul: P needs neither shuffles nor memory.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.key_ranges import KeyRange

from ..primitives.ptx import (
    LOG2_E,
    alloc_registers,
    exp2,
    int32,
    let,
    pack,
    reciprocal,
    reduce_quad,
    store_element,
    tanh,
)
from .mask_fragment import KeySpan, MaskFragment

ROWS = 2  # of a thread, in one accumulator
AT_ONCE = 4  # columns for which a mask is computed; they divide those of a thread


class OnlineSoftmax:
    """m, l and the masking of the two rows that a thread has of S [16, B_c].

    `rows` are query head and query row of the thread's rows, in int32; rows after the last one are legal. With `split`
    the sink is excluded here. Scores stay as the matmul produced them where only the scale changes them: `unit` turns
    them into exponents of base 2.
    """

    def __init__(
        self,
        bound: BoundAttention,
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
        scale = self.problem.scale or 0.0  # static here
        factor = bound.addressing.tensor_scale("k")
        self.scale = bound.scores.scale if factor is None else let(bound.scores.scale * factor)
        self.raw = not bound.scores.has_score_mod and not self.biased and scale > 0 and factor is None
        self.unit = _f32((scale if self.raw else 1.0) * LOG2_E)
        self.m, self.l, self.alpha = (alloc_registers(ROWS, "float32") for _ in range(3))
        self.split = split

    def start(self) -> None:
        """Initialize m and l before the first key."""
        for r, (h, _) in enumerate(self.rows):
            m, l = self.bound.scores.compute_initial_statistics(h)
            if self.problem.sink:
                m, l = (tirx.Select(self.split, n, x) for n, x in ((_f32(float("-inf")), m), (_f32(0), l)))
                m = m / _f32(self.problem.scale or 1.0) if self.raw else m
            store_element(self.m, r, m)
            store_element(self.l, r, tirx.Select(tirx.EQ(self.column, 0), l, _f32(0)))  # a sink counts once in a quad

    def step(
        self,
        S: tirx.Buffer,
        kv0: Expr,
        full: Expr,
        number: Expr,
        mask: MaskFragment | None,
        stop: Expr | None = None,
    ) -> None:
        """Emit S := P = exp(S - m'), alpha = exp(m - m'), l = alpha l + rowsum P, m = m', for the keys from kv0.

        They are in the row's range with index `number`; keys from `stop` on are ignored. `mask` is the result of
        `load_mask` for these keys. l is accumulated over the thread's own columns.
        """
        if not self.raw:
            for r, (h, i) in enumerate(self.rows):
                with T.unroll(self.keys // 4) as n:
                    at, key = _element(n, r), kv0 + self.column + (n // 2 * 8 + n % 2)
                    s = let(S[at] * self.scale)
                    store_element(S, at, self.bound.scores.apply_score_mod(s, self.b, h, i, key, tanh=tanh))
        if mask is not None:
            self._apply_mask_fragment(S, mask)
        else:
            with T.If(tirx.Not(full)), T.Then():
                for r in range(ROWS):
                    self._mask(S, r, kv0, number, stop)
        m_new = alloc_registers(1, "float32")
        for r in range(ROWS):
            store_element(m_new, 0, self.m[r])
            with T.unroll(self.keys // 4) as n:
                store_element(m_new, 0, tirx.max(m_new[0], S[_element(n, r)]))
            m = T.bind(reduce_quad(m_new[0], tirx.max))
            # No visible key so far: m' = -inf, and S - m' would be NaN.
            shift = T.bind(let(tirx.Select(tirx.EQ(m, _f32(float("-inf"))), _f32(0), self._scale_shift(m))))
            store_element(self.alpha, r, self._exponential(self.m[r], shift))
            store_element(self.m, r, m)
            store_element(self.l, r, self.l[r] * self.alpha[r])
            with T.unroll(self.keys // 4) as n:
                at = _element(n, r)
                store_element(S, at, self._exponential(S[at], shift))
                store_element(self.l, r, self.l[r] + S[at])

    def _scale_shift(self, m: Expr) -> Expr:
        """Return the shift that `_exponential` subtracts. log2(e) times the lowest number would overflow."""
        return m if self.lowest else m * self.unit

    def _exponential(self, x: Expr, shift: Expr) -> Expr:
        """Return exp of a score or maximum, relative to the shift."""
        return exp2((x - shift) * self.unit if self.lowest else x * self.unit - shift)

    def maximum(self, r: int) -> Expr:
        """Return m of the thread's row r, in units of the problem's scores."""
        return self.m[r] * self.scale if self.raw else self.m[r]

    def load_mask(self, kv0: Expr, number: Expr, stop: Expr | None = None) -> MaskFragment:
        """Load the elements of a mask tensor for the `step` of the keys from kv0.

        They arrive in registers while the kernel does other work.
        """
        first = let(kv0 + self.column)
        rows = [(h, self._clamp_row(i), self._key_span(i, first, number, stop)) for h, i in self.rows]
        return MaskFragment(self.bound.scores, self.b, first, rows, self.keys // 8)

    def _key_span(self, i: Expr, first: Expr, number: Expr, stop: Expr | None) -> KeySpan:
        """Return the keys, counted from `first`, that row i may see."""
        lo, hi = self._range(i, number)
        end = let((hi if stop is None else tirx.min(hi, stop)) - first)
        return KeySpan(None if isinstance(lo, tirx.IntImm) else let(lo - first), end)

    def _clamp_row(self, i: Expr) -> Expr:
        """Return the row, or the last one."""
        return let(tirx.min(i, int32(T.int64(1) * self.bound.rows(self.b)) - 1))

    def _mask(self, S: tirx.Buffer, r: int, kv0: Expr, number: Expr, stop: Expr | None) -> None:
        """Replace the scores of the thread's row r by logits, or -inf where a key is invisible, without a mask tensor.

        They are selected, not added, because invisible scores may be NaN.
        """
        # Values that depend only on the row are computed here: they would cost registers in all other tiles.
        first, (h, i) = let(kv0 + self.column), self.rows[r]
        span, row = self._key_span(i, first, number, stop), self._clamp_row(i)

        def mask_column(s: Expr, n: Expr) -> tuple[Expr, Expr]:
            key = n // 2 * 8 + n % 2
            return self._mask_score(s, span.holds(key, key), (h, row, first + key))

        if self.bound.scores.has_mask and not self.biased:
            self._select(S, r, lambda n: mask_column(_f32(0), n)[1])
            return
        with T.unroll(self.keys // 4) as n:
            s, seen = mask_column(S[_element(n, r)], n)
            store_element(S, _element(n, r), tirx.Select(seen, s, _f32(float("-inf"))))

    def _select(self, S: tirx.Buffer, r: int, seen: Callable[[Expr], Expr]) -> None:
        """Set S := -inf where the thread's row r does not see its n-th column.

        `seen` is called in a loop that is not unrolled completely. Otherwise nvcc computes so many columns at once that
        it has no registers left for the values of the whole tile.
        """
        bits = alloc_registers(1, "uint32")
        for start in range(0, self.keys // 4, 32):
            count = min(32, self.keys // 4 - start)
            store_element(bits, 0, T.uint32(0))
            with T.serial(count, unroll=AT_ONCE) as n:
                bit = T.shift_left(seen(start + n).astype("uint32"), n.astype("uint32"))
                store_element(bits, 0, T.bitwise_or(bits[0], bit))
            with T.unroll(count) as n:
                at = _element(start + n, r)
                bit = T.bitwise_and(bits[0], T.shift_left(T.uint32(1), n.astype("uint32")))
                store_element(S, at, tirx.Select(tirx.NE(bit, T.uint32(0)), S[at], _f32(float("-inf"))))

    def _range(self, i: Expr, number: Expr) -> KeyRange:
        """Return the row's range of keys with that index; int32."""
        ranges = [tuple(map(int32, ends)) for ends in self.bound.keys.compute_row_ranges(self.b, i)]
        if len(ranges) == 1:
            return ranges[0]
        lo, hi = (tirx.Select(tirx.EQ(number, 0), *ends) for ends in zip(*ranges))
        return lo, hi

    def _mask_score(self, s: Expr, seen: Expr, position: tuple[Expr, Expr, Expr]) -> tuple[Expr, Expr]:
        """Return s plus the computed mask, if that is added, and whether the row sees the key.

        The mask is evaluated only where the row may see the key.
        """
        if not self.bound.scores.has_mask:
            return s, seen
        hidden = _f32(float("-inf")) if self.biased else tirx.const(False, "bool")
        read = self.bound.scores.compute_bias if self.biased else self.bound.scores.is_unmasked
        register = alloc_registers(1, str(hidden.ty))  # a formula may take several statements
        store_element(register, 0, hidden)
        with T.If(seen), T.Then():
            store_element(register, 0, read(self.b, *position, inside=True))
        element = register[0]
        return (s + element, tirx.NE(element, hidden)) if self.biased else (s, element)

    def _apply_mask_fragment(self, S: tirx.Buffer, mask: MaskFragment) -> None:
        """Set S := logits under the mask's elements, or -inf where a key is invisible."""
        for r in range(ROWS):
            with T.unroll(self.keys // 8) as n:
                for x in range(2):
                    at = _element(n * 2 + x, r)
                    store_element(S, at, mask.mask_score(r, n, x, S[at], self.biased))

    def pack(self, S: tirx.Buffer, P: tirx.Buffer) -> None:
        """Emit P := S in 16 bits: register 2 n + r has both columns of group n in row r."""
        with T.unroll(self.keys // 4) as n:
            pack(self.problem.v_dtype, P[n], S[2 * n], S[2 * n + 1])

    def rescale(self, O: tirx.Buffer, factors: tirx.Buffer, columns: int) -> None:
        """Emit O := diag(by) O, O [16, columns]."""
        with T.unroll(columns // 2) as n:
            store_element(O, n, O[n] * factors[n // 2 % 2])

    def invalidate(self, P: tirx.Buffer, marked: Callable[[Expr], Expr]) -> None:
        """Set l := NaN in rows that give weight to a marked key; `marked` tells it by the key's index in the tile."""
        for r in range(ROWS):
            with T.unroll(self.keys // 4) as n:
                half = T.bitwise_and(P[n // 2 * 2 + r], tirx.Select(n % 2 == 0, T.uint32(0xFFFF), T.uint32(0xFFFF0000)))
                has_weight = tirx.all(tirx.NE(half, T.uint32(0)), marked(n // 2 * 8 + self.column + n % 2))
                store_element(self.l, r, tirx.Select(has_weight, _f32(float("nan")), self.l[r]))

    def finish(self) -> tirx.Buffer:
        """Return 1 / l of the rows, 0 where l = 0: no key was visible. Store the lse output.

        NaN is not 0, so it stays.
        """
        for r in range(ROWS):
            l = let(reduce_quad(self.l[r], lambda x, y: x + y))
            store_element(self.alpha, r, tirx.Select(tirx.EQ(l, _f32(0)), _f32(0), reciprocal(l)))
            if self.problem.lse or self.problem.max:
                h, i = self.rows[r]
                with T.If(tirx.all(tirx.EQ(self.column, 0), i < self.bound.rows(self.b))), T.Then():
                    self.bound.addressing.store_statistics(self.b, h, i, self.maximum(r), l)
        return self.alpha


def _element(n: Expr, r: int) -> Expr:
    """Return the index in the accumulator of the n-th column that a thread has in its row r."""
    return n // 2 * 4 + r * 2 + n % 2


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")
