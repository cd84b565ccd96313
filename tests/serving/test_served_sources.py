"""Requests with sources of their own: keys and values are computed once for each, and seen by one request only."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import lowering
from lowering import Batcher, InputError
from lowering.manifest import CachePool, SourceCache
from lowering.runtime.artifact.manifest_rules import find_contradictions
from tests.support.error_codes import raises

EXPORTS = Path(__file__).parents[1] / "exports"
BART = EXPORTS / "decoders" / "bart.onnx"
TORCH = EXPORTS / "samples" / "flan-t5-past-dynamo18-batch1" / "model.onnx"
CONTEXT, BLOCK, VOCABULARY, WIDTH = 48, 8, 40, 16


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> lowering.Model:
    folder = tmp_path_factory.mktemp("bart") / "out"
    lowering.compile(BART, serve=lowering.Serve(CONTEXT, BLOCK), dims={"encoder_sequence_len": (1, 30)}).save(folder)
    return lowering.load(folder)


class Sequence:
    """Tokens, a source, and the logits after each token, by onnxruntime in one run."""

    def __init__(self, session: onnxruntime.InferenceSession, rng: np.random.Generator, tokens: int, rows: int) -> None:
        self.ids = rng.integers(0, VOCABULARY, tokens)
        self.source = rng.standard_normal((1, rows, WIDTH)).astype(np.float32)
        feeds: dict[str, np.ndarray] = {"input_ids": self.ids[None], "encoder_hidden_states": self.source}
        pasts = {port.name: np.zeros((1, 4, 0, 4), np.float32) for port in session.get_inputs()}
        self.expected = session.run(["logits"], pasts | feeds)[0][0]

    def fixed(self, padding: int) -> dict[str, Any]:
        """Return the source, padded by rows of NaN that do not count."""
        padded = np.concatenate([self.source, np.full((1, padding, WIDTH), np.nan, np.float32)], axis=1)
        return {"encoder_hidden_states": padded, "source_lengths": np.array([self.source.shape[1]])}


def test_requests_get_what_they_get_alone(bart: lowering.Model) -> None:
    """Requests start at different steps, one is forked, and others are evicted for lack of blocks, of either pool."""
    session, rng = onnxruntime.InferenceSession(BART), np.random.default_rng(5)
    shapes = ((37, 7), (3, 13), (17, 1), (40, 24), (9, 9))
    sequences: dict[Any, Sequence] = {k: Sequence(session, rng, *shape) for k, shape in enumerate(shapes)}
    batcher = Batcher(bart, blocks=10, tokens_per_step=13, source_blocks=4)
    for array in batcher._pools.arrays.values():
        array[:] = np.nan
    worst, waiting, active, forked = 0.0, dict(sequences), 0, False
    while waiting or active:
        if waiting:
            name, sequence = waiting.popitem()
            fixed = sequence.fixed(name)
            batcher.add(name, sequence.ids[: 1 + len(sequence.ids) // 2], fixed=fixed)
            fixed["encoder_hidden_states"][:] = np.nan  # a copy was taken
            active += 1
        for name, logits in batcher.step().items():
            sequence, count = sequences[name], len(batcher.tokens(name))
            expected = sequence.expected
            worst = max(worst, np.abs(logits - expected[count - 1]).max() / np.abs(expected).max())
            if name == 3 and not forked:
                batcher.fork(3, "fork")
                sequences["fork"], forked, active = sequence, True, active + 1
                batcher.extend("fork", int(sequence.ids[count]))
            if count < len(sequence.ids):
                batcher.extend(name, int(sequence.ids[count]))
            else:
                batcher.free(name)
                active -= 1
    assert forked and worst < 1e-5
    usage = batcher.usage()
    assert (usage.used, usage.source_blocks, usage.free_source_blocks) == (0, 4, 4)


def test_keys_and_values_of_an_encoder() -> None:
    """PyTorch's export takes them as inputs, and a padding mask: requests have neither padding nor a mask."""
    rng, total = np.random.default_rng(2), 11
    session = onnxruntime.InferenceSession(TORCH)
    batcher = Batcher(lowering.compile(TORCH, serve=lowering.Serve(24, 8)), blocks=8, source_blocks=4)
    assert batcher._served.sources is not None and batcher._served.sources.rows == ("cross_0", 2)
    sequences, expected = {}, {}
    for rows in (5, 9):
        ids, keys = rng.integers(0, 20, total), {f"cross_{k}": rng.standard_normal((1, 2, rows, 4)) for k in range(4)}
        cross = {name: array.astype(np.float32) for name, array in keys.items()}
        feeds: dict[str, Any] = {
            "decoder_input_ids": ids[None],
            "attention_mask": np.ones((1, rows), np.int64),
            **cross,
        }
        for port in session.get_inputs():
            shape = (1, rows, 8) if port.name == "states" else (1, 2, 0, 4)
            feeds.setdefault(port.name, np.zeros(shape, np.float32))
        sequences[rows], expected[rows] = ids, session.run(["logits"], feeds)[0][0]
        batcher.add(rows, ids[:4], fixed=cross)
    for _ in range(4, total):
        for name, logits in batcher.step().items():
            count = len(batcher.tokens(name))
            np.testing.assert_allclose(logits, expected[name][count - 1], 1e-4, 1e-5)
            batcher.extend(name, int(sequences[name][count]))


