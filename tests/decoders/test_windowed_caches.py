"""Caches of layers that see a window are rings: equal to whole runs however often they wrap, and no larger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import lowering
from lowering.about import list_facts
from tests.decoders.test_cache_forms import CASES, KV_HEADS, SIZE, VOCABULARY, Case, model_of, plainly
from tests.support.error_codes import raises

CAPACITY, TOKENS = 1400, 1300
FORMS = {
    "attribute and sinks": Case("GroupQueryAttention", {"local_window_size": 3}, ("sinks",)),
    "computed mask": CASES["Attention, computed window"],
    "attribute and mask": CASES["Attention, window"],
    "attribute and bias": Case("GroupQueryAttention", {"local_window_size": 5, "softcap": 2.0}, ("bias",)),
}


def caches(model: lowering.Model) -> list[tuple[int | str, ...]]:
    return [spec.dims for spec in model.inputs if spec.name in model.manifest.donated]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FORMS)
def test_steps_equal_the_whole_over_several_wraps(name: str) -> None:
    source = model_of(FORMS[name])
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, TOKENS))
    expected = plainly(source, ids)
    model = lowering.compile(source, static_cache=CAPACITY)
    decoder = model.decoder()
    answers = [decoder.prefill(ids[:, :1]), decoder.prefill(ids[:, 1:1250])]
    answers += [decoder.step(token)[:, None] for token in ids.T[1250:]]
    np.testing.assert_allclose(np.concatenate(answers, axis=1), expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    slots = model.manifest.slots
    assert slots is not None and slots.rings == {"past_k": 576, "past_v": 576}
    assert caches(model) == [("B", KV_HEADS, 576, SIZE)] * 2
    assert (decoder.length, decoder.capacity) == (TOKENS, CAPACITY)


def test_padding_on_the_left_takes_slots_and_no_window() -> None:
    source = model_of(FORMS["computed mask"])
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (2, 900))
    mask = np.arange(900) >= np.array([[0], [633]])
    decoder = lowering.compile(source, static_cache=CAPACITY).decoder()
    answer = np.concatenate([decoder.prefill(ids[:, :700], mask[:, :700]), decoder.prefill(ids[:, 700:])], axis=1)
    for row, begin in enumerate((0, 633)):
        expected = plainly(source, ids[row : row + 1, begin:])[0]
        np.testing.assert_allclose(answer[row, begin:], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_what_rings_refuse_leaves_the_decoder_as_it_was(tmp_path: Path) -> None:
    source = model_of(FORMS["attribute and mask"])
    lowering.compile(source, static_cache=CAPACITY).save(tmp_path / "decoder")
    model = lowering.load(tmp_path / "decoder")
    slots = model.manifest.slots
    assert slots is not None and slots.rows == 574
    assert (
        "1400 slots, of which 'past_length' says how many are filled, 2 of 2 rings of 576"
        in dict(list_facts(model._files, model.manifest))["Caches"]
    )
    decoder = model.decoder()
    ids = np.random.default_rng(2).integers(0, VOCABULARY, (1, 1350))
    wrong = ids.copy()
    wrong[0, 1340] = VOCABULARY
    for read in (1, 100):
        decoder.prefill(ids[:, :read])
        other = decoder.fork()
        with raises("run.index_out_of_range"):
            decoder.prefill(wrong[:, read:])
        assert decoder.length == read
        np.testing.assert_array_equal(decoder.prefill(ids[:, read:110]), other.prefill(ids[:, read:110]))
        decoder.reset()
    decoder.prefill(np.ones((1, 800), np.int64))
    other = decoder.fork()
    with raises("static_cache.capacity_exceeded"):
        decoder.prefill(np.ones((1, 700), np.int64))
    with raises("decoder.padding_between_tokens"):
        decoder.prefill(np.ones((1, 4), np.int64), np.array([[1, 0, 1, 1]]))
    np.testing.assert_array_equal(decoder.prefill([[3, 1, 4]]), other.prefill([[3, 1, 4]]))
    inputs: dict[str, Any] = {"ids": np.ones((1, 575), np.int64), "keep": np.ones((1, 575), np.int64)}
    inputs |= {name: np.zeros((1, KV_HEADS, 576, SIZE), np.float32) for name in slots.rings}
    with raises("static_cache.rows_exceeded"):
        model.run({**inputs, slots.length: np.array(0)})


def full(source: onnx.ModelProto) -> bool:
    """Whether the caches have a slot for each token."""
    model = lowering.compile(source, static_cache=CAPACITY)
    slots = model.manifest.slots
    assert slots is not None
    return slots.rings == {} and slots.rows is None and all(CAPACITY in dims for dims in caches(model))


def test_what_sees_all_keys_or_is_read_elsewhere_keeps_all_slots() -> None:
    assert full(model_of(CASES["Attention, bool mask"]))
    source = model_of(FORMS["computed mask"])
    source.graph.node.append(helper.make_node("ReduceSum", ["present_k"], ["sum"], keepdims=0))
    source.graph.output.append(helper.make_tensor_value_info("sum", onnx.TensorProto.FLOAT, []))
    assert full(source)


def test_a_mask_that_depends_on_the_length_of_a_call_keeps_all_slots() -> None:
    source = model_of(FORMS["computed mask"])
    index, less = next((k, node) for k, node in enumerate(source.graph.node) if node.op_type == "Less")
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.array(700), "many"))
    near = less.output[0]
    less.output[0] = "near"
    for node in (
        helper.make_node("Or", ["near", "is_short"], [near]),
        helper.make_node("Less", ["total", "many"], ["is_short"]),
        helper.make_node("Shape", ["keep"], ["total"], start=1, end=2),
    ):
        source.graph.node.insert(index + 1, node)
    assert full(source)
