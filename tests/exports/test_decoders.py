"""Decoders of ONNX Runtime's exporter, whose attention holds the caches: in place and served, equal to whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from mobius_models import CAPACITY, KEPT
from thinned import thinned

import lowering
from lowering.compiling.options import Options
from lowering.compiling.prepare import PreparedModel, prepare_model
from lowering.runtime.decoder import Decoder
from lowering.target import resolve

FOLDER = Path(__file__).parent / "decoders"
VOCABULARY, BATCH, PROMPT, STEPS = 40, 3, 9, 8

SOURCES = (7, 4, 5, 17)  # rows of what an encoder made, by sequence


def whole(name: str, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """The logits [S, vocabulary] of each sequence alone, by onnxruntime, of the model as it was exported."""
    session = onnxruntime.InferenceSession(FOLDER / f"{name}.onnx")
    return [session.run(None, feeds(session, row, ids))[0][0] for row, ids in enumerate(sequences)]


def feeds(session: onnxruntime.InferenceSession, row: int, ids: np.ndarray) -> dict[str, np.ndarray]:
    count = len(ids)
    are_embeddings = ids.ndim > 1
    known = {
        "input_ids": np.zeros((1, count), np.int64) if are_embeddings else ids[None], "decoder_input_ids": ids[None],
        "inputs_embeds": ids[None], "attention_mask": np.ones((1, count), np.int64),
        "position_ids": np.arange(count)[None], "write_indices": np.zeros(1, np.int64),
        "nonpad_kv_seqlen": np.array([count]),
    }  # fmt: skip
    empty = {"batch": 1, "past_sequence_len": 0, "past_sequence_length": 0, "sequence_len": count}
    for given in session.get_inputs():
        if given.name == "encoder_hidden_states":
            known[given.name] = encoded(given.shape[2])[row : row + 1, : SOURCES[row]]
            empty["encoder_sequence_len"] = SOURCES[row]
        elif not given.shape:
            known[given.name] = np.ones((), np.int64 if given.type == "tensor(int64)" else np.float32)
        elif given.name == "position_ids" and len(given.shape) == 3:
            known[given.name] = np.broadcast_to(known[given.name], (given.shape[0], 1, count))
    return {
        given.name: known[given.name]
        if given.name in known
        else np.zeros([empty.get(size, size) for size in given.shape], np.float32)
        for given in session.get_inputs()
    }


def sequences_of(name: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random tokens: ids, or their embeddings where a decoder takes these."""
    model = onnx.load(FOLDER / f"{name}.onnx", load_external_data=False)
    for value in model.graph.input:
        if value.name == "inputs_embeds":
            width = value.type.tensor_type.shape.dim[2].dim_value
            return rng.standard_normal((*shape, width)).astype(np.float32)
    return rng.integers(0, VOCABULARY, shape)


IN_PLACE = [
    *((name, None) for name in KEPT),
    ("llama", "float16"), ("gpt_oss", "float16"), ("qwen3", "bfloat16"), ("bart", "float16"),
]  # fmt: skip
SERVED = [
    *((name, None) for name in KEPT),
    ("llama", "float16"), ("gpt2", "bfloat16"), ("bamba", "float16"), ("whisper", "bfloat16"),
]  # fmt: skip
BARS = {None: 1e-5, "float16": 5e-3, "bfloat16": 6e-2}


def encoded(width: int) -> np.ndarray:
    """What an encoder has made of the sources, with anything behind the shorter ones."""
    return np.random.default_rng(3).standard_normal((len(SOURCES), max(SOURCES), width)).astype(np.float32)


def decoder_of(model: lowering.Model) -> Decoder:
    """A decoder; arrays of sources that it was given hold nothing any more."""
    if model.setup is None:
        slots = model.manifest.slots
        switches = [t for t in model.inputs if not t.dims and (slots is None or t.name != slots.length)]
        return model.decoder(fixed={t.name: np.ones((), t.dtype) for t in switches})
    states = encoded(int(model.setup.inputs[0].dims[2]))[:BATCH]
    for row, count in enumerate(SOURCES[:BATCH]):
        states[row, count:] = np.nan
    decoder = model.decoder(fixed={"encoder_hidden_states": states, "source_lengths": np.array(SOURCES[:BATCH])})
    states[:] = np.nan
    return decoder


