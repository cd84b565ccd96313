"""A model file that was compiled before is copied, and nothing that differs in anything is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import lowering
from lowering.compiling import compilation
from lowering.compiling.cache import artifact_cache, fingerprints
from lowering.compiling.compiler import compile_to

TEXT = """<ir_version: 10, opset_import: ["" : 23]>
m (float[N, M] x) => (float[N, 40] y) <float[24, 40] w> { y = MatMul (x, w) }
"""
X = np.random.default_rng(0).standard_normal((3, 24), np.float32)


def write(path: Path, seed: int = 0, external: bool = False) -> np.ndarray:
    """The model's matrix."""
    proto = onnx.parser.parse_model(TEXT)
    w = np.random.default_rng(seed).standard_normal((24, 40), np.float32)
    del proto.graph.initializer[:]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    (path.parent / f"{path.name}.data").unlink(missing_ok=True)
    onnx.save(proto, path, save_as_external_data=external, location=f"{path.name}.data", size_threshold=0)
    return w


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, artifacts_are_cached: None) -> list[Any]:
    """One entry for each time that the compiler runs, with a cache of this test alone."""
    monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path / "cache"))
    models: list[Any] = []
    compile_model = compilation.compiled

    def record_model(model: Any, *more: Any, **how: Any) -> compilation.CompiledModel:
        models.append(model)
        return compile_model(model, *more, **how)

    monkeypatch.setattr(compilation, "compiled", record_model)
    return models


def test_the_same_file_is_copied(compiles: list[Any], tmp_path: Path) -> None:
    w = write(tmp_path / "m.onnx")
    first = compile_to(tmp_path / "first", tmp_path / "m.onnx")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "m.onnx").rename(tmp_path / "elsewhere" / "renamed.onnx")
    second = compile_to(tmp_path / "second", tmp_path / "elsewhere" / "renamed.onnx")
    assert len(compiles) == 1 and first == second and files(tmp_path / "first") == files(tmp_path / "second")
    module = lowering.compile(str(tmp_path / "elsewhere" / "renamed.onnx"))
    np.testing.assert_allclose(module.run({"x": X})["y"], X @ w, rtol=1e-4, atol=1e-5)
    assert len(compiles) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"dims": {"N": 3}},
        {"dims": {"N": (1, 8)}},
        {"threads": 1},
        {"weights": "int8"},
        {"weights": "int4"},
        {"target": "cpu:x86-64-v3"},
        {"precision": "bfloat16"},
        {"precision": "float16", "calls": [{"x": X}]},
        {"precision": "float16", "calls": [{"x": X + 1}]},
        {"cc": "cc"},
    ],
    ids=lambda other: " ".join(other),
)
def test_other_options_are_another_artifact(compiles: list[Any], tmp_path: Path, other: dict[str, Any]) -> None:
    write(tmp_path / "m.onnx")
    keys = {artifact_cache.key(tmp_path / "m.onnx", compilation.CompileOptions(**options)) for options in ({}, other)}
    assert len(keys) == 2 and None not in keys
    again = artifact_cache.key(tmp_path / "m.onnx", compilation.CompileOptions(**other))
    assert again in keys


@pytest.mark.parametrize("external", [False, True])
def test_other_contents_are_another_artifact(compiles: list[Any], tmp_path: Path, external: bool) -> None:
    """This includes files with external data."""
    path = tmp_path / "m.onnx"
    for seed in (0, 1):
        w = write(path, seed, external)
        np.testing.assert_allclose(lowering.compile(path).run({"x": X})["y"], X @ w, rtol=1e-4, atol=1e-5)
    write(path, 0, external)
    lowering.compile(path)
    assert len(compiles) == 2


