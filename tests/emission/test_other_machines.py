"""Static objects for other machines give the same answers under emulation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import lowering
from lowering.compiling.compiler import compile_static
from lowering.errors import TargetError
from tests.emission.models import CASES, make_inputs, make_model
from tests.emission.test_memory_of_calls import CASES as DYNAMIC
from tests.emission.test_memory_of_calls import make_case_model
from tests.exports import table
from tests.support.foreign_objects import run_elsewhere

HALF = """
m (float[n] x, float16[k] h) => (float16[n] y, float[k] z)
{
  y = Cast<to = 10>(x)
  z = Cast<to = 1>(h)
}"""
SAMPLES = Path(__file__).parents[1] / "exports" / "samples"
EMULATORS: dict[str, tuple[str, list[str]]] = {
    "cpu:aarch64": ("aarch64-linux-gnu-gcc", ["qemu-aarch64"]),
    "cpu:aarch64+dotprod+i8mm": ("aarch64-linux-gnu-gcc", ["qemu-aarch64", "-cpu", "max"]),
    "cpu:riscv64": ("riscv64-linux-gnu-gcc", ["qemu-riscv64"]),
    "cpu:riscv64+v": ("riscv64-linux-gnu-gcc", ["qemu-riscv64", "-cpu", "rv64,v=true,vlen=128"]),
}
needs_tools = [
    pytest.param(
        target,
        marks=pytest.mark.skipif(
            shutil.which(cc) is None or shutil.which(emulator[0]) is None,
            reason=f"needs Debian's gcc-{cc.removesuffix('-gcc')} and qemu-user",
        ),
    )
    for target, (cc, emulator) in EMULATORS.items()
]


def check(
    model: onnx.ModelProto | Path, inputs: dict[str, np.ndarray], target: str, folder: Path, **options: Any
) -> None:
    expected = lowering.compile(model, **options).run(inputs)
    manifest = compile_static(folder, model, target, **options)
    outputs = run_elsewhere(folder, manifest, inputs, expected, *EMULATORS[target])
    for name, array in outputs.items():
        if array.dtype.kind == "f":
            rtol, atol = (2e-2, 2e-2) if array.dtype == np.float16 else (2e-4, 2e-5)
            np.testing.assert_allclose(array, expected[name], rtol, atol, err_msg=name)
        else:
            np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", needs_tools)
@pytest.mark.parametrize("case", ["attention", "embedding", "wide"])
def test_nodes(case: str, target: str, tmp_path: Path) -> None:
    text, weights, sizes = CASES[case]
    model = make_model(text, weights)
    check(model, make_inputs(model, sizes[0]), target, tmp_path / "out")


@pytest.mark.parametrize("target", needs_tools)
def test_weights_in_few_bits(target: str, tmp_path: Path) -> None:
    text, weights, sizes = CASES["wide"]
    model = make_model(text, weights)
    check(model, make_inputs(model, sizes[0]), target, tmp_path / "out", weights="int8")


@pytest.mark.parametrize("target", needs_tools)
def test_float16_is_rounded_alike(target: str, tmp_path: Path) -> None:
    """All float16 values and ties between them, overflow, and values that are not finite."""
    model = make_model(HALF, {})
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = np.sort(halves[np.isfinite(halves)]).astype("f")
    ties = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, [65519, 65520, 1e30, -np.inf, np.nan]]).astype("f")
    inputs = {"x": np.concatenate([ties, np.nextafter(ties, np.float32(0))]), "h": halves}
    module = lowering.compile(model)
    manifest = compile_static(tmp_path / "out", model, target)
    expected = module.run(inputs)
    outputs = run_elsewhere(tmp_path / "out", manifest, inputs, expected, *EMULATORS[target])
    for name, array in outputs.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)  # any NaN equals any other


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", needs_tools)
@pytest.mark.parametrize("case", ["chain", "nested"])
def test_memory_that_depends_on_data(case: str, target: str, tmp_path: Path) -> None:
    *_, calls = DYNAMIC[case]
    check(make_case_model(case), dict(calls[1]), target, tmp_path / "out")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("target", needs_tools)
@pytest.mark.parametrize(
    "sample",
    ["modernbert-dynamo23", "llama-past-dynamo23", "gemma2-past-dynamo23", "t5-dynamo18", "whisper-past-dynamo23-f16"],
)
def test_exports(sample: str, target: str, tmp_path: Path) -> None:
    folder = SAMPLES / sample
    arrays, _ = table.load_setting(min(folder.glob("*.npz")))
    check(folder / "model.onnx", arrays, target, tmp_path / "out")


@pytest.mark.parametrize("target, code", [("cpu:riscv64", "static_required"), ("cpu:riscv64+zfh", "feature_unknown")])
def test_machines_without_a_runtime_have_no_artifacts(target: str, code: str) -> None:
    with pytest.raises(TargetError) as caught:
        lowering.compile(make_model(*CASES["wide"][:2]), target)
    assert caught.value.code == f"target.{code}"
