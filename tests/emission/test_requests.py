"""Static objects of serving operators: results, and errors of tables that do not fit, are those of artifacts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lowering
from lowering.compiling.compiler import compile_static
from tests.serving.cache_attention.test_cache_attention import make_model
from tests.serving.gpt_attention import gpt_attention_cases
from tests.serving.gpt_attention.test_gpt_compiled_checks import CONTENTS, draw_corrupted_calls
from tests.serving.request_checks import check_gpt, make_gpt_node
from tests.serving.test_compiled_checks import MODES, OPERATOR_DEFECTS, Inputs, choose_case, corrupt_inputs
from tests.support.static_objects import StaticError, StaticObject

SEED = 20261130


def copy(inputs: Inputs) -> Inputs:
    return {name: array.copy() for name, array in inputs.items()}


@pytest.mark.parametrize("operator, mode", MODES)
def test_openppl(operator: str, mode: int, tmp_path: Path) -> None:
    case = choose_case(operator, mode)
    model = make_model(case, functional=False)
    module = lowering.compile(model, threads=1)
    static = StaticObject(tmp_path / "out", compile_static(tmp_path / "out", model))
    for seed in range(4):
        inputs = case.arrays(np.random.default_rng(seed))
        own = copy(inputs)
        expected = module.run(inputs)
        actual = static.compute(own, expected)
        for name, array in inputs.items():  # a cache is written in place
            assert own[name].tobytes() == array.tobytes(), name
        for name, array in actual.items():
            assert array.tobytes() == expected[name].tobytes(), name
    rejected = 0
    for defect in OPERATOR_DEFECTS[operator].values():
        corrupted = corrupt_inputs(operator, mode, defect)
        if corrupted is None:
            continue
        inputs, _ = corrupted
        with pytest.raises(lowering.LoweringError) as said:
            module.run(copy(inputs))
        own = copy(inputs)
        with pytest.raises(StaticError) as caught:
            static.compute(own, expected)
        assert caught.value.code == said.value.code
        assert caught.value.text == str(said.value).partition(": ")[2]
        assert all(own[name].tobytes() == array.tobytes() for name, array in inputs.items())
        rejected += 1
    assert rejected >= 5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(4))
def test_gpt_attention(number: int, tmp_path: Path) -> None:
    *_, case = gpt_attention_cases.cases(5, number + 1)
    model, inputs = make_gpt_node(case.arrays(np.random.default_rng(SEED)), symbolic=True)
    static = StaticObject(tmp_path / "out", compile_static(tmp_path / "out", model))
    own = copy(inputs)
    expected = lowering.compile(model, threads=1).run(inputs)
    for name, array in static.compute(own, expected).items():
        assert array.tobytes() == expected[name].tobytes(), name
    for name, array in inputs.items():
        assert own[name].tobytes() == array.tobytes(), name


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", sorted(CONTENTS))
def test_gpt_attention_rejects_contents(name: str, tmp_path: Path) -> None:
    (call,) = draw_corrupted_calls(11, {name})
    with pytest.raises(ValueError) as said:
        check_gpt(call.arguments)
    model, inputs = make_gpt_node(call.arguments, symbolic=True)
    static = StaticObject(tmp_path / "out", compile_static(tmp_path / "out", model))
    own = copy(inputs)
    outputs = {field: np.zeros(1 << 20, "f") for field in static.tensor_fields()[1]}
    with pytest.raises(StaticError) as caught:
        static.compute(own, outputs)
    assert str(caught.value) == str(said.value)
    assert all(own[name].tobytes() == array.tobytes() for name, array in inputs.items())
