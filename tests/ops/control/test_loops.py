"""Loop and Scan, unrolled and as loops at run time, compared with onnxruntime; If that squeezes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import lowering
from lowering.errors import NodeError
from tests.cases import node_cases
from tests.support.error_codes import raises

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'


def check_equal(text: str, feeds: dict[str, np.ndarray], **options: object) -> None:
    model = onnx.parser.parse_model(f"{HEADER} {text}")
    results = lowering.compile(model, **options).run(feeds)  # type: ignore[arg-type]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for value, expected in zip(model.graph.output, session.run(None, feeds)):
        np.testing.assert_allclose(results[value.name], expected, rtol=1e-5, atol=1e-6)


LOOP = """m (float[N, 3] x) => (float[N, 3] y, float[K, N, 3] all)
    <int64 trips = {TRIPS}, bool go = {1}, int64 last = {LAST}>
    { y, all = Loop (trips, go, x) <body = b (int64 i, bool c, float[N, 3] s) =>
        (bool g, float[N, 3] t, float[N, 3] o) {
        g = Less (i, last)
        f = CastLike (i, s)
        a = Add (s, f)
        t = Tanh (a)
        o = Mul (t, f) }> }"""


@pytest.mark.parametrize("trips, last", [(1, 99), (5, 99), (50, 3)])
def test_loop(trips: int, last: int) -> None:
    """The loop ends by its number of steps, or by a condition on the number of the step."""
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    check_equal(LOOP.replace("TRIPS", str(trips)).replace("LAST", str(last)), {"x": x})


SCAN = """m (float[2, S, B] x, float[B] start) => (float[B] last, float[B, S] totals)
    { last, totals = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [BACK],
        scan_output_axes = [1], scan_output_directions = [OUT],
        body = b (float[B] s, float[2, B] at) => (float[B] t, float[B] o) {
            axis = Constant <value_ints = [0]> ()
            r = ReduceSum <keepdims = 0> (at, axis)
            t = Add (s, r)
            o = Neg (t) }> (start, x) }"""


@pytest.mark.parametrize("back, out", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_scan(back: int, out: int) -> None:
    rng = np.random.default_rng(1)
    x, start = rng.standard_normal((2, 6, 4)).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    check_equal(SCAN.replace("BACK", str(back)).replace("OUT", str(out)), {"x": x, "start": start}, dims={"S": 6})


def check_calls(text: str, calls: list[dict[str, np.ndarray]]) -> None:
    """Compare several calls of one module, with different numbers of steps."""
    model = onnx.parser.parse_model(f"{HEADER} {text}")
    module, session = lowering.compile(model), onnxruntime.InferenceSession(model.SerializeToString())
    for feeds in calls:
        results = module.run(feeds)
        for value, expected in zip(model.graph.output, session.run(None, feeds)):
            assert results[value.name].shape == expected.shape
            np.testing.assert_allclose(results[value.name], expected, rtol=1e-5, atol=1e-6)


def test_loop_of_the_run() -> None:
    """A number, a condition or both are inputs; negative numbers run 0 steps."""
    rng = np.random.default_rng(2)
    free = LOOP.replace("m (", "m (int64 trips, bool go, int64 last, ")
    free = free.replace("<int64 trips = {TRIPS}, bool go = {1}, int64 last = {LAST}>", "")
    steps = [(5, True, 99, 2), (1, True, 99, 2), (700, True, 99999, 1), (2**62, True, 20, 3)]
    none = [(0, True, 9, 2), (-1, True, 9, 2), (-(2**62), True, 9, 0), (5, False, 9, 2)]
    calls = [
        {"trips": np.asarray(t), "go": np.asarray(g), "last": np.asarray(last),
         "x": rng.standard_normal((n, 3)).astype(np.float32)}
        for t, g, last, n in steps + none
    ]  # fmt: skip
    check_calls(free, calls[:3])  # onnxruntime reserves memory for the maximum number of steps
    module = lowering.compile(onnx.parser.parse_model(f"{HEADER} {free}"))
    assert module.run(calls[3])["all"].shape == (21, 3, 3)
    for feeds in calls[4:]:
        results = module.run(feeds)
        assert np.array_equal(results["y"], feeds["x"]) and results["all"].shape == (0, *feeds["x"].shape)


def test_outputs_are_not_inputs() -> None:
    """A value that no step changes is a copy, too."""
    free = LOOP.replace("m (", "m (int64 trips, ").replace("int64 trips = {TRIPS}, ", "").replace("LAST", "9")
    module = lowering.compile(onnx.parser.parse_model(f"{HEADER} {free}"))
    x = np.ones((2, 3), np.float32)
    actual = module.run({"trips": np.asarray(0), "x": x})["y"]
    x[:] = 2
    assert np.array_equal(actual, np.ones((2, 3)))


@pytest.mark.parametrize("back, out", [(1, 0), (0, 1)])
def test_scan_of_the_run(back: int, out: int) -> None:
    rng = np.random.default_rng(3)
    calls = [
        {"x": rng.standard_normal((2, steps, 4)).astype(np.float32), "start": np.ones(4, np.float32)}
        for steps in (6, 1, 33)
    ]
    check_calls(SCAN.replace("BACK", str(back)).replace("OUT", str(out)), calls)


NESTED = """m (float[S, 4] x, float[4] h, int64 inner, float[Q] other) => (float[4] last, float[S, 4] all)
    <float[4, 4] W = {WEIGHTS}> {
    size = Shape (other) w = Exp (h) zero = Constant <value_float = 0.0> () axis = Constant <value_ints = [0]> ()
    last, all = Scan <num_scan_inputs = 1, body = b (float[4] s, float[4] at) => (float[4] t, float[4] o) {
        row = Unsqueeze (s, axis) matmul = MatMul (row, W) flat = Squeeze (matmul, axis) f = CastLike (size, s)
        some = Add (flat, f) more = Tanh (some)
        r = Loop (inner, , more) <body = c (int64 i, bool g, float[4] u) => (bool go, float[4] v) {
            go = Identity (g) sum = Add (u, at) v = Mul (sum, w) }>
        total = ReduceSum <keepdims = 0> (r) positive = Greater (total, zero)
        t = If (positive) <then_branch = th () => (float[4] p) { p = Tanh (r) },
                           else_branch = el () => (float[4] q) { q = Sigmoid (r) }>
        o = Neg (t) }> (h, x) }"""


def test_bodies_that_read_what_is_around_them() -> None:
    """A loop and a branch inside a loop, with weights, values and sizes of the graphs around."""
    rng = np.random.default_rng(4)
    weights = ", ".join(f"{w:.5f}" for w in rng.standard_normal(16))
    calls = [
        {"x": rng.standard_normal((s, 4)).astype(np.float32), "h": rng.standard_normal(4).astype(np.float32),
         "inner": np.asarray(n), "other": np.zeros(q, np.float32)}
        for s, n, q in ((6, 2, 3), (1, 0, 0), (17, 1, 2))
    ]  # fmt: skip
    check_calls(NESTED.replace("WEIGHTS", weights), calls)


FRAMES = """m (float[B, N] x) => (float[B, T, 5] frames) {
    head = Slice (x, zero, three, one) rest = Slice (x, three, last, one) parts = Reshape (rest, shape)
    state, frames = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
        body = b (float[B, 3] before, float[B, 2] at) => (float[B, 3] next, float[B, 5] frame) {
            frame = Concat <axis = 1> (before, at) next = Slice (frame, two, last, one) }> (head, parts) }"""


def test_a_body_that_reads_a_size_as_a_number() -> None:
    """Overlapping frames, whose number is symbolic, cut by a kernel that takes their number."""
    named = {"zero": [0], "one": [1], "two": [2], "three": [3], "last": [2**62], "shape": [0, -1, 2]}
    constants = ", ".join(f"int64[{len(v)}] {k} = {{{', '.join(map(str, v))}}}" for k, v in named.items())
    text = FRAMES.replace("frames) {", f"frames) <{constants}> {{", 1)
    rng = np.random.default_rng(5)
    check_calls(text, [{"x": rng.standard_normal((b, n)).astype(np.float32)} for b, n in ((2, 9), (1, 5), (3, 41))])


WHILE = """m (float[N] x, float limit) => (float[N] y, int64 count)
    { one = Constant <value_int = 1> () zero = Constant <value_int = 0> ()
      y, count = Loop (, , x, zero) <body = b (int64 i, bool c, float[N] s, int64 k) => (bool g, float[N] t, int64 n) {
          t = Add (s, s) total = ReduceSum <keepdims = 0> (t) g = Less (total, limit) n = Add (k, one) }> }"""


def test_while() -> None:
    x = np.asarray([0.5, 0.25, 0.125], np.float32)
    check_calls(WHILE, [{"x": x, "limit": np.asarray(limit, np.float32)} for limit in (100, 1e6, 0)])


def test_standard_cases() -> None:
    """The number of steps is a constant, as exporters write it."""
    for case in node_cases.cases("Loop"):
        proto, feeds = onnx.ModelProto(), case.named_inputs
        proto.CopyFrom(case.model)
        for value in list(proto.graph.input)[:2]:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(feeds.pop(value.name), value.name))
            proto.graph.input.remove(value)
        fitting, dims = node_cases.fitted(proto, feeds)
        results = lowering.compile(fitting, dims=dims).run(feeds)
        for value, expected in zip(proto.graph.output, case.outputs, strict=True):
            node_cases.assert_close(results[value.name], expected, 1e-6, 0, case.name)


CHANGED = """m (int64 trips, float[N] x) => (float[K] y)
    { y = Loop (trips, , x) <body = b (int64 i, bool c, float[N] s) => (bool g, float[M] t) {
        axis = Constant <value_ints = [0]> () g = Identity (c) t = BODY }> }"""


def test_values_that_change() -> None:
    """Rank, type or size of a carried value changes in loops that cannot be unrolled."""
    for body, words in (
        ("Cast <to = 11> (s)", "float64 of rank 1 after"),
        ("Unsqueeze (s, axis)", "of rank 2 after"),
    ):
        with pytest.raises(NodeError, match=words):
            lowering.compile(onnx.parser.parse_model(f"{HEADER} {CHANGED.replace('BODY', body)}"))
    text = CHANGED.replace("BODY", "Concat <axis = 0> (s, s)")
    module = lowering.compile(onnx.parser.parse_model(f"{HEADER} {text}"))
    with raises("run.size_mismatch"):
        module.run({"trips": np.asarray(2), "x": np.ones(3, np.float32)})


def test_outputs_of_sizes_that_depend_on_data() -> None:
    """Each step pads its own number of rows to the longest, as encoders of images do."""
    text = """m (int64[S] counts) => (int64[S, M] y, int64[S, 1, K] indices)
        { most = ReduceMax <keepdims = 0> (counts) y, indices = Scan <num_scan_inputs = 1, body = b (int64 count)
            => (int64[M] row, int64[1, K] two) {
                zero = Constant <value_int = 0> () one = Constant <value_int = 1> ()
                ones = Constant <value_ints = [1]> () none = Constant <value_ints = [0]> ()
                own = Range (zero, count, one) left = Sub (most, count) room = Reshape (left, ones)
                pads = Concat <axis = 0> (none, room) row = Pad (own, pads, zero)
                first = Slice (row, none, ones) equal = Equal (first, first) two = NonZero (equal) }> (counts) }"""
    model = onnx.parser.parse_model(f"{HEADER} {text}")
    module, session = lowering.compile(model), onnxruntime.InferenceSession(model.SerializeToString())
    for counts in ([3, 1, 5, 2, 4], [2]):
        feeds = {"counts": np.array(counts)}
        for name, expected in zip(("y", "indices"), session.run(None, feeds)):
            np.testing.assert_array_equal(module.run(feeds)[name], expected)
    assert module.run({"counts": np.zeros(0, np.int64)})["indices"].shape[0] == 0
    uneven = """m (float[S, 4] x) => (int64[S, 1, K] y) { y = Scan <num_scan_inputs = 1, body = b (float[4] s)
                => (int64[1, M] indices) { indices = NonZero (s) }> (x) }"""
    module = lowering.compile(onnx.parser.parse_model(f"{HEADER} {uneven}"))
    assert module.run({"x": np.float32([[1, 0, 2, 0], [0, 3, 0, 4]])})["y"].tolist() == [[[0, 2]], [[1, 3]]]
    with raises("run.size_mismatch"):
        module.run({"x": np.float32([[1, 0, 2, 0], [1, 1, 1, 1]])})


REPEATED = """m (int64[S, 3] x) => (int64[S, K] y)
    <int64[1] one = {1}, int64 zero = {0}, int64 first = {1}, int64 second = {2}, int64[1] axis = {0}> {
    y = Scan <num_scan_inputs = 1, body = b (int64[3] s) => (int64[M] row) {
        n = Gather (s, zero) a = Gather (s, first) b = Gather (s, second) matmul = Mul (a, b)
        size = Unsqueeze (n, axis) ones = Expand (one, size) row = Mul (ones, matmul) }> (x) }"""


def test_a_step_whose_kernels_are_fused_before_their_size_is_static() -> None:
    check_calls(REPEATED, [{"x": np.array([[2, 3, 4], [2, 5, 6]])}, {"x": np.array([[3, 1, 1]])}])


SQUEEZE = """m (float[A, C] x) => (float[C] y)
    { shape = Shape <start = 0, end = 1> (x) one = Constant <value_ints = [1]> () c = Equal (shape, one)
      y = If (c) <then_branch = t () => (float[C] a) { axis = Constant <value_ints = [0]> () a = Squeeze (x, axis) },
                  else_branch = e () => (float[A, C] b) { b = Identity (x) }> }"""


def test_squeeze_under_a_condition() -> None:
    """PyTorch's squeeze(0): compiled for one element, which the run checks."""
    module = lowering.compile(onnx.parser.parse_model(f"{HEADER} {SQUEEZE}"))
    x = np.arange(5, dtype=np.float32)
    assert np.array_equal(module.run({"x": x[None]})["y"], x)
    with raises("node.element_count_mismatch"):
        module.run({"x": np.stack([x, x])})