def test_other_records_are_another_artifact(compiles: list[Any], tmp_path: Path) -> None:
    write(tmp_path / "m.onnx")
    records = tmp_path / "records"
    records.mkdir()
    options = compilation.CompileOptions(database=records)
    keys = [artifact_cache.key(tmp_path / "m.onnx", options)]
    for content in ("[]", "[1]"):
        (records / "database_workload.json").write_text(content)
        keys.append(artifact_cache.key(tmp_path / "m.onnx", options))
    assert len(set(keys)) == 3 and None not in keys


def test_other_sources_are_another_artifact(
    compiles: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "m.onnx")
    lowering.compile(tmp_path / "m.onnx")
    monkeypatch.setattr(fingerprints, "sources", lambda: "others")
    lowering.compile(tmp_path / "m.onnx")
    assert len(compiles) == 2


def test_what_looks_inside_compiles(compiles: list[Any], tmp_path: Path) -> None:
    write(tmp_path / "m.onnx")
    seen: list[str] = []
    for _ in range(2):
        lowering.compile(tmp_path / "m.onnx", dump=lambda name, _: seen.append(name))
    assert len(compiles) == 2 and seen.count("fused") == 2


def test_signatures_are_made_anew(compiles: list[Any], tmp_path: Path) -> None:
    write(tmp_path / "m.onnx")
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    for k, key in enumerate(keys):
        compile_to(tmp_path / str(k), tmp_path / "m.onnx", sign_key=key)
        lowering.load(tmp_path / str(k), verify_key=key.public_key())
    compile_to(tmp_path / "unsigned", tmp_path / "m.onnx")
    assert len(compiles) == 1 and "manifest.sig" not in files(tmp_path / "unsigned")


@pytest.mark.parametrize("harm", ["short", "other"])
@pytest.mark.parametrize("name", ["model.so", "manifest.json", "weights.bin"])
def test_what_is_not_whole_is_compiled_anew(compiles: list[Any], tmp_path: Path, name: str, harm: str) -> None:
    w = write(tmp_path / "m.onnx")
    lowering.compile(tmp_path / "m.onnx")
    (path,) = artifact_cache.folder().glob(f"*/{name}")
    content = path.read_bytes()
    path.write_bytes(content[:-70] if harm == "short" else content[:999] + bytes([content[999] ^ 1]) + content[1000:])
    module = lowering.compile(tmp_path / "m.onnx")
    assert len(compiles) == 2
    np.testing.assert_allclose(module.run({"x": X})["y"], X @ w, rtol=1e-4, atol=1e-5)
    lowering.compile(tmp_path / "m.onnx")
    assert len(compiles) == 2


@pytest.mark.parametrize("prepare", [lambda p: p.write_bytes(b"no model"), lambda p: None, lambda p: p.mkdir()])
def test_errors_are_the_compilers(compiles: list[Any], tmp_path: Path, prepare: Callable[[Path], Any]) -> None:
    prepare(tmp_path / "m.onnx")
    with pytest.raises(lowering.ModelError):
        lowering.compile(tmp_path / "m.onnx")


def test_the_least_recently_used_go_first(compiles: list[Any], tmp_path: Path) -> None:
    for seed in range(3):
        write(tmp_path / f"{seed}.onnx", seed)
        lowering.compile(tmp_path / f"{seed}.onnx")
    lowering.compile(tmp_path / "0.onnx")  # is used now
    count, size = artifact_cache.size()
    assert count == 3
    artifact_cache.trim(max_bytes=size * 2 // 3 + 100)
    compiles.clear()
    for seed in (0, 2, 1):
        lowering.compile(tmp_path / f"{seed}.onnx")
    assert len(compiles) == 1
    artifact_cache.clear()
    assert artifact_cache.size() == (0, 0)


def test_a_cached_artifact_needs_no_compiler(compiles: list[Any], tmp_path: Path) -> None:
    write(tmp_path / "m.onnx")
    lowering.compile(tmp_path / "m.onnx")
    script = (
        "import sys, lowering\n"
        f"lowering.compile({str(tmp_path / 'm.onnx')!r})\n"
        "assert not {'tvm', 'schedules', 'onnx_ir', 'torch'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ, timeout=60)
