"""`onnx-lowering package`: a folder that is built and run without Python, and what is refused."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import lowering
from lowering.commands.cli import main
from lowering.compiling.compiler import compile_to
from lowering.manifest import FILE, Manifest
from lowering.packaging import libraries
from lowering.packaging.folder import package_artifact

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
model (float[n, 256] x, int64[m] rows) => (float[m, 64] y) <float[256, 64] w = {0}> {
  picked = Gather (x, rows)
  y = MatMul (picked, w)
}
"""
DECODER = Path(__file__).parents[1] / "exports" / "decoders" / "llama.onnx"
HOSTILE = Path(__file__).with_name("hostile_host_calls.json")
WEIGHTS = np.random.default_rng(0).standard_normal((256, 64), np.float32)
CLEAN = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}


def make_model() -> onnx.ModelProto:
    model = onnx.parser.parse_model(MODEL)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(WEIGHTS, "w"))
    return model


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact") / "out"
    compile_to(folder, make_model())
    return folder


def clean(command: list[str | Path] | str, folder: Path) -> str:
    """Return the output of a command that sees no Python packages, nor libraries of this environment."""
    shell = isinstance(command, str)
    done = subprocess.run(command, cwd=folder, env=CLEAN, shell=shell, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_host(host: list[str | Path], app: Path) -> None:
    """Check that the command `host` computes with app's model the same as float64."""
    x, rows = np.random.default_rng(1).standard_normal((5, 256), np.float32), np.array([4, 1])
    x.tofile(app.parent / "x.bin")
    rows.tofile(app.parent / "rows.bin")
    output = clean([*host, app / "model", "n=5", "m=2", "x=x.bin", "rows=rows.bin"], app.parent)
    expected = x[rows].astype(np.float64) @ WEIGHTS
    match = re.fullmatch(r"y: float32 \[ 2 64 \] (.*)\n", output)
    assert match is not None, output
    np.testing.assert_allclose(np.array(match[1].split(), np.float32), expected.ravel()[:8], rtol=1e-4, atol=1e-5)


def test_a_folder_is_built_and_run_without_python(artifact: Path, tmp_path: Path) -> None:
    """By the command that its README says, after it was moved."""
    assert main(["package", str(artifact), "--to", str(tmp_path / "first")]) == 0
    app = (tmp_path / "first").rename(tmp_path / "app")
    assert {p.name for p in (app / "lib").iterdir()} == {"libtvm_ffi.so", "libtvm_runtime.so"}
    command = re.search(r"^g\+\+ .*$", (app / "README.md").read_text(), re.MULTILINE)
    assert command is not None
    clean(command[0] + " -Wall -Wextra -Werror -Wno-unused-parameter", app)
    check_host([app / "host"], app)
    lowering.load(app / "model")


def test_hosts_refuse_what_python_refuses(tmp_path: Path) -> None:
    """Each call of hostile_host_calls.json, on a decoder with caches of 48 slots; @N is a file with that int64."""
    compile_to(tmp_path / "out", DECODER, static_cache=48)
    assert main(["package", str(tmp_path / "out"), "--to", str(tmp_path / "app")]) == 0
    command = re.search(r"^g\+\+ .*$", (tmp_path / "app" / "README.md").read_text(), re.MULTILINE)
    assert command is not None
    clean(command[0], tmp_path / "app")
    host: list[str | Path] = [tmp_path / "app" / "host", tmp_path / "app" / "model"]
    right = clean([*host, "batch=1", "sequence_len=3"], tmp_path)
    for call in json.loads(HOSTILE.read_text()):
        arguments = []
        for text in call["arguments"]:
            name, _, value = text.partition("=@")
            if value:
                np.array(int(value)).tofile(tmp_path / f"{name}.bin")
                text = f"{name}={name}.bin"
            arguments.append(text)
        done = subprocess.run(
            [*host, *arguments], cwd=tmp_path, env=CLEAN, capture_output=True, text=True, timeout=120,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34)),  # where memory is given unseen
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (1, "") and call["says"] in done.stderr, (call, done)
    assert clean([*host, "batch=1", "sequence_len=3"], tmp_path) == right


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_an_application_of_cmake_links_with_the_model(artifact: Path, tmp_path: Path) -> None:
    assert main(["package", str(artifact), "--to", str(tmp_path / "app.tar.gz")]) == 0
    with tarfile.open(tmp_path / "app.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    project = "cmake_minimum_required(VERSION 3.13)\nproject(mine CXX)\nadd_subdirectory(app)\n"
    project += "add_executable(mine app/main.cc)\ntarget_link_libraries(mine lowering::model)\n"
    (tmp_path / "CMakeLists.txt").write_text(project)
    clean(["cmake", "-S", ".", "-B", "build"], tmp_path)
    clean(["cmake", "--build", "build"], tmp_path)
    assert not list((tmp_path / "build").rglob("host")), "host is built for the folder alone"
    check_host([tmp_path / "build" / "mine"], tmp_path / "app")


def test_licenses(artifact: Path, tmp_path: Path) -> None:
    main(["package", str(artifact), "--to", str(tmp_path / "app")])
    names = {p.name for p in (tmp_path / "app" / "licenses").iterdir()}
    assert {"apache-tvm-LICENSE", "apache-tvm-NOTICE", "apache-tvm-ffi-LICENSE", "apache-tvm-ffi-NOTICE"} <= names
    assert "apache-tvm-ffi-libbacktrace-LICENSE" in names
    assert "Apache License" in (tmp_path / "app" / "LICENSE").read_text()
    notice = (tmp_path / "app" / "NOTICE").read_text()
    for name, title in (("apache-tvm", "Apache TVM"), ("apache-tvm-ffi", "Apache TVM FFI")):
        assert f"* {name} {libraries.metadata.version(name)}\n" in notice
        assert f"\n{title}\nCopyright " in notice


def test_the_same_artifact_makes_the_same_files(artifact: Path, tmp_path: Path) -> None:
    for name in ("first.tar.gz", "second.tar.gz"):
        assert main(["package", str(artifact), "--to", str(tmp_path / name)]) == 0
    contents = []
    for name in ("first", "second"):
        with tarfile.open(tmp_path / f"{name}.tar.gz") as tar:
            contents.append({m.name.removeprefix(name): (m.mtime, m.uid, m.size) for m in tar})
    assert contents[0] == contents[1] and sorted(os.listdir(tmp_path)) == ["first.tar.gz", "second.tar.gz"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["package", *map(str, arguments)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error[") and said.count("\n") == 1
    return said


def test_folders_that_are_not_empty(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.cc").write_text("int main() {}")
    assert "[argument.folder_not_empty]" in refused(capsys, artifact, "--to", tmp_path / "app")
    assert (tmp_path / "app" / "main.cc").read_text() == "int main() {}"
    assert "[argument.folder_not_empty]" in refused(capsys, artifact, "--to", artifact)
    for name in ("app/main.cc/new", "app/main.cc/new.tar.gz"):
        assert "cannot be written: File exists" in refused(capsys, artifact, "--to", tmp_path / name)
    assert os.listdir(tmp_path) == ["app"]


def test_damaged_artifacts(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(artifact, tmp_path / "out")
    with (tmp_path / "out" / "weights.bin").open("r+b") as file:
        file.write(b"other")
    for name in ("app", "app.tar.gz"):
        assert "weights.bin' is not the file that" in refused(capsys, tmp_path / "out", "--to", tmp_path / name)
    assert os.listdir(tmp_path) == ["out"]


def wheels_of(machine: int, folder: Path) -> Path:
    """Write the installed files of wheels for a machine, as pip --target does, by the machine's number in ELF."""
    for name in ("apache-tvm", "apache-tvm-ffi"):
        for path in libraries.metadata.distribution(name).files or []:
            said = path.name.startswith(("LICENSE", "NOTICE")) or ".dist-info" in path.parts[0]
            header = path.parts[:2] == ("tvm_ffi", "include")
            if said or header or path.name.startswith(("libtvm_ffi.so", "libtvm_runtime")):
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                content = bytearray(Path(str(path.locate())).read_bytes())
                if path.suffix == ".so":
                    content[18:20] = machine.to_bytes(2, "little")
                target.write_bytes(content)
    return folder


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs a cross compiler")
def test_artifacts_of_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are shipped with libraries of that machine, which the message says how to get."""
    out, app = tmp_path / "out", tmp_path / "app"
    compile_to(out, make_model(), "cpu:aarch64")
    said = refused(capsys, out, "--to", app)
    assert "the artifact is for aarch64, but the runtime libraries installed here are for x86_64" in said
    assert "--platform manylinux_2_28_aarch64 apache-tvm==" in said and "--runtime FOLDER." in said
    said = refused(capsys, out, "--to", app, "--runtime", tmp_path)
    assert (
        f"is not in '{tmp_path}'. Install its libraries: pip" in said and "manylinux_2_28_aarch64 apache-tvm==" in said
    )
    assert os.listdir(tmp_path) == ["out"]
    wheels = wheels_of(183, tmp_path / "wheels")
    app.mkdir()
    assert main(["package", str(out), "--to", str(app), "--runtime", str(wheels)]) == 0
    library = "libtvm_runtime.so"
    assert (app / "lib" / library).read_bytes() == (wheels / "tvm" / "lib" / library).read_bytes()
    (info,) = wheels.glob("apache_tvm-*.dist-info")
    metadata = (info / "METADATA").read_text()
    (info / "METADATA").write_text(re.sub(r"^Version: .*$", "Version: 0.26.0", metadata, flags=re.MULTILINE))
    said = refused(capsys, out, "--to", tmp_path / "other", "--runtime", wheels)
    assert "was built with apache-tvm 0." in said and "and 0.26.0 is installed" in said


def test_applications_for_gpus_are_linked_without_a_driver(artifact: Path, tmp_path: Path) -> None:
    """Without the CUDA runtime, they say what is missing."""
    shutil.copytree(artifact, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    manifest = Manifest.from_dict(json.loads(path.read_text()))
    manifest = replace(manifest, architectures=("sm_90a",), target="cuda:sm_90a")
    path.write_text(replace(manifest, hashes={**manifest.hashes, FILE: manifest.digest()}).to_json())
    package_artifact(tmp_path / "out", tmp_path / "app")
    assert (tmp_path / "app" / "lib" / "libtvm_runtime_cuda.so").is_file()
    text = (tmp_path / "app" / "README.md").read_text()
    assert "driver 580 or later" in text and "libcudart.so.13" in text
    command = re.search(r"^g\+\+ .*$", text, re.MULTILINE)
    assert command is not None
    clean(command[0].replace("-O2", "-O0"), tmp_path / "app")
    done = subprocess.run([tmp_path / "app" / "host", "model"], env=CLEAN, capture_output=True, text=True)
    assert done.returncode != 0 and re.search(r"libcu(da|dart)\.so\.1.*cannot open", done.stderr)
