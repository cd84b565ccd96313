"""Matmuls of bfloat16 pairs against NumPy in float64: any sizes, odd depths, both ways to store an operand."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx

from lowering.passes.graph.pack_weights import pack_weights
from lowering.target import host_features
from schedules.cpu.matmul.matmul import matmul
from tests.schedules.test_matmul import check, compile_main, draw
from tests.support.pass_states import make_state
from tests.support.this_machine import WIDEST

pytestmark = pytest.mark.optimized

TARGETS = {
    name: tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu, "mattr": features})
    for name, (mcpu, features) in {"widened": (WIDEST, []), "pairs": ("x86-64-v4", ["+avx512bf16"])}.items()
}
RUNS = TARGETS if "avx512_bf16" in host_features() else {"widened": TARGETS["widened"]}


def emit_matmul(builder: relax.BlockBuilder, x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return relax.op.matmul(x, w, out_dtype="float32")


def exact(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x.astype("float64") @ w.astype("float64")


@pytest.mark.parametrize("target", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(("depth", "columns"), [(37, 71), (1, 16), (64, 5), (2051, 33)])
def test_any_number_of_rows(target: tvm.target.Target, depth: int, columns: int) -> None:
    """Matmuls are exact, and accumulators are float32: only the order of additions differs."""
    rng = np.random.default_rng(0)
    w = draw(rng, (depth, columns), "bfloat16")
    run = compile_main({"x": ((tirx.Var("m", "int64"), depth), "bfloat16")}, emit_matmul, target, {"w": w})
    for rows in (*range(1, 10), 71, 145):
        x = draw(rng, (rows, depth), "bfloat16")
        check(run(x), exact(x, w), "float32", depth)


@pytest.mark.parametrize("target", RUNS.values(), ids=RUNS)
def test_rows_and_columns_do_not_leak(target: tvm.target.Target) -> None:
    """A row's last number of an odd depth is alone in its pair, not with the next row's first."""
    rng = np.random.default_rng(0)
    w = draw(rng, (35, 70), "bfloat16")
    run = compile_main({"x": ((tirx.Var("m", "int64"), 35), "bfloat16")}, emit_matmul, target, {"w": w})
    x = draw(rng, (9, 35), "bfloat16")
    x[[2, 5], 0] = np.nan, np.inf
    y = run(x)
    assert not np.isfinite(y[[2, 5]]).any()
    clean = [0, 1, 3, 4, 6, 7, 8]
    check(y[clean], exact(x[clean], w), "float32", 35)


@pytest.mark.parametrize("target", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("transposed", ["", "xw"])
def test_two_activations(target: tvm.target.Target, transposed: str) -> None:
    """Every size symbolic: either operand may be stored by rows or by columns."""

    def matmul(x: te.Tensor, w: te.Tensor) -> te.Tensor:
        (m, depth), n = (reversed(x.shape) if "x" in transposed else x.shape), w.shape["w" not in transposed]
        k = te.reduce_axis((0, depth), "k")

        def total(i: tirx.Var, j: tirx.Var) -> tvm.ir.Expr:
            a, b = (x(k, i) if "x" in transposed else x(i, k)), (w(j, k) if "w" in transposed else w(k, j))
            return te.sum(a.astype("float32") * b.astype("float32"), k)

        return te.compute((m, n), total, name="matmul")

    m, k, n = (tirx.Var(name, "int64") for name in "mkn")
    shapes = {"x": (k, m) if "x" in transposed else (m, k), "w": (n, k) if "w" in transposed else (k, n)}
    run = compile_main(
        {name: (shape, "bfloat16") for name, shape in shapes.items()},
        lambda builder, x, w: builder.emit_te(matmul, x, w, primfunc_name_hint="matmul"),
        target,
    )
    rng = np.random.default_rng(0)
    for sizes in [(5, 7, 9), (70, 64, 64), (1, 2, 4), (3, 1, 65), (8, 2051, 70)]:
        x, w = draw(rng, sizes[:2], "bfloat16"), draw(rng, sizes[1:], "bfloat16")
        stored = (
            np.ascontiguousarray(array.T) if name in transposed else array for name, array in {"x": x, "w": w}.items()
        )
        check(run(*stored), exact(x, w), "float32", sizes[1])


@pytest.mark.parametrize("target", RUNS.values(), ids=RUNS)
def test_a_weight_in_two_types(target: tvm.target.Target) -> None:
    """A weight that meets float32 is not stored in pairs, also where it meets bfloat16 elsewhere."""
    rng = np.random.default_rng(0)
    w = draw(rng, (36, 40), "bfloat16")

    def body(builder: relax.BlockBuilder, x: relax.Expr, y: relax.Expr, w: relax.Expr) -> relax.Expr:
        widened = relax.op.matmul(x, builder.emit(relax.op.astype(w, "float32")))
        return builder.emit(relax.op.add(builder.emit(widened), builder.emit(emit_matmul(builder, y, w))))

    run = compile_main({"x": ((3, 36), "float32"), "y": ((3, 36), "bfloat16")}, body, target, {"w": w})
    x, y = draw(rng, (3, 36), "float32"), draw(rng, (3, 36), "bfloat16")
    check(run(x, y), exact(x, w) + exact(y, w), "float32", 72)


@pytest.mark.parametrize(
    ("name", "dtype", "used"), [("pairs", "bfloat16", 28), ("pairs", "float16", 0), ("widened", "bfloat16", 0)]
)
def test_pairs_become_the_instruction(name: str, dtype: str, used: int) -> None:
    """One for each of seven rows and four vectors of columns; float16 is not rounded to bfloat16."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in {"x": (7, 30), "w": (30, 64)}.items())
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        builder.emit_func_output(builder.emit(emit_matmul(builder, x, w)))
    weights = {"w": draw(np.random.default_rng(0), (30, 64), dtype)}
    mod = pack_weights(make_state(builder.finalize(), TARGETS[name], weights)).module
    kernel = matmul(mod["packed_matmul"], TARGETS[name])[0].make()
    assert kernel is not None
    module = tvm.IRModule({"matmul": kernel.with_attr("global_symbol", "matmul")})
    assembly = tvm.compile(module, TARGETS[name]).mod.inspect_source("asm")
    assert len(re.findall("vdpbf16ps", assembly)) >= used
    assert ("vdpbf16ps" in assembly) == (used > 0)
