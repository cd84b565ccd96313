"""Packages for AArch64, made on another machine: their files, and that an emulator runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from packaging.utils import parse_wheel_filename

from lowering.commands.cli import main
from lowering.compiling.compiler import compile_to
from tests.packaging.test_package import check_host, clean, make_model
from tests.packaging.test_runtime_wheel import MODEL, check_record, commands

# Where .ci/run installs the wheels of TVM for AArch64.
LIBRARIES = Path(sys.prefix) / "aarch64"
EMULATOR = "qemu-aarch64"
TOOLS = ("aarch64-linux-gnu-g++", EMULATOR, "cmake")
pytestmark = [
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}, as .ci/run installs them"),
    pytest.mark.skipif(not LIBRARIES.exists(), reason=f"needs TVM for AArch64 in {LIBRARIES}, as .ci/run installs it"),
]

APPLICATION = """
import numpy as np
import my_model

q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 5, 16)).astype("f")
assert my_model.run(q, k, np.ones_like(v)).y.round(5).tolist() == np.ones((2, 4, 5, 16)).tolist()
"""


def machine(code: bytes) -> int:
    """e_machine of an ELF file: 183 is AArch64."""
    assert code[:4] == b"\x7fELF"
    return int.from_bytes(code[18:20], "little")


def test_a_host_is_cross_built_and_runs(tmp_path: Path) -> None:
    """By both ways that its README names, after it was moved."""
    compile_to(tmp_path / "out", make_model(), "cpu:aarch64")
    first = tmp_path / "first"
    assert main(["package", str(tmp_path / "out"), "--to", str(first), "--runtime", str(LIBRARIES)]) == 0
    text = (first / "README.md").read_text()
    assert "It runs on aarch64." in text and "`aarch64-linux-gnu-g++` in place\nof `g++`" in text
    direct = re.search(r"^g\+\+ (.*)$", text, re.MULTILINE)
    configured = re.search(r"^cmake -B build .*$", text, re.MULTILINE)
    assert direct is not None and configured is not None
    clean(f"aarch64-linux-gnu-g++ {direct[1]} -O0 -Wall -Wextra -Werror -Wno-unused-parameter", first)
    clean(configured[0] + " && cmake --build build", first)
    app = first.rename(tmp_path / "app")
    hosts = [app / "host", app / "build" / "host"]
    files = [*hosts, *(app / "lib").iterdir(), app / "model" / "model.so"]
    assert [machine(file.read_bytes()) for file in files] == 5 * [183]
    for host in hosts:
        check_host([EMULATOR, "-L", "/usr/aarch64-linux-gnu", host], app)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    compile_to(folder / "out", onnx.parser.parse_model(MODEL), "cpu:aarch64")
    np.save(folder / "x.npy", np.ones((1, 4, 3, 16), np.float32))
    return folder / "out"


@pytest.fixture(scope="module")
def wheels(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the wheels of the runtime and of a model, by their names."""
    dist = tmp_path_factory.mktemp("dist")
    making = [sys.executable, "-m", "lowering.packaging.runtime_wheel", dist, "--runtime", LIBRARIES]
    subprocess.run(making, check=True)
    assert main(["package", "--wheel", str(artifact), "--to", str(dist), "--name", "my-model"]) == 0
    return {str(parse_wheel_filename(path.name)[0]): path for path in dist.iterdir()}


@pytest.mark.parametrize(
    ("name", "platforms", "libraries"),
    [
        ("my-model", "linux_aarch64", ["model.so"]),
        ("onnx-lowering-runtime", "manylinux_2_\\d+_aarch64", ["libtvm_runtime.so", "libtvm_runtime_cuda.so"]),
    ],
)
def test_wheels_are_of_one_machine(name: str, platforms: str, libraries: list[str], wheels: dict[str, Path]) -> None:
    """Their names, their metadata, and all code in them are of the same machine."""
    check_record(wheels[name])
    tags = {str(tag) for tag in parse_wheel_filename(wheels[name].name)[3]}
    assert tags and all(re.fullmatch(f"py3-none-{platforms}", tag) for tag in tags)
    with zipfile.ZipFile(wheels[name]) as archive:
        code = {path: archive.read(path) for path in archive.namelist() if path.endswith(".so")}
        (said,) = (archive.read(path).decode() for path in archive.namelist() if path.endswith(".dist-info/WHEEL"))
    assert set(re.findall("^Tag: (.*)$", said, re.MULTILINE)) == tags
    assert sorted(path.rpartition("/")[2] for path in code) == libraries
    assert {machine(content) for content in code.values()} == {183}


def python_for_aarch64(folder: Path) -> Path:
    """Unpack Debian's Python into a root folder; packages of this system are neither read nor changed."""
    state, root = folder / "state", folder / "root"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True)
    (state / "status").touch()
    options = {"APT::Architecture": "arm64", "APT::Architectures::": "arm64", "Dir::State": state, "Dir::Cache": state}
    options |= {"Dir::State::status": state / "status", "APT::Sandbox::User": ""}
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*apt, "update"], check=True)
    fetched = ["install", "--download-only", "--yes", "--no-install-recommends", "python3", "libstdc++6"]
    subprocess.run([*apt, *fetched], check=True)
    for package in sorted((state / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
    return root


@pytest.mark.slow
def test_both_wheels_run_in_python(wheels: dict[str, Path], artifact: Path, tmp_path: Path) -> None:
    """With what pip chooses for that machine; it downloads 35 MB of Debian's packages and wheels."""
    root, site = python_for_aarch64(tmp_path), tmp_path / "site"
    python = root / "usr" / "bin" / "python3"
    version = os.readlink(python).removeprefix("python")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", site, "--only-binary=:all:"]
    pip += ["--python-version", version, "--platform", "manylinux_2_28_aarch64", "--platform", "linux_aarch64"]
    subprocess.run([*pip, *wheels.values()], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    emulated = [EMULATOR, "-L", root, python]
    kind = "import platform; print(platform.machine())"
    assert subprocess.check_output([*emulated, "-c", kind], env=environment, text=True) == "aarch64\n"
    commands(emulated, artifact, environment, tmp_path, bench=False)
    subprocess.run([*emulated, "-c", APPLICATION], env=environment, cwd=tmp_path, check=True)
