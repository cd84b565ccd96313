"""Weights of 4 and 8 bits on emulated GPUs: they stay packed, and tensor cores multiply by their values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import te, tirx

import lowering
from lowering.importing.quantized_matrix import quantize_matrix
from lowering.passes.graph.panels import pack_matrix, packed_matmul
from schedules.cuda.matmul.matmul import matmul
from schedules.cuda.matmul.matmul_tiles import MatmulTiles
from schedules.cuda.matmul.small_m_tiles import SmallMTiles
from schedules.variant import Variant
from tests import cuda_emulation as emulated
from tests.cuda.audits.machine_code import machine_code
from tests.cuda_emulation.mutations import survivors


@dataclass(frozen=True)
class Case:
    """x [m, K] W, W [K, N] of so many bits, as in MatMulNBits; with a gate, silu(x W) * (x V)."""

    bits: int
    block: int
    k: int
    n: int
    zeros: bool = False
    dtype: str = "float16"
    gate: bool = False
    arch: str = "sm_80"


CASES = {
    "int4": Case(4, 32, 512, 72),
    "int4, zeros, bfloat16": Case(4, 32, 160, 40, zeros=True, dtype="bfloat16"),
    "int4, short blocks": Case(4, 16, 96, 24),
    "int4, a gate": Case(4, 64, 128, 96, gate=True),
    "int8": Case(8, 32, 288, 136),
    "int8, zeros": Case(8, 128, 256, 48, zeros=True, arch="sm_90a"),
    "float32": Case(4, 32, 64, 16, dtype="float32"),
}
ROWS = (1, 5, 16, 17, 130)


def matrix(case: Case, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the inputs of MatMulNBits by name, and W in float64."""
    rng = np.random.default_rng(seed)
    blocks, levels = -(-case.k // case.block), 1 << case.bits
    quantized = rng.integers(0, levels, (case.n, blocks * case.block))
    zeros = rng.integers(0, levels, (case.n, blocks)) if case.zeros else np.full((case.n, blocks), levels // 2)
    scales = (rng.random((case.n, blocks)) + 0.5).astype("float16").astype(case.dtype)
    w = (quantized - zeros.repeat(case.block, 1)) * scales.astype("float64").repeat(case.block, 1)

    def packed(values: np.ndarray) -> np.ndarray:
        values = values.astype(np.uint8)
        if case.bits == 8:
            return values
        even = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, values.shape[-1] % 2)])
        return even[..., 0::2] | even[..., 1::2] << 4

    weights = {"quantized": packed(quantized).reshape(case.n, blocks, -1), "scales": scales.reshape(-1)}
    if case.zeros:
        weights["zeros"] = packed(zeros).reshape(-1)
    return weights, w.T[: case.k]


def model(case: Case) -> onnx.ModelProto:
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(case.dtype))
    nodes, weights = [], []
    for seed, name in enumerate(("gate", "y") if case.gate else ("y",)):
        weights_of_node, _ = matrix(case, seed)
        weights += [numpy_helper.from_array(array, f"{name}.{suffix}") for suffix, array in weights_of_node.items()]
        sizes = {"K": case.k, "N": case.n, "bits": case.bits, "block_size": case.block}
        inputs = ["x", *(f"{name}.{suffix}" for suffix in weights_of_node)]
        out = "up" if case.gate and name == "y" else name
        nodes.append(helper.make_node("MatMulNBits", inputs, [out], domain="com.microsoft", **sizes))
    if case.gate:
        nodes.append(helper.make_node("Sigmoid", ["gate"], ["s"]))
        nodes += [helper.make_node("Mul", ["gate", "s"], ["silu"]), helper.make_node("Mul", ["silu", "up"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, dtype, ["m", n]) for name, n in (("x", case.k), ("y", case.n)))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=opsets, ir_version=10)


