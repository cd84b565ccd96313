"""onnx-lowering-runtime: a wheel of everything but the compiler."""

from __future__ import annotations

import ast
import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest

from lowering.compiling.compiler import compile_to
from lowering.packaging.runtime_wheel import write_runtime_wheel

MODEL = """
<ir_version: 10, opset_import: ["" : 24]>
model (float[B, 4, S, 16] q, float[B, 4, S, 16] k, float[B, 4, S, 16] v) => (float[B, 4, S, 16] y) {
  y = Attention (q, k, v)
}
"""
# Run in a process that has the wheel and its requirements; argument: the folder of the artifact.
APPLICATION = """
import importlib.util, sys
import lowering, numpy as np
assert "tvm" not in sys.modules
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 5, 16)).astype("f")
scores = np.einsum("bhsd,bhtd->bhst", q, k) / 4
p = np.exp(scores - scores.max(-1, keepdims=True))
expected = np.einsum("bhst,bhtd->bhsd", p / p.sum(-1, keepdims=True), v)
model = lowering.load(sys.argv[1])
np.testing.assert_allclose(model.run({"q": q, "k": k, "v": v})["y"], expected, rtol=1e-4, atol=1e-5)
try:
    lowering.compile
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runtime_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    compile_to(folder / "out", onnx.parser.parse_model(MODEL))
    np.save(folder / "x.npy", np.ones((1, 4, 3, 16), np.float32))
    return folder / "out"


def check_record(wheel: Path) -> None:
    """RECORD has every file, its size and its digest."""
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        lines = [line.rsplit(",", 2) for line in archive.read(record).decode().splitlines()]
        assert sorted(line[0] for line in lines) == sorted(archive.namelist())
        for name, digest, size in lines:
            content = archive.read(name)
            right = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, size) == (("", "") if name == record else (f"sha256={right}", str(len(content))))


def test_the_file(wheel: Path, tmp_path: Path) -> None:
    check_record(wheel)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert sum(entry.file_size for entry in archive.infolist()) < 15e6
    assert "lowering/runtime/lib/libtvm_runtime.so" in names and not any("compiling" in name for name in names)
    again = write_runtime_wheel(tmp_path)
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()
    assert os.listdir(tmp_path) == [wheel.name]


def test_libraries_that_are_not_there(tmp_path: Path) -> None:
    making = [sys.executable, "-m", "lowering.packaging.runtime_wheel", tmp_path / "dist", "--runtime", tmp_path]
    done = subprocess.run(making, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error[package.distribution_not_in_folder]: apache-tvm, ")
    assert "pip install --target FOLDER" in done.stderr and done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def commands(
    python: list[str | Path], artifact: Path, environment: dict[str, str], folder: Path, bench: bool = True
) -> None:
    """Run all commands of the runtime, and its refusals of the rest; an emulator takes minutes for `bench`."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [*python, *arguments]
        return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)

    done = run("-c", APPLICATION, artifact)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lowering.compile needs the compiler, which onnx-lowering-runtime leaves out: pip")
    inputs = [option for name in "qkv" for option in ("--input", f"{name}={artifact.parent / 'x.npy'}")]
    done = run("-m", "lowering", "run", artifact, *inputs)
    assert (done.returncode, done.stdout.partition("\n")[0]) == (0, "y: float32[1, 4, 3, 16]"), done.stderr
    if bench:
        done = run("-m", "lowering", "bench", artifact, "--dim", "B=1", "--dim", "S=3", "--seconds", "0")
        assert done.returncode == 0 and "attention" in done.stdout, done.stderr
    done = run("-m", "lowering", "compile", "model.onnx", "-o", "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: compile needs the compiler, which onnx-lowering-runtime leaves out: pip")


def test_it_runs_artifacts_where_there_is_no_compiler(wheel: Path, artifact: Path, tmp_path: Path) -> None:
    """Unpacked before everything else on the path, where tvm, onnx and rich cannot be imported."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    for barred in ("tvm", "onnx", "onnx_ir", "rich", "torch"):
        (tmp_path / "site" / f"{barred}.py").write_text(f"raise ModuleNotFoundError('no {barred}', name='{barred}')")
    commands([sys.executable], artifact, {**os.environ, "PYTHONPATH": str(tmp_path / "site")}, tmp_path)


def test_what_it_imports_is_in_it(wheel: Path) -> None:
    """lowering imports it at the top of its files: imports inside functions may need the compiler."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        sources = {name: archive.read(name) for name in names if name.endswith(".py")}
    for name, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*name.split("/")[: -node.level], *(node.module.split(".") if node.module else [])]
                candidates = {"/".join(base) + ".py", "/".join([*base, "__init__.py"])}
                assert candidates & names, f"{name} imports {'.'.join(base)}"


@pytest.mark.slow
def test_in_a_virtual_environment(wheel: Path, artifact: Path, tmp_path: Path) -> None:
    """With what pip brings along, and nothing else."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", wheel], check=True, env=environment)
    done = subprocess.run([python, "-c", "import tvm"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'tvm'" in done.stderr
    commands([python], artifact, environment, tmp_path)
    script = tmp_path / "venv" / "bin" / "onnx-lowering"
    done = subprocess.run([script, "doctor"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r"load the runtime +works", done.stdout), done.stdout
    done = subprocess.run([python, "-m", "pip", "check"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
