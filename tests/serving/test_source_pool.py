"""Batcher gives each request its source, for any sharing, any number of blocks, and any failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm_ffi

from lowering import Batcher, InputError
from lowering.manifest import CachePool, ServedCache, SourceCache, TensorSpec
from lowering.runtime.arrays.inputs import InputPort
from lowering.runtime.arrays.strings import StringTable
from tests.support.error_codes import raises


class Translator:
    """A model that answers with a digest of a request's source and tokens, both of which it reads from its pools."""

    gpu = None

    def __init__(self) -> None:
        pool, sources = (CachePool(name, "", 1, 1, 1) for name in ("kv_cache", "source_cache"))
        served = ServedCache(40, 4, (pool,), "float32", 0, "ids", (), SourceCache((sources,), ("source", 1)))
        inputs, outputs = [TensorSpec("ids", "int32", "int32", (1, "tokens"))], [SimpleNamespace(name="logits")]
        self.manifest: Any = SimpleNamespace(served=served, inputs=inputs, outputs=outputs)
        spec = TensorSpec("source", "float32", "float32", (1, "rows", 2))
        specs, self.port = (spec, TensorSpec("source_table", "", "", ())), InputPort(spec, "input", {"rows": (0, 60)})
        self.setup: Any = SimpleNamespace(manifest=SimpleNamespace(inputs=specs), accept=self.accept, run=self.file)
        self.setups = 0

    def accept(self, inputs: Any) -> dict[str, Any]:
        return {"source": self.port.snapshot(inputs["source"], {}, StringTable(()))}

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
            answers.append(np.eye(64)[compute_digest(source, seen)])
        return {"logits": np.array(answers)}


def compute_digest(source: list[int], tokens: list[int]) -> int:
    value = 7
    for number in (*source, -1, *tokens):
        value = (value * 31 + number) % 1009
    return value % 64


def make_array(source: list[int]) -> np.ndarray:
    return np.repeat(np.array(source, np.float32)[None, :, None], 2, axis=2)


@pytest.mark.parametrize(("blocks", "source_blocks"), [(200, 200), (30, 8), (12, 60), (60, 6), (12, 6)])
def test_sources_are_those_of_their_request(blocks: int, source_blocks: int) -> None:
    """Sources are correct for any number of blocks; equal prompts share nothing, since their keys depend on sources."""
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
                name, tokens, fixed={"source": make_array([*sources[name], 1]), "source_lengths": len(sources[name])}
            )
        for name, logits in batcher.step().items():
            assert logits.argmax() == compute_digest(sources[name], batcher.tokens(name))
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
        batcher.add(name, range(7), fixed={"source": make_array([ord(name)])})
    for _ in range(6):
        for name, logits in batcher.step().items():
            assert isinstance(name, str) and logits.argmax() == compute_digest([ord(name)], batcher.tokens(name))
            batcher.extend(name, 1)
    assert batcher.waiting == ["a", "b"] and batcher.usage().tokens == 12  # of "a"
    assert model.setups == 2 and batcher.usage().free_source_blocks == 7


def test_a_full_pool_of_sources() -> None:
    batcher = Batcher(Translator(), 9, source_blocks=2)
    batcher.add("a", [1], fixed={"source": make_array([1, 2, 3, 4, 5])})
    assert list(batcher.step()) == ["a"]
    batcher.add("b", [2], fixed={"source": make_array([3])})
    with raises("batcher.source_blocks_exhausted"):
        batcher.step()
    batcher.free("a")
    assert list(batcher.step()) == ["b"]


def test_a_setup_that_fails_ends_its_request_only() -> None:
    """Other requests are answered in this step and in later ones, also those whose setup runs later."""
    model = Translator()
    batcher = Batcher(model, 20, source_blocks=20)
    batcher.add("a", [1], fixed={"source": make_array([5])})
    batcher.extend("a", int(batcher.step()["a"].argmax()))
    file = model.file

    def refuse(inputs: Any) -> None:
        if inputs["source"][0, 0, 0] == 9:
            raise ZeroDivisionError("no such source")
        file(inputs)

    model.setup.run = refuse
    for name, value in {"b": 9, "c": 6, "d": 9}.items():
        batcher.add(name, [1], fixed={"source": make_array([value])})
    batcher.fork("b", "e")
    with raises("batcher.request_failed") as error:
        batcher.step()
    assert list(error.value.errors) == ["b", "d", "e"]
    assert isinstance(error.value.errors["b"], ZeroDivisionError)
    assert error.value.answers["a"].argmax() == compute_digest([5], batcher.tokens("a"))
    assert error.value.answers["c"].argmax() == compute_digest([6], [1])
    assert not batcher.waiting and batcher.usage().free_source_blocks == 18
    batcher.extend("c", 3)
    assert batcher.step()["c"].argmax() == compute_digest([6], [1, 3])
    with raises("batcher.name_unknown"):
        batcher.free("b")


def test_a_failed_setup_is_told_after_a_call_that_failed() -> None:
    model = Translator()
    batcher = Batcher(model, 20)
    batcher.add("a", [1], fixed={"source": make_array([5])})
    batcher.add("b", [1], fixed={"source": make_array([6])})
    model.setup.run = lambda inputs: model.file(inputs) if inputs["source"][0, 0, 0] == 5 else 1 / 0
    run, model.run = model.run, lambda inputs: [][0]  # type: ignore[method-assign]
    with pytest.raises(IndexError):
        batcher.step()
    model.run = run  # type: ignore[method-assign]
    with raises("batcher.request_failed") as error:
        batcher.step()
    assert error.value.answers["a"].argmax() == compute_digest([5], [1])