LEGAL = {
    "row_starts": [0, 3, 4], "past_lengths": [6, 8], "block_table": [[3, 4], [5, 6]], "source_lengths": [9, 2],
    "source_table": [[1, 2], [0, -1]],
}  # fmt: skip


def make_inputs(model: lowering.Model, tables: dict[str, Any]) -> dict[str, Any]:
    pools = {t.name: np.zeros((7, *map(int, t.dims[1:])), np.float32) for t in model.inputs if len(t.dims) == 6}
    arrays = {name: np.array(table, np.int64) for name, table in (LEGAL | tables).items()}
    return {"input_ids": np.zeros((1, 4), np.int64), **arrays, **pools}


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"source_lengths": [-1, 2]}, "source_lengths of request 0 is -1: make it the number of its source's rows"),
        ({"source_lengths": [9, 17]}, "source_table has 2 blocks of 8 rows for each request, and request 1 has 17 r"),
        ({"source_lengths": [9, 2**63 - 1]}, "give it 1152921504606846976 blocks"),
        ({"source_table": [[1, 7], [0, 0]]}, "source_table of request 0, column 1 is 7, and source_cache has 7 blocks"),
        ({"source_table": [[1, 2], [-1, 0]]}, "source_table of request 1, column 0 is -1, and source_cache has 7"),
    ],
)
def test_tables_that_do_not_fit(bart: lowering.Model, tables: dict[str, Any], text: str) -> None:
    bart.run(make_inputs(bart, {}))
    with pytest.raises(InputError, match=f"PackedSources.*{text}"):
        bart.run(make_inputs(bart, tables))


def test_a_block_that_a_setup_writes_twice(bart: lowering.Model) -> None:
    pool = make_inputs(bart, {})["source_cache"]
    source = {"encoder_hidden_states": np.ones((1, 12, WIDTH), np.float32), "source_cache": pool}
    assert bart.setup is not None
    with raises("requests.block_written_twice"):
        bart.setup.run({**source, "source_table": np.array([[1, 1]])})
    assert not pool.any()
    bart.setup.run({**source, "source_table": np.array([[1, 2, 1]])})  # the repeated block is not written


def test_sizes_of_sources_have_bounds(bart: lowering.Model) -> None:
    assert bart.setup is not None and bart.setup.manifest.ranges == {"encoder_sequence_len": (1, 30)}
    batcher = Batcher(bart, blocks=8)
    with raises("input.dimension_out_of_range"):
        batcher.add("a", [1], fixed={"encoder_hidden_states": np.ones((1, 31, WIDTH), np.float32)})


