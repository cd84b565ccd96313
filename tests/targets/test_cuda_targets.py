"""Artifacts for GPUs, built on machines without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm_ffi
from tvm import ir, tirx

import lowering
from lowering.compiling import own_device
from lowering.compiling.compiler import compile_to
from lowering.runtime.gpu import choose_architecture, runs_on
from lowering.target import resolve
from tests.support.error_codes import raises

MODEL = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["" : 21]>
model (float[n, 64] x) => (float[n, 64] y) { z = Exp (x)  y = Add (x, z) }
""")

ELF, CUDA_MACHINE = b"\x7fELF", (190).to_bytes(2, "little")


def machine_code(library: bytes) -> list[bytes]:
    """Return the ELF images of machine code for GPUs inside a library."""
    images = library.split(ELF)[1:]
    return [image for image in images if image[14:16] == CUDA_MACHINE]


def test_each_architecture_gets_machine_code_and_no_source(tmp_path: Path) -> None:
    manifest = compile_to(tmp_path / "out", MODEL, "cuda:sm_80,sm_90a")
    assert manifest.code() == {"sm_80": "model.sm_80.so", "sm_90a": "model.sm_90a.so"}
    libraries = [(tmp_path / "out" / name).read_bytes() for name in manifest.code().values()]
    assert all(machine_code(library) and b"__global__" not in library for library in libraries)
    assert machine_code(libraries[0]) != machine_code(libraries[1])


def test_one_architecture_is_one_file(tmp_path: Path) -> None:
    assert compile_to(tmp_path / "out", MODEL, "cuda:sm_90a").code() == {"sm_90a": "model.so"}
    assert (tmp_path / "out" / "model.so").is_file()


@pytest.mark.parametrize("compiler", ["nvrtc", *(["nvcc"] if shutil.which("nvcc") else [])])
def test_either_compiler_will_do(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowering.target.cubin.find_nvcc", lambda: shutil.which("nvcc") if compiler == "nvcc" else None)
    compile_to(tmp_path / "out", MODEL, "cuda:sm_90a")
    assert machine_code((tmp_path / "out" / "model.so").read_bytes())


def test_without_a_driver_loading_is_refused_in_one_sentence(tmp_path: Path) -> None:
    compile_to(tmp_path / "out", MODEL, "cuda:sm_90a")
    code = f"import lowering; lowering.load({str(tmp_path / 'out')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "lowering.errors.ArtifactError" in done.stderr.splitlines()[-1]


def test_without_a_gpu_a_model_can_be_saved_and_says_why_it_cannot_run(tmp_path: Path) -> None:
    """One sentence says so, also in the process that built it, where stub libraries refuse everything."""
    code = f"""
import sys, onnx, lowering
from tests.targets.test_cuda_targets import MODEL
module = lowering.compile(MODEL, "cuda:sm_90a")
module.save({str(tmp_path / "out")!r})
load = lambda: lowering.load({str(tmp_path / "out")!r})
for call in (lambda: module.run({{}}), load, lambda: lowering.bench(module, {{"n": 2}})):
    try: call()
    except lowering.ArtifactError as error: print(error)
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == third and first.startswith(
        "the model was compiled for 'cuda:sm_90a' and cannot run here: this machine"
    )
    assert second.startswith("this machine has no ") and (tmp_path / "out" / "model.so").is_file()


@pytest.mark.parametrize(
    ("built", "here", "runs"),
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_86", True),
        ("sm_86", "sm_80", False),
        ("sm_80", "sm_90", False),
        ("sm_90a", "sm_90", True),
        ("sm_100", "sm_103", True),
        ("sm_120", "sm_121", True),
        ("sm_100", "sm_120", False),
        ("sm_100f", "sm_100", True),
        ("sm_100f", "sm_103", True),
        ("sm_103f", "sm_100", False),
        ("sm_100f", "sm_120", False),
        ("sm_100a", "sm_103", False),
    ],
)
def test_what_runs_where(built: str, here: str, runs: bool) -> None:
    assert runs_on(built, here) == runs


def test_the_best_code_is_chosen_and_foreign_gpus_are_refused() -> None:
    assert choose_architecture(["sm_80", "sm_86", "sm_90a"], "sm_89") == "sm_86"
    assert choose_architecture(["sm_100", "sm_100f"], "sm_103") == "sm_100f"
    assert choose_architecture(["sm_100a", "sm_100f", "sm_100"], "sm_100") == "sm_100a"
    with raises("artifact.gpu_architecture_mismatch"):
        choose_architecture(["sm_80", "sm_86"], "sm_90")


def test_unknown_architectures_name_the_supported_ones() -> None:
    with raises("target.name_unknown"):
        resolve("cuda:sm_70")
    with pytest.raises(lowering.TargetError):
        resolve("cuda:sm_80,")


def test_host_code_asks_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of SMs is that of the GPU whose arrays a call has."""
    seen: list[ir.Expr] = []
    rewrite = own_device._rewrite_queries

    def looked_at(func: tirx.PrimFunc) -> tirx.PrimFunc:
        func = rewrite(func)
        calls: list[ir.Call] = []
        tvm_ffi.structural_walk(func.body, (ir.Call, calls.append))
        seen.extend(call.args[2] for call in calls if own_device.is_device_query(call))
        return func

    monkeypatch.setattr(own_device, "_rewrite_queries", looked_at)
    text = """<ir_version: 10, opset_import: ["" : 23]> m (float16[b, 2, 1, 64] q, float16[b, 2, t, 64] k,
    float16[b, 2, t, 64] v) => (float16[b, 2, 1, 64] y) { y = Attention (q, k, v) }"""
    lowering.compile(onnx.parser.parse_model(text), "cuda:sm_90a")
    assert seen and all(isinstance(number, tirx.Var) for number in seen)


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
def test_models_without_kernels_need_no_headers(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation may lack TVM's headers."""

    def missing() -> str:
        raise RuntimeError("Cannot find TVM include path.")

    monkeypatch.setattr("tvm.libinfo.find_include_path", missing)
    text = '<ir_version: 10, opset_import: ["" : 23]> m (float[n] x) => (float[n] y) { y = Identity (x) }'
    model = lowering.compile(onnx.parser.parse_model(text), target)
    if target == "cpu":
        x = np.arange(3, dtype="float32")
        np.testing.assert_array_equal(model.run({"x": x})["y"], x)
