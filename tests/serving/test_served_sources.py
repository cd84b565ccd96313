"""Requests with sources of their own: keys and values are computed once for each, and seen by no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import tvm_ffi

import lowering
from lowering import Batcher, InputError, PoolFullError, RequestError
from lowering.manifest import CachePool, ServedCache, SourceCache, TensorSpec
from lowering.runtime.inputs import Port
from lowering.runtime.rules import contradictions
from lowering.runtime.strings import Dictionary

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
    """Tokens, a source, and the logits behind each token, by onnxruntime in one run."""

    def __init__(self, session: onnxruntime.InferenceSession, rng: np.random.Generator, tokens: int, rows: int) -> None:
        self.ids = rng.integers(0, VOCABULARY, tokens)
        self.source = rng.standard_normal((1, rows, WIDTH)).astype(np.float32)
        feeds: dict[str, np.ndarray] = {"input_ids": self.ids[None], "encoder_hidden_states": self.source}
        pasts = {given.name: np.zeros((1, 4, 0, 4), np.float32) for given in session.get_inputs()}
        self.expected = session.run(["logits"], pasts | feeds)[0][0]

    def fixed(self, padding: int) -> dict[str, Any]:
        """The source, with rows of NaN behind it that do not count."""
        padded = np.concatenate([self.source, np.full((1, padding, WIDTH), np.nan, np.float32)], axis=1)
        return {"encoder_hidden_states": padded, "source_lengths": np.array([self.source.shape[1]])}


def test_requests_get_what_they_get_alone(bart: lowering.Model) -> None:
    """They come at different steps, one is forked, and others are put back for want of blocks, of either pool."""
    session, rng = onnxruntime.InferenceSession(BART), np.random.default_rng(5)
    shapes = ((37, 7), (3, 13), (17, 1), (40, 24), (9, 9))
    sequences: dict[Any, Sequence] = {k: Sequence(session, rng, *shape) for k, shape in enumerate(shapes)}
    batcher = Batcher(bart, blocks=10, tokens_per_step=13, source_blocks=4)
    for store in batcher._stores.values():
        store[:] = np.nan
    worst, waiting, live, forked = 0.0, dict(sequences), 0, False
    while waiting or live:
        if waiting:
            name, sequence = waiting.popitem()
            fixed = sequence.fixed(name)
            batcher.add(name, sequence.ids[: 1 + len(sequence.ids) // 2], fixed=fixed)
            fixed["encoder_hidden_states"][:] = np.nan  # a copy was taken
            live += 1
        for name, logits in batcher.step().items():
            sequence, count = sequences[name], len(batcher.tokens(name))
            expected = sequence.expected
            worst = max(worst, np.abs(logits - expected[count - 1]).max() / np.abs(expected).max())
            if name == 3 and not forked:
                batcher.fork(3, "fork")
                sequences["fork"], forked, live = sequence, True, live + 1
                batcher.extend("fork", int(sequence.ids[count]))
            if count < len(sequence.ids):
                batcher.extend(name, int(sequence.ids[count]))
            else:
                batcher.free(name)
                live -= 1
    assert forked and worst < 1e-5
    usage = batcher.usage()
    assert (usage.used, usage.source_blocks, usage.free_source_blocks) == (0, 4, 4)


def test_keys_and_values_that_an_encoder_gives() -> None:
    """PyTorch's export takes them as inputs, and a mask of padding: requests have no padding, and no mask."""
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
        for given in session.get_inputs():
            shape = (1, rows, 8) if given.name == "states" else (1, 2, 0, 4)
            feeds.setdefault(given.name, np.zeros(shape, np.float32))
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


def given(model: lowering.Model, tables: dict[str, Any]) -> dict[str, Any]:
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
    bart.run(given(bart, {}))
    with pytest.raises(InputError, match=f"PackedSources.*{text}"):
        bart.run(given(bart, tables))


def test_a_block_that_a_setup_writes_twice(bart: lowering.Model) -> None:
    pool = given(bart, {})["source_cache"]
    source = {"encoder_hidden_states": np.ones((1, 12, WIDTH), np.float32), "source_cache": pool}
    assert bart.setup is not None
    with pytest.raises(InputError, match="source_table has request 0 and request 0 write to block 1: give each, and"):
        bart.setup.run({**source, "source_table": np.array([[1, 1]])})
    assert not pool.any()
    bart.setup.run({**source, "source_table": np.array([[1, 2, 1]])})  # a block that nothing is written to


