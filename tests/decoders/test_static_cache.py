"""Growing caches become slot caches: steps equal the whole sequence, in place, and overflow is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import lowering
from tests.support.error_codes import raises

SAMPLES = Path(__file__).parents[1] / "exports" / "samples"
DECODERS = ["llama-past-dynamo23", "mistral-past-dynamo18", "gemma2-past-dynamo23"]
VOCABULARY, CAPACITY, B = 30, 80, 2


@pytest.fixture(scope="module", params=DECODERS)
def models(request: pytest.FixtureRequest) -> tuple[lowering.Model, lowering.Model]:
    """As it was exported, and with slot caches."""
    path = SAMPLES / request.param / "model.onnx"
    return lowering.compile(path), lowering.compile(path, static_cache=CAPACITY)


def whole(model: lowering.Model, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The logits of the model as it was exported, for the whole sequences at once."""
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    for spec in model.inputs:
        if spec.name.startswith("past"):
            sizes = [len(ids), *(0 if isinstance(size, str) else size for size in spec.dims[1:])]
            inputs[spec.name] = np.zeros(sizes, spec.dtype)
    if any(spec.name == "position_ids" for spec in model.inputs):
        inputs["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)
    return model.run(inputs)[model.outputs[0].name]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("padded", [False, True])
def test_every_step_equals_the_whole(models: tuple[lowering.Model, lowering.Model], padded: bool) -> None:
    exported, model = models
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (B, 9 + 64))
    mask = np.ones_like(ids)
    if padded:
        mask[1, :4] = 0
    expected = whole(exported, ids, mask)
    assert len(model.manifest.donated) == len(model.outputs) - 1
    decoder = model.decoder()
    scale = np.abs(expected).max()
    prompt = decoder.prefill(ids[:, :9], mask[:, :9])
    counts = mask[:, :9].astype(bool)
    assert np.abs(prompt - expected[:, :9])[counts].max() < 1e-5 * scale
    for k in range(9, 9 + 64):
        assert np.abs(decoder.step(ids[:, k]) - expected[:, k]).max() < 1e-5 * scale, k
    assert decoder.length == 9 + 64
    forked(decoder)
    overflow(decoder)


def forked(decoder: Any) -> None:
    """A fork goes on by itself; the first does not see what it reads."""
    other = decoder.fork()
    first = decoder.step([1, 2])
    other.step([3, 4])
    other.step([5, 6])
    third = decoder.fork().step([7, 8])
    np.testing.assert_array_equal(decoder.step([7, 8]), third)
    assert np.abs(first - third).max() > 0


def overflow(decoder: Any) -> None:
    """Refused before a slot is written, and the decoder goes on."""
    free = CAPACITY - decoder.length
    before = decoder.length
    copy = decoder.fork()
    with raises("static_cache.capacity_exceeded"):
        decoder.prefill(np.ones((B, free + 1), int))
    assert decoder.length == before
    np.testing.assert_array_equal(decoder.prefill(np.ones((B, free), int)), copy.prefill(np.ones((B, free), int)))
    with raises("static_cache.capacity_exceeded"):
        decoder.step([1, 1])
    decoder.reset()
    assert decoder.length == 0 and decoder.prefill([1, 2, 3]).shape[:2] == (1, 3)


def test_a_bound_call_is_refused_once_the_slots_are_full(models: tuple[lowering.Model, lowering.Model]) -> None:
    """The value of the length at the time of the call counts, not its value when the arrays were bound."""
    model = models[1]
    length = np.array(0, np.int64)
    inputs: dict[str, Any] = {"input_ids": np.ones((1, 1), np.int64), "past_length": length}
    for spec in model.inputs:
        if spec.name in model.manifest.donated:
            inputs[spec.name] = np.zeros([1, *spec.dims[1:]], spec.dtype)
        elif spec.name not in inputs:
            inputs[spec.name] = np.ones((1, 1), spec.dtype)
    call = model.bind(inputs)
    call()
    length[()] = CAPACITY
    before = {name: inputs[name].copy() for name in model.manifest.donated}
    with raises("static_cache.capacity_exceeded"):
        call()
    assert all((inputs[name] == cache).all() for name, cache in before.items())


def test_refusals() -> None:
    plain = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 23]> g (float[N] x) => (float[N] y) {y = Neg (x)}'
    )
    with raises("static_cache.cache_missing"):
        lowering.compile(plain, static_cache=8)
    with raises("decoder.caches_missing"):
        lowering.compile(plain).decoder()
    for capacity in (0, -1, 1.5, 2**40):
        with raises("argument.integer_invalid"):
            lowering.compile(SAMPLES / DECODERS[0] / "model.onnx", static_cache=capacity)
