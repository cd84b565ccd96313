"""The parts of the fuzzers that need no atheris: mutations that keep the form, and notes of exceptions."""

from __future__ import annotations

import json
import random
from pathlib import Path

import onnx
import pytest

from .fuzz import importer, loader, mutate_json, mutate_model
from .fuzz.notes import CURRENT, noted


def test_mutated_models_are_models() -> None:
    inputs, rng = importer.corpus(), random.Random(0)
    assert len(inputs) > 100 and sum(map(len, inputs)) < 100_000
    changed = 0
    for data in inputs[:60]:
        result = mutate_model.mutated(data, rng, 8192)
        assert result is not None
        onnx.ModelProto().ParseFromString(result)
        changed += result != data
    assert changed > 50
    assert mutate_model.mutated(b"no model", rng, 8192) is None


def test_mutated_manifests_are_json() -> None:
    (written, *_), rng = loader.corpus(), random.Random(0)
    loader.attempt(written)
    results = [mutate_json.mutated(written, rng, 8192) for _ in range(100)]
    assert len({json.dumps(json.loads(r)) for r in results if r is not None}) > 80


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "fuzz" / "found").iterdir()), ids=lambda p: p.name)
def test_what_was_found_once(path: Path) -> None:
    """Models that the fuzzer met: NodeError or ModelError now."""
    importer.attempt(path.read_bytes())


def test_notes_name_locations(tmp_path: Path) -> None:
    def attempt(data: bytes) -> None:
        if data == b"odd":
            raise KeyError("x")
        assert data == b"even"

    run = noted(attempt, tmp_path)
    for data in (b"even", b"odd", b"odd", b"other"):
        run(data)
    assert {p.read_bytes() for p in tmp_path.glob("finding-*") if not p.suffix} == {b"odd", b"other"}
    assert any("KeyError" in p.read_text() for p in tmp_path.glob("*.txt"))
    assert (tmp_path / CURRENT).read_bytes() == b"other"
