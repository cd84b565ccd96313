"""Symbolic sizes that do not fit together: an error of the call that names the node, and never a result; and
sizes of 0, which have a result."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest

import lowering
from lowering.errors import InputError, NodeError


def module(body: str, opset: int = 24) -> lowering.Model:
    opsets = f'["" : {opset}, "com.microsoft" : 1]'
    return lowering.compile(onnx.parser.parse_model(f"<ir_version: 10, opset_import: {opsets}> m {body}"))


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


# The model, arrays that fit, arrays that do not, and the code of the error.
CASES = {
    "Expand": (
        "(float[a, b] x) => (float[c, d, e] y) {s = Constant<value_ints=[2, 3, 5]>() [node] y = Expand(x, s)}",
        {"x": zeros(1, 5)},
        {"x": zeros(2, 5)},
        "expand.shapes_not_broadcastable",
    ),
    "Gemm": (
        "(float[a, b] x, float[b, c] w, float[d] z) => (float[a, c] y) {[node] y = Gemm(x, w, z)}",
        {"x": zeros(2, 3), "w": zeros(3, 4), "z": zeros(4)},
        {"x": zeros(2, 3), "w": zeros(3, 1), "z": zeros(4)},
        "run.size_mismatch",
    ),
    "QuantizeLinear": (
        "(float[a] x, float[b] s) => (uint8[a] y) {[node] y = QuantizeLinear<axis = 0, block_size = 3>(x, s)}",
        {"x": zeros(7), "s": np.ones(3, np.float32)},
        {"x": zeros(15), "s": np.ones(3, np.float32)},
        "run.size_mismatch",
    ),
    "DequantizeLinear": (
        "(int8[a, b] x, float[c] s) => (float[a, b] y) {[node] y = DequantizeLinear<axis = 1>(x, s)}",
        {"x": zeros(2, 3, dtype="int8"), "s": np.ones(3, np.float32)},
        {"x": zeros(2, 5, dtype="int8"), "s": np.ones(3, np.float32)},
        "run.size_mismatch",
    ),
    "Concat": (
        "(float[a, b] x, float[c, 4] z) => (float[d, e] y) {[node] y = Concat<axis = 0>(x, z)}",
        {"x": zeros(2, 4), "z": zeros(3, 4)},
        {"x": zeros(2, 5), "z": zeros(3, 4)},
        "node.shape_mismatch",
    ),
    "Split": (
        "(float[a] x) => (float[b] y, float[c] z, float[d] w) {[node] y, z, w = Split<axis = 0, num_outputs = 3>(x)}",
        {"x": zeros(4)},
        {"x": zeros(1)},
        "split.too_many_parts",
    ),
    "Tile": (
        "(float[a, b] x, int64[c] r) => (float[d, e] y) {[node] y = Tile(x, r)}",
        {"x": zeros(2, 3), "r": np.array([2, 1])},
        {"x": zeros(2, 3), "r": np.array([2, 1, 1])},
        "run.size_mismatch",
    ),
    "Clip": (
        "(float[a] x, float[b] low) => (float[a] y) {[node] y = Clip(x, low)}",
        {"x": zeros(3), "low": zeros(1)},
        {"x": zeros(3), "low": zeros(3)},
        "run.size_mismatch",
    ),
    "TensorScatter": (
        "(float[a, b, 4] x, float[a, c, 4] u) => (float[a, b, 4] y) {[node] y = TensorScatter(x, u)}",
        {"x": zeros(1, 8, 4), "u": zeros(1, 8, 4)},
        {"x": zeros(1, 4, 4), "u": zeros(1, 7, 4)},
        "tensor_scatter.update_too_long",
    ),
    "Range": (
        "(float a, float b, float c) => (float[n] y) {[node] y = Range(a, b, c)}",
        {"a": np.float32(0), "b": np.float32(3), "c": np.float32(1)},
        {"a": np.float32(0), "b": np.float32(np.inf), "c": np.float32(-1)},
        "range.input_not_finite",
    ),
    "BiasSplitGelu": (
        "(float[a, 6] x, float[b] z) => (float[a, 3] y) {[node] y = com.microsoft.BiasSplitGelu(x, z)}",
        {"x": zeros(2, 6), "z": zeros(6)},
        {"x": zeros(2, 6), "z": zeros(1)},
        "run.size_mismatch",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_do_not_fit(name: str) -> None:
    body, legal, illegal, code = CASES[name]
    model = module(body)
    model.run(legal)
    with pytest.raises(InputError) as error:
        model.run(illegal)
    message = str(error.value)
    assert error.value.code == code, message
    assert (f"{name}-" in message or "input '" in message) and "T.int64" not in message
    model.run(legal)


@pytest.mark.parametrize(
    "body, words",
    [
        ("(float[3] x) => (float[3] y) {y = Gelu<approximate = 'exact'>(x)}", "attribute approximate is 'exact'"),
        ("(int32[n, 2] x) => (int32[n, 2] y) {y = Cast<to = 0>(x)}", "attribute to is 0"),
        ("(float[2, 1] x) => (float[a, b] y, float[c, d] z, float[e, f] w) "
         "{y, z, w = Split<axis = 1, num_outputs = 3>(x)}", "cannot be split into 3 parts of 1"),
        ("(float[n, 33] x) => (float[a, b] y) "
         "{r = Constant<value_ints=[4294967296, 4294967296]>() y = Tile(x, r)}", "larger than any memory"),
        ("(float[1, 4, 2, 2] x) => (float[a, b, c, d] y) "
         "{y = DepthToSpace<blocksize = 2147483648>(x)}", "blocksize is 2147483648"),
    ],
)  # fmt: skip
def test_models_that_every_run_would_reject(body: str, words: str) -> None:
    with pytest.raises(NodeError, match=words):
        module(body.replace("'exact'", '"exact"'))


@pytest.mark.parametrize("columns", [1, 3, 16, 17, 40])
def test_nan_goes_through_clips_maxima_and_minima(columns: int) -> None:
    constants = "low = Constant<value_float=-0.5>() high = Constant<value_float=0.5>()"
    body = f"(float[a, b] x) => (float[a, b] y, float[a, b] z) {{{constants} y = Clip(x, low, high) z = Max(x, low)}}"
    x = np.random.default_rng(0).standard_normal((3, columns)).astype(np.float32)
    x[:, ::2] = np.nan
    results = module(body).run({"x": x})
    np.testing.assert_array_equal(results["y"], np.clip(x, np.float32(-0.5), np.float32(0.5)))
    np.testing.assert_array_equal(results["z"], np.maximum(x, np.float32(-0.5)))


def test_empty_inputs_give_empty_results_or_zeros() -> None:
    assert (
        module('(float[n, 0] x) => (float y) {y = Einsum<equation = "ij,ij->">(x, x)}').run({"x": zeros(2, 0)})["y"]
        == 0
    )
    normalize = module(
        "(float[a, b, c] x, float[0] s) => (float[a, b, c] y) {y = GroupNormalization<num_groups = 3>(x, s, s)}"
    )
    assert normalize.run({"x": zeros(2, 0, 3), "s": zeros(0)})["y"].shape == (2, 0, 3)
    accumulate = module("(int32[a, 0, b] x, int64 k) => (int32[a, 0, b] y) {y = CumSum(x, k)}")
    assert accumulate.run({"x": zeros(3, 0, 5, dtype="int32"), "k": np.int64(-1)})["y"].shape == (3, 0, 5)
    dropped = module("(float[2, 0] x) => (float[2, 0] y, bool[2, 0] m) {y, m = Dropout(x)}").run({"x": zeros(2, 0)})
    assert dropped["m"].shape == (2, 0)
    keys = "(float[5, 15, 8] q, float[5, 0, 8] k, int32[5, 0] m) => (float[5, 15, 8] y) "
    attended = module(keys + '{y = com.microsoft.MultiHeadAttention<num_heads = 4>(q, k, k, "", m)}'.replace('""', ""))
    empty = {"q": zeros(5, 15, 8), "k": zeros(5, 0, 8), "m": zeros(5, 0, dtype="int32")}
    assert not attended.run(empty)["y"].any()


def test_a_bfloat16_for_all_elements() -> None:
    model = module("(bfloat16 x) => (bfloat16[a, b] y) {s = Constant<value_ints=[2, 40]>() y = Expand(x, s)}")
    x = np.array(1.5, ml_dtypes.bfloat16)
    assert (model.run({"x": x})["y"] == x).all()