def source_of(model: lowering.Model, row: int) -> dict[str, Any]:
    """What a request is given beside its tokens; rows behind its own are NaN."""
    if model.setup is None:
        return {}
    spec, length = model.setup.inputs[0], SOURCES[row]
    states = encoded(int(spec.dims[2]))[row : row + 1].astype(getattr(ml_dtypes, spec.dtype, spec.dtype))
    states[:, length:] = np.nan
    return {spec.name: states, "source_lengths": length}


def compiled(name: str, precision: Any = None) -> lowering.Model:
    return lowering.compile(FOLDER / f"{name}.onnx", static_cache=CAPACITY, precision=precision)


def prepared_model(name: str, **options: Any) -> PreparedModel:
    """What is compiled, without compiling it."""
    return prepare_model(FOLDER / f"{name}.onnx", Options(**options), resolve("cpu"), None)


def error_in_place(name: str, precision: Any) -> float:
    """Of a prompt in two calls and 8 steps, of sequences of different lengths, relative to the largest logit."""
    rng = np.random.default_rng(0)
    ids = sequences_of(name, rng, (BATCH, PROMPT + STEPS))
    model = compiled(name, precision)
    spec = model.manifest.decoder
    assert spec is not None
    can_pad = not spec.states and bool(spec.mask or spec.starts) and model.setup is None
    padding = [0, 3, 1] if can_pad else [0, 0, 0]
    mask = np.arange(PROMPT + STEPS) >= np.array(padding)[:, None]
    found = whole(name, [ids[b, n:] for b, n in enumerate(padding)])
    expected = np.zeros((*ids.shape[:2], found[0].shape[-1]), np.float32)
    for row, (count, logits) in enumerate(zip(padding, found)):
        expected[row, count:] = logits
    decoder = decoder_of(model)
    answers = [decoder.prefill(ids[:, :5], mask[:, :5]), decoder.prefill(ids[:, 5:PROMPT])]
    addresses = {key: cache.ctypes.data for key, cache in decoder._memory.items()}
    answers += [decoder.step(ids[:, k])[:, None] for k in range(PROMPT, PROMPT + STEPS - 1)]
    fork, rows = decoder.fork(), [2, 0, 2]
    fork.reorder(rows)
    answers.append(decoder.step(ids[:, -1])[:, None])
    moved = float(np.abs(fork.step(ids[rows, -1])[:, None] - answers[-1][rows]).max())
    assert moved < 1e-3 * np.abs(expected).max()
    assert addresses.keys() == model.manifest.donated.keys()
    assert addresses == {key: cache.ctypes.data for key, cache in decoder._memory.items()}
    assert {t.dtype for t in model.inputs if t.name in addresses} <= {precision or "float32"}
    return float(np.abs(np.concatenate(answers, axis=1) - expected)[mask].max() / np.abs(expected).max())


