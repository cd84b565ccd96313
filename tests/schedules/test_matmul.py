"""Matmuls against NumPy in float64: packed weights and two activations, odd sizes, epilogues, vector widths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import tvm
from onnx import parser
from tvm import relax, tirx

import lowering
import schedules
from lowering.importing.quantized_matrix import QuantizedMatrix
from lowering.passes.graph.fold_transposes import fold_transposes
from lowering.passes.graph.pack_weights import pack_weights
from schedules.cpu.matmul.matmul import matmul
from tests.support.pass_states import make_state
from tests.support.placed_arrays import unaligned
from tests.support.this_machine import LEVELS, WIDEST

RUNS = {level: tvm.target.Target({"kind": "llvm", "mcpu": level}) for level in LEVELS[1:]}
V3, WIDE = RUNS["x86-64-v3"], RUNS[WIDEST]
EPSILON = {"float64": 4e-16, "float32": 2e-7, "float16": 1e-3, "bfloat16": 8e-3}

Epilogue = Callable[[relax.BlockBuilder, relax.Expr, relax.Expr, relax.Expr], relax.Expr]


def compile_main(
    params: dict[str, tuple[tuple, str]],
    body: Callable[..., relax.Expr],
    target: tvm.target.Target,
    weights: Mapping[str, np.ndarray | QuantizedMatrix] | None = None,
) -> Callable[..., np.ndarray]:
    """Compile a Relax function through packing, legalization, fusion and schedules to a function of arrays.

    Every matmul must have been replaced by a kernel.
    """
    weights = weights or {}
    builder = relax.BlockBuilder()
    args = [relax.Var(name, relax.TensorType(shape, dtype)) for name, (shape, dtype) in params.items()]
    args += [relax.Var(name, relax.TensorType(w.shape, w.dtype.name)) for name, w in weights.items()]
    with builder.function("main", args, attrs={"num_input": len(params)}):
        with builder.dataflow():
            result = builder.emit_output(body(builder, *args))
        builder.emit_func_output(result)
    t = relax.transform
    state = fold_transposes(pack_weights(make_state(builder.finalize(), target, weights)))
    mod, arrays = state.module, state.packed_weights
    assert not any(
        isinstance(b.value, relax.Call) and b.value.op == tvm.ir.Op.get("relax.permute_dims")
        for block in mod["main"].body.blocks
        for b in block.bindings
    )
    with target:
        passes = [t.LegalizeOps(), t.AnnotateTIROpPattern(), t.FuseOps(), t.FuseTIR(), t.DeadCodeElimination()]
        mod = tvm.transform.Sequential(passes)(mod)
        matmuls = [g for g, f in mod.functions_items() if isinstance(f, tirx.PrimFunc) and "matmul" in g.name_hint]
        assert matmuls
        assert all(matmul(mod[g], target) is not None for g in matmuls)
        mod = schedules.apply_schedules(mod, target)
    vm = relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())

    def run(*inputs: np.ndarray) -> np.ndarray:
        return vm["main"](*map(tvm.runtime.tensor, (*inputs, *arrays.values()))).numpy()

    return run


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.dtype(dtype))


def check(actual: np.ndarray, expected: np.ndarray, dtype: str, depth: int) -> None:
    assert actual.dtype.name == dtype and actual.shape == expected.shape
    error = np.abs(actual.astype("float64") - expected)
    assert (error <= EPSILON[dtype] * (1e-2 + np.abs(expected)) + 2e-7 * depth).all(), error.max()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize(("depth", "columns"), [(37, 71), (1, 16), (64, 5), (32, 32)])
def test_weight_any_number_of_rows(target: tvm.target.Target, dtype: str, depth: int, columns: int) -> None:
    rng = np.random.default_rng(0)
    w = draw(rng, (depth, columns), dtype)
    run = compile_main(
        {"x": ((tirx.Var("m", "int64"), depth), dtype)},
        lambda b, x, w: relax.op.matmul(x, w),
        target,
        {"w": w},
    )
    for rows in (*range(1, 15), 71, 72, 73, 150):
        x = draw(rng, (rows, depth), dtype)
        check(run(x), x.astype("float64") @ w.astype("float64"), dtype, depth)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


EPILOGUES: dict[str, tuple[Callable, Callable]] = {
    "bias": (lambda y, b, r: relax.op.add(b, y), lambda y, b, r: y + b),
    "gelu": (lambda y, b, r: relax.op.nn.gelu(relax.op.add(y, b)), lambda y, b, r: gelu(y + b)),
    "silu_residual": (
        lambda y, b, r: relax.op.add(relax.op.nn.silu(relax.op.add(y, b)), r),
        lambda y, b, r: (y + b) / (1 + np.exp(-(y + b))) + r,
    ),
    "relu_scale": (
        lambda y, b, r: relax.op.multiply(relax.op.nn.relu(y), relax.const(0.5, "float32")),
        lambda y, b, r: np.maximum(y, 0) * 0.5,
    ),
}


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("target", "columns"), [(WIDE, 200), (V3, 33)], ids=["wide", "v3"])
def test_epilogues_are_fused(epilogue: str, target: tvm.target.Target, columns: int) -> None:
    """Rows in two symbolic dimensions; a matmul and its epilogue are one kernel."""
    symbolic, exact = EPILOGUES[epilogue]
    rng = np.random.default_rng(1)
    batch, length = tirx.Var("batch", "int64"), tirx.Var("length", "int64")
    w, bias = draw(rng, (40, columns), "float32"), draw(rng, (columns,), "float32")

    def body(builder: relax.BlockBuilder, x: relax.Expr, r: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        return builder.emit(symbolic(relax.op.matmul(x, w), b, r))

    run = compile_main(
        {"x": ((batch, length, 40), "float32"), "r": ((batch, length, columns), "float32")},
        body,
        target,
        {"w": w, "b": bias},
    )
    for shape in ((1, 1), (3, 5), (2, 40)):
        x, r = draw(rng, (*shape, 40), "float32"), draw(rng, (*shape, columns), "float32")
        y = x.astype("float64") @ w.astype("float64")
        check(run(x, r), exact(y, bias.astype("float64"), r.astype("float64")), "float32", 40)


def test_a_bias_in_another_type_is_part_of_the_epilogue() -> None:
    """As Gemm in half precision has it: the bias is widened, and the total is rounded once."""
    rng = np.random.default_rng(2)
    w, bias = draw(rng, (40, 72), "float16"), draw(rng, (72,), "float16")

    def body(builder: relax.BlockBuilder, x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        y = builder.emit(relax.op.matmul(x, w, out_dtype="float32"))
        y = builder.emit(relax.op.add(y, builder.emit(relax.op.astype(b, "float32"))))
        return builder.emit(relax.op.astype(y, "float16"))

    run = compile_main({"x": ((tirx.Var("rows", "int64"), 40), "float16")}, body, WIDE, {"w": w, "b": bias})
    for rows in (1, 7):
        x = draw(rng, (rows, 40), "float16")
        check(run(x), x.astype("float64") @ w.astype("float64") + bias.astype("float64"), "float16", 40)


# Few and many rows and columns, fewer than a vector, one more than a tile, one block of k and two, none.
SIZES = (
    (1, 77, 100),
    (3, 16, 17),
    (8, 1030, 33),
    (2, 5, 40),
    (9, 64, 65),
    (77, 80, 77),
    (150, 7, 130),
    (5, 9, 3),
    (4, 0, 20),
)


@pytest.mark.parametrize(
    ("target", "dtype"),
    [(V3, "float32"), (WIDE, "float32"), (V3, "float16"), (WIDE, "bfloat16"), (V3, "float64"), (WIDE, "float64")],
    ids=["v3", "wide", "v3-f16", "wide-bf16", "v3-f64", "wide-f64"],
)
def test_two_activations_of_any_size(target: tvm.target.Target, dtype: str) -> None:
    rng = np.random.default_rng(2)
    batch, m, k, n = (tirx.Var(name, "int64") for name in ("batch", "m", "k", "n"))
    run = compile_main(
        {"x": ((batch, m, k), dtype), "y": ((batch, k, n), dtype), "z": ((n,), dtype)},
        lambda b, x, y, z: b.emit(relax.op.add(b.emit(relax.op.matmul(x, y)), z)),
        target,
    )
    for rows, depth, columns in SIZES:
        x, y = draw(rng, (3, rows, depth), dtype), draw(rng, (3, depth, columns), dtype)
        z = draw(rng, (columns,), dtype)
        check(run(x, y, z), x.astype("float64") @ y.astype("float64") + z.astype("float64"), dtype, 2 * depth)


@pytest.mark.parametrize("target", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("columns", [2, 3, 8])
def test_few_columns(target: tvm.target.Target, columns: int) -> None:
    rng = np.random.default_rng(3)
    m, k = (tirx.Var(name, "int64") for name in ("m", "k"))
    run = compile_main(
        {"x": ((m, k), "float32"), "y": ((k, columns), "float32")}, lambda b, x, y: relax.op.matmul(x, y), target
    )
    for rows, depth in ((1, 16), (5, 3), (259, 70), (513, 33)):
        x, y = draw(rng, (rows, depth), "float32"), draw(rng, (depth, columns), "float32")
        check(run(x, y), x.astype("float64") @ y.astype("float64"), "float32", depth)


@pytest.mark.parametrize(
    ("target", "dtype"),
    [(V3, "float32"), (WIDE, "float32"), (WIDE, "float16"), (WIDE, "float64")],
    ids=["v3", "wide", "wide-f16", "wide-f64"],
)
def test_transposed_activations(target: tvm.target.Target, dtype: str) -> None:
    """Heads that are not leading, and keys that are not transposed, are read in place; a batch of one serves all."""
    rng = np.random.default_rng(4)
    batch, heads, m, n = (tirx.Var(name, "int64") for name in ("batch", "heads", "m", "n"))
    for depth in (70, 5):
        run = compile_main(
            {"x": ((1, m, heads, depth), dtype), "y": ((batch, n, heads, depth), dtype)},
            lambda b, x, y: relax.op.matmul(
                b.emit(relax.op.permute_dims(x, [0, 2, 1, 3])), b.emit(relax.op.permute_dims(y, [0, 2, 3, 1]))
            ),
            target,
        )
        for rows, columns in ((1, 1), (1, 50), (3, 17), (7, 300), (37, 71), (150, 130)):
            x, y = draw(rng, (1, rows, 2, depth), dtype), draw(rng, (3, columns, 2, depth), dtype)
            expected = np.einsum("zmhk,bnhk->bhmn", x.astype("float64"), y.astype("float64"))
            check(run(x, y), expected, dtype, depth)


def test_transposed_rows() -> None:
    rng = np.random.default_rng(5)
    m, k, n = (tirx.Var(name, "int64") for name in ("m", "k", "n"))
    run = compile_main(
        {"x": ((k, m), "float32"), "y": ((n, k), "float32")},
        lambda b, x, y: relax.op.matmul(b.emit(relax.op.permute_dims(x)), b.emit(relax.op.permute_dims(y))),
        WIDE,
    )
    for rows, depth, columns in SIZES:
        x, y = draw(rng, (depth, rows), "float32"), draw(rng, (columns, depth), "float32")
        check(run(x, y), x.T.astype("float64") @ y.T.astype("float64"), "float32", 2 * depth)


MATMULS = """<ir_version: 10, opset_import: ["" : 21]>
matmuls (float[b, m, k] x, float[b, k, n] y, float[b, k, m] turned_x, float[b, n, k] turned_y, float[k, 3] narrow)
      => (float[b, m, n] xy, float[b, m, n] xyt, float[b, m, n] xty, float[b, m, n] xtyt, float[b, m, 3] xn) {
    xt = Transpose<perm = [0, 2, 1]>(turned_x)
    yt = Transpose<perm = [0, 2, 1]>(turned_y)
    xy = MatMul(x, y)
    xyt = MatMul(x, yt)
    xty = MatMul(xt, y)
    xtyt = MatMul(xt, yt)
    xn = MatMul(x, narrow)
}"""


@pytest.fixture(scope="module")
def matmuls() -> lowering.Model:
    return lowering.compile(parser.parse_model(MATMULS))


@pytest.mark.parametrize("threads", [1, 2])
def test_unaligned_operands_and_results(matmuls: lowering.Model, threads: int) -> None:
    """Streams, dot products and blocks, large enough that two threads share each."""
    rng = np.random.default_rng(0)
    for batch, rows, depth, columns in ((1, 1, 301, 517), (2, 5, 203, 260), (1, 77, 131, 90), (3, 150, 67, 19)):
        x, y = draw(rng, (batch, rows, depth), "float32"), draw(rng, (batch, depth, columns), "float32")
        narrow = draw(rng, (depth, 3), "float32")
        arrays = {"x": x, "y": y, "turned_x": x.swapaxes(1, 2), "turned_y": y.swapaxes(1, 2), "narrow": narrow}
        arrays = {name: unaligned(array) for name, array in arrays.items()}
        results = {
            name: unaligned(np.full((batch, rows, 3 if name == "xn" else columns), np.nan, np.float32))
            for name in ("xy", "xyt", "xty", "xtyt", "xn")
        }
        matmuls.bind(arrays, results, threads=threads)()
        expected = x.astype("float64") @ y.astype("float64")
        for name in ("xy", "xyt", "xty", "xtyt"):
            check(results[name], expected, "float32", 2 * depth)
        check(results["xn"], x.astype("float64") @ narrow.astype("float64"), "float32", 2 * depth)
        for name, array in matmuls.run(arrays, threads=threads).items():
            np.testing.assert_array_equal(array, results[name])
