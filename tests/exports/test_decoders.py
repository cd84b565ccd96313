"""Decoders of ONNX Runtime's exporter, whose attention has caches: in place and served, equal to whole runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

import lowering
from lowering.compiling.compilation import load_compiled
from lowering.compiling.options import CompileOptions
from lowering.compiling.prepare import PreparedModel, prepare_model
from lowering.runtime.decoding.decoder import Decoder
from lowering.target import resolve
from tests.exports.mobius_models import CAPACITY, COMMITTED
from tests.support.error_codes import raises

Tokens: TypeAlias = dict[str, np.ndarray]  # by input: [S], [S, H], or the same of several sequences

FOLDER = Path(__file__).parent / "decoders"
VOCABULARY, BATCH, PROMPT, STEPS = 40, 3, 9, 8

ENCODED = ("encoder_hidden_states", "cross_attention_states")
SOURCES = (7, 4, 5, 17)  # rows of the encoder's states, by sequence


def whole(name: str, sequences: list[Tokens]) -> list[np.ndarray]:
    """Return the logits [S, vocabulary] of each sequence by onnxruntime, of the model as it was exported."""
    session = onnxruntime.InferenceSession(FOLDER / f"{name}.onnx")
    run = token_by_token if takes_one_token(session) else at_once
    return [run(session, row, tokens) for row, tokens in enumerate(sequences)]


def at_once(session: onnxruntime.InferenceSession, row: int, tokens: Tokens) -> np.ndarray:
    return session.run(None, feeds(session, row, tokens))[0][0]


def takes_one_token(session: onnxruntime.InferenceSession) -> bool:
    """Return whether the graph takes one token a call."""
    return any("conv_state" in value.name and isinstance(value.shape[2], str) for value in session.get_outputs())


def token_by_token(session: onnxruntime.InferenceSession, row: int, tokens: Tokens) -> np.ndarray:
    logits, caches, names = [], dict[str, np.ndarray](), [value.name for value in session.get_outputs()]
    for position in range(length(tokens)):
        inputs = feeds(session, row, select_tokens(tokens, slice(position, position + 1))) | caches
        inputs |= {name: np.ones((1, position + 1), np.int64) for name in inputs if name == "attention_mask"}
        inputs |= {name: np.full((1, 1), position) for name in inputs if name == "position_ids"}
        results = dict(zip(names, session.run(None, inputs)))
        logits.append(results[names[0]][0])
        pasts = [name for name in inputs if name.startswith("past")]
        caches = {
            name: results[name.replace("past_key_values", "present").replace("past_states", "present")]
            for name in pasts
        }
    return np.concatenate(logits)


def feeds(session: onnxruntime.InferenceSession, row: int, tokens: Tokens) -> dict[str, np.ndarray]:
    count = length(tokens)
    arrays = {
        **select_tokens(tokens, None), "attention_mask": np.ones((1, count), np.int64),
        "position_ids": np.arange(count)[None], "write_indices": np.zeros(1, np.int64),
        "nonpad_kv_seqlen": np.array([count]),
    }  # fmt: skip
    empty = {
        "batch": 1,
        "past_sequence_len": 0,
        "past_sequence_length": 0,
        "sequence_len": count,
        "cross_past_seq_len": 0,
    }
    arrays |= images(value.name for value in session.get_inputs())
    for value in session.get_inputs():
        if value.name in ENCODED:
            arrays[value.name] = encoded(value.shape[2])[row : row + 1, : SOURCES[row]]
            empty["encoder_sequence_len"] = SOURCES[row]
        elif not value.shape:
            arrays[value.name] = np.ones((), np.int64 if value.type == "tensor(int64)" else np.float32)
        elif value.name == "position_ids" and len(value.shape) == 3:
            arrays[value.name] = np.broadcast_to(arrays[value.name], (value.shape[0], 1, count))
    return {
        value.name: arrays[value.name]
        if value.name in arrays
        else np.zeros([empty.get(size, size) for size in value.shape], np.float32)
        for value in session.get_inputs()
    }


def sequences_of(name: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Tokens:
    """Draw tokens [*shape] or [*shape, H], for each input that takes a value of each token."""
    graph, tokens = onnx.load(FOLDER / f"{name}.onnx", load_external_data=False).graph, dict[str, np.ndarray]()
    sizes = {
        value.name: [d.dim_value or d.dim_param for d in value.type.tensor_type.shape.dim] for value in graph.input
    }
    count = next(sizes[name][1] for name in ("inputs_embeds", "input_ids", "decoder_input_ids") if name in sizes)
    for value in graph.input:
        if sizes[value.name][1:2] == [count] and value.name not in ("attention_mask", "position_ids"):
            if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
                tokens[value.name] = rng.standard_normal((*shape, *sizes[value.name][2:])).astype(np.float32)
            else:
                tokens[value.name] = rng.integers(0, VOCABULARY, shape)
    return tokens


def select_tokens(tokens: Tokens, index: Any) -> Tokens:
    return {name: array[index] for name, array in tokens.items()}


def length(tokens: Tokens) -> int:
    return len(next(iter(tokens.values())))


def format_tokens(tokens: Tokens) -> Any:
    """Return the tokens as a decoder takes them: those of a single input are an array."""
    return tokens if len(tokens) > 1 else next(iter(tokens.values()))


IN_PLACE = [
    *((name, None) for name in COMMITTED),
    ("llama", "float16"), ("gpt_oss", "float16"), ("qwen3", "bfloat16"), ("bart", "float16"),
]  # fmt: skip
SERVED = [
    *((name, None) for name in COMMITTED if name != "jamba"),  # which is one token a call
    ("llama", "float16"), ("gpt2", "bfloat16"), ("bamba", "float16"), ("whisper", "bfloat16"),
]  # fmt: skip
BARS = {None: 1e-5, "float16": 5e-3, "bfloat16": 6e-2}


def encoded(width: int) -> np.ndarray:
    """Return the encoder's states of the sources, with random values after the shorter ones."""
    return np.random.default_rng(3).standard_normal((len(SOURCES), max(SOURCES), width)).astype(np.float32)


