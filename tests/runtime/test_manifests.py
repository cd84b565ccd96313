"""Manifests that say what cannot be: each is refused in one sentence, whatever is wrong."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

import lowering
from lowering.errors import ArtifactError, LoweringError
from lowering.importing.values import storage_dtype
from lowering.manifest import Manifest, ServedCache, StatePool, TensorSpec
from lowering.records import decode
from lowering.runtime.arrays.elements import STORAGE_TYPES
from lowering.runtime.artifact.manifest_rules import find_contradictions
from tests.support.error_codes import raises


@pytest.fixture
def folder(artifact: Callable[..., Path], tmp_path: Path) -> Path:
    lowering.load(artifact("cache")).save(tmp_path / "out")
    return tmp_path / "out"


SLOTS = {"capacity": 4, "length": "n", "tokens": None, "rings": {}, "rows": None}
LIST = {"name": "s", "first": 0, "count": 1}
SERVED = {
    "context": 8, "tokens_per_block": 4, "pools": [], "dtype": "", "scales": 0, "ids": "ids",
    "states": [{"name": "past", "layers": 1, "shape": [3], "dtype": "float32"}], "sources": None,
    "per_token": [], "fixed": [], "vocabularies": {},
}  # fmt: skip
POOL = {"name": "past", "scale": "", "layers": 1, "kv_heads": 2, "head_dim": 5}
TEXTS = ["[" * 100_000, '{"format":' * 50_000, "9" * 10_000, "\x00", '{"a": "', "NaN", '"\\ud800"']


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_texts(folder: Path, text: str) -> None:
    for format in ("{}", '{{"format": 6, "inputs": {}}}'):
        (folder / "manifest.json").write_text(format.format(text))
        refused(folder)


def test_bytes(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b'{"format": "\xff"}')
    refused(folder)


def refused(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        lowering.load(folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600, message
    return message


OTHERS: list[Any] = [
    *(None, True, 0, -1, 1, 3, 2**31, 2**63, 10**400, 1.5, float("nan"), "", "x", "\x00", "\ud800", "é", "../../etc"),
    *([], [1], ["n"], [[]], {}, {"x": 1}, {"x": "y"}, [None], "float32", "int4", "string", "version", "finfo"),
]


def list_paths(data: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths to all values inside plain data."""
    yield path
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from list_paths(value, (*path, key))


