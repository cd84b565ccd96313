"""Artifact folders: written whole, refused when anything is not as it was written."""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import lowering
import lowering.runtime
from lowering.compiling import artifact as artifacts
from lowering.errors import ArtifactError
from lowering.manifest import BLOCK, Manifest, compute_block_digests, digest
from lowering.runtime import library
from lowering.runtime.artifact import checks
from tests.runtime import modules
from tests.support.error_codes import raises


@pytest.fixture
def folder(artifact: Callable[..., Path], tmp_path: Path) -> Path:
    lowering.load(artifact("dense")).save(tmp_path / "out")
    return tmp_path / "out"


def edit(folder: Path, **fields: object) -> None:
    """Writes the manifest anew, as a compiler would that had put other values into it."""
    path = folder / "manifest.json"
    manifest = replace(Manifest.from_dict(json.loads(path.read_text())), **fields)  # type: ignore[arg-type]
    path.write_text(replace(manifest, hashes={**manifest.hashes, "manifest.json": manifest.digest()}).to_json())


def blocks_of(path: Path) -> tuple[str, ...]:
    size = os.stat(path).st_size
    with path.open("rb") as file:

        def read(at: int, count: int) -> bytes:
            return os.pread(file.fileno(), count, at)

        return tuple(compute_block_digests(size, read, range(-(-size // BLOCK))))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        lowering.load(folder)
    assert "\n" not in str(caught.value)


def test_what_is_in_it(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {"model.so", "weights.bin", "manifest.json", "model.h", "host.hpp"}
    data = json.loads((folder / "manifest.json").read_text())
    assert data["inputs"] == [{"name": "x", "dtype": "float32", "storage": "float32", "dims": ["n", 64]}]
    assert data["format"] == 11 and set(data["hashes"]) == {p.name for p in folder.iterdir()}
    assert all(w["offset"] % 64 == 0 for w in data["weights"])


def test_no_artifact(tmp_path: Path) -> None:
    refused(
        tmp_path / "nowhere",
        r"there is no folder '.*nowhere'\. An artifact is a folder that `onnx-lowering compile` writes\.",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"manifest\.json' cannot be read: "),
        (
            "[]",
            r"has artifact format None, and this version of onnx-lowering reads format 11: compile the model",
        ),
        ('{"format": 2}', r"has artifact format 2, which is older, and this version of onnx-lowering reads format 11"),
        ('{"format": 12}', r"format 12, which is newer, and this .* reads format 11: install a newer one, or compile"),
        ('{"format": true}', r"has artifact format True, and this version of onnx-lowering reads format 11"),
        ('{"format": 11}', r"manifest\.json' is damaged: "),
    ],
)
def test_manifests_that_cannot_be_read(folder: Path, text: str, message: str) -> None:
    (folder / "manifest.json").write_text(text)
    refused(folder, message)


@pytest.mark.parametrize("without", [("input_lists", "output_lists"), ("derived",), ()])
def test_an_artifact_of_format_9(folder: Path, without: tuple[str, ...]) -> None:
    """It is older, not damaged, whatever fields it lacks."""
    data = json.loads((folder / "manifest.json").read_text())
    data = {name: value for name, value in data.items() if name not in without} | {"format": 10}
    (folder / "manifest.json").write_text(json.dumps(data))
    refused(folder, r"has artifact format 10, which is older, and .* reads format 11: compile the model again\.$")


def test_a_changed_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"n"', '"m"'))
    refused(folder, r"manifest\.json' has been changed since it was written: compile the model again\.")


@pytest.mark.parametrize("name", ["model.so", "weights.bin", "model.h", "host.hpp"])
def test_missing_and_changed_files(folder: Path, name: str) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused(folder, rf"{name}' is not the file that manifest\.json was written with.*: copy the whole folder")
    path.unlink()
    refused(folder, rf"{name}' is missing: copy the whole folder, or compile the model again\.")


def test_versions(folder: Path) -> None:
    edit(folder, versions={"apache-tvm": "0.27.99", "apache-tvm-ffi": "0.1.99"})
    lowering.load(folder)
    edit(folder, versions={"apache-tvm": "0.26.0"})
    refused(
        folder,
        r"was built with apache-tvm 0\.26\.0 and 0\.27\S* is installed: install apache-tvm==0\.26\.0",
    )
    edit(folder, versions={"apache-tvm-ffi": "0.2.0"})
    refused(folder, r"was built with apache-tvm-ffi 0\.2\.0 and ")


def test_versions_of_the_runtime_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """apache-tvm is not installed there; its library's version is in a file next to it."""

    def version(name: str) -> str:
        if name == "apache-tvm":
            raise checks.metadata.PackageNotFoundError(name)
        return "0.1.14"

    monkeypatch.setattr(checks.metadata, "version", version)
    monkeypatch.setattr(checks, "SHIPPED", tmp_path)
    monkeypatch.setattr(checks, "runtime_alone", lambda: True)
    (tmp_path / "apache-tvm.version").write_text("0.27.0.post1")
    lowering.load(folder)
    (tmp_path / "apache-tvm.version").write_text("0.28.0")
    refused(folder, r"was built with apache-tvm 0\.27\S* and 0\.28\.0 is installed: install apache-tvm==0\.27")


def test_missing_cpu_features(folder: Path) -> None:
    edit(folder, cpu_features=("fma", "amx_from_the_future", "avx1024"))
    refused(folder, r"for a CPU with (fma, )?amx_from_the_future, avx1024, which this one lacks: compile")


def test_another_architecture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.so"
    code = bytearray(path.read_bytes())
    other = "aarch64" if checks.platform.machine() == "x86_64" else "x86_64"
    code[18:20] = struct.pack("<H", {"aarch64": 183, "x86_64": 62}[other])
    path.write_bytes(code)
    hashes = json.loads((folder / "manifest.json").read_text())["hashes"]
    edit(folder, hashes={**hashes, "model.so": digest(path.read_bytes())}, target=f"cpu:{other}")
    refused(folder, rf"was built for {other} \(cpu:{other}\) and this machine is ")


def test_code_that_cannot_be_loaded(folder: Path) -> None:
    """A library that is not a model."""
    path = folder / "model.so"
    subprocess.run(["gcc", "-shared", "-o", path, "-x", "c", os.devnull], check=True)
    hashes = json.loads((folder / "manifest.json").read_text())["hashes"]
    edit(folder, hashes={**hashes, "model.so": digest(path.read_bytes())})
    refused(folder, r"model\.so' cannot be loaded as a compiled model: ")


def test_no_runtime_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_LOADER", "ffi.Module.load_from_bytes.nothing")
    monkeypatch.setattr(sys, "path", [])
    refused(
        folder, r"no installed apache-tvm has the TVM runtime library libtvm_runtime\.so\. Install apache-tvm, or put"
    )
    # A library next to the artifact is code that no digest covers, and stays untouched.
    (folder / "libtvm_runtime.so").write_bytes(b"no library")
    refused(folder, r"no installed apache-tvm has the TVM runtime library libtvm_runtime\.so\.")
    libraries = folder.parent / "tvm" / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libtvm_runtime.so").write_bytes(b"no library")
    monkeypatch.setattr(sys, "path", [str(folder.parent)])
    refused(folder, r"libtvm_runtime\.so' cannot be loaded: ")


@pytest.mark.parametrize("bar", ["sys.modules['tvm'] = None", "sys.meta_path.insert(0, Bar())"])
def test_loading_needs_no_compiler(folder: Path, bar: str) -> None:
    code = f"""
import sys
class Bar:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "tvm": raise ImportError("no compiler here")
{bar}
import lowering, numpy as np
model = lowering.load({str(folder)!r})
assert model.run({{"x": np.ones((2, 64), "f")}})["y"].shape == (2, 32)
assert sys.modules.get("tvm") is None and "schedules" not in sys.modules and "onnx" not in sys.modules
"""
    assert modules.run_python(code) == 0


def test_the_compiler_may_be_imported_afterwards(folder: Path) -> None:
    code = f"""
import lowering, numpy as np
model = lowering.load({str(folder)!r})
x = np.ones((2, 64), "f")
y = model.run({{"x": x}})["y"]
import tvm
assert (lowering.load({str(folder)!r}).run({{"x": x}})["y"] == y).all() and (model.run({{"x": x}})["y"] == y).all()
"""
    assert modules.run_python(code) == 0


# -- writing ----------------------------------------------------------------------------------------------------------


def test_a_model_outlives_its_folder(folder: Path) -> None:
    """All it needs is in memory or in open files: its files may be removed, and it can still be saved."""
    module = lowering.load(folder)
    call = module.bind({"x": np.ones((1, 64), "f")})
    before = call()["y"]
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    shutil.rmtree(folder)
    np.testing.assert_array_equal(call()["y"], before)
    module.save(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == files


def test_files_are_closed_with_the_model(folder: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    module = lowering.load(folder)
    assert len(os.listdir("/proc/self/fd")) <= before + 5
    del module
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_artifact_is_replaced_whole(folder: Path, artifact: Callable[..., Path]) -> None:
    module = lowering.load(folder)
    lowering.load(artifact("addition")).save(folder)
    assert "weights.bin" not in os.listdir(folder) and [t.name for t in lowering.load(folder).inputs] == ["x", "y"]
    x = np.ones((1, 64), "f")
    right = lowering.load(artifact("dense")).run({"x": x})["y"]
    np.testing.assert_array_equal(module.run({"x": x})["y"], right, "loaded models keep their files")
    module.save(folder.parent / "copy")
    np.testing.assert_array_equal(lowering.load(folder.parent / "copy").run({"x": x})["y"], right)
    assert sorted(os.listdir(folder.parent)) == ["copy", "out"], "no traces"


def test_a_failed_write_leaves_no_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    manifest = Manifest.from_dict(json.loads(before["manifest.json"]))
    monkeypatch.setattr(artifacts, "model_header", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        artifacts.write_artifact(folder, [artifacts.ArtifactPart(manifest, (b"code",), {"w": np.ones(3)})])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert os.listdir(folder.parent) == ["out"]


def test_folders_with_other_things_are_not_replaced(folder: Path) -> None:
    (folder / "thesis.tex").write_text("years of work")
    module = lowering.load(folder)
    for target in (folder, folder / "thesis.tex"):
        with raises("artifact.folder_not_replaceable"):
            module.save(target)
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_weights_of_every_form(tmp_path: Path) -> None:
    """Strided, mapped read-only, empty, of no dimension and of a type NumPy does not know."""
    np.save(tmp_path / "w.npy", np.arange(12, dtype="f").reshape(3, 4))
    weights = {
        "mapped": np.load(tmp_path / "w.npy", mmap_mode="r"),
        "strided": np.arange(12, dtype="d").reshape(3, 4).T,
        "empty": np.zeros((0, 4), "f"),
        "scalar": np.array(3, "int64"),
        "bfloat16": np.arange(5).astype("bfloat16"),
        "bool": np.array([True, False]),
    }
    outputs = [modules.spec(name, w.dtype.name, *w.shape) for name, w in weights.items()]
    folder = modules.build(tmp_path / "m", [], outputs, lambda b, i, w: w, weights)
    for _ in range(2):
        results = lowering.load(folder).run({})
        for name, weight in weights.items():
            np.testing.assert_array_equal(results[name], weight)
            assert results[name].dtype == weight.dtype and results[name].shape == weight.shape


def test_only_empty_weights(tmp_path: Path) -> None:
    outputs = [modules.spec("w", "float32", 0)]
    folder = modules.build(tmp_path / "m", [], outputs, lambda b, i, w: w, {"w": np.zeros(0, "f")})
    assert lowering.load(folder).run({})["w"].shape == (0,)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 20 MiB and a bit."""
    outputs = [modules.spec("w", "int8", 20 * BLOCK + 5)]
    weights = {"w": np.random.default_rng(0).integers(-100, 100, 20 * BLOCK + 5, np.int8)}
    return modules.build(tmp_path_factory.mktemp("large") / "m", [], outputs, lambda b, i, w: w, weights)


@pytest.mark.parametrize("seed", range(12))
def test_every_damage_of_weights_is_found(seed: int, large: Path, tmp_path: Path) -> None:
    """A bit, a page of zeros, a block of another offset: by a load, and before anything is copied or signed."""
    loaded = lowering.load(large)
    loaded.save(tmp_path / "m")
    model = lowering.load(tmp_path / "m")
    rng, path = np.random.default_rng(seed), tmp_path / "m" / "weights.bin"
    at = int(rng.integers(0, 20 * BLOCK))
    content = bytearray(path.read_bytes())
    if seed % 3 == 0:
        content[at] ^= 1 << rng.integers(8)
    elif seed % 3 == 1:
        content[at : at + 4096] = bytes(min(4096, len(content) - at))
    else:
        content[:BLOCK], content[BLOCK : 2 * BLOCK] = content[BLOCK : 2 * BLOCK], content[:BLOCK]
    path.write_bytes(content)
    where = 0 if seed % 3 == 2 else at // BLOCK * BLOCK
    refused(tmp_path / "m", rf"bytes from {where} on differ|bytes from {where + BLOCK} on differ")
    for write in (lambda: model.save(tmp_path / "n"), lambda: model.save(tmp_path / "n", sign_key=bytes(32))):
        with raises("artifact.file_changed"):
            write()
    assert not (tmp_path / "n").exists()


def test_large_weights_are_sampled(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lowering.load(large).save(tmp_path / "m")
    monkeypatch.setattr(checks, "SMALL", 10 * BLOCK)
    monkeypatch.setattr(checks, "_SAMPLED", 3)
    path = tmp_path / "m" / "weights.bin"
    whole = path.read_bytes()
    for at, is_sampled in ((7, True), (3 * BLOCK, False), (20 * BLOCK + 1, True), (14 * BLOCK, True)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        if is_sampled:
            refused(tmp_path / "m", "differ")
        else:
            lowering.load(tmp_path / "m")
        with raises("artifact.file_changed"):
            lowering.load(tmp_path / "m", check="full")
    path.write_bytes(whole)
    lowering.load(tmp_path / "m", check="full")
    with raises("argument.value_unknown"):
        lowering.load(tmp_path / "m", check="all")  # type: ignore[arg-type]


@pytest.mark.slow
def test_weights_beyond_two_gigabytes(tmp_path: Path) -> None:
    """A sparse file, which takes 2 GiB of memory all the same."""
    outputs = [modules.spec(n, "float32", 4) for n in "ab"]
    values = {"a": np.arange(4, dtype="f"), "b": np.arange(4, 8).astype("f")}
    folder = modules.build(tmp_path / "m", [], outputs, lambda b, i, w: w, values)
    path = folder / "weights.bin"
    far = 2**31 + 64
    with path.open("r+b") as file:
        file.seek(far)
        file.write(values["b"].tobytes())
    manifest = Manifest.from_dict(json.loads((folder / "manifest.json").read_text()))
    a, b = manifest.weights
    edit(
        folder,
        weights=(a, replace(b, offset=far)),
        weights_blocks=blocks_of(path),
    )
    results = lowering.load(folder).run({})
    assert results["a"].tolist() == [0, 1, 2, 3] and results["b"].tolist() == [4, 5, 6, 7]
    os.truncate(path, far)
    refused(folder, r"weights\.bin' has [0-9]+ bytes of")
