"""The backend of onnx.backend.base: by itself, and through onnx's own suite."""

from __future__ import annotations

import re
import unittest
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, parser
from onnx.backend.test import BackendTest
from onnx.backend.test.case import node as case_package

import lowering
import lowering.backend as backend
from tests.cases import node_cases
from tests.support.error_codes import raises

MODEL = parser.parse_model(
    '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 3] x, float[3] b) => (float[N, 3] y, float[N, 3] z)'
    "{ y = Add(x, b) z = Mul(x, b) }"
)
X, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, -2, 3], np.float32)

# Models of onnx's suite that need no download.
CLASSES = ("Node", "Simple", "PyTorchConverted", "PyTorchOperator")

# By operator a case: several outputs, small types, sizes of data, control flow, functions, lists of tensors; and two
# that are refused.
SAMPLE = {
    "Attention": "test_attention_4d_gqa",
    "Cast": "test_cast_FLOAT_to_BFLOAT16",
    "Clip": "test_clip_expanded",
    "Dropout": "test_dropout_default_mask",
    "Identity": "test_identity_sequence",
    "If": "test_if",
    "MatMul": "test_matmul_2d",
    "NonZero": "test_nonzero_example",
    "OptionalHasElement": "test_optional_has_element_empty_optional_input",
    "SequenceInsert": "test_sequence_insert_at_back",
    "SequenceMap": "test_sequence_map_add_2_sequences",
    "SoftmaxCrossEntropyLoss": "test_sce_mean_log_prob",
    "Split": "test_split_variable_parts_1d_opset18",
    "SplitToSequence": "test_split_to_sequence_1",
    "StringSplit": "test_string_split_basic",
    "TopK": "test_top_k",
}
REFUSED = 2


def test_models_run() -> None:
    """Arrays in order, by name, and one alone."""
    prepared = backend.prepare(MODEL, "CPU")
    for inputs in ([X, B], (X, B), {"b": B, "x": X}):
        y, z = prepared.run(inputs)
        np.testing.assert_array_equal(y, X + B)
        np.testing.assert_array_equal(z, X * B)
    relu = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (float[N] y) { y = Relu(x) }'
    )
    (y,) = backend.run_model(relu, B)
    np.testing.assert_array_equal(y, [1, 0, 3])


def test_nodes_run() -> None:
    """With inferred outputs, with given ones, with holes, and of another opset and domain."""
    (y,) = backend.run_node(helper.make_node("Relu", ["x"], ["y"]), [B])
    np.testing.assert_array_equal(y, [1, 0, 3])
    (y,) = backend.run_node(helper.make_node("Clip", ["x", "", "most"], ["y"]), [X, np.float32(2)])
    np.testing.assert_array_equal(y, np.minimum(X, 2))
    values, indices = backend.run_node(helper.make_node("TopK", ["x", "k"], ["v", "i"]), [X, np.array([2])])[:2]
    np.testing.assert_array_equal(values, X[:, :0:-1])
    np.testing.assert_array_equal(indices, [[2, 1]] * 2)
    squeeze = helper.make_node("Squeeze", ["x"], ["y"], axes=[0])
    (y,) = backend.run_node(squeeze, [X[:1]], outputs_info=[(np.float32, (3,))], opset_version=11)
    np.testing.assert_array_equal(y, X[0])
    gelu = helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft")
    (y,) = backend.run_node(gelu, [B], outputs_info=[(np.float32, (3,))])
    np.testing.assert_allclose(y, B / (1 + np.exp(-1.702 * B)), rtol=1e-5)


@pytest.mark.no_gpu
def test_devices() -> None:
    assert backend.supports_device("CPU")
    assert not any(map(backend.supports_device, ("NPU", "CPU:x", "CUDA:7", "")))
    with raises("argument.device_unsupported"):
        backend.prepare(MODEL, "NPU")


LISTS = parser.parse_model(
    '<ir_version: 10, opset_import: ["" : 21]> g (seq(float) s, float[N] x, optional(float[N]) o) => (seq(float[P]) t, '
    "optional(float[N]) p, float[N] y) { t = SequenceInsert (s, x) p = Identity (o) y = Neg (x) }"
)


def test_lists_and_optional_values() -> None:
    """Compiled for each number of elements, and for each number of dimensions where the model declares none."""
    LISTS.graph.input[0].type.sequence_type.elem_type.tensor_type.ClearField("shape")
    prepared = backend.prepare(LISTS)
    for arrays in ([B], [B, B[:2]], [], [B], [X, X, X]):
        for o in (None, B):
            t, p, y = prepared.run([arrays, B, o])
            for actual, want in zip(t, [*arrays, B], strict=True):
                np.testing.assert_array_equal(actual, want)
            assert (p is None) == (o is None)
            np.testing.assert_array_equal(y, -B)
    with raises("model.input_shape_missing"):
        prepared.run({"s": [B, X], "x": B})