def test_sizes_of_sources_have_bounds(bart: lowering.Model) -> None:
    assert bart.setup is not None and bart.setup.manifest.ranges == {"encoder_sequence_len": (1, 30)}
    batcher = Batcher(bart, blocks=8)
    with pytest.raises(InputError, match=r"request 'a': dimension 'encoder_sequence_len' is 31 .* takes 1 to 30"):
        batcher.add("a", [1], fixed={"encoder_hidden_states": np.ones((1, 31, WIDTH), np.float32)})


def test_hostile_tables_stay_inside() -> None:
    """Whatever tables hold, nothing but the pools is read or written, and the process lives."""
    model = lowering.compile(BART, serve=lowering.Serve(CONTEXT, BLOCK), checks=False)
    rng, ends = np.random.default_rng(3), np.array([-(2**63), -1, 0, 1, 6, 7, 2**31, 2**62, 2**63 - 1])
    assert model.setup is not None
    for _ in range(40):
        tables = {"source_lengths": rng.choice(ends, 2), "source_table": rng.choice(ends, (2, 3))}
        arrays = given(model, tables)
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
    assert served is not None and served.sources == SOURCES and not list(contradictions(bart.manifest))
    wrong = replace(bart.manifest, served=replace(served, sources=sources))
    assert re.search(text, "; ".join(contradictions(wrong)))
    assert "no setup writes the pools of sources" in list(contradictions(replace(bart.manifest, setup=None)))