def mutated(data: Any, rng: random.Random) -> Any:
    """A copy in which one to three values are others, gone, or repeated."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(list(list_paths(data))[1:])
        parent = data
        for key in path[:-1]:
            parent = parent[key]
        action = rng.randrange(4)
        if action == 0:
            del parent[path[-1]]
        elif action == 1 and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[path[-1]]))
        elif action == 2 and isinstance(parent, dict):
            parent[rng.choice(["", "x", "name", "dims"])] = copy.deepcopy(rng.choice(OTHERS))
        else:
            parent[path[-1]] = copy.deepcopy(rng.choice(OTHERS))
        if not data:
            break
    return data


@pytest.mark.parametrize("name", ["cache", "dense", "translator"])
@pytest.mark.parametrize("redigested", [False, True])
def test_mutations(name: str, redigested: bool, artifact: Callable[..., Path], tmp_path: Path) -> None:
    """600 manifests in which something else stands; redigested, as one would write who had made them on purpose."""
    folder = tmp_path / "out"
    lowering.load(artifact(name)).save(folder)
    path = folder / "manifest.json"
    right = json.loads(path.read_text())
    loaded = 0
    for seed in range(100):
        data = mutated(right, random.Random(seed))
        if redigested:
            try:
                manifest = Manifest.from_dict(data)
            except ValueError:
                pass
            else:
                data = dataclasses.asdict(manifest)
                data["hashes"]["manifest.json"] = manifest.digest()
        path.write_text(json.dumps(data))
        try:
            model = lowering.load(folder)
        except LoweringError as error:
            assert "\n" not in str(error), seed
        except Exception as error:
            raise AssertionError(f"seed {seed}: {data}") from error
        else:
            assert redigested or data == right, seed
            loaded += 1
            assert repr(model)
    assert loaded < 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": [{"name": "x"}]}, r"damaged: manifest\.inputs\[0\] lacks field 'dtype'"),
        ({"inputs": "x"}, r"damaged: manifest\.inputs must be a list, not 'x'"),
        ({"extra": 1}, r"damaged: manifest has the unknown field 'extra'"),
        ({"threads": True}, r"damaged: manifest\.threads must be a whole number, not 'True'"),
        ({"threads": 5000}, r"damaged: it says that calls take 5000 threads"),
        ({"ranges": {"n": [3, 2]}}, r"it says that dimension 'n' goes from 3 to 2"),
        ({"donated": {"past": "nowhere"}}, r"it says that input 'past' becomes output 'nowhere'"),
        ({"architectures": ["../x", "sm_80"]}, r"it says that '\.\./x' is an architecture"),
        ({"input_lists": [LIST | {"count": 99}]}, r"input 's' is 99 of \d tensors from number 0 on"),
        ({"input_lists": [LIST | {"count": -1}]}, r"input 's' is -1 of"),
        ({"output_lists": [LIST | {"first": 9}]}, r"output 's' is 1 of \d tensors from number 9 on"),
        ({"input_lists": [LIST, LIST | {"name": "t"}]}, r"input 't' is 1 of \d tensors from number 0 on"),
        ({"input_lists": [LIST | {"name": "past"}]}, r"it says that two inputs have one name"),
        (
            {"output_lists": [LIST | {"count": "1"}]},
            r"damaged: manifest\.output_lists\[0\]\.count must be a whole number",
        ),
        ({"hashes": {}}, r"it says that there is no digest of model\.so"),
        ({"slots": {**SLOTS, "length": "past"}}, r"'past' is an input that holds a length"),
        ({"slots": {**SLOTS, "tokens": ["past", 9]}}, r"'n' is an input that holds a length"),
        ({"served": SERVED}, r"it says that input 'past' is a pool of float32\[1, 3\], written in place"),
        ({"served": {**SERVED, "states": []}}, r"a served decoder keeps nothing"),
        ({"served": {**SERVED, "context": 0}}, r"requests have 0 tokens"),
        (
            {"served": {**SERVED, "states": [], "pools": [POOL], "dtype": "int8"}},
            r"input 'past' is a pool of int8\[1, 2, 2, 4, 5\]",
        ),
    ],
)
def test_what_is_said(change: dict[str, Any], message: str, folder: Path) -> None:
    path = folder / "manifest.json"
    data = {**json.loads(path.read_text()), **change}
    try:
        manifest = Manifest.from_dict(data)
        hashes = {**manifest.hashes, "manifest.json": manifest.digest()}
        data["hashes"] = hashes
    except ValueError:
        pass
    path.write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match=message):
        lowering.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda setup: {"format": setup["format"] - 1}, "the setup has format"),
        (
            lambda setup: {"outputs": [{**setup["outputs"][0], "dims": ["batch", 4, "encoder_sequence_len", 9]}]},
            "'present.0.cross.key: float32[batch, 4, encoder_sequence_len, 9]' of the setup is the input 'present",
        ),
    ],
)
def test_setups_of_other_decoders(
    change: Callable[[Any], Any], message: str, artifact: Callable[..., Path], tmp_path: Path
) -> None:
    lowering.load(artifact("translator")).save(tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    data = json.loads(path.read_text())
    data["setup"] |= change(data["setup"])
    data["hashes"]["manifest.json"] = Manifest.from_dict(data).digest()
    path.write_text(json.dumps(data))
    assert message in refused(tmp_path / "out")


@pytest.mark.parametrize("change", [{"layers": 3}, {"dtype": "float16"}, {"name": "slots"}, {"shape": (4, 8)}])
def test_pools_that_the_code_does_not_have(change: dict[str, Any], folder: Path) -> None:
    """A served decoder's pools are inputs, by name, type and sizes."""
    specs = [
        *(TensorSpec(name, "int64", "int64", dims) for name, dims in {
            "row_starts": ("n",), "past_lengths": ("r",), "state_slots": ("r",), "ids": (1, "t")}.items()),
        TensorSpec("states", "float32", "float32", ("slots", 2, 4, 5)),
    ]  # fmt: skip
    states = StatePool("states", 2, (4, 5), "float32")
    served = ServedCache(8, 4, (), "", 0, "ids", (states,))
    right = dataclasses.replace(
        lowering.load(folder).manifest, inputs=tuple(specs), outputs=(dataclasses.replace(specs[-1], name="after"),),
        donated={"states": "after"}, served=served,
    )  # fmt: skip
    assert not list(find_contradictions(right))
    wrong = dataclasses.replace(states, **change)
    contradictions = list(
        find_contradictions(dataclasses.replace(right, served=dataclasses.replace(served, states=(wrong,))))
    )
    assert len(contradictions) == 1 and "is a pool of" in contradictions[0]
    absent = dataclasses.replace(served, per_token=("hidden",), fixed=("gate",))
    said = ["input 'hidden' holds the tokens of requests", "all requests share input 'gate'"]
    assert list(find_contradictions(dataclasses.replace(right, served=absent))) == said


