"""Chains of convolutions: nodes between them are computed with channels last, and transposed only at the ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import lowering

RNG = np.random.default_rng(0)

# The nodes after x [N, 6, H, W]; w0 is 3 x 3 and w1 is 1 x 1 of six channels, b a vector of six elements.
CHAINS = {
    "residual": "a = Conv<pads=[1,1,1,1]>(x, w0, b) r = Relu(a) c = Conv<pads=[1,1,1,1]>(r, w0) y = Add(c, x)",
    "scale": "a = Conv(x, w1, b) g = GlobalAveragePool(a) e = Conv(g, w1) s = Sigmoid(e) m = Mul(a, s) y = Conv(m, w1)",
    "normalize": "a = Conv(x, w1) n = BatchNormalization(a, b, b, b, v) c = Clip(n, low, high) y = Conv(c, w1)",
    "pools": "a = Conv(x, w1) p = MaxPool<kernel_shape=[2,2]>(a) q = AveragePool<kernel_shape=[2,3]>(p)"
    " y = Conv(q, w1)",
    "concat": "a = Conv(x, w1) c = Conv(x, w1, b) d = Concat<axis=1>(a, c) p, q = Split<axis=1, num_outputs=2>(d)"
    " s = Mul(p, q) y = Conv(s, w1)",
    "pad": "a = Conv(x, w1) p = Pad<mode=\"edge\">(a, pads) y = Conv(p, w0)",
    "slice": "a = Conv(x, w1) p = Slice(a, one, far, axis, two) y = Conv(p, w1)",
    "means": "a = Conv(x, w1) m = ReduceMean<keepdims=1>(a, channel) d = Sub(a, m) s = ReduceMax<keepdims=0>(d, axes)"
    " y = Identity(s)",
    "flat": "a = Conv(x, w1) f = Flatten<axis=2>(a) t = Transpose<perm=[1,0]>(f) y = Softmax(t)",
    "columns": "a = Conv(x, w1) r = Reshape(a, shape) t = Transpose<perm=[0,2,1]>(r) y = Relu(t)",
    "cast": "a = Conv(x, w1) h = Cast<to=10>(a) f = Cast<to=1>(h) y = Conv(f, w1)",
    "last": "t = Transpose<perm=[0,2,3,1]>(x) n = LayerNormalization(t, b) p = Transpose<perm=[0,3,1,2]>(n)"
    " y = Conv(p, w1)",
    "shared": "a = Conv(x, w1) t = Transpose<perm=[1,0,2,3]>(a) e = Exp(a) s = ReduceSum<keepdims=0>(t, all)"
    " y = Add(e, s)",
    "plain": "a = Conv(x, w1) s = Sin(x) c = Cos(x) m = Where(no, s, c) y = Add(a, m)",
}  # fmt: skip

# Remaining transpositions to and from ONNX's order: at the ends, and where an operator lacks another order.
ENDS = {"means": 1, "flat": 3, "columns": 1, "last": 2, "shared": 3, "plain": 3}


def make_chain(name: str, symbolic: bool) -> onnx.ModelProto:
    sizes = "N, 6, H, W" if symbolic else "2, 6, 9, 8"
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]>
        chain (float[{sizes}] x) => (float[] y) {{ {CHAINS[name]} }}""")
    generator = np.random.default_rng(1)
    weights = {
        "w0": generator.standard_normal((6, 6, 3, 3)) / 7, "w1": generator.standard_normal((6, 6, 1, 1)) / 2,
        "b": generator.standard_normal(6), "v": generator.uniform(1, 2, 6), "low": np.array(-1.0),
        "high": np.array(1.0),
    }  # fmt: skip
    integers = {
        "pads": [0, 0, 1, 2, 0, 0, 1, 0], "one": [1, 2], "far": [100, 100], "axis": [2, 3], "two": [2, 1],
        "channel": [1], "axes": [2, 3], "shape": [0, 0, -1], "all": [0, 1, 2, 3],
    }  # fmt: skip
    for name_, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array, "float32"), name_))
    for name_, numbers in integers.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(numbers, "int64"), name_))
    model.graph.initializer.append(numpy_helper.from_array(np.array(False), "no"))
    return model


def declare_rank(model: onnx.ModelProto, rank: int) -> onnx.ModelProto:
    """Declare an output of that rank."""
    for axis in range(rank):
        model.graph.output[0].type.tensor_type.shape.dim.add().dim_param = f"y{axis}"
    return model


@pytest.mark.sampled(4)
@pytest.mark.parametrize("symbolic", (False, True), ids=("fixed", "symbolic"))
@pytest.mark.parametrize("name", CHAINS)
def test_chain(name: str, symbolic: bool) -> None:
    model, x = make_chain(name, symbolic), RNG.standard_normal((2, 6, 9, 8)).astype("float32")
    passes: list[str] = []

    def count(stage: str, module: Any) -> None:
        if stage == "eliminate_dead_code":
            passes.append(str(module["main"].script(show_meta=False)))

    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    compiled = lowering.compile(declare_rank(model, expected.ndim), dump=count)
    tolerance = 1e-2 if name == "cast" else 1e-5
    np.testing.assert_allclose(compiled.run({"x": x})["y"], expected, rtol=tolerance, atol=tolerance)
    assert passes[0].count("R.permute_dims") == ENDS.get(name, 2)
