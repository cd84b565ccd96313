"""Static objects of exported models and decoders compute what their artifacts do, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lowering
from lowering.compiling.compiler import compile_static
from tests.exports import table
from tests.support.static_objects import StaticError, StaticObject

SAMPLES = Path(__file__).parents[1] / "exports" / "samples"
SEED = 20261130


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sample", sorted(SAMPLES.iterdir()), ids=lambda sample: sample.name)
def test_sample(sample: Path, tmp_path: Path) -> None:
    static = StaticObject(tmp_path / "out", compile_static(tmp_path / "out", sample / "model.onnx"))
    module = lowering.compile(sample / "model.onnx")
    for setting in sorted(sample.glob("*.npz")):
        inputs, _ = table.load_setting(setting)
        expected = module.run(inputs)
        outputs = static.compute(inputs, expected)
        for name, array in expected.items():
            assert outputs[name].tobytes() == array.tobytes(), (setting.name, name)


def test_decoder_with_static_caches(tmp_path: Path) -> None:
    """The number of tokens in the caches is a size of the call, which must equal the input."""
    model, slots = SAMPLES / "llama-past-dynamo23" / "model.onnx", 32
    static = StaticObject(tmp_path / "out", compile_static(tmp_path / "out", model, static_cache=slots))
    module = lowering.compile(model, static_cache=slots)
    fields, output_fields = static.tensor_fields()
    assert list(output_fields) == ["logits"] and "past_length" in static.fields
    rng = np.random.default_rng(SEED)
    caches = {name: np.zeros((2, 1, slots, 4), "f") for name in static.manifest.donated}
    own_caches = {name: array.copy() for name, array in caches.items()}
    past = 0
    for tokens in (7, 1, 1, 3, 20):
        inputs = {
            "input_ids": rng.integers(0, 32, (2, tokens)),
            "attention_mask": np.ones((2, past + tokens), np.int64),
            "past_length": np.array(past),
        }
        expected = module.run({**inputs, **caches})
        caches = {name: expected[output] for name, output in static.manifest.donated.items()}
        logits = np.full((2, tokens, 32), np.nan, "f")
        sizes = {"batch": 2, "tokens": tokens, "total": past + tokens, "past_length": past}
        memory = {fields[name]: array for name, array in {**inputs, **own_caches}.items()}
        wrong = past + 1 if past + tokens < slots else past - 1
        with pytest.raises(StaticError, match=f"'past_length' is {wrong}.* says {past}"):
            static.run({**sizes, "past_length": wrong}, {**memory, "logits": logits})
        assert np.isnan(logits).all()
        static.run(sizes, {**memory, "logits": logits})
        np.testing.assert_array_equal(logits, expected["logits"])
        for name, array in own_caches.items():
            np.testing.assert_array_equal(array, caches[name])
        past += tokens
    assert past == slots
    memory["input_ids"], memory["attention_mask"] = np.zeros((2, 1), np.int64), np.ones((2, slots + 1), np.int64)
    memory[fields["past_length"]] = np.array(slots)
    with pytest.raises(StaticError, match="32"):
        static.run({"batch": 2, "tokens": 1, "total": slots + 1, "past_length": slots}, {**memory, "logits": logits})
