"""Rows of a matmul in int8, where the model or the user permits that: what a block of them becomes, and their error."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
import tvm_ffi.libinfo
from onnx import helper, numpy_helper
from tvm import relax, tirx

import lowering
from lowering.compiling.compiler import compile_to
from lowering.importing.quantized_matrix import QuantizedMatrix, pack_bits
from lowering.target import resolve
from tests.schedules.test_codes import draw_quantized_matrix
from tests.schedules.test_matmul import RUNS, compile_main
from tests.support.error_codes import raises

HOST = Path(__file__).parents[1] / "targets" / "kernel_host.c"
TARGETS = RUNS | {"this machine": resolve("cpu")[0].tvm}
ROWS = (*range(14), 25, 40, 150)

SHAPES = [
    ((77, 33), 8, 77, "none", "float32"),  # a scale for each column, and a short last block
    ((1100, 5), 8, 16, "int8", "float16"),  # deeper than the cache block
    ((256, 40), 8, 128, "float32", "float32"),
    ((40, 70), 4, 16, "int8", "float32"),
    ((1101, 37), 4, 32, "none", "float16"),
    ((300, 20), 4, 64, "float32", "float32"),  # more than 16 bits accumulate in a block
    ((520, 48), 4, 256, "int8", "float32"),  # several blocks of a row in one of the matrix
    ((72, 18), 4, 24, "none", "float32"),
]


def row_block(matrix: QuantizedMatrix) -> int:
    """How many values of a row share a scale, as int8_rows.py says."""
    block = matrix.scale_block
    return block if 0 < block <= 128 else 32


def compile_matmul(matrix: QuantizedMatrix, target: tvm.target.Target, dtype: str = "float32") -> tvm.runtime.Function:
    matrix = replace(matrix, permits_int8_rows=True)
    m = tirx.Var("m", "int64")
    return compile_main(
        {"x": ((m, matrix.shape[0]), dtype)}, lambda b, x, w: relax.op.matmul(x, w), target, {"w": matrix}
    )


def quantize(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the represented values, and the scale of each of them."""
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, -x.shape[1] % block)]).reshape(len(x), -1, block)
    scales = np.abs(padded).max(2, keepdims=True) / 127
    values = np.rint(padded / np.where(scales == 0, 1, scales)) * scales
    return tuple(np.broadcast_to(a, padded.shape).reshape(len(x), -1)[:, : x.shape[1]] for a in (values, scales))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("shape", "bits", "block", "zeros", "scales"), SHAPES)
def test_integers_stay_what_they_are(
    target: tvm.target.Target, shape: tuple[int, int], bits: int, block: int, zeros: str, scales: str
) -> None:
    """Rows of integers up to 127, among them 127 in each block, are multiplied without an error of quantization."""
    rng = np.random.default_rng(0)
    matrix = draw_quantized_matrix(rng, shape, bits, (block, 1), zeros, scales)
    run, exact = compile_matmul(matrix, target), matrix.array().astype(np.float64)
    for rows in ROWS:
        x = rng.integers(-127, 128, (rows, shape[0])).astype(np.float32)
        x[:, :: row_block(matrix)] = rng.choice([-127, 127], x[:, :: row_block(matrix)].shape)
        got = run(x)
        assert got.shape == (rows, shape[1])
        error = np.abs(got - x.astype(np.float64) @ exact)
        assert (error <= 1e-6 * (np.abs(x.astype(np.float64)) @ np.abs(exact)) + 1e-6).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("shape", "bits", "block", "zeros", "scales"), SHAPES)
