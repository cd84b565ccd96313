"""Graphs in processes without the compiler: of Python, and of a C++ application that captures on its own stream."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tvm
from tvm_ffi import libinfo

from tests.cuda.models import steps
from tests.cuda_emulation.build import libraries
from tests.cuda_emulation.processes import environment

pytestmark = pytest.mark.no_gpu

COMPILE = """
import sys, onnx, lowering
proto = onnx.parser.parse_model(sys.argv[1])
lowering.compile(proto, "cuda:sm_80", donate=("cache_.*",)).save(sys.argv[2])
"""
PYTHON = """
import sys
sys.modules["tvm"] = sys.modules["onnx"] = None
import numpy as np, tvm_ffi, lowering
from lowering.runtime.arrays.tensors import copy_tensor, copy_to
model = lowering.load(sys.argv[1])
sizes, rng = {"B": 2, "C": 600}, np.random.default_rng(0)
def bound(graph):
    arrays = {t.name: model.gpu.copy(np.zeros([sizes.get(d, d) for d in t.dims], t.dtype)) for t in model.inputs}
    return arrays, model.bind(arrays, graph=graph)
both = [bound(False), bound(True)]
for number in range(4):
    new = {name: rng.standard_normal(both[0][0][name].shape).astype("f") for name in "qkv"}
    new["write_indices"] = np.full(2, number)
    results = []
    for arrays, call in both:
        for name, values in new.items():
            copy_to(tvm_ffi.from_dlpack(values), arrays[name])
        results.append([np.from_dlpack(copy_tensor(y, tvm_ffi.device("cpu"))) for y in call().values()])
    assert all((a == b).all() and a.any() for a, b in zip(*results))
print("equal")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compile the model of steps.py for the emulation, in a process that takes the emulation for a GPU."""
    path = tmp_path_factory.mktemp("graphs") / "attention"
    done(sys.executable, "-c", COMPILE, steps.ATTENTION, path)
    yield path


def done(*command: object) -> str:
    """Return the output of a command that takes the emulation for a GPU."""
    here = {**os.environ, **environment("sm_80"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([*map(str, command)], env=here, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_process_without_the_compiler(folder: Path) -> None:
    assert done(sys.executable, "-c", PYTHON, folder) == "equal\n"


def test_an_application_captures_on_its_own_stream(folder: Path, tmp_path: Path) -> None:
    ffi, runtime = Path(libinfo.find_libtvm_ffi()).parent, Path(tvm.__file__).parent / "lib"
    cuda = next(p for folder in sys.path if (p := Path(folder) / "nvidia/cu13/include").is_dir())
    command = ["g++", "-std=c++17", "-pthread", Path(__file__).with_name("graph_host.cc"), "-o", tmp_path / "host"]
    command += ["-I", folder, "-I", cuda, "-I", libinfo.find_include_path(), "-I", libinfo.find_dlpack_include_path()]
    command += ["-L", ffi, "-L", runtime, "-Wl,--no-as-needed", "-ltvm_ffi", "-ltvm_runtime", "-ltvm_runtime_cuda"]
    command += [f"-Wl,-rpath,{ffi}:{runtime}", *libraries()]
    subprocess.run(command, check=True)
    plain, captured = (done(tmp_path / "host", folder, how) for how in ("plain", "captured"))
    assert plain == captured and len(set(plain.splitlines())) == 6
