"""MultiHeadCacheAttention, KeyValueCache and MultiHeadAttention of OpenPPL equal the float64 reference, caches and
scales bit for bit, over the cross product of their attributes.

A short run draws some configurations, several calls of each; the long one (-m slow) thousands.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lowering
from tests.serving.cache_attention import cache_attention_cases as cases
from tests.serving.coverage_of_serving import PAGE, PPL, make_page

TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
    "int64": TensorProto.INT64,
}
OUTPUTS = {
    "MultiHeadCacheAttention": ("output", "cache", "scale"),
    "KeyValueCache": ("key", "value", "cache", "scale"),
    "MultiHeadAttention": ("output",),
}


def make_model(case: cases.Case, functional: bool) -> onnx.ModelProto:
    """Return a model of one node. functional: caches are outputs of the node; else it updates its inputs."""
    inputs = case.inputs()
    names = [name if name in inputs else "" for name in cases.INPUTS[case.operator]]
    while not names[-1]:
        names.pop()
    outputs: dict[str, tuple[str, Any]] = {}
    heads = case.num_heads if case.operator != "KeyValueCache" else case.num_kv_heads * case.attribute("num_repeat")
    for name in OUTPUTS[case.operator]:
        if name not in inputs:
            if name not in ("cache", "scale"):
                outputs[name] = case.dtype, (f"{name}_rows", heads, case.head_dim)
        elif functional and (name == "cache" or case.scale == "stored"):
            outputs[f"{name}_out"] = inputs[name]
    node = helper.make_node(case.operator, names, list(outputs), name=case.name, domain=case.domain, **case.attributes)
    infos = [
        [helper.make_tensor_value_info(name, TYPES[dtype], shape) for name, (dtype, shape) in values.items()]
        for values in (inputs, outputs)
    ]
    graph = helper.make_graph([node], "serving", *infos)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid(case.domain, 1)])


def check(case: cases.Case, seed: int, calls: int, target: str = "cpu") -> None:
    rng = np.random.default_rng(seed)
    functional = seed % 2 == 0
    compiled = lowering.compile(make_model(case, functional), target, threads=1 + seed % 3 // 2)
    for _ in range(calls):
        inputs = case.arrays(rng)
        before = {name: array.copy() for name, array in inputs.items()}
        expected_results = cases.compute_expected(case, before)
        results = compiled.run(inputs)
        for name, want in expected_results.items():
            if name in ("cache", "scale"):
                got = inputs[name] if not functional else results.get(f"{name}_out", inputs.get(name))
                assert is_equal_bitwise(got, want), f"{name} of {case}"
                assert not functional or is_equal_bitwise(inputs[name], before[name]), f"{name} was written"
            else:
                tolerance = 2e-5 if case.dtype == "float32" else 3e-3
                np.testing.assert_allclose(results[name], want, tolerance, tolerance, err_msg=str(case))


def is_equal_bitwise(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("operator", cases.INPUTS)
def test_equals_the_reference(operator: str) -> None:
    seed, count, calls = PPL["CPU"]
    for number, case in enumerate(cases.cases(seed, count, operator)):
        check(case, number, calls)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(0, PPL["CPU, long"][1], 20))
@pytest.mark.parametrize("operator", cases.INPUTS)
def test_equals_the_reference_at_length(operator: str, first: int) -> None:
    seed, _, calls = PPL["CPU, long"]
    for number, case in enumerate(cases.cases(seed, first + 20, operator)[first:]):
        check(case, number, calls)


@pytest.mark.parametrize("operator", cases.INPUTS)
def test_every_two_features_meet_in_the_long_run(operator: str) -> None:
    seed, count, _ = PPL["CPU, long"]
    assert cases.find_missing_pairs(cases.cases(seed, count, operator)) == set()


def test_every_argument_of_gpt_attention_is_described() -> None:
    text = PAGE.with_name("serving.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name.strip(" `") for row in rows for name in row.split(",")}
    assert set(inspect.signature(lowering.gpt_attention).parameters) - {"others"} <= named


def test_the_page_of_serving_is_generated_anew() -> None:
    assert PAGE.read_text() == make_page(), "run `python -m tests.serving.coverage_of_serving`"
