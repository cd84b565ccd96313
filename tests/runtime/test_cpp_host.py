"""Compiled models in C++ applications: host.hpp, model.h, and the example."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tvm
from tvm_ffi import libinfo

import lowering
from tests.runtime import modules


def test_host_header(artifact: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("cache", "dense", "inside", "shared", "threads", "translator"):
        lowering.load(artifact(name)).save(tmp_path / name)
    decoder = lowering.load(tmp_path / "translator").decoder(
        fixed={"encoder_hidden_states": np.full((1, 7, 16), 0.5, np.float32)}
    )
    (tmp_path / "translator.bin").write_bytes(decoder.prefill([[1]]).tobytes())
    ffi = Path(libinfo.find_libtvm_ffi()).parent
    runtime = Path(tvm.__file__).parent / "lib"
    command = ["g++", "-std=c++17", "-pthread", Path(__file__).with_name("host_test.cc"), "-o", tmp_path / "host"]
    command += ["-I", tmp_path, "-I", libinfo.find_include_path(), "-I", libinfo.find_dlpack_include_path()]
    command += ["-L", ffi, "-L", runtime, "-Wl,--no-as-needed", "-ltvm_ffi", "-ltvm_runtime"]
    command += [f"-Wl,-rpath,{ffi}:{runtime}"]
    subprocess.run(command, check=True)
    result = subprocess.run([tmp_path / "host", tmp_path], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_example(tmp_path: Path) -> None:
    folder = tmp_path / "cpp_host"
    shutil.copytree(modules.ROOT / "examples" / "cpp_host", folder)
    result = subprocess.run(
        ["make", "run", f"PYTHON={sys.executable}"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "40 tokens, max error" in result.stdout
