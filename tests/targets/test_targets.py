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
from lowering.compiling.compiler import compile_to
from lowering.runtime.artifact import checks
from lowering.target import host_features, resolve
from tests.support.error_codes import raises

pytestmark = pytest.mark.optimized

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


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        pytest.param(
            "cpu:aarch64",
            r"the artifact was built for aarch64 \(cpu:aarch64\) and this machine is x86_64\.",
            marks=pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs a cross compiler"),
        ),
        ("cpu:x86-64-v3", r"the artifact was built for a CPU with avx2, which this one lacks: compile the model here"),
    ],
)
def test_what_this_machine_cannot_run(
    target: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is compiled, inspected and saved. Calls say in a sentence why they fail."""
    flags = checks.cpu_flags() | {"sse4_2", "popcnt", "avx", "f16c", "fma", "bmi1", "bmi2", "abm", "movbe"}
    monkeypatch.setattr(checks, "cpu_flags", lambda: flags - {"avx2"})
    module = lowering.compile(MODEL, target)
    assert [t.name for t in module.inputs] == ["q", "k", "v"] and "-> y: float32" in repr(module)
    assert module.manifest.target == target
    message = rf"the model was compiled for '{target}' and cannot run here: {reason}"
    for call in (lambda: module.run(inputs()), lambda: module(**inputs()), lambda: module.bind({}), module.decoder):
        with pytest.raises(lowering.ArtifactError, match=message):
            call()
    module.save(tmp_path / "out")
    with pytest.raises(lowering.ArtifactError, match=reason):
        lowering.load(tmp_path / "out")
    monkeypatch.undo()
    if target == "cpu:x86-64-v3":
        assert lowering.load(tmp_path / "out").run(inputs())["y"].shape == (1, 4, 37, 20)


def test_unknown_target_names_the_supported_ones() -> None:
    with raises("target.name_unknown"):
        resolve("cpu:sparc")


def test_missing_cross_linker_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    with raises("toolchain.linker_missing"):
        compile_to(tmp_path / "out", MODEL, "cpu:aarch64")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs Debian's gcc-aarch64-linux-gnu")
def test_aarch64_expands_weights_in_vectors(tmp_path: Path) -> None:
    """A matmul with a matrix of 4 bits is code of that machine, which converts vectors of integers to floats."""
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    model (float[n, 64] x) => (float[n, 32] y) <float[64, 32] w = {0}> { y = MatMul (x, w) }
    """)
    w = np.random.default_rng(0).standard_normal((64, 32), np.float32)
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
    feeds = inputs()
    shapes = [str(n) for array in (*feeds.values(), feeds["q"]) for n in (array.ndim, *array.shape)]
    result = subprocess.run(
        ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", host, library, symbols.pop(), *shapes],
        input=b"".join(a.tobytes() for a in feeds.values()),
        capture_output=True,
        check=True,
    )
    y = np.frombuffer(result.stdout, np.float32).reshape(feeds["q"].shape)
    np.testing.assert_allclose(y, ReferenceEvaluator(MODEL).run(None, feeds)[0], rtol=1e-4, atol=1e-5)


def test_numpy_integers_are_numbers(tmp_path: Path) -> None:
    """In the manifest they are Python integers."""
    text = '<ir_version: 10, opset_import: ["" : 21]> m (float[n] x) => (float[n] y) { y = Neg (x) }'
    dims = {"n": (np.int64(1), np.uint8(4))}
    module = lowering.compile(onnx.parser.parse_model(text), threads=np.int64(2), dims=dims)  # type: ignore[arg-type]
    module.save(tmp_path / "out")
    manifest = lowering.load(tmp_path / "out").manifest
    assert (manifest.threads, manifest.ranges) == (2, {"n": (1, 4)})
    assert lowering.bench(module, {"n": np.int64(3)}, threads=np.int64(1), seconds=0).to_json()  # type: ignore[arg-type]
    for bad in ((0.5, 2), (-1, 2), (0, 2**70), ("1", 2)):
        with raises("argument.integer_invalid"):
            lowering.compile(onnx.parser.parse_model(text), dims={"n": bad})  # type: ignore[arg-type]