SCAN_8 = """<ir_version: 10, opset_import: ["" : 8]> m (float[B, 2] start, float[B, S, 2] x)
    => (float[B, 2] last, float[B, S, 2] totals) {
    last, totals = Scan <num_scan_inputs = 1, directions = [BACK], body = b (float[2] s, float[2] at) =>
        (float[2] t, float[2] o) { t = Add (s, at) o = Neg (t) }> (LENGTHS, start, x) }"""


@pytest.mark.parametrize("back", [0, 1])
def test_scan_over_batches(back: int) -> None:
    model = onnx.parser.parse_model(SCAN_8.replace("BACK", str(back)).replace("LENGTHS", ""))
    module, rng = lowering.compile(model, dims={"B": 3}), np.random.default_rng(2)
    for length in (1, 5, 70):
        start, x = (rng.standard_normal(s).astype(np.float32) for s in ((3, 2), (3, length, 2)))
        cumulative = start[:, None] + np.cumsum(x[:, ::-1] if back else x, axis=1)
        results = module.run({"start": start, "x": x})
        np.testing.assert_allclose(results["last"], cumulative[:, -1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(results["totals"], -cumulative, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "batch, lengths, message",
    [
        (None, "", "the batch is the symbolic size B"),
        (1000, "", "1000 entries of the batch"),
        (2, "n", "sequence_lens is given"),
    ],
)
def test_refused_batches(batch: int | None, lengths: str, message: str) -> None:
    text = SCAN_8.replace("BACK", "0").replace("LENGTHS", lengths)
    text = text.replace("m (float", "m (int64[B] n, float") if lengths else text
    with pytest.raises(NodeError, match=message):
        lowering.compile(onnx.parser.parse_model(text), dims={} if batch is None else {"B": batch})
