"""Kernels that TVM schedules itself, and whole artifacts, run in the emulation."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from tvm import te, tirx, topi
from tvm.s_tir import dlight

from schedules.cuda.elementwise.fallback import ordinary
from tests import cuda_emulation as emulated

TARGET = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 49152, "thread_warp_size": 32}


def scheduled(dtype: str) -> dict[str, tvm.tirx.PrimFunc]:
    a, b = te.placeholder((8, 500), dtype, "A"), te.placeholder((500, 96), dtype, "B")
    mod = tvm.IRModule(
        {
            "softmax": te.create_prim_func([a, topi.nn.softmax(a, axis=-1)]),
            "matmul": te.create_prim_func([a, b, topi.matmul(a, b)]),
            "total": te.create_prim_func([a, topi.sum(a, axis=1)]),
        }
    )
    with tvm.target.Target({"kind": "cuda", "arch": "sm_80", **TARGET}, host="llvm"):
        gpu = dlight.gpu
        rules = (gpu.Matmul(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
        mod = dlight.ApplyDefaultSchedule(*rules)(mod)
    return {var.name_hint: func for var, func in mod.functions.items()}


@pytest.mark.parametrize("dtype, eps", [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)])
def test_schedules_of_tvm(dtype: str, eps: float) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(0, 1, shape).astype(kind) for shape in ((8, 500), (500, 96)))
    exact_a, exact_b = a.astype("float64"), b.astype("float64")
    e = np.exp(exact_a)
    expected = {"softmax": e / e.sum(1, keepdims=True), "matmul": exact_a @ exact_b, "total": exact_a.sum(1)}
    module = emulated.module(scheduled(dtype), arch="sm_80")
    for order in emulated.ORDERS:
        for name, value in expected.items():
            inputs = [a, b] if name == "matmul" else [a]
            out = module.call(name, [*inputs, np.full(value.shape, np.nan, kind)], order=order)[-1]
            # accumulators have the type itself
            np.testing.assert_allclose(out.astype("float64"), value, rtol=eps * (1 if name == "softmax" else 60))


MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
model (float[n, 64] x) => (float[n, 64] y) { z = Exp (x)  s = Softmax (z)  y = Add (x, s) }
"""


def compile_and_run(folder: str, x: np.ndarray) -> dict[str, np.ndarray]:
    import lowering
    from lowering.compiling.compiler import compile_to

    compile_to(Path(folder), onnx.parser.parse_model(MODEL), "cuda:sm_90a")
    return lowering.load(folder).run({"x": x})


def test_whole_artifacts(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((5, 64)).astype("float32")
    y = emulated.run(compile_and_run, str(tmp_path / "out"), x)["y"]
    e = np.exp(np.exp(x.astype("float64")))
    np.testing.assert_allclose(y, x + e / e.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 7])
def test_a_reduction_over_one_element(rows: int) -> None:
    """The epilogue of the reduction is applied once, to the total, and not to 0 before."""
    unit, m, n = (tirx.IntImm("int64", size) for size in (1, rows, 5))
    a, b = te.placeholder((m, unit), "float32", "a"), te.placeholder((unit, n), "float32", "b")
    k = te.reduce_axis((0, unit), "k")
    total = te.compute((m, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), "total")
    func = te.create_prim_func([a, b, topi.add(topi.cos(total), total)])
    (variant,) = ordinary(func, tvm.target.Target({"kind": "cuda", "arch": "sm_80", **TARGET}, host="llvm"))
    module = emulated.module({"main": variant.make()}, arch="sm_80")
    rng = np.random.default_rng(rows)
    x, y = (rng.standard_normal(shape).astype("float32") for shape in ((rows, 1), (1, 5)))
    result = module.call("main", [x, y, np.full((rows, 5), np.nan, "float32")])[-1]
    np.testing.assert_allclose(result, np.cos(x * y) + x * y, rtol=1e-5)
