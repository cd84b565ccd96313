"""Outputs that float32 computes badly, whoever does it: one in float64 tells them from wrong ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import lowering
from lowering.checking import trial
from lowering.checking.compare import Comparison, Tolerance, add_float64_errors, compare_output
from lowering.checking.float64_reference import compute_in_float64, widen_model


def norm() -> onnx.ModelProto:
    """Numbers that are much larger than their differences."""
    return onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 23]>
        m (float[N, 64] x, float[64] scale) => (float[N, 64] y) {
          far = Constant <value_float = 30000.0> ()
          moved = Add (x, far)
          y = LayerNormalization (moved, scale) }""")


def canceling() -> onnx.ModelProto:
    """A softmax of accumulators, to which the difference of two large and equal matmuls is added.

    The order of accumulation, which depends on the machine, costs less than the rounding that all have in common.
    """
    model, rng = (
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 23]> m (float[64, 96] x) => (float[64, 8] y) {
          far = Constant <value = float {1000000.0}> ()
          moved = Add (x, far)
          rounded = Sub (moved, far)
          large = Constant <value = float {5000.0}> ()
          scaled = Mul (x, large)
          permuted = Gather <axis = 1> (scaled, order)
          one = MatMul (scaled, w)
          other = MatMul (permuted, w_permuted)
          nothing = Sub (one, other)
          z = MatMul (rounded, w)
          sum = Add (z, nothing)
          y = Softmax (sum) }"""),
        np.random.default_rng(0),
    )
    w, order = rng.standard_normal((96, 8)).astype(np.float32), rng.permutation(96)
    arrays = {"w": w, "w_permuted": w[order], "order": order}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


@pytest.mark.parametrize("model", [norm(), canceling()], ids=["norm", "canceling"])
def test_an_ill_conditioned_output_is_as_close_as_the_reference(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one of a wrong kernel is not."""
    compiled = trial.compile

    def wrong(model: ir.Model, *options: Any, **more: Any) -> lowering.Model:
        """All that is given out is too large by a tenth."""
        other = ir.to_proto(model)
        other.graph.node[-1].output[0] = "right"
        other.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1.1), "factor"))
        other.graph.node.append(onnx.helper.make_node("Mul", ["right", "factor"], ["y"]))
        return compiled(other, *options, **more)

    (y,) = lowering.verify(model).comparisons
    assert y.close and y.float64 is not None and y.max_rel > 1e-2
    assert y.float64.ours <= 2 * y.float64.reference and "ok: the output is ill-conditioned; beside float64" in str(y)
    (y,) = lowering.verify(model, rtol=1e-3).comparisons
    assert not y.close  # that much was demanded

    monkeypatch.setattr(trial, "compile", wrong)
    (y,) = lowering.verify(model).comparisons
    assert not y.close and y.float64 is not None and y.float64.ours > 2 * y.float64.reference
    assert "DIFFERS: beside float64 ours is" in str(y)


def judged(lowered: float, reference: float, exact: float, dtype: type = np.float32) -> Comparison:
    """Compare an array whose other elements are right."""
    arrays = [np.array([1, 2, last]) for last in (lowered, reference)]
    allowed, (actual, expected) = Tolerance(1e-3, 1e-5), [array.astype(dtype) for array in arrays]
    wide = np.array([1, 2, exact], np.float64 if dtype is np.float32 else dtype)
    return add_float64_errors(compare_output("y", actual, expected, allowed), actual, expected, wide, allowed)


def test_errors_that_the_float64_reference_excuses() -> None:
    assert judged(3.02, 3.0, 3.02).close  # the reference is wrong
    assert judged(3.03, 3.0, 3.015).close  # both are, by as much
    assert not judged(2.99, 3.03, 3.05).close  # ours is three times as far
    assert not judged(9.0, 3.0, 6.0).close  # a reference that is far from float64 proves nothing
    assert not judged(np.nan, 3.0, 3.01).close and not judged(3.1, np.inf, 3.0).close
    assert judged(4, 3, 4, np.int64).close and not judged(4, 2, 3, np.int64).close  # as of ArgMax


def test_everything_is_widened() -> None:
    text = """<ir_version: 10, opset_import: ["" : 23]> m (float[N] x, bool c) => (float[N] y, float16[N] h) {
        three = Constant <value_float = 3.0> ()
        four = Constant <value_floats = [4.0]> ()
        half = Cast <to = 10> (x)
        back = Cast <to = 1> (half)
        shape = Shape (x)
        zeros = ConstantOfShape (shape)
        z = If (c) <then_branch = t () => (float[N] a) { a = Cast <to = 1> (half) },
                    else_branch = e () => (float[N] b) { b = Mul (x, w) }>
        s = Sum (back, three, four, zeros, z)
        y = Identity (s)
        h = Identity (half) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0.5], np.float32), "w"))
    x = np.array([1 + 2**-20, 1 / 3], np.float32)  # which float16 cannot represent
    for c in (True, False):
        feeds = {"x": x, "c": np.array(c)}
        y, h = compute_in_float64(ir.from_proto(model), "reference", lambda run, feeds=feeds: run(feeds)) or []
        wide = x.astype(np.float64)
        np.testing.assert_array_equal(y, wide + 3 + 4 + (wide if c else wide / 2))
        np.testing.assert_array_equal(h, wide)
        assert y.dtype == h.dtype == np.float64


def test_models_without_a_float64_reference() -> None:
    integers = '<ir_version: 10, opset_import: ["" : 23]> m (int64[N] x) => (int64[N] y) { y = Neg (x) }'
    assert widen_model(ir.from_proto(onnx.parser.parse_model(integers))) is None
    text = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
        m (float[N, 8] x) => (float[N, 8] y) { y = com.microsoft.Gelu (x) }"""
    model, feeds = ir.from_proto(onnx.parser.parse_model(text)), {"x": np.ones((1, 8), np.float32)}
    assert compute_in_float64(model, "onnxruntime", lambda run: run(feeds)) is None  # has kernels for float32 alone
