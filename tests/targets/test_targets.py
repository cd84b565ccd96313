"""Targets: this machine by its features, other x86 levels, and AArch64 through a cross linker and an emulator."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm_ffi.libinfo
from onnx.reference import ReferenceEvaluator

import lowering
from lowering.compiler import compile_to
from lowering.target import host_features, resolve

HERE = Path(__file__).parent
MODEL = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["" : 24]>
model (float[1, 4, 37, 20] q, float[1, 2, 41, 20] k, float[1, 2, 41, 20] v) => (float[1, 4, 37, 20] y) {
  y = Attention <is_causal = 1, softcap = 5.0> (q, k, v)
}
""")


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"q": (1, 4, 37, 20), "k": (1, 2, 41, 20), "v": (1, 2, 41, 20)}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def test_cpu_takes_the_features_the_machine_shows() -> None:
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[1].split())  # type: ignore[index]
    features = host_features()
    assert features and set(features) <= flags
    assert ("avx2" in features) == ("avx2" in flags)


@pytest.mark.parametrize("target", ["cpu", "cpu:x86-64-v3"])
def test_x86(target: str) -> None:
    y = lowering.compile(MODEL, target).run(inputs())["y"]
    np.testing.assert_allclose(y, ReferenceEvaluator(MODEL).run(None, inputs())[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("target", "zmm"), [("cpu:x86-64-v3", False), ("cpu:x86-64-v4", True)])
def test_vector_width_comes_from_the_features_asked_for(target: str, zmm: bool, tmp_path: Path) -> None:
    compile_to(tmp_path / "out", MODEL, target)
    text = subprocess.run(
        ["objdump", "-d", tmp_path / "out" / "model.so"], capture_output=True, text=True, check=True
    ).stdout
    assert "%ymm" in text
    assert ("%zmm" in text) == zmm


def test_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(lowering.TargetError, match="cpu:x86-64-v3, cpu:x86-64-v4, cpu:aarch64"):
        resolve("cpu:sparc")


def test_missing_cross_linker_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(lowering.TargetError, match="linked by 'aarch64-linux-gnu-gcc', which is not installed"):
        compile_to(tmp_path / "out", MODEL, "cpu:aarch64")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs Debian's gcc-aarch64-linux-gnu")
def test_aarch64_expands_weights_in_vectors(tmp_path: Path) -> None:
    """A product with a matrix of 4 bits is code of that machine, which turns vectors of integers into floats."""
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    model (float[n, 64] x) => (float[n, 32] y) <float[64, 32] w = {0}> { y = MatMul (x, w) }
    """)
    w = np.random.default_rng().standard_normal((64, 32), np.float32)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(w, "w"))
    manifest = compile_to(tmp_path / "out", model, "cpu:aarch64", weights="int4")
    assert [weight.storage for weight in manifest.weights] == ["int32", "float16"]
    command = ["aarch64-linux-gnu-objdump", "-d", tmp_path / "out" / "model.so"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"scvtf\s+v\d+\.4s", text) and re.search(r"fml[as]\s+v\d+\.4s", text)


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs Debian's gcc-aarch64-linux-gnu")
@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs Debian's qemu-user")
def test_aarch64_kernel_under_emulation(tmp_path: Path) -> None:
    compile_to(tmp_path / "out", MODEL, "cpu:aarch64")
    library = tmp_path / "out" / "model.so"
    names = subprocess.run(["aarch64-linux-gnu-nm", "-D", library], capture_output=True, text=True, check=True).stdout
    symbols = set(re.findall(r"\b(__tvm_ffi_(?!_)\w*attention\w*)", names)) - {"__tvm_ffi_attention_pairs"}
    assert len(symbols) == 1
    host = tmp_path / "kernel_host"
    include = tvm_ffi.libinfo.find_include_path()
    command = ["aarch64-linux-gnu-gcc", "-O1", "-rdynamic", "-I", include, HERE / "kernel_host.c", "-o", host, "-ldl"]
    subprocess.run(command, check=True)
    given = inputs()
    shapes = [str(n) for array in (*given.values(), given["q"]) for n in (array.ndim, *array.shape)]
    result = subprocess.run(
        ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", host, library, symbols.pop(), *shapes],
        input=b"".join(a.tobytes() for a in given.values()),
        capture_output=True,
        check=True,
    )
    y = np.frombuffer(result.stdout, np.float32).reshape(given["q"].shape)
    np.testing.assert_allclose(y, ReferenceEvaluator(MODEL).run(None, given)[0], rtol=1e-4, atol=1e-5)