def outputs(case: Case) -> tuple[list[str], list[int], dict[int, tuple[np.ndarray, np.ndarray]]]:
    """Return schedules of the matmuls, bytes of weights, and x and y by number of rows. In the emulation's process."""
    compiled = lowering.compile(model(case), f"cuda:{case.arch}")
    results = {}
    for rows in ROWS:
        x = np.random.default_rng(rows).standard_normal((rows, case.k)).astype(case.dtype)
        results[rows] = x, compiled.run({"x": x})["y"]
    kernels, weights = compiled.manifest.kernels, compiled.manifest.weights
    return [k.schedule for k in kernels if k.kind == "matmul"], [w.nbytes for w in weights], results


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_matmuls_with_quantized_weights(name: str) -> None:
    case = CASES[name]
    schedules, sizes, results = emulated.run(outputs, case, arch=case.arch, timeout=300)
    assert set(schedules) == ({"ordinary"} if case.dtype == "float32" else {"matmul"})
    count, elements = 1 + case.gate, case.k * case.n
    assert sum(sizes) <= count * (elements * case.bits // 8 + 8 * -(-elements // case.block))
    for rows, (x, y) in results.items():
        matmuls = [x.astype("float64") @ matrix(case, seed)[1] for seed in range(count)]
        want: Any = matmuls[0]
        if case.gate:
            want = matmuls[0] / (1 + np.exp(-matmuls[0])) * matmuls[1]
        rounding = float(ml_dtypes.finfo(case.dtype).eps)
        np.testing.assert_allclose(
            y.astype("float64"), want, rtol=4 * rounding, atol=2 * rounding * np.abs(want).max(), err_msg=str(rows)
        )


def compressed() -> tuple[list[int], float]:
    """Return the bytes of weights="int4", and the largest difference from the CPU with the same quantized values."""
    rng = np.random.default_rng(0)
    w = numpy_helper.from_array(rng.standard_normal((256, 64)).astype("float16").astype("float32"), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["m", n]) for name, n in (("x", 256), ("y", 64)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
    feeds = {"x": rng.standard_normal((3, 256)).astype("float32")}
    sources = onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    gpu = lowering.compile(sources, "cuda:sm_80", weights="int4", precision="float16")
    cpu = lowering.compile(sources, "cpu", weights="int4")
    results = [compiled.run(feeds)["y"] for compiled in (gpu, cpu)]
    return [weight.nbytes for weight in gpu.manifest.weights], float(np.abs(results[0] - results[1]).max())


def test_weights_are_compressed_on_gpus_too() -> None:
    sizes, error = emulated.run(compressed, arch="sm_80", timeout=300)
    assert sum(sizes) == 256 * 64 // 2 + 256 * 64 // 32 * 2
    assert error < 0.05


def size(n: int) -> tirx.IntImm:
    return tirx.IntImm("int64", n)


def function(rows: int | None, k: int, n: int, bits: int) -> tuple[tirx.PrimFunc, list[np.ndarray], np.ndarray]:
    """Return x W for a number of rows, None for any; the packed W; and W in float64."""
    m = tirx.Var("m", "int64") if rows is None else size(rows)
    quantized = quantize_matrix(np.random.default_rng(bits).standard_normal((k, n)).astype("float32"), bits)
    packed, element = pack_matrix(quantized, 1)
    x = te.placeholder((m, size(k)), "float16", "x")
    stored = [te.placeholder(list(map(size, array.shape)), str(array.dtype), name) for name, array in packed.items()]
    func = te.create_prim_func([x, *stored, packed_matmul(x, partial(element, stored), size(n), "float16")])
    return func, list(packed.values()), quantized.array().astype("float64")


def variant_of(func: tirx.PrimFunc, arch: str) -> Variant:
    return (matmul(func, tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")) or [])[0]


# The last stores of a warp need no wait.
@pytest.mark.no_gpu
@pytest.mark.parametrize(("rows", "bits", "redundant"), [(50, 4, ["cuda_warp_sync"]), (5, 8, [])])
def test_nothing_can_be_left_out(rows: int, bits: int, redundant: list[str]) -> None:
    func, packed, w = function(rows, 224, 40, bits)
    many = {"tiles": MatmulTiles(32, 32, 32, 2, 1, 3, split_steps=100)}
    tiles = many if rows > 16 else {"rows": SmallMTiles(2, 2)}  # more than one iteration for a warp
    module = emulated.module({"main": variant_of(func, "sm_80").make(**tiles)}, arch="sm_80")
    x = np.random.default_rng(0).standard_normal((rows, 224)).astype("float16")
    want = x.astype("float64") @ w

    def right(after: list[Any]) -> bool:
        return np.allclose(after[-1].astype("float64"), want, rtol=2e-3, atol=5e-2, equal_nan=True)

    arrays = [x, *packed, np.full((rows, 40), np.nan, "float16")]
    assert [step.name for step in survivors(module, "main", arrays, right)] == redundant


@pytest.mark.parametrize(("rows", "bits"), [(11, 4), (20, 4), (20, 8)])
def test_a_vectorized_load_is_complete(rows: int, bits: int) -> None:
    """Tiles may prefetch little, but 16 bytes of quantized values are several chunks of k."""
    func, packed, w = function(rows, 512, 40, bits)
    tiles = SmallMTiles(4, 1, 16 if rows <= 16 else 32)
    variant = variant_of(func, "sm_80")
    assert tiles.shared_memory(variant.problem) >= 16 * tiles.threads * (2 + tiles.rows // 8 * 16 // bits)
    x = np.random.default_rng(rows).standard_normal((rows, 512)).astype("float16")
    kernels = {name: tiles for name in ("sixteen", "several") if name in variant.tiles}
    module = emulated.module({"main": variant.make(**kernels)}, arch="sm_80")
    y = module.call("main", [x, *packed, np.full((rows, 40), np.nan, "float16")])[-1]
    np.testing.assert_allclose(y.astype("float64"), x.astype("float64") @ w, rtol=2e-3, atol=8e-2)


@pytest.mark.no_gpu
@pytest.mark.parametrize(
    ("arch", "bits", "rows"),
    [
        ("sm_80", 4, None),
        *(pytest.param("sm_80", *case, marks=pytest.mark.slow) for case in ((8, None), (4, 1), (8, 1))),
        *(pytest.param("sm_90a", bits, None, marks=pytest.mark.slow) for bits in (4, 8)),
    ],
)
def test_weights_are_dequantized_in_registers(arch: str, bits: int, rows: int | None) -> None:
    """Tensor cores multiply, no register is put into memory, and nothing waits for slow conversions of integers."""
    code = machine_code(variant_of(function(rows, 4096, 4096, bits)[0], arch).make(), arch)
    assert code.whole["HMMA"] and not code.said
    assert (code.spills, code.stack) == (0, 0)
    assert not code.loop["I2F"] and not code.loop["I2FP"]