def test_wrong_inputs_are_refused() -> None:
    with raises("input.count_mismatch"):
        backend.prepare(MODEL).run([X])


def test_what_cannot_be_lowered_is_not_compatible() -> None:
    assert backend.is_compatible(MODEL)
    node = helper.make_node("StringSplit", ["x"], ["y", "n"])
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.STRING, ["a", "b"])]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.STRING, ["a"])]
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 21)]
    )
    assert not backend.is_compatible(model)


@contextmanager
def skipped_where_refused() -> Iterator[None]:
    """Skip cases that the compiler refuses: docs/node_cases.md lists them with the reasons."""
    try:
        yield
    except (lowering.ModelError, lowering.NodeError) as error:
        raise unittest.SkipTest(str(error)) from error


class TestedModel(backend.PreparedModel):
    """A model that takes lists is compiled when it runs."""

    __test__ = False  # for pytest

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        with skipped_where_refused():
            return super().run(inputs, **kwargs)


class TestedBackend(backend.LoweringBackend):
    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> backend.PreparedModel:
        tolerances = ("rtol", "atol")  # the suite hands on what it is told of a case
        with skipped_where_refused():
            prepared = super().prepare(model, device, **{k: v for k, v in kwargs.items() if k not in tolerances})
        prepared.__class__ = TestedModel
        return prepared


def suite() -> unittest.TestSuite:
    """The cases of onnx's suite for CPUs, but for those that are compared with draws of another generator.

    Values that are rounded between the nodes of a case are as close as float16 allows. Zeros that float32 accumulators
    give are not, as in tests/cases/node_cases.py.
    """
    close = {case.name: {"atol": node_cases.NOISE["DFT"]} for case in node_cases.cases("DFT")}
    halves = (case for case in node_cases.cases("Attention") if case.inputs[0].dtype == np.float16)
    close |= {case.name: {"rtol": node_cases.TWO_UNITS["float16"]} for case in halves}
    tests = BackendTest(TestedBackend, __name__, test_kwargs=close).exclude("_cuda$")
    for case in (case for operator in ("Bernoulli", "Dropout") for case in node_cases.cases(operator)):
        if case.is_random:
            tests.exclude(f"^{case.name}_cpu$")
    classes = (tests.test_cases[f"OnnxBackend{name}ModelTest"] for name in CLASSES)
    loaded = map(unittest.defaultTestLoader.loadTestsFromTestCase, classes)
    return unittest.TestSuite(loaded)


def run(cases: unittest.TestSuite) -> tuple[int, int]:
    """Return how many cases passed, and how many were skipped. Raise AssertionError for others."""
    result = unittest.TestResult()
    cases.run(result)
    errors = [f"{case.id()}: {text}" for case, text in (*result.failures, *result.errors)]
    assert not errors, "\n".join(errors)
    return result.testsRun - len(result.skipped), len(result.skipped)


def check_constant_vectors(operators: Iterable[str]) -> None:
    """Check docs/node_cases.md on cases whose sizes, positions and conditions come with the call."""
    for operator in operators:
        refused = [m for m in node_cases.every_model(operator) if node_cases.refusal_of(m.proto, m.inputs)]
        assert refused, operator
        for model in map(node_cases.with_constant_vectors, refused):
            results = backend.prepare(model.proto).run(model.inputs)
            for actual, expected in zip(results, model.outputs, strict=True):
                node_cases.assert_close(actual, expected, 1e-3, 1e-6, model.name)


def test_cases_with_constant_vectors() -> None:
    check_constant_vectors(["If", "Loop", "SequenceInsert", "SplitToSequence"])


@pytest.mark.slow
def test_all_cases_with_constant_vectors() -> None:
    page = (Path(__file__).parents[2] / "docs" / "node_cases.md").read_text()
    table = page.partition("\n## Known by the call only\n")[2].partition("\n## ")[0]
    operators = dict.fromkeys(re.findall(r"^\| (\w+) \| test_", table, re.MULTILINE))
    assert operators
    check_constant_vectors(operators)


def test_sample_of_onnx_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making all cases takes onnx half a minute: the suite is given some."""
    for operator in SAMPLE:
        node_cases.cases(operator)  # makes them

    def load(kind: str) -> list[Any]:
        return [case for case in case_package._NodeTestCases if case.name in SAMPLE.values()] if kind == "node" else []

    monkeypatch.setattr(onnx.backend.test.runner, "load_model_tests", load)
    tests = BackendTest(TestedBackend, __name__).exclude("_cuda$")
    cases = tests.test_cases["OnnxBackendNodeModelTest"]
    passed, skipped = run(unittest.defaultTestLoader.loadTestsFromTestCase(cases))
    assert (passed + skipped, skipped - REFUSED) == (2 * len(SAMPLE), len(SAMPLE))  # those for GPUs are excluded


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_onnx_suite() -> None:
    passed, _ = run(suite())
    assert passed > 1850
