"""Exported decoders over a paged cache: packed tokens of many requests give what each request gives alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import lowering
from tests.support.error_codes import raises

EXPORTS = Path(__file__).parents[1] / "exports"
SAMPLES = EXPORTS / "samples"
EXPORTED = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi", "falcon", "bloom", "opt", "gpt2",
    "gpt-neox",
)  # fmt: skip
# One window; alternating windows with a soft cap.
DECODERS = ["mistral-past-dynamo18", "gemma2-past-dynamo23"]
LLAMA = SAMPLES / "llama-past-dynamo23" / "model.onnx"
VOCABULARY, CONTEXT, BLOCK, POOL = 30, 48, 8, 24
LENGTHS = (37, 3, 17, 48)


def run_alone(session: onnxruntime.InferenceSession, ids: np.ndarray) -> np.ndarray:
    """Return the logits [S, vocabulary] of the exported model for one whole sequence, by onnxruntime."""
    inputs = {"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64)}
    for port in session.get_inputs():
        if port.name.startswith("past"):
            inputs[port.name] = np.zeros((1, port.shape[1], 0, port.shape[3]), np.float32)
    return session.run(["logits"], inputs)[0][0]


class Pool:
    """The arrays of a cache, initialized with numbers that would corrupt any accumulator outside the own blocks."""

    def __init__(self, model: lowering.Model) -> None:
        served = model.manifest.served
        assert served is not None
        (pool,) = served.pools
        self.cache = lowering.PagedKVCache(
            POOL, served.tokens_per_block, layers=pool.layers, kv_heads=pool.kv_heads, head_dim=pool.head_dim,
            dtype=served.dtype,
        )  # fmt: skip
        self.cache.pool[...] = 77 if served.scales else np.nan
        self.arrays = {"kv_cache": self.cache.pool}
        if served.scales:
            shape = (*self.cache.pool.shape[:-1], served.scales)
            self.arrays["kv_cache_scale"] = np.full(shape, np.nan, np.float32)

    def call(self, model: lowering.Model, rows: dict[int, np.ndarray]) -> np.ndarray:
        """Read more tokens of each request; return the logits after the last token of each."""
        self.cache.reserve_all({name: len(ids) for name, ids in rows.items()})
        names = list(rows)
        inputs = {
            "input_ids": np.concatenate([np.zeros(0, np.int64), *rows.values()])[None],
            "row_starts": np.cumsum([0, *(len(ids) for ids in rows.values())]),
            "past_lengths": self.cache.lengths(names).astype(np.int64),
            "block_table": self.cache.block_table(names),
        }
        answer = model.run({**inputs, **self.arrays})["logits"]
        for name, ids in rows.items():
            self.cache.advance(name, len(ids))
        return answer


Decoder = tuple[Path, lowering.Model]


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    path = SAMPLES / request.param / "model.onnx"
    return path, lowering.compile(path, serve=lowering.Serve(CONTEXT, BLOCK), threads=2)


def test_no_requests_get_no_rows(decoder: Decoder) -> None:
    pool = Pool(decoder[1])
    assert pool.call(decoder[1], {}).shape[0] == 0
    for name in range(2):
        pool.cache.add(name)
    with raises("requests.tokens_missing"):
        pool.call(decoder[1], {name: np.zeros(0, np.int64) for name in range(2)})


def measure_error(path: Path, model: lowering.Model, lengths: tuple[int, ...] = LENGTHS) -> float:
    """Return the largest difference of logits, relative to the largest one; requests are split and mixed at random."""
    rng = np.random.default_rng(0)
    sequences = {name: rng.integers(0, VOCABULARY, count) for name, count in enumerate(lengths)}
    exported = onnxruntime.InferenceSession(path)
    logits_by_request = {name: run_alone(exported, ids) for name, ids in sequences.items()}
    pool, worst = Pool(model), 0.0
    for name in sequences:
        pool.cache.add(name)
    while left := {n: count for n, ids in sequences.items() if (count := len(ids) - pool.cache.length(n))}:
        names = [name for name in left if rng.random() < 0.8] or list(left)
        counts = {name: int(rng.integers(1, min(9, left[name]) + 1)) for name in names}
        starts = {name: pool.cache.length(name) for name in names}
        answers = pool.call(model, {n: sequences[n][starts[n] : starts[n] + counts[n]] for n in names})
        for name, answer in zip(names, answers, strict=True):
            expected = logits_by_request[name][starts[name] + counts[name] - 1]
            worst = max(worst, float(np.abs(answer - expected).max() / np.abs(logits_by_request[name]).max()))
    return worst


def test_packed_requests_equal_each_alone(decoder: Decoder) -> None:
    path, model = decoder
    assert model.manifest.donated == {"kv_cache": "kv_cache_updated"}
    assert measure_error(path, model) < 3e-6


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("name", EXPORTED)
def test_exports_of_every_architecture(name: str, opset: int, tmp_path: Path) -> None:
    """Needs torch and transformers, which make the exports. Those with learned positions have 40 of them."""
    export = f"{name}-past-dynamo{opset}"
    subprocess.run([sys.executable, "-m", "tests.exports.export", export, "--folder", tmp_path], check=True)
    path = tmp_path / export / "model.onnx"
    model = lowering.compile(path, serve=lowering.Serve(40, BLOCK), threads=2)
    assert measure_error(path, model, (37, 3, 17, 40)) < 1e-5


def test_only_own_blocks_are_written(decoder: Decoder) -> None:
    _, model = decoder
    pool = Pool(model)
    pool.cache.add("a")
    pool.call(model, {"a": np.arange(11) % VOCABULARY})  # type: ignore[dict-item]
    written = ~np.isnan(pool.cache.pool).all(axis=(1, 2, 3, 5))
    table = pool.cache.block_table(["a"])[0]
    assert sorted(map(tuple, np.argwhere(written))) == sorted((table[t // BLOCK], t % BLOCK) for t in range(11))


def test_hostile_tables_stay_inside() -> None:
    """For any tables, only the pool is read or written, and the process survives."""
    model = lowering.compile(LLAMA, serve=lowering.Serve(CONTEXT, BLOCK), checks=False)
    rng, ends = np.random.default_rng(3), np.array([-(2**63), -1, 0, 1, POOL - 1, POOL, 2**31, 2**62, 2**63 - 1])
    for _ in range(60):
        rows, requests, columns = (int(rng.integers(1, limit)) for limit in (12, 4, 5))
        pool = Pool(model)
        model.run(
            {
                "input_ids": rng.integers(0, VOCABULARY, (1, rows)),
                "row_starts": rng.choice([*ends, *range(12)], requests + 1),
                "past_lengths": rng.choice([*ends, *range(40)], requests),
                "block_table": rng.choice(ends, (requests, columns)),
                **pool.arrays,
            }
        )


LEGAL = {"row_starts": [0, 3, 4], "past_lengths": [6, 8], "block_table": [[3, 4], [5, 6]]}


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"row_starts": [1, 3, 4]}, "row_starts of request 0 is 1"),
        ({"row_starts": [0, 5, 4]}, "row_starts decreases at request 1, from 5 to 4"),
        ({"row_starts": [0, 3, 3]}, "row_starts of 2 requests ends with 3, and there are 4 token ids"),
        ({"past_lengths": [6, -1]}, "past_lengths of request 1 is -1"),
        ({"past_lengths": [CONTEXT - 2, 8]}, f"past_lengths of request 0 is {CONTEXT - 2}, and its 3 new tokens"),
        ({"past_lengths": [6, 16]}, "2 blocks of 8 tokens for each request, and request 1 has 17 tokens"),
        (
            {"block_table": [[3, POOL], [5, 6]]},
            f"block_table of request 0, column 1 is {POOL}, and kv_cache has {POOL}",
        ),
        ({"block_table": [[3, 4], [5, -1]]}, "block_table of request 1, column 1 is -1"),
        ({"block_table": [[3, 4], [5, 4]]}, "request 0 and request 1 write to block 4"),
        ({"block_table": [[3, 3], [5, 6]]}, "request 0 and request 0 write to block 3"),
        ({"block_table": [[3, 4], [4, 6]]}, "request 0 write to block 4, which request 1 reads in column 0"),
    ],
)
def test_tables_that_do_not_fit(decoder: Decoder, tables: dict, text: str) -> None:
    """The error names node, table and request, before anything is written."""
    pool = Pool(decoder[1])
    before = pool.cache.pool.tobytes()
    arrays = {name: np.array(table, np.int64) for name, table in (LEGAL | tables).items()}
    with pytest.raises(lowering.InputError, match=rf"PackedRequests.*{text}"):
        decoder[1].run({"input_ids": np.zeros((1, 4), np.int64), **arrays, **pool.arrays})
    assert pool.cache.pool.tobytes() == before


def test_unused_entries_may_be_anything(decoder: Decoder) -> None:
    tables = {**LEGAL, "block_table": [[3, 4, -9], [5, 6, 2**40]]}
    arrays = {name: np.array(table, np.int64) for name, table in tables.items()}
    decoder[1].run({"input_ids": np.zeros((1, 4), np.int64), **arrays, **Pool(decoder[1]).arrays})


def test_int8_cache() -> None:
    model = lowering.compile(LLAMA, serve=lowering.Serve(CONTEXT, BLOCK, cache="int8"))
    assert model.manifest.donated == {"kv_cache": "kv_cache_updated", "kv_cache_scale": "kv_cache_scale_updated"}
    assert 1e-4 < measure_error(LLAMA, model) < 0.05  # the error of quantization, and not more


def test_a_served_model_is_saved_and_loaded(decoder: Decoder, tmp_path: Path) -> None:
    path, model = decoder
    model.save(tmp_path / "out")
    assert measure_error(path, lowering.load(tmp_path / "out")) < 3e-6


def test_models_that_are_not_growing_decoders() -> None:
    with raises("serve.size_static"):
        lowering.compile(SAMPLES / "llama-past-dynamo23-fixed" / "model.onnx", serve=lowering.Serve(8))
    with raises("serve.cache_missing"):
        lowering.compile(SAMPLES / "llama-dynamo18-batch1" / "model.onnx", serve=lowering.Serve(8))
    with raises("input.name_unknown"):
        lowering.compile(LLAMA, serve=lowering.Serve(8, ids="tokens"))


def test_internal_operators_are_not_accepted_in_models() -> None:
    node = helper.make_node("PackedRequests", ["x"], ["y"], name="own", domain="onnx_lowering")
    info = [helper.make_tensor_value_info(name, 7, [1]) for name in "xy"]
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("onnx_lowering", 1)]
    model = helper.make_model(helper.make_graph([node], "g", info[:1], info[1:]), opset_imports=opsets, ir_version=11)
    with raises("model.domain_reserved"):
        lowering.compile(model)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"context": 0}, "context must be a whole number from 1"),
        ({"context": 8, "tokens_per_block": 12}, "must be a power of two, not 12"),
        ({"context": 8, "cache": "int4"}, 'cache must be "model" or "int8"'),
    ],
)
def test_illegal_options_of_serve(how: dict, text: str) -> None:
    with pytest.raises(lowering.InputError, match=text):
        lowering.Serve(**how)


def edit_decoder(edit: str, path: Path) -> Path:
    """Save a decoder whose tokens see more than attention shows them."""
    model = onnx.load(LLAMA)
    nodes = list(model.graph.node)
    index = next(k for k, node in enumerate(nodes) if node.op_type == "Gather" and "input_ids" in node.input)
    embedding = nodes[index].output[0]
    if edit == "sum over tokens":
        new_nodes = [
            helper.make_node("CumSum", [embedding, "axis_1"], ["mixed"], name="mixer"),
        ]
        model.graph.initializer.append(numpy_helper.from_array(np.array(1), "axis_1"))
    else:
        new_nodes = [
            helper.make_node("ReduceMax", [embedding], ["most"], name="mixer", keepdims=1),
            helper.make_node("Add", [embedding, "most"], ["mixed"], name="adder"),
        ]
    for node in nodes:
        node.input[:] = ["mixed" if name == embedding else name for name in node.input]
    for k, node in enumerate(new_nodes):
        model.graph.node.insert(index + 1 + k, node)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("edit", ["sum over tokens", "most of all tokens"])
def test_nodes_that_mix_tokens_are_rejected(edit: str, tmp_path: Path) -> None:
    with raises("serve.node_not_row_wise"):
        lowering.compile(edit_decoder(edit, tmp_path / "model.onnx"), serve=lowering.Serve(8))