@pytest.mark.parametrize(
    ("field", "value"),
    [("offset", -64), ("offset", 3), ("offset", 2**62), ("nbytes", 10**9), ("nbytes", -1), ("dims", [2**62, 2**62])],
)
def test_weights_elsewhere(field: str, value: Any, artifact: Callable[..., Path], tmp_path: Path) -> None:
    """Weights lie inside their file and take the bytes of their shape."""
    lowering.load(artifact("dense")).save(tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    data = json.loads(path.read_text())
    data["weights"][0][field] = value
    manifest = Manifest.from_dict(data)
    path.write_text(
        dataclasses.replace(manifest, hashes={**manifest.hashes, "manifest.json": manifest.digest()}).to_json()
    )
    assert "weight" in refused(tmp_path / "out")


def test_the_whole_way_through_json(folder: Path) -> None:
    manifest = lowering.load(folder).manifest
    assert Manifest.from_dict(json.loads(manifest.to_json())) == manifest


def test_decoding_by_types() -> None:
    assert decode(tuple[int | str, ...], [1, "a"], "x") == (1, "a")
    assert decode(dict[str, tuple[int, int]], {"a": [1, 2]}, "x") == {"a": (1, 2)}
    assert decode(float, 1, "x") == 1.0
    for kind, data in (
        (int, True),
        (int, 1.0),
        (str, None),
        (tuple[int, int], [1]),
        (int | None, "1"),
        (str, "\ud800"),
    ):
        with pytest.raises(ValueError, match=r"x|surrogates"):
            decode(kind, data, "x")


def test_storage_types_are_those_of_the_compiler() -> None:
    assert all(storage_dtype(name) == storage for name, storage in STORAGE_TYPES.items())
    assert np.dtype("float32").name in STORAGE_TYPES


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sig", "model.h", "host.hpp", "model.so"])
def test_files_of_a_size_that_none_has(name: str, folder: Path) -> None:
    """Sparse, so that they use no space on the disk."""
    (folder / name).touch()
    os.truncate(folder / name, 300 * 2**30)
    if name == "manifest.sig":
        key = ed25519.Ed25519PrivateKey.generate().public_key()
        with raises("signature.mismatch"):
            lowering.load(folder, verify_key=key)
    else:
        with raises("artifact.file_too_large"):
            lowering.load(folder)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_manifests_of_other_outputs(count: int, artifact: Callable[..., Path], tmp_path: Path) -> None:
    lowering.load(artifact("dense")).save(tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    data = json.loads(path.read_text())
    data["outputs"] = [data["outputs"][0] | {"name": f"y{k}"} for k in range(count)]
    data["hashes"]["manifest.json"] = Manifest.from_dict(data).digest()
    path.write_text(json.dumps(data))
    if not count:
        assert "it gives nothing" in refused(tmp_path / "out")
        return
    model = lowering.load(tmp_path / "out")
    with raises("artifact.output_count_mismatch"):
        model.run({"x": np.ones((2, 64), np.float32)})
