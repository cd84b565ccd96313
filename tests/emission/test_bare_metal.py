"""A static object runs on a machine without an operating system and without a C library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

import lowering
from lowering.compiling.compiler import compile_static

SOURCES = Path(__file__).parent / "bare_metal"
TOOLS = ("aarch64-linux-gnu-gcc", "qemu-system-aarch64")
SEED = 20261130
BATCH, TOKENS = 2, 7
MODEL = """
<ir_version: 10, opset_import: ["" : 24]>
m (float[batch, n, 64] x, int64[batch] k) => (float[batch, n, 32] y, float[batch, n, 64] z)
{
  e = Gather<axis = 0>(table, k)
  e3 = Reshape(e, shape_of_rows)
  z = Add(x, e3)
  a = MatMul(z, w)
  y = Softmax<axis = -1>(a)
}"""


def make_model() -> onnx.ModelProto:
    rng = np.random.default_rng(SEED)
    model = onnx.parser.parse_model(MODEL)
    for name, array in (
        ("table", rng.standard_normal((10, 64)).astype("f")),
        ("w", rng.standard_normal((64, 32)).astype("f")),
        ("shape_of_rows", np.array([-1, 1, 64])),
    ):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="needs Debian's gcc-aarch64-linux-gnu, qemu-system-arm")
def test_without_an_operating_system(tmp_path: Path) -> None:
    model, folder = make_model(), tmp_path / "out"
    compile_static(folder, model, "cpu:aarch64", threads=1)
    flags = ["-O1", "-ffreestanding", "-fno-pie", "-I", folder, f"-DBATCH={BATCH}", f"-DN={TOKENS}"]
    sources = [*(SOURCES / name for name in ("start.S", "main.c")), folder / "weights.S", folder / "model.o"]
    layout = ["-nostdlib", "-static", "-no-pie", "-T", SOURCES / "program.ld"]
    program = tmp_path / "program.elf"
    subprocess.run(["aarch64-linux-gnu-gcc", *flags, *layout, *sources, "-o", program], check=True)
    machine = ["-M", "virt", "-cpu", "cortex-a72", "-nodefaults", "-display", "none", "-serial", "stdio"]
    command = ["qemu-system-aarch64", *machine, "-kernel", program]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    y = np.array([int(line, 16) for line in lines[:-1]], np.uint32).view(np.float32)
    x = np.arange(BATCH * TOKENS * 64) * 37 % 101 / np.float32(101) - np.float32(0.5)
    inputs = {"x": x.astype("f").reshape(BATCH, TOKENS, 64), "k": np.arange(BATCH)}
    expected = lowering.compile(model).run(inputs)["y"]
    np.testing.assert_allclose(y.reshape(expected.shape), expected, rtol=0, atol=2e-6)
    assert "contains 10 at [0], and dimension 0 of input 'table' allows -10 to 9." in lines[-1]
