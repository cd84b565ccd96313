"""Masks, ranges and positions that exporters compute from dynamic sizes: compiled once, compared at several sizes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.reference_runs import agree, model

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_causal_mask_from_positions() -> None:
    proto = model("""(int64[B, S] ids, float[B, P, 4] past) => (bool[1, 1, S, T] mask, float[S, T] bias) {
        zero = Constant<value_int=0>() one = Constant<value_int=1>()
        i1 = Constant<value_int=1>()
        si = Shape(ids) s = Gather(si, i1)
        sp = Shape(past) p = Gather(sp, i1)
        t = Add(p, s)
        queries = Range(p, t, one)
        keys = Range(zero, t, one)
        a = Constant<value_ints=[-1]>() o = Constant<value_ints=[0]>() oo = Constant<value_ints=[0, 1]>()
        q = Unsqueeze(queries, a)
        k = Unsqueeze(keys, o)
        seen = LessOrEqual(k, q)
        mask = Unsqueeze(seen, oo)
        none = Constant<value_float=0.0>() off = Constant<value_float=-3.4e38>()
        bias = Where(seen, none, off)
    }""")
    sizes = [(1, 1, 0), (2, 3, 4), (1, 6, 2)]
    agree(proto, [{"ids": np.zeros((b, s), np.int64), "past": floats(b, p, 4)} for b, s, p in sizes])


def test_triangle_with_symbolic_diagonal() -> None:
    proto = model("""(float[S, T] x) => (float[S, T] upper, float[S, T] lower) {
        shape = Shape(x) i0 = Constant<value_int=0>() i1 = Constant<value_int=1>()
        s = Gather(shape, i0) t = Gather(shape, i1)
        d = Sub(t, s)
        one = Constant<value_int=1>()
        k = Add(d, one)
        upper = Trilu(x, k)
        lower = Trilu<upper=0>(x, d)
    }""")
    agree(proto, [{"x": floats(3, 3)}, {"x": floats(2, 6)}, {"x": floats(1, 1)}])


def test_positions_from_attention_mask() -> None:
    proto = model("""(int64[B, S] mask) => (int64[B, S] positions) {
        axis = Constant<value_int=-1>() one = Constant<value_int=1>() zero = Constant<value_int=0>()
        sum = CumSum(mask, axis)
        p = Sub(sum, one)
        pad = Equal(mask, zero)
        positions = Where(pad, one, p)
    }""")
    agree(proto, [{"mask": np.array([[0, 1, 1, 1], [1, 1, 1, 1]])}, {"mask": np.ones((3, 1), np.int64)}])


def test_relative_buckets_in_both_directions() -> None:
    """T5's relative bias: half of the buckets are for keys after the query, which a cast of a comparison selects."""
    proto = model(
        """(float[B, 2, S, 8] x, float[32, 2] table) => (float[B, 2, S, 8] y) {
        zero = Constant<value_int=0>() one = Constant<value_int=1>() two = Constant<value_ints=[2]>()
        first = Constant<value_ints=[0]>() second = Constant<value_ints=[1]>()
        shape = Shape(x) length = Gather(shape, two) tokens = Squeeze(length, first)
        positions = Range(zero, tokens, one)
        keys = Unsqueeze(positions, first) queries = Unsqueeze(positions, second)
        distance = Sub(keys, queries)
        is_after = Greater(distance, zero) half = Constant<value_int=16>()
        side_index = Cast<to=7>(is_after) side = Mul(side_index, half)
        n = Abs(distance) exact = Constant<value_int=8>() near = Less(n, exact)
        positive = Max(n, one) wide = Cast<to=1>(positive) eight = Constant<value_float=8.0>()
        ratio = Div(wide, eight) log = Log(ratio)
        steps = Mul(log, eight) whole = Cast<to=7>(steps) far = Add(whole, exact)
        last = Constant<value_int=15>() limited = Min(far, last)
        bucket = Where(near, n, limited) index = Add(side, bucket)
        bias = Gather(table, index) move_heads_first = Transpose<perm=[2, 0, 1]>(bias)
        mask = Unsqueeze(move_heads_first, first)
        y = Attention(x, x, x, mask)
    }""",
        opset=23,
    )
    agree(proto, [{"x": floats(b, 2, s, 8), "table": floats(32, 2)} for b, s in ((2, 40), (1, 1))])


def test_range_in_float_scales_with_size() -> None:
    proto = model("""(float[N] x) => (float[M] y) {
        n = Size(x)
        f = Cast<to=1>(n)
        zero = Constant<value_float=0.0>() step = Constant<value_float=0.5>()
        y = Range(zero, f, step)
    }""")
    agree(proto, [{"x": floats(n)} for n in (0, 1, 5)])


@pytest.mark.parametrize(("delta", "swap"), [(1, False), (3, False), (-2, True)])
def test_range_length(delta: int, swap: bool) -> None:
    ends = "n, zero" if swap else "zero, n"
    proto = model(f"""(float[N] x) => (int64[M] y, int64[1] m) {{
        n = Size(x)
        zero = Constant<value_int=1>() step = Constant<value_int={delta}>()
        y = Range({ends}, step)
        m = Shape(y)
    }}""")
    agree(proto, [{"x": floats(n)} for n in (0, 1, 2, 6, 7)])
