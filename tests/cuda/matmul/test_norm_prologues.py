"""Prologue fusion of norms into small-M matmuls: which norms are fused, and the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from onnx import helper, numpy_helper
from tvm import te, tirx, topi

import lowering
from lowering.manifest import CallSpec
from schedules.cuda.fusion.fused_matmul import prologue_matmul
from schedules.cuda.fusion.prologue_tiles import PrologueSmallMTiles
from schedules.reading.row_segments import SEGMENTS
from schedules.variant import Variant
from tests import cuda_emulation as emulated
from tests.cuda.audits import early_launch
from tests.cuda.audits.matmul_code import machine_code_of
from tests.cuda.models.steps import work
from tests.cuda_emulation import device
from tests.cuda_emulation.mutations import survivors

TARGETS = ("sm_80", "sm_90a")
EPSILON = 1e-5
MOST = {256: 8, 520: 8, 2048: 4, 4096: 2}
"""Rows that a block computes, by their length."""


@dataclass(frozen=True)
class Case:
    """Y_n = norm(X) W_n, with options."""

    k: int = 256
    columns: tuple[int, ...] = (48,)
    norm: str = "RMSNormalization"
    dtype: str = "float16"
    is_output: bool = False
    """Whether the norm is an output, too."""
    gated: bool = False
    """Y = silu(Y_0) Y_1."""

    def model(self) -> onnx.ModelProto:
        rng, kind = np.random.default_rng(self.k), getattr(onnx.TensorProto, self.dtype.upper())
        weights = {"scale": 1 + 0.1 * rng.standard_normal(self.k)}
        if self.norm == "LayerNormalization":
            weights["shift"] = 0.1 * rng.standard_normal(self.k)
        operands = ["x", *weights]
        weights |= {f"w{n}": rng.standard_normal((self.k, c)) / self.k**0.5 for n, c in enumerate(self.columns)}
        nodes = [helper.make_node(self.norm, operands, ["normalized"], axis=-1, epsilon=EPSILON)]
        nodes += [helper.make_node("MatMul", ["normalized", f"w{n}"], [f"y{n}"]) for n in range(len(self.columns))]
        outputs = {f"y{n}": c for n, c in enumerate(self.columns)}
        if self.gated:
            nodes += [helper.make_node("Swish", ["y0"], ["s"]), helper.make_node("Mul", ["s", "y1"], ["y"])]
            outputs = {"y": self.columns[0]}
        if self.is_output:
            outputs["normalized"] = self.k
        rounded = {name: w.astype(getattr(ml_dtypes, self.dtype, self.dtype)) for name, w in weights.items()}
        graph = helper.make_graph(
            nodes, "normalized", [helper.make_tensor_value_info("x", kind, ["B", "S", self.k])],
            [helper.make_tensor_value_info(name, kind, ["B", "S", c]) for name, c in outputs.items()],
            [numpy_helper.from_array(w, name) for name, w in rounded.items()],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)

    def right(self, proto: onnx.ModelProto, x: np.ndarray) -> dict[str, np.ndarray]:
        """Return the results in float64."""
        weights = {w.name: numpy_helper.to_array(w).astype("float64") for w in proto.graph.initializer}
        x = x.astype("float64")
        if self.norm == "LayerNormalization":
            x = x - x.mean(-1, keepdims=True)
        normal = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weights["scale"] + weights.get("shift", 0.0)
        outputs = {f"y{n}": normal @ weights[f"w{n}"] for n in range(len(self.columns))}
        if self.gated:
            outputs = {"y": outputs["y0"] / (1 + np.exp(-outputs["y0"])) * outputs["y1"]}
        return {**outputs, "normalized": normal}


CASES = {
    "RMS norm": Case(),
    "layer norm, bfloat16": Case(norm="LayerNormalization", dtype="bfloat16", columns=(24,)),
    "queries, keys and values": Case(columns=(64, 32, 32), k=520),
    "a gate": Case(columns=(40, 40), gated=True),
    "the norm is read by others": Case(is_output=True, columns=(16, 16)),
    "rows of which few fit": Case(k=2048, columns=(16,)),
    "layer norm of long rows": Case(k=4096, columns=(16, 32), norm="LayerNormalization"),
}
# Batches and tokens; rows are padded at the end, so that a row too many would be noticed.
SIZES = ((1, 1), (2, 1), (1, 4), (1, 5), (3, 3), (1, 40), (0, 1))


def measured(name: str, arch: str) -> tuple[list[CallSpec], list[int], float]:
    """Return the calls of kernels, launches by SIZES, and the largest error in units in the last position."""
    case = CASES[name]
    proto, rng = case.model(), np.random.default_rng(1)
    kind = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    model = lowering.compile(proto, f"cuda:{arch}")
    launches, worst = [], 0.0
    for batch, tokens in SIZES:
        x = (3 * rng.standard_normal((batch, tokens, case.k)) + 0.5).astype(kind)
        device.take_calls()
        results = model.run({"x": x})
        calls = work(device.take_calls())
        launches.append(calls["cuLaunchKernelEx"] + calls["cuLaunchKernel"])
        right = case.right(proto, x)
        for output, result in results.items():
            assert result.shape == right[output].shape
            error = np.abs(result.astype("float64") - right[output]).max(initial=0.0)
            worst = max(worst, error / np.abs(right[output]).max(initial=1.0) / float(ml_dtypes.finfo(kind).eps))
    return list(model.manifest.calls), launches, worst


@pytest.mark.sampled(10)
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_norms_in_matmuls(name: str, arch: str) -> None:
    calls, launches, worst = emulated.run(measured, name, arch, arch=arch, timeout=500)
    case = CASES[name]
    limit = MOST[case.k]
    assert len(calls) == 1
    assert worst < 4
    for (batch, tokens), count in zip(SIZES, launches, strict=True):
        rows = batch * tokens
        assert not emulated.counts() or (count == (0 if rows == 0 else 1) if rows <= limit else count >= 2)


def function(m: int, k: int, n: int) -> tirx.PrimFunc:
    """Return Y [m, n] of rows that are divided by their root mean square, in float16."""
    M, K, N, unit = (tirx.IntImm("int64", size) for size in (m, k, n, 1))
    x, w = te.placeholder((M, K), "float16", "x"), te.placeholder((N, K), "float16", "w")
    along, step = te.reduce_axis((0, K), "along"), te.reduce_axis((0, K), "step")

    def square(i: tirx.Var) -> Any:
        value = x[i, along].astype("float32")
        return te.sum(value * value, axis=along)

    def matmul(i: tirx.Var, j: tirx.Var) -> Any:
        return te.sum(normalized[i, step].astype("float32") * w[j, step].astype("float32"), axis=step)

    squares = te.compute((M,), square, "squares")
    scaled = topi.multiply(
        topi.cast(x, "float32"), te.compute((M, unit), lambda i, _: tirx.rsqrt(squares[i] / k + EPSILON))
    )
    normalized = topi.cast(scaled, "float16")
    y = topi.cast(te.compute((M, N), matmul, "total"), "float16")
    return te.create_prim_func([x, w, normalized, y]).with_attr(SEGMENTS, [5, 2])


def variants(arch: str, m: int, k: int = 200, n: int = 40) -> list[Variant]:
    target = tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")
    return list(prologue_matmul(function(m, k, n), target) or [])


@pytest.mark.no_gpu
def test_no_wait_can_be_left_out() -> None:
    """The small-M kernel, with two warps that have several iterations."""
    rng, m, k, n = np.random.default_rng(0), 5, 200, 40
    x, w = (rng.standard_normal(shape).astype("float16") for shape in ((m, k), (n, k)))
    wide = x.astype("float64")
    normalized = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON)
    want = normalized @ w.astype("float64").T
    arrays = [x, w, np.full((m, k), np.nan, "float16"), np.full((m, n), np.nan, "float16")]

    def right(after: list[np.ndarray]) -> bool:
        pairs = zip((normalized, want), after[-2:], strict=True)
        return all(np.allclose(b.astype("float64"), a, rtol=2e-3, atol=5e-2, equal_nan=True) for a, b in pairs)

    module = emulated.module({"main": variants("sm_80", m)[0].make(normed=PrologueSmallMTiles(2, 2))}, arch="sm_80")
    # The last copies are empty. With more warps, their addresses after the accumulators would contain data.
    redundant = ["ptx_cp_async_wait_group_async_wait_group_0"]
    assert [step.name for step in survivors(module, "main", arrays, right)] == redundant


@pytest.mark.no_gpu
def test_rows_for_which_there_is_no_room_have_no_kernel() -> None:
    assert variants("sm_80", 8, 520) and not variants("sm_80", 9, 520)
    assert variants("sm_80", 1, 8192) and not variants("sm_80", 1, 16384)


@pytest.mark.sampled(6)
@pytest.mark.no_gpu
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", ["queries, keys and values", "a gate"])
def test_machine_code(name: str, arch: str) -> None:
    """Nothing spills to memory, and weights are prefetched before the rows are loaded."""
    manifest, functions = machine_code_of(CASES[name].model(), arch)
    (kernel,) = manifest.kernels
    assert kernel.schedule == "prologue_matmul"
    first = next(f for f in functions if f.name == f"{kernel.name}_kernel")
    opcodes = [instruction.opcode for instruction in first.instructions]
    assert "HMMA" in opcodes and not {"LDL", "STL"} & set(opcodes)
    assert opcodes.index("LDGSTS") < opcodes.index("LDG")
    if arch != "sm_80":
        assert early_launch.prefetches(first) and not early_launch.faults(first)
