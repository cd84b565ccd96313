"""A kernel that begins before the previous one has ended touches no memory of others until then."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import onnx
import pytest
from tvm import tirx

from benchmarks.gpu.bundling.models import in_half
from lowering.demo.decoder import DecoderConfig, build_decoder
from lowering.target import cubin
from schedules.cuda import dependent_launch as pass_under_test
from tests.cuda.audits import early_launch, sass, second_ptxas
from tests.cuda.audits.matmul_code import machine_code_of

pytestmark = pytest.mark.no_gpu

ARCH = "sm_90a"


def decoder() -> onnx.ModelProto:
    """Return a decoder whose rows of k are whole chunks, so that a small M has a kernel of its own."""
    return in_half(build_decoder(DecoderConfig(1, 256, 4, 2, 64, 512, 256, 64)))


RESIDUAL = """<ir_version: 10, opset_import: ["" : 23]>
m (float16[n, 64] x, float16[n, 64] r) => (float16[n, 64] y)
<float16[64] scale = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}>
{ s = Add (x, r)  t = RMSNormalization (s, scale)  y = Add (t, s) }"""


class Code(NamedTuple):
    """Kernels of a model: their CUDA C++, and the machine code that nvcc made of it."""

    source: str
    functions: list[sass.Function]


@pytest.fixture(scope="module")
def code() -> Code:
    """Compile a decoder with donated caches: fused launches, norms, rotations and cache updates in GEMMs."""
    sources: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        original = cubin.machine_code
        patch.setattr(cubin, "machine_code", lambda text, arch: (sources.append(text), original(text, arch))[1])
        manifest, functions = machine_code_of(decoder(), ARCH, donate=["cache_.*"])
    schedules = {kernel.schedule for kernel in manifest.kernels}
    assert {"several", "epilogue_matmul", "attention"} <= schedules, schedules
    (source,) = sources
    return Code(source, functions)


def audit(functions: list[sass.Function]) -> None:
    assert len(functions) > 10
    for function in functions:
        opcodes = {function.instructions[n].opcode for n in early_launch.before_the_wait(function)}
        assert early_launch.WAIT in opcodes and early_launch.BEGIN in opcodes, function.name
        assert not (messages := early_launch.faults(function)), messages
    # Small-M GEMMs prefetch weights before the wait.
    prefetching = [function for function in functions if early_launch.prefetches(function)]
    assert prefetching and all("matmul" in function.name for function in prefetching)


def recompiled(code: Code) -> list[sass.Function]:
    return early_launch.disassemble(cubin.machine_code(code.source, ARCH)[0])


def test_by_nvcc(code: Code) -> None:
    audit(code.functions)


@pytest.mark.slow
def test_by_nvrtc(code: Code) -> None:
    with early_launch.by_nvrtc():
        audit(recompiled(code))


@pytest.mark.slow
def test_by_another_ptxas(code: Code, tmp_path: Path) -> None:
    ptxas = second_ptxas.installed(tmp_path)
    assert ptxas is not None, "the package index is not reached"
    with second_ptxas.used(ptxas):
        audit(recompiled(code))


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_restricted_pointers_fail_the_audit(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler == "nvrtc":
        monkeypatch.setattr(cubin, "find_nvcc", lambda: None)
    model = onnx.parser.parse_model(RESIDUAL)
    faults = [early_launch.faults(function) for function in machine_code_of(model, ARCH)[1]]
    assert faults and not any(faults)

    launch = pass_under_test._make_early_launch
    restricted: list[tirx.PrimFunc] = []

    def mutant(func: tirx.PrimFunc) -> tirx.PrimFunc:
        restricted.append(launch(func).with_attr("tirx.noalias", True))
        return restricted[-1]

    monkeypatch.setattr(pass_under_test, "_make_early_launch", mutant)
    faults = [early_launch.faults(function) for function in machine_code_of(model, ARCH)[1]]
    assert restricted and any(faults)


def test_tables_of_the_code_may_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cosines of large numbers look up digits of 2 / pi, which no kernel writes."""
    text = '<ir_version: 10, opset_import: ["" : 20]> m (float[n] x) => (float[n] y) { y = Cos (x) }'
    _, functions = machine_code_of(onnx.parser.parse_model(text), ARCH)
    read_only = [i for f in functions for i in f.instructions if i.opcode == "LDG" and "CONSTANT" in i.modifiers]
    assert read_only and not any(map(early_launch.faults, functions))


def test_before_hopper_kernels_follow_each_other() -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> m (float[n] x) => (float[n] y) { y = Exp (x) }'
    _, functions = machine_code_of(onnx.parser.parse_model(text), "sm_80")
    opcodes = {instruction.opcode for function in functions for instruction in function.instructions}
    assert opcodes and not opcodes & {early_launch.BEGIN, early_launch.WAIT}