def test_error_is_that_of_rounding_to_nearest(
    target: tvm.target.Target, shape: tuple[int, int], bits: int, block: int, zeros: str, scales: str
) -> None:
    """No element is wrong by more than half a scale of each value allows, and the rms error is what rounding gives."""
    rng = np.random.default_rng(1)
    matrix = draw_quantized_matrix(rng, shape, bits, (block, 1), zeros, scales)
    exact = matrix.array().astype(np.float64)
    x = (rng.standard_normal((200, shape[0])) * rng.lognormal(0, 4, (200, 1))).astype(np.float32)
    represented, steps = quantize(x, row_block(matrix))
    error = compile_matmul(matrix, target)(x) - x.astype(np.float64) @ exact
    assert (np.abs(error) <= (0.5001 * steps) @ np.abs(exact)).all()
    expected = represented @ exact - x.astype(np.float64) @ exact
    ratio = np.sqrt(
        np.square(error / steps.max(1, keepdims=True)).mean() / np.square(expected / steps.max(1, keepdims=True)).mean()
    )
    assert 0.98 < ratio < 1.02


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_number_that_is_not_finite_stays_in_its_row(target: tvm.target.Target, bits: int) -> None:
    rng = np.random.default_rng(2)
    matrix = draw_quantized_matrix(rng, (96, 21), bits, (32, 1), "int8", "float32")
    run = compile_matmul(matrix, target)
    x = rng.standard_normal((9, 96)).astype(np.float32)
    clean = run(x)
    for number in (np.nan, np.inf, -np.inf):
        changed = x.copy()
        changed[4, 50] = number
        got = run(changed)
        assert not np.isfinite(got[4]).any()
        np.testing.assert_array_equal(np.delete(got, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_smallest_and_largest_numbers(target: tvm.target.Target) -> None:
    """Zeros give zeros, tiny blocks at most their size, and the largest floats no infinity of their own."""
    rng = np.random.default_rng(3)
    matrix = draw_quantized_matrix(rng, (64, 16), 8, (32, 1), "none", "float32")
    run, exact = compile_matmul(matrix, target), matrix.array().astype(np.float64)
    assert not run(np.zeros((3, 64), np.float32)).any()
    for size in (1e-45, 1e-39, 1e-37, 1e-35, 1e-20, 1e30, 1e36):
        x = (rng.uniform(-1, 1, (5, 64)) * size).astype(np.float32)
        error = np.abs(run(x) - x.astype(np.float64) @ exact)
        assert (error <= 0.005 * np.abs(x).max() * np.abs(exact).sum(0) + 1e-36 * np.abs(exact).sum(0)).all(), size


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(target: tvm.target.Target, dtype: str) -> None:
    rng = np.random.default_rng(4)
    matrix = replace(draw_quantized_matrix(rng, (70, 24), 4, (32, 1), "none", "float16"), dtype=np.dtype(dtype))
    run, exact = compile_matmul(matrix, target, dtype), replace(matrix, dtype=np.dtype("float32")).array()
    x = rng.standard_normal((7, 70)).astype(dtype)
    got = run(x).astype(np.float64)
    expected = quantize(x, 32)[0] @ exact.astype(np.float64)
    assert np.abs(got - expected).max() <= 0.02 * np.abs(expected).max()


# -- models -----------------------------------------------------------------------------------------------------------


def model_of_bits(matrix: QuantizedMatrix, level: int, rows: int | str = "m") -> onnx.ModelProto:
    """x times a matrix [K, N] without zero points, as MatMulNBits of that accuracy level."""
    depth, columns = matrix.shape
    block, offset = matrix.block[0], 2 ** (matrix.bits - 1)
    values = np.pad((matrix.values.astype(np.int16) + offset).astype(np.uint8), [(0, -depth % block), (0, 0)])
    packed = pack_bits(values.T.reshape(columns, -1, block), matrix.bits)
    constants = [
        numpy_helper.from_array(packed, "b"),
        numpy_helper.from_array(np.ascontiguousarray(matrix.scales.T), "s"),
    ]
    node = helper.make_node(
        "MatMulNBits", ["x", "b", "s"], ["y"], "node", domain="com.microsoft", K=depth, N=columns, bits=matrix.bits,
        block_size=block, accuracy_level=level,
    )  # fmt: skip
    x, y = (helper.make_tensor_value_info(name, 1, [rows, size]) for name, size in (("x", depth), ("y", columns)))
    graph = helper.make_graph([node], "g", [x], [y], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("bits", [4, 8])
def test_level_of_the_model_and_of_the_user(bits: int) -> None:
    """A node with level 4 is quantized unless the user asks for more; one without is not unless the user permits it."""
    rng = np.random.default_rng(5)
    matrix = draw_quantized_matrix(rng, (96, 24), bits, (32, 1), "none", "float32")
    x = rng.standard_normal((6, 96)).astype(np.float32)
    exact = x.astype(np.float64) @ matrix.array().astype(np.float64)
    represented = quantize(x, 32)[0] @ matrix.array().astype(np.float64)
    for level, asked, quantizes in ((4, None, True), (4, 0, False), (1, None, False), (0, None, False), (0, 4, True)):
        model = model_of_bits(matrix, level)
        compiled = lowering.compile(model, accuracy_level=asked)
        np.testing.assert_allclose(compiled.run({"x": x})["y"], represented if quantizes else exact, atol=1e-4)
        assert compiled.manifest.accuracy_level == (4 if quantizes else 0)
        assert any("are int8" in note for note in compiled.manifest.notes) == quantizes
        assert lowering.verify(model, against="onnxruntime", accuracy_level=asked).first_difference is None
    with raises("argument.integer_invalid"):
        lowering.compile(model, accuracy_level=5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 12000, 4), (5, 1100, 8)])
def test_static_sizes(bits: int, rows: int, depth: int, columns: int) -> None:
    """Loops of few operations are serial, and the scratch memory of both is of one scope."""
    rng = np.random.default_rng(9)
    matrix = draw_quantized_matrix(rng, (depth, columns), bits, (32, 1), "none", "float32")
    x = rng.standard_normal((rows, depth)).astype(np.float32)
    y = lowering.compile(model_of_bits(matrix, 4, rows)).run({"x": x})["y"]
    expected = quantize(x, 32)[0] @ matrix.array().astype(np.float64)
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32, 128])
def test_error_is_no_larger_than_that_of_onnxruntime(bits: int, block: int) -> None:
    """Against float64 of the same dequantized weights.

    On some processors onnxruntime keeps the rows of a level 4; then the bound is what rounding to 127 steps gives.
    """
    rng = np.random.default_rng(6)
    matrix = draw_quantized_matrix(rng, (512, 64), bits, (block, 1), "none", "float32")
    model = model_of_bits(matrix, 4)
    x = rng.standard_normal((64, 512)).astype(np.float32)
    exact = x.astype(np.float64) @ matrix.array().astype(np.float64)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    peer, ours = (
        np.square(y - exact).mean()
        for y in (session.run(None, {"x": x})[0], lowering.compile(model).run({"x": x})["y"])
    )
    size = np.square(exact).mean()
    quantizes = peer > 1e-8 * size
    print(f"onnxruntime quantizes: {quantizes}; squared errors {ours / size:.2e}, {peer / size:.2e}")
    assert ours <= (1.05 * peer if quantizes else 5e-5 * size)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_matmuls_of_one_tensor_quantize_it_once(scheme: lowering.choices.Scheme) -> None:
    """Queries, keys and values, and a gate; another tensor has integers of its own. Threads change nothing."""
    rng = np.random.default_rng(7)
    w = {
        name: (rng.standard_normal((64, n)) / 8).astype(np.float32)
        for name, n in {"q": 48, "k": 16, "v": 16, "g": 40, "u": 40}.items()
    }
    down = (rng.standard_normal((40, 24)) / 6).astype(np.float32)
    matmuls = " ".join(f"{name} = MatMul (x, w{name})" for name in w)
    text = f"{matmuls} s = Sigmoid (g) a = Mul (s, u) y = MatMul (a, wd)"
    nodes = onnx.parser.parse_graph(f"g (float[n,64] x) => (float[n,24] y) {{ {text} }}").node
    outputs = {"q": 48, "k": 16, "v": 16, "y": 24}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, ["n", 64])],
        [helper.make_tensor_value_info(name, 1, ["n", size]) for name, size in outputs.items()],
        [numpy_helper.from_array(array, f"w{name}") for name, array in {**w, "d": down}.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    compiled = lowering.compile(model, weights=scheme, accuracy_level=4)
    plain = lowering.compile(model, weights=scheme)
    for rows in (1, 5, 300):
        x = rng.standard_normal((rows, 64)).astype(np.float32)
        got, expected = compiled.bind({"x": x}, threads=2)(), plain.run({"x": x})
        for name, value in expected.items():
            error = np.sqrt(np.square(np.asarray(got[name]) - value).mean() / np.square(value).mean())
            assert 1e-4 < error < 0.02, (name, error)
        for name, value in compiled.bind({"x": x}, threads=1)().items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(got[name]))


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs Debian's gcc-aarch64-linux-gnu")
@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs Debian's qemu-user")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("feature", ["dotprod", "i8mm"])
def test_aarch64_under_emulation(feature: str, bits: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    matrix = draw_quantized_matrix(rng, (64, 20), bits, (32, 1), "none", "float32")
    manifest = compile_to(tmp_path / "out", model_of_bits(matrix, 4, rows=5), f"cpu:aarch64+{feature}")
    assert manifest.accuracy_level == 4
    library, host = tmp_path / "out" / "model.so", tmp_path / "kernel_host"
    names = subprocess.run(["aarch64-linux-gnu-nm", "-D", library], capture_output=True, text=True, check=True).stdout
    (symbol,) = set(re.findall(r"\b(__tvm_ffi_\w*matmul\w*)", names))
    include = tvm_ffi.libinfo.find_include_path()
    subprocess.run(["aarch64-linux-gnu-gcc", "-O1", "-rdynamic", "-I", include, HOST, "-o", host, "-ldl"], check=True)
    stored = (tmp_path / "out" / "weights.bin").read_bytes()
    x = rng.standard_normal((5, 64)).astype(np.float32)
    kinds = {"int8": "b", "int32": "i", "float32": ""}
    weights = [(kinds[w.storage], w.dims, stored[w.offset : w.offset + w.nbytes]) for w in manifest.weights]
    operands = [("", x.shape, x.tobytes()), *weights]
    shapes = [str(n) for kind, dims, _ in (*operands, ("", (5, 20), b"")) for n in (f"{kind}{len(dims)}", *dims)]
    done = subprocess.run(
        ["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", host, library, symbol, *shapes],
        input=b"".join(content for *_, content in operands), capture_output=True, check=True,
    )  # fmt: skip
    expected = quantize(x, 32)[0] @ matrix.array().astype(np.float64)
    np.testing.assert_allclose(np.frombuffer(done.stdout, np.float32).reshape(5, 20), expected, atol=1e-4)