def test_forks_share_a_source_that_comes_later() -> None:
    model = Translator()
    batcher = Batcher(model, 20, source_blocks=2)
    batcher.add("a", [1], fixed={"source": make_array([1] * 8)})
    batcher.fork("a", "b")
    assert list(batcher.step()) == ["a", "b"] and model.setups == 1
    batcher.free("a")
    batcher.extend("b", 2)
    assert batcher.step()["b"].argmax() == compute_digest([1] * 8, [1, 2]) and model.setups == 1
    batcher.free("b")
    assert batcher.usage().free_source_blocks == 2


def test_no_source_is_given_up_in_vain() -> None:
    """A fork's source belongs to an older request, and a small source does not make room for a large one."""
    model = Translator()
    batcher = Batcher(model, 50, tokens_per_step=2, source_blocks=3)
    batcher.add("a", [1], fixed={"source": make_array([1] * 8)})
    batcher.step()
    batcher.add("b", [1], fixed={"source": make_array([2] * 8)})
    batcher.fork("a", "fork")
    batcher.add("c", [1] * 9, fixed={"source": make_array([3] * 4)})
    batcher.extend("fork", 4)
    answers: dict[Any, Any] = {}
    for _ in range(6):
        answers |= batcher.step() if not {"fork", "c"} <= answers.keys() else {}
    assert answers["fork"].argmax() == compute_digest([1] * 8, [1, 4])
    assert answers["c"].argmax() == compute_digest([3] * 4, [1] * 9) and model.setups == 2
    with raises("batcher.source_blocks_exhausted"):
        batcher.step()
    batcher.free("a")
    batcher.free("fork")
    assert list(batcher.step()) == ["b"] and model.setups == 3  # next to the source of "c"


def test_setups_of_a_step_are_few() -> None:
    """Setups of a step have at most tokens_per_step rows, but one always runs; running requests are answered."""
    model = Translator()
    batcher = Batcher(model, 300, tokens_per_step=50, source_blocks=200)
    batcher.add("running", [1], fixed={"source": make_array([1])})
    for name in range(8):
        batcher.add(name, [1], fixed={"source": make_array([name] * (20 if name else 60))})
    counts = []
    batcher.step()
    while batcher.waiting:
        batcher.extend("running", 2)
        before = model.setups
        assert "running" in batcher.step()
        counts.append(model.setups - before)
    assert model.setups == 9 and counts == [1, 2, 2, 1]


SOURCE = make_array([1, 2, 3])


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
        (
            {"source": make_array([1] * 61)},
            "dimension 'rows' is 61 in input 'source' .axis 1.; the model takes 0 to 60",
        ),
        (
            {"source": SOURCE, "x": 1},
            "'x' of request 'b' is not an input of its source: `fixed` takes source: .*source_lengths",
        ),
        ({"source": SOURCE, "source_table": SOURCE}, "'source_table' of request 'b' is not an input of its source"),
        ({"source": SOURCE, "source_lengths": 4}, "'source_lengths' of request 'b' must be one integer from 0 to 3"),
        ({"source": SOURCE, "source_lengths": [1, 2]}, "'source_lengths' of request 'b' must be one integer"),
        ({"source": SOURCE, "source_lengths": [[1], [2, 3]]}, "'source_lengths' of request 'b' must be one integer"),
        (
            {"source": SOURCE, "source_lengths": np.ma.masked_array([1], True)},
            "'source_lengths' of request 'b' must be",
        ),
        (
            {"source": make_array([1] * 9)},
            "'source' of request 'b' has 9 rows, which take 3 blocks, and source_blocks is 2",
        ),
    ],
)
def test_sources_that_are_refused(fixed: Any, text: str) -> None:
    batcher = Batcher(Translator(), 9, source_blocks=2)
    with pytest.raises(InputError, match=text):
        batcher.add("b", [1], fixed=fixed)
    assert not batcher.waiting
    batcher.add("b", [1], fixed={"source": SOURCE})


def test_sources_are_copies() -> None:
    """Arrays of NumPy and of others, of any strides; a caller may change its arrays afterwards."""
    batcher, strided = Batcher(Translator(), 20), np.asfortranarray(np.repeat(make_array([1, 2, 3]), 2, axis=2))
    other, empty = make_array([4, 5]), make_array([])
    batcher.add("a", [1], fixed={"source": strided[..., ::2]})
    batcher.add("b", [1], fixed={"source": tvm_ffi.from_dlpack(other), "source_lengths": np.array([[1]])})
    batcher.add("c", [1], fixed={"source": tvm_ffi.from_dlpack(empty)})
    strided[:], other[:] = 7, 7
    answers = batcher.step()
    assert [answers[name].argmax() for name in "abc"] == [
        compute_digest(source, [1]) for source in ([1, 2, 3], [4], [])
    ]


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
    with raises("batcher.source_blocks_unused"):
        Batcher(model, 4, source_blocks=4)
    with raises("batcher.sources_unsupported"):
        Batcher(model, 4).add("a", [1], fixed={"source": SOURCE})
