"""Dynamic sizes as exporters write them: compiled once, run at several sizes, compared with onnx's reference.

Shape arithmetic, broadcasting, slices, sizes from data, and control flow; test_symbolic_positions.py has masks.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import lowering
from lowering.graph.loading.model import load_model
from lowering.importing.importer import import_model
from lowering.ops import lookup
from tests.support.error_codes import raises
from tests.support.reference_runs import agree, kernels, model

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# -- shape arithmetic never becomes tensor code -----------------------------------------------------------------------

SPLIT_HEADS = model("""(float[B, S, 32] x) => (float[b, h, s, d] y) {
    shape = Shape(x)
    zero = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>()
    b = Gather(shape, zero) s = Gather(shape, one)
    heads = Constant<value_ints=[4]>() rest = Constant<value_ints=[-1]>()
    target = Concat<axis=0>(b, s, heads, rest)
    split = Reshape(x, target)
    y = Transpose<perm=[0, 2, 1, 3]>(split)
}""")

MERGE_HEADS = model("""(float[B, 4, S, 8] x) => (float[b, s, e] y) {
    t = Transpose<perm=[0, 2, 1, 3]>(x)
    b = Shape<start=0, end=1>(x) s = Shape<start=2, end=3>(x)
    h = Shape<start=1, end=2>(x) d = Shape<start=3, end=4>(x)
    e = Mul(h, d)
    target = Concat<axis=0>(b, s, e)
    y = Reshape(t, target)
}""")

TOKENS_TO_ROWS = model("""(float[B, S, 8] x) => (float[r, 8] rows, float[b, s, 8] back) {
    shape = Shape(x)
    i0 = Constant<value_int=0>() i1 = Constant<value_int=1>()
    b = Gather(shape, i0) s = Gather(shape, i1)
    n = Mul(b, s)
    axis = Constant<value_ints=[0]>()
    n1 = Unsqueeze(n, axis) b1 = Unsqueeze(b, axis) e = Constant<value_ints=[8]>() rest = Constant<value_ints=[-1]>()
    t1 = Concat<axis=0>(n1, e)
    rows = Reshape(x, t1)
    t2 = Concat<axis=0>(b1, rest, e)
    back = Reshape(rows, t2)
}""")

HALVES = model("""(float[B, S, 8] x) => (float[B, S, 8] y) {
    i = Constant<value_int=2>()
    shape = Shape(x)
    d = Gather(shape, i)
    two = Constant<value_int=2>()
    half = Div(d, two)
    axis = Constant<value_ints=[0]>()
    h = Unsqueeze(half, axis)
    last = Constant<value_ints=[2]>() start = Constant<value_ints=[0]>()
    end = Constant<value_ints=[9223372036854775807]>()
    a = Slice(x, start, h, last)
    b = Slice(x, h, end, last)
    n = Neg(b)
    y = Concat<axis=-1>(n, a)
}""")


@pytest.mark.parametrize(
    ("proto", "own_kernels"),
    [(SPLIT_HEADS, set()), (MERGE_HEADS, set()), (TOKENS_TO_ROWS, set()), (HALVES, {"slice", "concat"})],
    ids=["split_heads", "merge_heads", "tokens_to_rows", "rotate_half"],
)
def test_shape_arithmetic(proto: onnx.ModelProto, own_kernels: set[str]) -> None:
    assert kernels(proto) == own_kernels
    dims = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    runs = []
    for sizes in ((1, 1), (2, 5), (3, 7)):
        free = iter(sizes)
        runs.append({"x": floats(*(d or next(free) for d in dims))})
    agree(proto, runs)


def test_reshape_with_minus_one_cancels_symbols() -> None:
    """The inferred size is the number it must be, so that what follows knows it."""
    proto = model("""(float[B, 4, S, 8] x, float[32] w) => (float[b, s, e] y) {
        t = Transpose<perm=[0, 2, 1, 3]>(x)
        b = Shape<start=0, end=1>(x) s = Shape<start=2, end=3>(x) rest = Constant<value_ints=[-1]>()
        target = Concat<axis=0>(b, s, rest)
        z = Reshape(t, target)
        y = Add(z, w)
    }""")
    assert import_model(load_model(proto), lookup).outputs[0].shape[2] == 32
    agree(proto, [{"x": floats(2, 4, 3, 8), "w": floats(32)}, {"x": floats(1, 4, 1, 8), "w": floats(32)}])


def test_reshape_zero_copies_unless_allowed() -> None:
    copied = model(
        "(float[B, S, 6] x) => (float[b, s, 2, 3] y) { t = Constant<value_ints=[0, 0, 2, 3]>() y = Reshape(x, t) }"
    )
    agree(copied, [{"x": floats(2, 3, 6)}, {"x": floats(1, 5, 6)}])
    empty = model(
        "(float[0, 6] x) => (float[3, 0] y) { t = Constant<value_ints=[3, 0]>() y = Reshape<allowzero=1>(x, t) }"
    )
    agree(empty, [{"x": floats(0, 6)}])


# -- broadcasting -----------------------------------------------------------------------------------------------------


def test_repeat_kv_heads() -> None:
    proto = model("""(float[B, 2, S, 4] k) => (float[b, h, s, d] y) {
        axis = Constant<value_ints=[2]>()
        k5 = Unsqueeze(k, axis)
        b = Shape<start=0, end=1>(k) s = Shape<start=2, end=3>(k)
        h = Constant<value_ints=[2]>() g = Constant<value_ints=[3]>() d = Constant<value_ints=[4]>()
        wide = Concat<axis=0>(b, h, g, s, d)
        e = Expand(k5, wide)
        six = Constant<value_ints=[6]>()
        target = Concat<axis=0>(b, six, s, d)
        y = Reshape(e, target)
    }""")
    assert kernels(proto) == {"expand"}
    agree(proto, [{"k": floats(1, 2, 1, 4)}, {"k": floats(2, 2, 5, 4)}])


def test_expand_to_minus_one_idiom() -> None:
    """Older exporters replace -1 by 1 with ConstantOfShape, Equal and Where before they expand."""
    proto = model("""(float[B, 1, S] x, float[M] y) => (float[b, m, s] z) {
        minus = Constant<value_ints=[-1]>() m = Shape(y)
        want = Concat<axis=0>(minus, m, minus)
        three = Constant<value_ints=[3]>()
        ones = ConstantOfShape<value=int64[1]{1}>(three)
        keep = Equal(want, minus)
        target = Where(keep, ones, want)
        z = Expand(x, target)
    }""")
    agree(proto, [{"x": floats(2, 1, 3), "y": floats(4)}, {"x": floats(1, 1, 1), "y": floats(1)}])


def test_either_side_of_expand_may_be_one() -> None:
    proto = model("(float[N, 3] x, float[M, 3] y) => (float[k, 3] z) { t = Shape(y) z = Expand(x, t) }")
    runs = [{"x": floats(n, 3), "y": floats(m, 3)} for n, m in ((1, 4), (4, 1), (4, 4), (1, 1), (1, 0), (0, 1))]
    agree(proto, runs)
    with raises("expand.shapes_not_broadcastable", kind=Exception):
        lowering.compile(proto).run({"x": floats(2, 3), "y": floats(3, 3)})


def test_first_and_last_token_next_to_all() -> None:
    """A symbolic size that is at most 1 broadcasts as 1."""
    proto = model("""(float[B, S, 4] x) => (float[B, S, 4] a, float[B, S, 4] b, float[B, S, 4] c, float[B, S, S] d) {
        zero = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>() minus = Constant<value_ints=[-1]>()
        end = Constant<value_ints=[9223372036854775807]>()
        first = Slice(x, zero, one, one)
        last = Slice(x, minus, end, one)
        a = Add(x, last)
        more = Greater(first, x)
        b = Where(more, x, last)
        shape = Shape(x)
        c = Expand(first, shape)
        keys = Transpose<perm=[0, 2, 1]>(x) query_of_last = Transpose<perm=[0, 2, 1]>(last)
        scores = MatMul(x, keys) one_score = MatMul(x, query_of_last)
        d = Max(scores, one_score)
    }""")
    agree(proto, [{"x": floats(b, s, 4)} for b, s in ((2, 5), (3, 1))])


def test_tile_by_sizes() -> None:
    proto = model("""(float[N, 3] x, float[M] y) => (float[a, b] z) {
        m = Shape(y) one = Constant<value_ints=[1]>()
        r = Concat<axis=0>(m, one)
        z = Tile(x, r)
    }""")
    agree(
        proto,
        [{"x": floats(2, 3), "y": floats(3)}, {"x": floats(1, 3), "y": floats(1)}, {"x": floats(2, 3), "y": floats(0)}],
    )


# -- slices -----------------------------------------------------------------------------------------------------------


def test_slice_a_table_by_length() -> None:
    proto = model("""(float[B, S, 4] x, float[16, 4] table) => (float[B, S, 4] y) {
        s = Shape<start=1, end=2>(x) zero = Constant<value_ints=[0]>() axis = Constant<value_ints=[0]>()
        rows = Slice(table, zero, s, axis)
        y = Add(x, rows)
    }""")
    agree(proto, [{"x": floats(b, s, 4), "table": floats(16, 4)} for b, s in ((1, 1), (2, 16))])


def test_last_token() -> None:
    proto = model("""(float[B, S, 4] x) => (float[B, 4] by_slice, float[B, 4] by_gather, float[B, 4] by_index) {
        last = Constant<value_ints=[-1]>() end = Constant<value_ints=[9223372036854775807]>()
        axis = Constant<value_ints=[1]>()
        row = Slice(x, last, end, axis)
        by_slice = Squeeze(row, axis)
        i = Constant<value_int=-1>()
        by_gather = Gather<axis=1>(x, i)
        shape = Shape(x) i1 = Constant<value_int=1>() s = Gather(shape, i1) one = Constant<value_int=1>()
        n = Sub(s, one)
        by_index = Gather<axis=1>(x, n)
    }""")
    agree(proto, [{"x": floats(1, 1, 4)}, {"x": floats(2, 5, 4)}])


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [
        (0, 3, 1), (2, 100, 1), (-2, 9223372036854775807, 1), (-100, -1, 1), (1, -1, 2), (-1, -9223372036854775808, -1),
        (5, 0, -2), (3, 1, 1), (-3, -1, 3),
    ],
)  # fmt: skip
def test_slice_of_symbolic_dimension(start: int, end: int, step: int) -> None:
    proto = model(f"""(float[N, 2] x) => (float[M, 2] y) {{
        s = Constant<value_ints=[{start}]>() e = Constant<value_ints=[{end}]>() a = Constant<value_ints=[0]>()
        t = Constant<value_ints=[{step}]>()
        y = Slice(x, s, e, a, t)
    }}""")
    agree(proto, [{"x": floats(n, 2)} for n in (1, 2, 3, 6)])


def test_slice_bounds_from_another_tensor() -> None:
    """The length of one tensor cuts another: how the two compare is unknown."""
    proto = model("""(float[N] x, float[M] y) => (float[a] head, float[b] rest) {
        m = Shape(y) zero = Constant<value_ints=[0]>() far = Constant<value_ints=[1000]>()
        head = Slice(x, zero, m)
        rest = Slice(x, m, far)
    }""")
    agree(proto, [{"x": floats(n), "y": floats(m)} for n, m in ((5, 3), (3, 5), (4, 4), (0, 2), (2, 0))])


def test_data_dependent_bounds() -> None:
    proto = model("""(float[N, 4] x, int64[1] start, int64[1] end, int64[2] shape) => (float[M, 4] y, float[a, b] z) {
        axis = Constant<value_ints=[0]>()
        y = Slice(x, start, end, axis)
        z = Reshape(y, shape)
    }""")
    x = floats(6, 4)
    runs = [(1, 3, (8, -1)), (-2, 100, (-1, 2)), (0, 6, (0, 4)), (4, 2, (0, 4))]
    agree(proto, [{"x": x, "start": np.array([s]), "end": np.array([e]), "shape": np.array(t)} for s, e, t in runs])


def test_split_in_symbolic_and_uneven_parts() -> None:
    proto = model("""(float[N, 7] x, float[M, 7] y)
            => (float[a, 7] first, float[b, 7] second, float[N, c] u, float[N, d] v) {
        n = Shape<start=0, end=1>(x) m = Shape<start=0, end=1>(y)
        both = Concat<axis=0>(x, y)
        parts = Concat<axis=0>(n, m)
        first, second = Split<axis=0>(both, parts)
        u, v = Split<axis=1, num_outputs=2>(x)
    }""")
    agree(proto, [{"x": floats(2, 7), "y": floats(3, 7)}, {"x": floats(1, 7), "y": floats(0, 7)}])


# -- data-dependent sizes ---------------------------------------------------------------------------------------------


def test_rows_that_are_not_zero() -> None:
    proto = model("""(float[N, 3] x, bool[N] keep) => (float[M, 3] y, int64[2] m) {
        where = NonZero(keep)
        axis = Constant<value_ints=[0]>()
        rows = Squeeze(where, axis)
        y = Gather(x, rows)
        m = Shape(y)
    }""")
    runs = [{"x": floats(4, 3), "keep": np.array(k, bool)} for k in ([1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1])]
    agree(proto, runs)


def test_range_with_data_dependent_limit() -> None:
    proto = model("""(int64 limit) => (int64[N] y) {
        zero = Constant<value_int=0>() step = Constant<value_int=2>()
        r = Range(zero, limit, step)
        y = Add(r, limit)
    }""")
    agree(proto, [{"limit": np.array(n)} for n in (0, 1, 6)])


def test_kernels_from_both_sides_of_a_size_are_fused() -> None:
    """The square root needs no run-time size and the expansion does: as one kernel they come after the size."""
    proto = model("""(float[3, 1, 5] x, int64[3] shape) => (float[a, b, c] z) {
        root = Sqrt(x)
        wide = Expand(root, shape)
        negative = Neg(wide)
        z = Exp(negative)
    }""")
    x = np.abs(floats(3, 1, 5))
    agree(proto, [{"x": x, "shape": np.array(s)} for s in ((1, 1, 5), (3, 4, 1))])


# -- control flow -----------------------------------------------------------------------------------------------------


def test_if_on_sizes_keeps_one_branch() -> None:
    proto = model("""(float[B, 4] x) => (float[B, 4] y) {
        rank = Shape<start=1>(x) four = Constant<value_ints=[4]>()
        c = Equal(rank, four)
        y = If(c) <
            then_branch = then () => (float[B, 4] a) { a = Add(x, x) },
            else_branch = other () => (float[B, 4] b) { b = Mul(x, x) }
        >
    }""")
    imported = import_model(load_model(proto), lookup).module["main"]
    assert "if " not in imported.script()
    agree(proto, [{"x": floats(3, 4)}])


def test_if_at_run_time() -> None:
    proto = model("""(bool c, float[B, 4] x) => (float[N, 4] z, float[4] w) {
        y, w = If(c) <
            then_branch = then () => (float[N, 4] a, float[4] p) {
                a = Concat<axis=0>(x, x) i = Constant<value_int=0>() p = Gather(x, i)
            },
            else_branch = other () => (float[M, 4] b, float[4] q) {
                b = Mul(x, x) q = Constant<value=float[4]{1.0, 2.0, 3.0, 4.0}>()
            }
        >
        z = Neg(y)
    }""")
    agree(proto, [{"c": np.array(c), "x": floats(n, 4)} for c in (True, False) for n in (1, 3)])


def test_a_loop_of_the_run() -> None:
    proto = model("""(int64 n, float[2] x) => (float[2] y) {
        go = Constant<value=bool{1}>()
        y = Loop(n, go, x) <
            body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) { d = Identity(c) t = Add(s, s) }
        >
    }""")
    agree(proto, [{"n": np.array(n), "x": floats(2)} for n in (3, 1)])


def test_quotients_of_sizes_that_are_zero() -> None:
    """By 0 they are 0, as between other integers; a quotient whose divisor cancels has none."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 23]>
        g (float[n, m] x) => (int64[a] quotient, int64[b] remainder, int64[c] canceled)
          <int64[1] zero = {0}, int64[1] one = {1}, int64[1] six = {6}> {
          shape = Shape (x) n = Slice (shape, zero, one) m = Slice (shape, one, six)
          quotient = Div (six, n) remainder = Mod (m, n) wider = Mul (n, six) canceled = Div (wider, n)
        }""")
    module = lowering.compile(model)
    for n, m in ((4, 7), (0, 3), (3, 0)):
        results = module.run({"x": np.zeros((n, m), np.float32)})
        assert [int(r[0]) for r in results.values()] == [6 // n if n else 0, m % n if n else 0, 6]


def test_heads_that_are_what_remains() -> None:
    """A length that is computed in two ways does not cancel: the number of heads is the declared one, and asserted."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[B, 1, N] x, float[96, 1, 10] w) => (float[B, S, 96] y) <float[B, S, 4, 24] split> {
          c = Conv <strides = [5]> (x, w) h = Transpose <perm = [0, 2, 1]> (c)
          n = Shape <start = 2, end = 3> (x) b = Shape <start = 0, end = 1> (x) all = Constant <value_ints = [-1]> ()
          ten = Constant <value_ints = [10]> () five = Constant <value_ints = [5]> ()
          size = Constant <value_ints = [24]> () wide = Constant <value_ints = [96]> ()
          one = Constant <value_ints = [1]> ()
          rest = Sub (n, ten) most = Div (rest, five) s = Add (most, one)
          to = Concat <axis = 0> (b, s, all, size) split = Reshape (h, to)
          q = Transpose <perm = [0, 2, 1, 3]> (split) kt = Transpose <perm = [0, 2, 3, 1]> (split)
          scores = MatMul (q, kt) p = Softmax <axis = -1> (scores) o = MatMul (p, q)
          t = Transpose <perm = [0, 2, 1, 3]> (o) flat = Concat <axis = 0> (b, s, wide) y = Reshape (t, flat) }""")
    module, reference = lowering.compile(model), ReferenceEvaluator(model)
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((96, 1, 10)).astype(np.float32)
    for batch, length in ((2, 40), (1, 10)):
        feeds = {"x": rng.standard_normal((batch, 1, length)).astype(np.float32), "w": weight}
        (want,) = reference.run(None, feeds)
        np.testing.assert_allclose(module.run(feeds)["y"], want, atol=1e-4, rtol=1e-4)
    model.graph.value_info[0].type.tensor_type.shape.dim[2].dim_value = 3  # a declaration that is wrong
    with raises("node.element_count_mismatch"):
        lowering.compile(model).run({"x": np.ones((1, 1, 40), np.float32), "w": weight})