def error_served(name: str, precision: Any) -> float:
    """Of requests of different lengths, whose prompts are read in parts beside steps of others.

    There are fewer blocks and slots of states than all of them take: some are put back, and others have had them. What
    blocks of sources held before, and rows of a source that do not count, are not seen.
    """
    rng = np.random.default_rng(1)
    sequences = [sequences_of(name, rng, (count,)) for count in (37, 3, 17, 40)]
    expected = whole(name, sequences)
    model = lowering.compile(
        FOLDER / f"{name}.onnx", serve=lowering.Serve(context=CAPACITY, tokens_per_block=8), precision=precision
    )
    assert model.manifest.served is not None and not any("copied" in note for note in model.manifest.notes)
    blocks, slots = 10 if model.manifest.served.pools else None, 3 if model.manifest.served.states else None
    sources = model.manifest.served.sources
    batcher = lowering.Batcher(model, blocks, 13, slots, source_blocks=None if sources is None else 5)
    for pool in () if sources is None else sources.pools:
        batcher._stores[pool.name][:] = np.nan
    for request, ids in enumerate(sequences):
        batcher.add(request, ids[: max(1, len(ids) // 2)], fixed=source_of(model, request))
    worst, answered = 0.0, 0
    while batcher.waiting:
        for request, logits in batcher.step().items():
            assert isinstance(request, int)
            count, ids = len(batcher.tokens(request)), sequences[request]
            worst = max(worst, np.abs(logits - expected[request][count - 1]).max() / np.abs(expected[request]).max())
            answered += 1
            if count < len(ids):
                batcher.extend(request, ids[count])
            else:
                batcher.free(request)
    assert answered == sum(len(ids) - max(1, len(ids) // 2) + 1 for ids in sequences)
    return float(worst)


@pytest.mark.parametrize(("name", "precision"), thinned(IN_PLACE, 3))
def test_caches_in_place(name: str, precision: Any) -> None:
    assert error_in_place(name, precision) < BARS[precision]


@pytest.mark.parametrize(("name", "precision"), thinned(SERVED, 4))
def test_served(name: str, precision: Any) -> None:
    assert error_served(name, precision) < BARS[precision]


def test_what_cannot_be_served_says_why() -> None:
    """A state that something else than its operators carries on."""
    model = onnx.load(FOLDER / "bamba.onnx")
    for node in model.graph.node:
        if node.op_type == "CausalConvWithState":
            present = node.output[1]
            node.output[1] = "state"
    model.graph.node.append(onnx.helper.make_node("Mul", ["state", "state"], [present]))
    with pytest.raises(lowering.ModelError, match=r"input 'past_key_values.0.conv_state' beside tokens.*carries on"):
        lowering.compile(model, serve=lowering.Serve(context=CAPACITY))


@pytest.mark.parametrize(("name", "pattern"), [("bamba", ".*ssm_state"), ("llama@static", "(key|value)_cache.*")])
def test_serve_donates_its_pools_in_place_of_what_they_replace(name: str, pattern: str) -> None:
    prepared = prepared_model(name, donate=(pattern,), serve=lowering.Serve(context=CAPACITY))
    assert prepared.served is not None
    pools = [pool.name for pool in (*prepared.served.pools, *prepared.served.states)]
    assert sorted(prepared.donated) == sorted(pools)


@pytest.mark.filterwarnings("error")
def test_narrowed_masks_warn_of_nothing() -> None:
    """What hides a key in float32 overflows in float16, where it hides the key, too."""
    slots = prepared_model("gpt_oss", static_cache=1400, precision="float16").kept.slots
    assert slots is not None and slots.rings == dict.fromkeys(("past_key_values.0.key", "past_key_values.0.value"), 576)


def test_caches_of_another_capacity_are_refused() -> None:
    with pytest.raises(lowering.ModelError, match=f"caches of {CAPACITY} slots itself, not of 7"):
        lowering.compile(FOLDER / "llama@static.onnx", static_cache=7)


def test_donated_caches_of_an_export_make_a_decoder() -> None:
    """Sequences of such a model have slots of their own: padding takes none."""
    model = lowering.compile(FOLDER / "llama@static.onnx", donate=(r"(key|value)_cache\..*",))
    decoder = model.decoder()
    decoder.prefill(np.ones((2, 5), np.int64), np.array([[0, 0, 0, 0, 1], [1, 1, 1, 1, 1]]))
    assert (decoder.length, decoder.capacity) == (5, CAPACITY)
    with pytest.raises(lowering.InputError, match="padding behind tokens"):
        decoder.prefill(np.ones((2, 2), np.int64), np.array([[1, 0], [1, 1]]))
    with pytest.raises(lowering.InputError, match=f"{CAPACITY} slots: 5 tokens are in them and 44 more"):
        decoder.prefill(np.ones((2, 44), np.int64))
    fork = decoder.fork()
    np.testing.assert_array_equal(decoder.step([3, 4]), fork.step([3, 4]))
    assert np.abs(decoder.step([5, 6]) - fork.step([7, 8])).max() > 0
    fork = decoder.fork()
    fork.reorder([1, 0])
    np.testing.assert_array_equal(decoder.step([5, 6])[::-1], fork.step([6, 5]))