def images(names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return an image of 4 patches, for a decoder that reads images itself."""
    arrays = {
        "pixel_values": np.random.default_rng(4).standard_normal((4, 1176)).astype(np.float32),
        "grid_thw": np.array([[1, 2, 2]]),
    }
    return {name: array for name, array in arrays.items() if name in names}


def decoder_of(model: lowering.Model) -> Decoder:
    """Return a decoder, and overwrite the arrays of sources that it was created with."""
    if model.setup is None:
        slots = model.manifest.slots
        switches = [t for t in model.inputs if not t.dims and (slots is None or t.name != slots.length)]
        return model.decoder(fixed={t.name: np.ones((), t.dtype) for t in switches})
    inputs = [spec.name for spec in model.setup.inputs]
    if "pixel_values" in inputs:
        return model.decoder(fixed=images(inputs))
    states = encoded(int(model.setup.inputs[0].dims[2]))[:BATCH]
    for row, count in enumerate(SOURCES[:BATCH]):
        states[row, count:] = np.nan
    decoder = model.decoder(fixed={inputs[0]: states, "source_lengths": np.array(SOURCES[:BATCH])})
    states[:] = np.nan
    return decoder


def source_of(model: lowering.Model, row: int) -> dict[str, Any]:
    """Return the source of a request; rows after its own are NaN."""
    if model.setup is None:
        return {}
    spec, length = model.setup.inputs[0], SOURCES[row]
    states = encoded(int(spec.dims[2]))[row : row + 1].astype(getattr(ml_dtypes, spec.dtype, spec.dtype))
    states[:, length:] = np.nan
    return {spec.name: states, "source_lengths": length}


def compiled(name: str, precision: Any = None) -> lowering.Model:
    return lowering.compile(FOLDER / f"{name}.onnx", static_cache=CAPACITY, precision=precision)


def prepared_model(name: str, **options: Any) -> PreparedModel:
    """Return the prepared model, without compiling it."""
    return prepare_model(FOLDER / f"{name}.onnx", CompileOptions(**options), resolve("cpu"), None, load_compiled)


def error_in_place(name: str, precision: Any) -> float:
    """Return the error of a prompt in two calls and 8 steps, for sequences of different lengths.

    It is relative to the largest logit.
    """
    rng = np.random.default_rng(0)
    model = compiled(name, precision)
    spec = model.manifest.decoder
    assert spec is not None
    batch = 1 if model.setup is not None and images(t.name for t in model.setup.inputs) else BATCH
    tokens = sequences_of(name, rng, (batch, PROMPT + STEPS))
    can_pad = not spec.states and bool(spec.mask or spec.starts) and model.setup is None
    padding = [0, 3, 1] if can_pad else [0] * batch
    mask = np.arange(PROMPT + STEPS) >= np.array(padding)[:, None]
    references = whole(name, [select_tokens(tokens, (b, slice(n, None))) for b, n in enumerate(padding)])
    expected = np.zeros((*mask.shape, references[0].shape[-1]), np.float32)
    for row, (count, logits) in enumerate(zip(padding, references)):
        expected[row, count:] = logits
    decoder = decoder_of(model)
    answers = [decoder.prefill(format_tokens(select_tokens(tokens, np.s_[:, :5])), mask[:, :5])]
    answers.append(decoder.prefill(format_tokens(select_tokens(tokens, np.s_[:, 5:PROMPT]))))
    addresses = {key: cache.ctypes.data for key, cache in decoder._memory.items()}
    answers += [
        decoder.step(format_tokens(select_tokens(tokens, np.s_[:, k])))[:, None]
        for k in range(PROMPT, PROMPT + STEPS - 1)
    ]
    fork, rows = decoder.fork(), [2 % batch, 0, 2 % batch][:batch]
    fork.reorder(rows)
    answers.append(decoder.step(format_tokens(select_tokens(tokens, np.s_[:, -1])))[:, None])
    moved = float(
        np.abs(fork.step(format_tokens(select_tokens(tokens, (rows, -1))))[:, None] - answers[-1][rows]).max()
    )
    assert moved < 1e-3 * np.abs(expected).max()
    assert addresses.keys() == model.manifest.donated.keys()
    assert addresses == {key: cache.ctypes.data for key, cache in decoder._memory.items()}
    assert {t.dtype for t in model.inputs if t.name in addresses} <= {precision or "float32"}
    return float(np.abs(np.concatenate(answers, axis=1) - expected)[mask].max() / np.abs(expected).max())


def error_served(name: str, precision: Any) -> float:
    """Return the error of requests of different lengths, whose prompts are read in chunks next to steps of others.

    There are fewer blocks and slots of states than all of them take: some are preempted, and blocks are used again. Old
    contents of blocks of sources, and rows of a source that do not count, are not seen.
    """
    model = lowering.compile(
        FOLDER / f"{name}.onnx", serve=lowering.Serve(context=CAPACITY, tokens_per_block=8), precision=precision
    )
    rng = np.random.default_rng(1)
    sequences = [sequences_of(name, rng, (count,)) for count in (37, 3, 17, 40)]
    expected = whole(name, sequences)
    assert model.manifest.served is not None and not any("copied" in note for note in model.manifest.notes)
    blocks, slots = 10 if model.manifest.served.pools else None, 3 if model.manifest.served.states else None
    sources = model.manifest.served.sources
    fixed = {name: np.ones(()) for name in model.manifest.served.fixed}
    batcher = lowering.Batcher(model, blocks, 13, slots, None if sources is None else 5, fixed)
    for pool in () if sources is None else sources.pools:
        batcher._pools.arrays[pool.name][:] = np.nan
    for number, tokens in enumerate(sequences):
        prompt = select_tokens(tokens, slice(max(1, length(tokens) // 2)))
        batcher.add(number, format_tokens(prompt), fixed=source_of(model, number))
    worst, answered = 0.0, 0
    while batcher.waiting:
        for request, logits in batcher.step().items():
            assert isinstance(request, int)
            count, tokens = len(batcher.tokens(request)), sequences[request]
            worst = max(worst, np.abs(logits - expected[request][count - 1]).max() / np.abs(expected[request]).max())
            answered += 1
            if count < length(tokens):
                batcher.extend(request, format_tokens(select_tokens(tokens, count)))
            else:
                batcher.free(request)
    assert answered == sum(count - max(1, count // 2) + 1 for count in map(length, sequences))
    return float(worst)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "precision"), IN_PLACE)
def test_caches_in_place(name: str, precision: Any) -> None:
    assert error_in_place(name, precision) < BARS[precision]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("name", "precision"), SERVED)
def test_served(name: str, precision: Any) -> None:
    assert error_served(name, precision) < BARS[precision]


def test_what_cannot_be_served_says_why() -> None:
    """A state that other operators carry on cannot be served."""
    model = onnx.load(FOLDER / "bamba.onnx")
    for node in model.graph.node:
        if node.op_type == "CausalConvWithState":
            present = node.output[1]
            node.output[1] = "state"
    model.graph.node.append(onnx.helper.make_node("Mul", ["state", "state"], [present]))
    with raises("serve.input_unsupported"):
        lowering.compile(model, serve=lowering.Serve(context=CAPACITY))


@pytest.mark.parametrize(("name", "pattern"), [("bamba", ".*ssm_state"), ("llama@static", "(key|value)_cache.*")])
def test_serve_donates_its_pools_in_place_of_what_they_replace(name: str, pattern: str) -> None:
    prepared = prepared_model(name, donate=(pattern,), serve=lowering.Serve(context=CAPACITY))
    assert prepared.served is not None
    pools = [pool.name for pool in (*prepared.served.pools, *prepared.served.states)]
    assert sorted(prepared.donated) == sorted(pools)


@pytest.mark.filterwarnings("error")
def test_narrowed_masks_warn_of_nothing() -> None:
    """A mask value that hides a key in float32 overflows in float16, and hides the key, too."""
    slots = prepared_model("gpt_oss", static_cache=1400, precision="float16").caches.slots
    assert slots is not None and slots.rings == dict.fromkeys(("past_key_values.0.key", "past_key_values.0.value"), 576)


def test_caches_of_another_capacity_are_refused() -> None:
    with raises("static_cache.capacity_mismatch"):
        lowering.compile(FOLDER / "llama@static.onnx", static_cache=7)


def test_donated_caches_of_an_export_make_a_decoder() -> None:
    """Sequences of such a model have slots of their own: padding takes none."""
    model = lowering.compile(FOLDER / "llama@static.onnx", donate=(r"(key|value)_cache\..*",))
    decoder = model.decoder()
    decoder.prefill(np.ones((2, 5), np.int64), np.array([[0, 0, 0, 0, 1], [1, 1, 1, 1, 1]]))
    assert (decoder.length, decoder.capacity) == (5, CAPACITY)
    with raises("decoder.padding_on_right"):
        decoder.prefill(np.ones((2, 2), np.int64), np.array([[1, 0], [1, 1]]))
    with raises("decoder.capacity_exceeded"):
        decoder.prefill(np.ones((2, 44), np.int64))
    fork = decoder.fork()
    np.testing.assert_array_equal(decoder.step([3, 4]), fork.step([3, 4]))
    assert np.abs(decoder.step([5, 6]) - fork.step([7, 8])).max() > 0
    fork = decoder.fork()
    fork.reorder([1, 0])
    np.testing.assert_array_equal(decoder.step([5, 6])[::-1], fork.step([6, 5]))