class Translator:
    """A model that answers with a digest of a request's source and tokens, both of which it reads from its pools."""

    gpu = None

    def __init__(self) -> None:
        pool, sources = (CachePool(name, "", 1, 1, 1) for name in ("kv_cache", "source_cache"))
        served = ServedCache(40, 4, (pool,), "float32", 0, "ids", (), SourceCache((sources,), ("source", 1)))
        inputs, outputs = [TensorSpec("ids", "int32", "int32", (1, "tokens"))], [SimpleNamespace(name="logits")]
        self.manifest: Any = SimpleNamespace(served=served, inputs=inputs, outputs=outputs)
        spec = TensorSpec("source", "float32", "float32", (1, "rows", 2))
        specs, self.port = (spec, TensorSpec("source_table", "", "", ())), Port(spec, "input", {"rows": (0, 60)})
        self.setup: Any = SimpleNamespace(manifest=SimpleNamespace(inputs=specs), accept=self.accept, run=self.file)
        self.setups = 0

    def accept(self, inputs: Any) -> dict[str, Any]:
        return {"source": self.port.keep(inputs["source"], {}, Dictionary(()))}

    def to_numpy(self, name: str, array: np.ndarray) -> np.ndarray:
        return array

    def file(self, inputs: Any) -> None:
        self.setups += 1
        cells, table = inputs["source_cache"][:, 0, 0, 0, :, 0], inputs["source_table"][0]
        for t, value in enumerate(inputs["source"][0, :, 0]):
            cells[table[t // 4], t % 4] = value

    def run(self, inputs: Any) -> Any:
        ids, starts, answers = inputs["ids"], inputs["row_starts"], []
        kinds = (("kv_cache", "block_table"), ("source_cache", "source_table"))
        (cells, table), (sources, of_sources) = ((inputs[a][:, 0, 0, 0, :, 0], inputs[b]) for a, b in kinds)
        for r, (before, rows) in enumerate(zip(inputs["past_lengths"], inputs["source_lengths"])):
            new = ids[0, starts[r] : starts[r + 1]]
            for t, token in enumerate(new, before):
                cells[table[r, t // 4], t % 4] = token
            seen = [int(cells[table[r, t // 4], t % 4]) for t in range(before + len(new))]
            source = [int(sources[of_sources[r, t // 4], t % 4]) for t in range(rows)]
            answers.append(np.eye(64)[digest(source, seen)])
        return {"logits": np.array(answers)}


def digest(source: list[int], tokens: list[int]) -> int:
    value = 7
    for number in (*source, -1, *tokens):
        value = (value * 31 + number) % 1009
    return value % 64


def array_of(source: list[int]) -> np.ndarray:
    return np.repeat(np.array(source, np.float32)[None, :, None], 2, axis=2)


@pytest.mark.parametrize(("blocks", "source_blocks"), [(200, 200), (30, 8), (12, 60), (60, 6), (12, 6)])
def test_sources_are_those_of_their_request(blocks: int, source_blocks: int) -> None:
    """However few blocks there are; equal prompts share nothing, since their keys depend on sources."""
    rng, model = np.random.default_rng(blocks), Translator()
    prompt = rng.integers(0, 64, 9).tolist()
    requests = {k: (prompt[: 1 + k % 9], rng.integers(0, 64, rng.integers(1, 22)).tolist()) for k in range(20)}
    batcher, queue, done, forks = Batcher(model, blocks, 9, source_blocks=source_blocks), list(requests), {}, 0
    sources: dict[Any, list[int]] = {}
    while queue or sources:
        while queue and len(sources) < 6:
            name = queue.pop(0)
            tokens, sources[name] = requests[name]
            batcher.add(
                name, tokens, fixed={"source": array_of([*sources[name], 1]), "source_lengths": len(sources[name])}
            )
        for name, logits in batcher.step().items():
            assert logits.argmax() == digest(sources[name], batcher.tokens(name))
            batcher.extend(name, int(logits.argmax()))
            if name in requests and name % 5 == 0 and ("fork", name) not in sources and len(batcher.tokens(name)) < 15:
                batcher.fork(name, ("fork", name))
                sources["fork", name], forks = sources[name], forks + 1
            if len(batcher.tokens(name)) > 20:
                done[name] = sources.pop(name)
                batcher.free(name)
    assert forks >= 4 and requests.keys() <= done.keys()
    assert (batcher.usage().used, batcher.usage().free_source_blocks) == (0, source_blocks)
    assert model.setups == 20 if source_blocks == 200 else model.setups >= 20


def test_a_request_that_is_put_back_keeps_its_source() -> None:
    model = Translator()
    batcher = Batcher(model, 4, source_blocks=9)
    for name in "ab":
        batcher.add(name, range(7), fixed={"source": array_of([ord(name)])})
    for _ in range(6):
        for name, logits in batcher.step().items():
            assert isinstance(name, str) and logits.argmax() == digest([ord(name)], batcher.tokens(name))
            batcher.extend(name, 1)
    assert batcher.waiting == ["a", "b"] and batcher.usage().tokens == 12  # of "a"
    assert model.setups == 2 and batcher.usage().free_source_blocks == 7


def test_a_full_pool_of_sources() -> None:
    batcher = Batcher(Translator(), 9, source_blocks=2)
    batcher.add("a", [1], fixed={"source": array_of([1, 2, 3, 4, 5])})
    assert list(batcher.step()) == ["a"]
    batcher.add("b", [2], fixed={"source": array_of([3])})
    with pytest.raises(PoolFullError, match="request 'b' needs 1 more source block, and 0 of the pool's 2 are free"):
        batcher.step()
    batcher.free("a")
    assert list(batcher.step()) == ["b"]


def test_a_setup_that_fails_ends_its_request_alone() -> None:
    """The others are answered in this step, those too whose setup comes after, and in the next ones."""
    model = Translator()
    batcher = Batcher(model, 20, source_blocks=20)
    batcher.add("a", [1], fixed={"source": array_of([5])})
    batcher.extend("a", int(batcher.step()["a"].argmax()))
    file = model.file

    def refuse(inputs: Any) -> None:
        if inputs["source"][0, 0, 0] == 9:
            raise ZeroDivisionError("no such source")
        file(inputs)

    model.setup.run = refuse
    for name, value in {"b": 9, "c": 6, "d": 9}.items():
        batcher.add(name, [1], fixed={"source": array_of([value])})
    batcher.fork("b", "e")
    with pytest.raises(RequestError, match=r"request 'b' and 2 more have ended, since .*: no such source") as error:
        batcher.step()
    assert list(error.value.errors) == ["b", "d", "e"]
    assert isinstance(error.value.errors["b"], ZeroDivisionError)
    assert error.value.answers["a"].argmax() == digest([5], batcher.tokens("a"))
    assert error.value.answers["c"].argmax() == digest([6], [1])
    assert not batcher.waiting and batcher.usage().free_source_blocks == 18
    batcher.extend("c", 3)
    assert batcher.step()["c"].argmax() == digest([6], [1, 3])
    with pytest.raises(InputError, match="there is no request 'b'"):
        batcher.free("b")


def test_a_failed_setup_is_told_after_a_call_that_failed() -> None:
    model = Translator()
    batcher = Batcher(model, 20)
    batcher.add("a", [1], fixed={"source": array_of([5])})
    batcher.add("b", [1], fixed={"source": array_of([6])})
    model.setup.run = lambda inputs: model.file(inputs) if inputs["source"][0, 0, 0] == 5 else 1 / 0
    run, model.run = model.run, lambda inputs: [][0]  # type: ignore[method-assign]
    with pytest.raises(IndexError):
        batcher.step()
    model.run = run  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="request 'b'") as error:
        batcher.step()
    assert error.value.answers["a"].argmax() == digest([5], [1])


def test_forks_share_a_source_that_comes_later() -> None:
    model = Translator()
    batcher = Batcher(model, 20, source_blocks=2)
    batcher.add("a", [1], fixed={"source": array_of([1] * 8)})
    batcher.fork("a", "b")
    assert list(batcher.step()) == ["a", "b"] and model.setups == 1
    batcher.free("a")
    batcher.extend("b", 2)
    assert batcher.step()["b"].argmax() == digest([1] * 8, [1, 2]) and model.setups == 1
    batcher.free("b")
    assert batcher.usage().free_source_blocks == 2


def test_no_source_is_given_up_in_vain() -> None:
    """A fork's is that of an older request, and a small one does not make room for a large one."""
    model = Translator()
    batcher = Batcher(model, 50, tokens_per_step=2, source_blocks=3)
    batcher.add("a", [1], fixed={"source": array_of([1] * 8)})
    batcher.step()
    batcher.add("b", [1], fixed={"source": array_of([2] * 8)})
    batcher.fork("a", "fork")
    batcher.add("c", [1] * 9, fixed={"source": array_of([3] * 4)})
    batcher.extend("fork", 4)
    answers: dict[Any, Any] = {}
    for _ in range(6):
        answers |= batcher.step() if not {"fork", "c"} <= answers.keys() else {}
    assert answers["fork"].argmax() == digest([1] * 8, [1, 4])
    assert answers["c"].argmax() == digest([3] * 4, [1] * 9) and model.setups == 2
    with pytest.raises(PoolFullError, match="request 'b' needs 2 more source blocks, and 0"):
        batcher.step()
    batcher.free("a")
    batcher.free("fork")
    assert list(batcher.step()) == ["b"] and model.setups == 3  # beside that of "c"


def test_setups_of_a_step_are_few() -> None:
    """Their rows are no more than tokens_per_step, but one goes at least; who runs is answered in each step."""
    model = Translator()
    batcher = Batcher(model, 300, tokens_per_step=50, source_blocks=200)
    batcher.add("running", [1], fixed={"source": array_of([1])})
    for name in range(8):
        batcher.add(name, [1], fixed={"source": array_of([name] * (20 if name else 60))})
    counts = []
    batcher.step()
    while batcher.waiting:
        batcher.extend("running", 2)
        before = model.setups
        assert "running" in batcher.step()
        counts.append(model.setups - before)
    assert model.setups == 9 and counts == [1, 2, 2, 1]


SOURCE = array_of([1, 2, 3])


@pytest.mark.parametrize(
    ("fixed", "text"),
    [
        ({}, r"request 'b' has no source: pass 'source' in `fixed`, source: float32\[1, rows, 2\]"),
        (SOURCE, "`fixed` of request 'b' must map names to arrays, not ndarray"),
        ({"source": SimpleNamespace(__dlpack__=None)}, "input 'source' is a SimpleNamespace; pass a NumPy array"),
        ({"source": SOURCE[0]}, "the source of request 'b': input 'source' must have 3 dimensions"),
        ({"source": SOURCE[..., :1]}, "the source of request 'b': input 'source' must have size 2 along axis 2, not 1"),
        ({"source": SOURCE.astype(ml_dtypes.bfloat16)}, "input 'source' must be float32, not bfloat16"),
        ({"source": SOURCE.tolist()}, "input 'source' is a list; pass a NumPy array"),
        ({"source": np.ma.masked_array(SOURCE, mask=True)}, "input 'source' is a masked array"),
        ({"source": array_of([1] * 61)}, "dimension 'rows' is 61 in input 'source' .axis 1.; the model takes 0 to 60"),
        ({"source": SOURCE, "x": 1}, "'x' of request 'b' is not of its source: `fixed` takes source: .*source_lengths"),
        ({"source": SOURCE, "source_table": SOURCE}, "'source_table' of request 'b' is not of its source"),
        ({"source": SOURCE, "source_lengths": 4}, "'source_lengths' of request 'b' must be one integer from 0 to 3"),
        ({"source": SOURCE, "source_lengths": [1, 2]}, "'source_lengths' of request 'b' must be one integer"),
        ({"source": SOURCE, "source_lengths": [[1], [2, 3]]}, "'source_lengths' of request 'b' must be one integer"),
        (
            {"source": SOURCE, "source_lengths": np.ma.masked_array([1], True)},
            "'source_lengths' of request 'b' must be",
        ),
        ({"source": array_of([1] * 9)}, "'source' of request 'b' has 9 rows, which take 3 blocks, and there are 2 for"),
    ],
)
def test_sources_that_are_refused(fixed: Any, text: str) -> None:
    batcher = Batcher(Translator(), 9, source_blocks=2)
    with pytest.raises(InputError, match=text):
        batcher.add("b", [1], fixed=fixed)
    assert not batcher.waiting
    batcher.add("b", [1], fixed={"source": SOURCE})


def test_sources_are_copies() -> None:
    """Of arrays of NumPy and of others, of any strides; a caller may do with its own what it likes."""
    batcher, ours = Batcher(Translator(), 20), np.asfortranarray(np.repeat(array_of([1, 2, 3]), 2, axis=2))
    other, empty = array_of([4, 5]), array_of([])
    batcher.add("a", [1], fixed={"source": ours[..., ::2]})
    batcher.add("b", [1], fixed={"source": tvm_ffi.from_dlpack(other), "source_lengths": np.array([[1]])})
    batcher.add("c", [1], fixed={"source": tvm_ffi.from_dlpack(empty)})
    ours[:], other[:] = 7, 7
    answers = batcher.step()
    assert [answers[name].argmax() for name in "abc"] == [digest(source, [1]) for source in ([1, 2, 3], [4], [])]


def test_tensors_without_memory() -> None:
    torch, batcher = pytest.importorskip("torch"), Batcher(Translator(), 9)
    with pytest.raises(InputError, match="the source of request 'b': input 'source' cannot be read through DLPack"):
        batcher.add("b", [1], fixed={"source": torch.ones(1, 3, 2, device="meta")})
    with pytest.raises(InputError, match="'source_lengths' of request 'b' must be one integer"):
        batcher.add("b", [1], fixed={"source": SOURCE, "source_lengths": torch.tensor(1, device="meta")})
    batcher.add("b", [1], fixed={"source": torch.ones(1, 3, 2)})


def test_sources_of_other_decoders() -> None:
    model = Translator()
    model.manifest.served = ServedCache(40, 4, model.manifest.served.pools, "float32", 0, "ids")
    with pytest.raises(InputError, match="source_blocks is 4, and the model reads no sources: leave it out"):
        Batcher(model, 4, source_blocks=4)
    with pytest.raises(InputError, match="request 'a' has 'source', and the model takes tokens alone"):
        Batcher(model, 4).add("a", [1], fixed={"source": SOURCE})


def read_elsewhere(model: onnx.ModelProto) -> None:
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


def mask_by_distance(model: onnx.ModelProto) -> None:
    """Hide keys of the source from tokens by a mask that no input is."""
    (node, *_) = [node for node in model.graph.node if node.op_type == "Attention" and "cross" in "".join(node.output)]
    mask = onnx.numpy_helper.from_array(np.ones((1, 1), bool), "mask")
    model.graph.initializer.append(mask)
    node.input.extend([""] * (3 - len(node.input)))
    node.input.insert(3, "mask")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (read_elsewhere, "'join' .Add. reads what is computed of 'encoder_hidden_states' alone, and is not attention"),
        (mask_by_distance, "reads keys .* of a source, and does not see all that count"),
    ],
)
def test_decoders_that_are_refused(change: Callable[[onnx.ModelProto], None], text: str) -> None:
    model = onnx.load(BART)
    change(model)
    with pytest.raises(lowering.ModelError, match=text):
        lowering.compile(model, serve=lowering.Serve(CONTEXT))
