"""Loop and Scan whose steps are known: written out, as onnxruntime runs them; If that squeezes."""

from __future__ import annotations

import node_cases
import numpy as np
import onnx
import onnxruntime
import pytest

import lowering
from lowering.errors import InputError, NodeError

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'


def same(text: str, feeds: dict[str, np.ndarray], **options: object) -> None:
    model = onnx.parser.parse_model(f"{HEADER} {text}")
    found = lowering.compile(model, **options).run(feeds)  # type: ignore[arg-type]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for value, want in zip(model.graph.output, session.run(None, feeds)):
        np.testing.assert_allclose(found[value.name], want, rtol=1e-5, atol=1e-6)


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
    """By their number, or by a condition on the number of the step."""
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    same(LOOP.replace("TRIPS", str(trips)).replace("LAST", str(last)), {"x": x})


SCAN = """m (float[2, S, B] x, float[B] start) => (float[B] last, float[B, S] sums)
    { last, sums = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [BACK],
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
    same(SCAN.replace("BACK", str(back)).replace("OUT", str(out)), {"x": x, "start": start}, dims={"S": 6})


def test_standard_cases() -> None:
    """With the number of steps a constant, as exporters have it."""
    (case,) = node_cases.cases("Loop")
    made = onnx.ModelProto()
    made.CopyFrom(case.model)
    for value, array in zip(list(made.graph.input)[:2], case.inputs):
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        made.graph.input.remove(value)
    results = lowering.compile(made).run({made.graph.input[0].name: case.inputs[2]})
    for value, want in zip(made.graph.output, case.outputs):
        np.testing.assert_allclose(results[value.name], want)


def test_steps_that_are_not_known() -> None:
    model = onnx.parser.parse_model(f"{HEADER} {SCAN.replace('BACK', '0').replace('OUT', '0')}")
    with pytest.raises(NodeError, match=r"the number of steps .* is not known before the run"):
        lowering.compile(model)
    with pytest.raises(NodeError, match="steps of 4 nodes would be written out"):
        lowering.compile(model, dims={"S": 10**6})


SQUEEZE = """m (float[A, C] x) => (float[C] y)
    { shape = Shape <start = 0, end = 1> (x) one = Constant <value_ints = [1]> () c = Equal (shape, one)
      y = If (c) <then_branch = t () => (float[C] a) { axis = Constant <value_ints = [0]> () a = Squeeze (x, axis) },
                  else_branch = e () => (float[A, C] b) { b = Identity (x) }> }"""


def test_squeeze_under_a_condition() -> None:
    """PyTorch's squeeze(0): compiled for one element, which the run checks."""
    module = lowering.compile(onnx.parser.parse_model(f"{HEADER} {SQUEEZE}"))
    x = np.arange(5, dtype=np.float32)
    assert np.array_equal(module.run({"x": x[None]})["y"], x)
    with pytest.raises(InputError, match=r"If-21"):
        module.run({"x": np.stack([x, x])})
