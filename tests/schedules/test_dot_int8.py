"""Packed lanes of four bytes: every machine's way to multiply them gives the same accumulators."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.support import cc

from lowering.compiling.compiler import compile_to
from lowering.target import host_features, resolve
from schedules.cpu.matmul.dot_int8 import dot, dot_signed, multiplies_signed
from schedules.cpu.primitives.vector import SDOT, USDOT, VNNI_256, VNNI_512, CpuFeatures, load, read_cpu_features, store

pytestmark = pytest.mark.optimized

HOST = Path(__file__).parents[1] / "targets" / "kernel_host.c"

WAYS = {
    "AVX-512 VNNI": (CpuFeatures(64, 32, f16_conversion=True, int8_dot=VNNI_512), "avx512_vnni"),
    "VNNI in 256 bits": (CpuFeatures(32, 16, f16_conversion=True, int8_dot=VNNI_256), "avx512_vnni"),
    "pairs in 512 bits": (CpuFeatures(64, 32, f16_conversion=True), "avx512bw"),
    "pairs in 256 bits": (CpuFeatures(32, 16, f16_conversion=True), "avx2"),
    "one by one": (CpuFeatures(16, 16, f16_conversion=False), ""),
}


def kernel(cpu: CpuFeatures, is_signed: bool = False) -> tirx.PrimFunc:
    lanes = cpu.lanes("int32")
    function = dot_signed if is_signed else dot
    with IRBuilder() as builder, T.prim_func():
        T.func_name("dot")
        total, a, b, y = (T.arg(name, T.buffer((lanes,), "int32")) for name in ("total", "a", "b", "y"))
        store(y, function(load(total, lanes, 0), load(a, lanes, 0), load(b, lanes, 0), cpu), 0)
    return builder.get()


def draw_packed_lanes(lanes: int, is_signed: bool = False) -> tuple[list[np.ndarray], np.ndarray]:
    """Draw accumulators and bytes, four in each lane, and return the expected result, too.

    The first bytes are unsigned; or both are signed and the second has no -128."""
    rng = np.random.default_rng(0)
    a = rng.choice([0, 1, 127, 128, 254, 255], (lanes, 4)).astype(np.uint8)
    a = (a ^ np.uint8(128)).view(np.int8) if is_signed else a
    b = rng.choice([-127 if is_signed else -128, -127, -1, 0, 1, 127], (lanes, 4)).astype(np.int8)
    total = rng.integers(-(2**31), 2**31, lanes).astype(np.int32)
    want = total.astype(np.int64) + (a.astype(np.int64) * b.astype(np.int64)).sum(1)
    return [total, a.view(np.int32)[:, 0], b.view(np.int32)[:, 0]], want.astype(np.int32)


@pytest.mark.parametrize("way", [way for way, (_, feature) in WAYS.items() if feature in ("", *host_features())])
def test_accumulators_are_exact(way: str) -> None:
    cpu, _ = WAYS[way]
    target = resolve("cpu")[0].tvm
    run = tvm.compile(tvm.IRModule({"dot": kernel(cpu)}), target=target)["dot"]
    for _ in range(20):
        operands, want = draw_packed_lanes(cpu.lanes("int32"))
        arguments = [tvm.runtime.tensor(x) for x in (*operands, operands[0])]
        run(*arguments)
        np.testing.assert_array_equal(arguments[-1].numpy(), want)


def test_accumulators_of_signed_bytes_are_exact() -> None:
    """On a machine with AVX2; -128 times 127 twice is the largest pair."""
    cpu, feature = WAYS["pairs in 256 bits"]
    assert multiplies_signed(cpu, holds_lowest=False) and not multiplies_signed(cpu, holds_lowest=True)
    if feature not in host_features():
        return
    target = resolve("cpu")[0].tvm
    run = tvm.compile(tvm.IRModule({"dot": kernel(cpu, is_signed=True)}), target=target)["dot"]
    operands, want = draw_packed_lanes(cpu.lanes("int32"), is_signed=True)
    arguments = [tvm.runtime.tensor(x) for x in (*operands, operands[0])]
    run(*arguments)
    np.testing.assert_array_equal(arguments[-1].numpy(), want)


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs Debian's gcc-aarch64-linux-gnu")
@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs Debian's qemu-user")
@pytest.mark.parametrize(
    ("target", "instruction", "is_signed"),
    [
        ("aarch64+dotprod", SDOT, False),
        ("aarch64+dotprod", SDOT, True),
        ("aarch64+i8mm", USDOT, False),
        ("aarch64", "", False),
    ],
)
def test_accumulators_are_exact_on_aarch64(target: str, instruction: str, is_signed: bool, tmp_path: Path) -> None:
    (made_for,) = resolve(f"cpu:{target}")
    cpu = read_cpu_features(made_for.tvm)
    assert cpu.int8_dot == instruction
    library, host = tmp_path / "dot.so", tmp_path / "kernel_host"
    linker = cc.cross_compiler("aarch64-linux-gnu-gcc")
    tvm.compile(tvm.IRModule({"dot": kernel(cpu, is_signed)}), target=made_for.tvm).export_library(
        str(library), fcompile=linker
    )
    command = ["aarch64-linux-gnu-gcc", "-O1", "-rdynamic", "-I", tvm_ffi.libinfo.find_include_path(), HOST, "-o", host]
    subprocess.run([*command, "-ldl"], check=True)
    operands, want = draw_packed_lanes(cpu.lanes("int32"), is_signed)
    emulated = ["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu"]
    shapes = ["i1", str(len(want))] * 4
    done = subprocess.run(
        [*emulated, host, library, "__tvm_ffi_dot", *shapes],
        input=b"".join(x.tobytes() for x in operands),
        capture_output=True,
        check=True,
    )
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.int32), want)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs Debian's binutils")
@pytest.mark.parametrize(
    ("target", "instruction"),
    [
        ("x86-64-v3+avxvnni", r"\{vex\} vpdpbusd .*%ymm"),
        ("x86-64-v4+avx512vnni", r"vpdpbusd .*%zmm"),
        ("x86-64-v4", r"vpmaddwd .*%zmm"),
        ("x86-64-v3", r"vpmaddwd .*%ymm"),
    ],
)
def test_matmuls_of_a_model_use_what_the_target_has(target: str, instruction: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        m (uint8[n, 64] a) => (int32[n, 32] y) <int8[64, 32] b> { y = MatMulInteger (a, b) }""")
    del model.graph.initializer[:]
    b = np.random.default_rng(0).integers(-128, 128, (64, 32)).astype(np.int8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(b, "b"))
    manifest = compile_to(tmp_path / "out", model, f"cpu:{target}")
    assert (("avx_vnni" in manifest.cpu_features), ("avx512_vnni" in manifest.cpu_features)) == (
        "+avxvnni" in target,
        "+avx512vnni" in target,
    )
    text = subprocess.run(["objdump", "-d", tmp_path / "out" / "model.so"], capture_output=True, text=True, check=True)
    assert re.search(instruction, text.stdout)
