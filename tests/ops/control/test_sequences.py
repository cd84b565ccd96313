"""Sequences whose lengths are static, compared with onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import lowering
from tests.support.error_codes import raises

NUMBERS = "<int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64 last = {-1}, int64[3] sizes = {1, 3, 2}>"

CASES = {
    "split by lengths": """s = SplitToSequence <axis = 1> (x, sizes) a = SequenceAt (s, one) b = SequenceAt (s, last)
        r = ReduceSum (b) y = Add (a, r)""",
    "split by a number": """s = SplitToSequence <axis = 1> (x, two) a = SequenceAt (s, zero) b = SequenceAt (s, last)
        y = Mul (a, b)""",
    "split to ones": """s = SplitToSequence <axis = -1> (x) a = SequenceAt (s, two) y = Neg (a)""",
    "split to ones without the axis": """s = SplitToSequence <axis = 1, keepdims = 0> (x) n = SequenceLength (s)
        a = SequenceAt (s, last) f = CastLike (n, a) y = Add (a, f)""",
    "a smaller last part": """four = Constant <value_int = 4> () s = SplitToSequence <axis = 1> (x, four)
        y = SequenceAt (s, last)""",
    "joined again": """s = SplitToSequence <axis = 1> (x, sizes) y = ConcatFromSequence <axis = 1> (s)""",
    "joined along a new axis": """n = Neg (x) s = SequenceConstruct (x, n, x)
        y = ConcatFromSequence <axis = -1, new_axis = 1> (s)""",
    "inserted and erased": """e = SequenceEmpty () n = Neg (x) p = Exp (x) a = SequenceInsert (e, x)
        b = SequenceInsert (a, n, zero) c = SequenceInsert (b, p, last) d = SequenceErase (c, zero)
        f = SequenceConstruct (x, p) g = SequenceErase (f) i = Identity (d)
        h = ConcatFromSequence <axis = 0> (i) j = ConcatFromSequence <axis = 0> (g) y = Concat <axis = 0> (h, j)""",
    "another type": """i = Cast <to = 7> (x) e = SequenceEmpty <dtype = 7> () a = SequenceInsert (e, i)
        y = ConcatFromSequence <axis = 0> (a)""",
    "an index of the run": """n = Neg (x) s = SequenceConstruct (x, n) t = ReduceMax <keepdims = 0> (x)
        z = Constant <value_float = 0.0> () g = Greater (t, z) p = Cast <to = 7> (g) y = SequenceAt (s, p)""",
    "a loop": """e = SequenceEmpty () t = Constant <value_int = 3> ()
        s = Loop (t, , e) <body = b (int64 i, bool go, seq(float[B, 6]) a) => (bool g, seq(float[B, 6]) c) {
            g = Identity (go) f = CastLike (i, x) m = Mul (x, f) c = SequenceInsert (a, m) }>
        y = ConcatFromSequence <axis = 0> (s)""",
    "a loop over a sequence": """parts = SplitToSequence <axis = 1> (x, sizes) t = SequenceLength (parts)
        e = SequenceEmpty () ones = Constant <value_ints = [1, 2]> ()
        s = Loop (t, , e) <body = b (int64 i, bool go, seq(float[B, M]) a) => (bool g, seq(float[B, M]) c) {
            g = Identity (go) p = SequenceAt (parts, i) m = Tile (p, ones) c = SequenceInsert (a, m) }>
        y = ConcatFromSequence <axis = 1> (s)""",
    "a branch": """shape = Shape (x) rank = Size (shape) yes = Equal (rank, two)
        s = If (yes) <then_branch = t () => (seq(float[B, 3]) u) { u = SplitToSequence <axis = 1> (x, sizes) },
                      else_branch = e () => (seq(float[B, 6]) v) { v = SequenceConstruct (x) }>
        y = SequenceAt (s, one)""",
    "a map": """s = SequenceConstruct (x, x)
        r = SequenceMap <body = b (float[B, 6] a, float[B, 6] w) => (float[B, 6] c) {
        c = Add (a, w) }> (s, x) y = ConcatFromSequence <axis = 0> (r)""",
    "an optional value": """o = Optional (x) has = OptionalHasElement (o) v = OptionalGetElement (o)
        f = CastLike (has, v) y = Add (v, f)""",
}


def make_model(body: str, output: str = "float[P, Q] y") -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> m (float[B, 6] x) => ({output}) {NUMBERS} {{ {body} }}'
    )
    proto.graph.output[0].ClearField("type")
    return proto


@pytest.mark.parametrize("case", CASES)
def test_sequences(case: str) -> None:
    proto = make_model(CASES[case])
    module, session = lowering.compile(proto), onnxruntime.InferenceSession(proto.SerializeToString())
    rng = np.random.default_rng(0)
    for rows in (2, 1):
        x = (3 * rng.standard_normal((rows, 6))).astype(np.float32)
        actual, (expected,) = module.run({"x": x})["y"], session.run(None, {"x": x})
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_symbolic_dimension_of_static_lengths() -> None:
    """The lengths are asserted to add up to the dimension."""
    module = lowering.compile(make_model("s = SplitToSequence <axis = 0> (x, sizes) y = SequenceAt (s, one)"))
    x = np.random.default_rng(1).standard_normal((6, 6)).astype(np.float32)
    np.testing.assert_array_equal(module.run({"x": x})["y"], x[1:4])
    with raises("run.size_mismatch"):
        module.run({"x": x[:5]})


REFUSED = {
    "s = SplitToSequence <axis = 0> (x) y = SequenceAt (s, zero)": "on dimension 0, which is the symbolic size B",
    "s = SequenceConstruct (x) y = SequenceAt (s, one)": r"position is 1, and the sequence of 1 tensors allows -1 to 0",
    "s = SequenceEmpty () y = SequenceAt (s, zero)": "position is 0, and the sequence of 0 tensors is empty",
    "s = SequenceEmpty () y = SequenceErase (s)": "position is -1, and the sequence of 0 tensors is empty",
    "s = SequenceEmpty <dtype = 7> () y = SequenceInsert (s, x)": "is float32, and the sequence is int64",
    "s = SequenceEmpty () y = ConcatFromSequence <axis = 0> (s)": "is empty, so the shape",
    "s = SequenceConstruct (x, x) y = Relu (s)": "input X is a sequence, and must be a float",
    "y = SequenceAt (x, zero)": "input input_sequence is float32, and must be a sequence",
    """e = SequenceEmpty () shape = Shape (x) n = Gather (shape, zero)
        s = Loop (n, , e) <body = b (int64 i, bool go, seq(float[B, 6]) a) => (bool g, seq(float[B, 6]) c) {
        g = Identity (go) c = SequenceInsert (a, x) }> y = ConcatFromSequence <axis = 0> (s)""": "carries a sequence",
}


@pytest.mark.parametrize("body", REFUSED)
def test_refused(body: str) -> None:
    proto = make_model(body)
    with pytest.raises(lowering.NodeError, match=REFUSED[body]):
        lowering.compile(proto)
    assert not lowering.check(proto).ok
