"""`onnx-lowering doctor` on machines where something is missing, and `--version`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import lowering
from lowering.commands.cli import main
from lowering.diagnosis import here, packages, toolchain
from lowering.diagnosis.report import DiagnosisReport
from lowering.machine import install_command


def doctor(*options: str, **environment: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "lowering", "doctor", *options]
    environment = {**os.environ, **environment}
    root = Path(lowering.__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Other versions than those that are here, by names with _ for -."""
    true = metadata.version
    monkeypatch.setattr(packages.metadata, "version", lambda name: versions.get(name.replace("-", "_")) or true(name))
    monkeypatch.setattr(packages, "_try_import", lambda report: None)


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and not any(problem["blocks"] for problem in said["problems"])
    assert said["facts"]["packages"]["apache-tvm"] == metadata.version("apache-tvm")
    assert said["facts"]["packages"]["import tvm"] == "works"
    assert said["facts"]["machine"]["threads"].startswith(f"{len(os.sched_getaffinity(0))} of ")


@pytest.mark.parametrize("package", ["tvm", "tvm_ffi"])
def test_packages_that_cannot_be_imported(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("raise OSError('libodd.so: undefined symbol')\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    status, text = doctor(PYTHONPATH=paths)
    assert status == 1
    assert "PROBLEM: the compiler, apache-tvm, cannot be imported: OSError: libodd.so: undefined symbol." in text
    assert install_command(options="--force-reinstall") in text


def test_an_import_that_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "tvm.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    status, text = doctor(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert status == 1 and "cannot be imported: the process ended with status -11." in text


def test_versions_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, apache_tvm="0.27.0.post1", apache_tvm_ffi="0.1.15.post2", numpy="1.26.4")
    report = DiagnosisReport()
    packages.examine(report)
    assert not report.ok
    (pair,) = (p for p in report.problems if "do not go together" in p.what)
    assert "segmentation fault" in pair.what and pair.fix == "pip install apache-tvm-ffi==0.1.14.post1"
    assert any(p.what == "numpy 1.26.4 is installed, and onnx-lowering needs numpy>=2.1." for p in report.problems)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    missing = ("onnx", "cryptography", "xgboost", "xgboost-cpu")
    monkeypatch.setattr(packages, "version_of", lambda name: None if name in missing else "99")
    report = DiagnosisReport()
    packages.examine(report)
    assert "onnx is not installed." in [p.what for p in report.problems if p.blocks]
    xgboost = "xgboost-cpu" if os.uname().machine == "x86_64" else "xgboost"
    assert report.facts["extras"]["tune"] == f"lacks {xgboost}: {install_command('tune')}"
    assert report.facts["extras"]["sign"] == f"lacks cryptography: {install_command('sign')}"


@pytest.mark.parametrize(
    ("package", "version", "fits"),
    [
        ("numpy", "2.10.0", True),
        ("numpy", "2.0.9", False),
        ("numpy", "3.0rc1", True),
        ("apache_tvm_ffi", "0.1.14", False),
        ("apache_tvm_ffi", "0.1.14.post1", True),
    ],
)
def test_bounds(monkeypatch: pytest.MonkeyPatch, package: str, version: str, fits: bool) -> None:
    installed(monkeypatch, **{package: version})
    report = DiagnosisReport()
    packages.examine(report)
    assert any(f" {version} is installed, and onnx-lowering needs" in p.what for p in report.problems) != fits


def test_no_linker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    report = DiagnosisReport()
    toolchain.examine(report)
    assert [p.what for p in report.problems if p.blocks] == ["there is no gcc, which links compiled models."]
    gcc = tmp_path / "gcc"
    gcc.write_text("#!/bin/sh\necho 'pthread.h: No such file' >&2\nexit 1\n")
    gcc.chmod(0o755)
    report = DiagnosisReport()
    toolchain.examine(report)
    assert report.problems[0].what == "gcc cannot make a shared library: pthread.h: No such file."
    assert not report.ok and "libc6-dev" in report.problems[0].fix


def test_a_control_group_with_less_time_than_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{3 * 2**30}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    report = DiagnosisReport()
    here.examine(report, tmp_path)
    assert report.facts["machine"]["memory limit"] == "3.0 GiB by the control group"
    (problem,) = (p for p in report.problems if "control group" in p.what)
    assert "1.5 CPUs, and a call takes 8 threads" in problem.what and "threads=1" in problem.fix
    assert not problem.blocks


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernel").write_bytes(bytes(3 * 2**20))
    monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path / "cache"))
    usage: Any = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(here.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(here.os, "access", lambda path, _: path != tmp_path / "cache")
    report = DiagnosisReport()
    here.examine(report)
    assert report.facts["folders"]["cache"].endswith("holds 3.0 MiB")
    said = [p.what for p in report.problems]
    assert f"'{tmp_path / 'cache'}', for cache, cannot be written." in said
    assert any("for temporary files, has 1 MiB left." in what for what in said)


DRIVER = """
#include <string.h>
int cuDriverGetVersion(int *v) { *v = VERSION; return 0; }
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strcpy(name, device ? "Old" : "New"); return 0; }
int cuDeviceTotalMem_v2(unsigned long *size, int device) { *size = 8ul << 30; return 0; }
int cuDeviceGetAttribute(int *v, int what, int device) { *v = what == 75 ? (device ? 7 : 9) : 0; return 0; }
"""


@pytest.mark.parametrize("version, status", [(13000, 0), (12080, 0), (13000, 999)])
def test_drivers_and_gpus(version: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of two GPUs, of which one is too old, on a machine without CUDA's runtime library."""
    library = tmp_path / "libdriver.so"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        f"-DVERSION={version}",
        f"-DINIT={status}",
        "-x",
        "c",
        "-",
        "-o",
        str(library),
    ]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    monkeypatch.setattr(toolchain, "DRIVER", str(library))
    monkeypatch.setattr(toolchain, "find_cudart", lambda: None)
    report = DiagnosisReport()
    toolchain.examine(report)
    said = [problem.what for problem in report.problems]
    assert report.ok and all(problem.fix for problem in report.problems)
    assert report.facts["gpu"]["driver"] == f"for CUDA {version // 1000}.{version % 1000 // 10}"
    assert ("the NVIDIA driver is for CUDA 12, and artifacts need CUDA 13." in said) == (version < 13000)
    assert ("the NVIDIA driver is installed and reports error 999." in said) == (status != 0)
    if status == 0:
        assert report.facts["gpu"]["GPU 0"] == "New, sm_90, 8 GiB"
        assert "GPU 1 is sm_70, and artifacts are for GPUs from sm_80 on." in said
        assert "there is a GPU and no libcudart.so.13 to run on it." in said and not any("GPU 0 is" in s for s in said)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"onnx-lowering {lowering.__version__}\n"
