"""Sizes of two names, of which either may be 1 when the model runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import lowering
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)


def model(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\ng {body}')


_OPEN = {
    "one node": "(float[A,3] x, float[B,3] z) => (float[C,3] y) { y = Add (x, z) }",
    "what follows": "(float[A,3] x, float[B,3] z) => (float[C,3] y) <float[C,3] s> { s = Add (x, z)  y = Mul (s, x) }",
    "two axes": "(float[A,B] x, float[D,E] z, float[F,1] c) => (float[G,H] y) <float[G,H] s> "
    "{ s = Mul (x, z)  y = Sub (s, c) }",
    "three operands": "(bool[D,1] c, float[A,3] x, float[B,3] z) => (float[G,3] y) { y = Where (c, x, z) }",
    "a number as well": "(float[A,3] x, float[B,3] z) => (float[C,3] y) <float[1,1] c = {2}> { y = Max (x, z, c) }",
    "a static size as well": "(float[A,B] x, float[4,D] z) => (float[4,E] y) { y = Add (x, z) }",
    "integers": "(int64[A] x, int64[B] z) => (bool[C] y) { y = Less (x, z) }",
    "a kernel of ours": "(float[A,3] x, float[B,3] z) => (float[C,3] y) <float[C,3] s> "
    "{ s = Pow (x, z)  y = Softmax (s) }",
    "a name and a formula": '(float["past + tokens"] x, float[tokens] z) => (float[tokens] y) { y = Add (x, z) }',
    "ranks": "(float[A,B,2] x, float[D,2] z) => (float[A,E,2] y) { y = Max (x, z) }",
}


def _values(declared: onnx.ValueInfoProto, sizes: Mapping[str, int]) -> np.ndarray:
    """Numbers between 0.5 and 2.5, or truth values, of the declared shape."""
    kind = declared.type.tensor_type
    shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in kind.shape.dim]
    return (RNG.random(shape) * 2 + 0.5).round(1).astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))


@pytest.mark.parametrize("body", _OPEN.values(), ids=_OPEN)
def test_sizes_whose_result_has_a_third_name_broadcast_at_run_time(body: str) -> None:
    """Every choice of 1 and 4 for every size agrees with the reference; sizes that do not broadcast are an error."""
    proto = model(body)
    shapes = [declared.type.tensor_type.shape for declared in proto.graph.input]
    names = sorted({dim.dim_param for shape in shapes for dim in shape.dim} - {""})
    choices = [dict(zip(names, sizes)) for sizes in itertools.product((1, 4), repeat=len(names))]
    module, reference = lowering.compile(proto), ReferenceEvaluator(proto)
    for sizes in choices:
        inputs = {declared.name: _values(declared, sizes) for declared in proto.graph.input}
        (expected,) = reference.run(None, inputs)
        np.testing.assert_allclose(module.run(inputs)["y"], expected, rtol=1e-5, atol=1e-6, strict=True)
    for sizes in ((2, 3, 4, 5, 6), (3, 0, 2, 3, 2)):
        wrong = dict(zip(names, sizes))
        with raises("run.size_mismatch"):
            module.run({i.name: _values(i, wrong) for i in proto.graph.input})


def test_sizes_without_a_third_name_are_taken_to_be_equal() -> None:
    """The error says how a model tells that they are not."""
    proto = model("(float[A,3] x, float[B,3] z) => (float[A,3] y) { y = Add (x, z) }")
    module = lowering.compile(proto)
    with raises("run.size_mismatch"):
        module.run({"x": np.ones((1, 3), np.float32), "z": np.ones((4, 3), np.float32)})