def test_hostile_tables_stay_inside() -> None:
    """For any tables, only the pools are read or written, and the process survives."""
    model = lowering.compile(BART, serve=lowering.Serve(CONTEXT, BLOCK), checks=False)
    rng, ends = np.random.default_rng(3), np.array([-(2**63), -1, 0, 1, 6, 7, 2**31, 2**62, 2**63 - 1])
    assert model.setup is not None
    for _ in range(40):
        tables = {"source_lengths": rng.choice(ends, 2), "source_table": rng.choice(ends, (2, 3))}
        arrays = make_inputs(model, tables)
        model.run(arrays)
        source = {"encoder_hidden_states": np.ones((1, int(rng.integers(1, 30)), WIDTH), np.float32)}
        model.setup.run({**source, "source_table": tables["source_table"][:1], "source_cache": arrays["source_cache"]})


SOURCES = SourceCache((CachePool("source_cache", "", 2, 4, 4),), ("encoder_hidden_states", 1))


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        (replace(SOURCES, rows=("x", 1)), "input 'x' of the setup has rows along axis 1"),
        (replace(SOURCES, rows=("encoder_hidden_states", 3)), "'encoder_hidden_states' of the setup has rows along"),
        (replace(SOURCES, pools=()), "no setup writes the pools of sources"),
        (
            replace(SOURCES, pools=(replace(SOURCES.pools[0], layers=3),)),
            r"'source_cache' is a pool of float32\[3, 2, 4",
        ),
        (replace(SOURCES, pools=(replace(SOURCES.pools[0], name="kv_cache"),)), "'kv_cache' is a pool of .*, read"),
        (None, "the part 'setup' is a setup of the part 'model'"),
    ],
)
def test_manifests_say_where_sources_are(bart: lowering.Model, sources: SourceCache | None, text: str) -> None:
    served = bart.manifest.served
    assert served is not None and served.sources == SOURCES and not list(find_contradictions(bart.manifest))
    wrong = replace(bart.manifest, served=replace(served, sources=sources))
    assert re.search(text, "; ".join(find_contradictions(wrong)))
    assert "no setup writes the pools of sources" in list(find_contradictions(replace(bart.manifest, setup=None)))


def add_mean_of_source(model: onnx.ModelProto) -> None:
    """Add the mean of the source to the logits."""
    (logits,) = [node for node in model.graph.node if "logits" in node.output]
    logits.output[:] = ["scores"]
    weights = onnx.numpy_helper.from_array(np.ones((WIDTH, 1), np.float32), "weights")
    model.graph.initializer.append(weights)
    make = onnx.helper.make_node
    model.graph.node.extend(
        [
            make("MatMul", ["encoder_hidden_states", "weights"], ["seen"], name="see"),
            make("ReduceMean", ["seen"], ["mean"]),
            make("Add", ["scores", "mean"], ["logits"], name="join"),
        ]
    )


def hide_by_distance(model: onnx.ModelProto) -> None:
    """Hide keys of the source from tokens by a mask that is not an input."""
    (node, *_) = [node for node in model.graph.node if node.op_type == "Attention" and "cross" in "".join(node.output)]
    mask = onnx.numpy_helper.from_array(np.ones((1, 1), bool), "mask")
    model.graph.initializer.append(mask)
    node.input.extend([""] * (3 - len(node.input)))
    node.input.insert(3, "mask")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            add_mean_of_source,
            "'join' .Add. reads values computed from 'encoder_hidden_states' only, but is not attention",
        ),
        (hide_by_distance, "reads keys .* of a source, but does not attend to all of its rows"),
    ],
)
def test_decoders_that_are_refused(change: Callable[[onnx.ModelProto], None], text: str) -> None:
    model = onnx.load(BART)
    change(model)
    with pytest.raises(lowering.ModelError, match=text):
        lowering.compile(model, serve=lowering.Serve(CONTEXT))
