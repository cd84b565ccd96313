"""QuantizeLinear; DequantizeLinear: computed at run time, and as constant matrices of matmuls that stay integers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering
from lowering.importing.values import numpy_dtype
from tests.ops.expectations import Expectations, import_node
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)
RANGES = {
    "int8": (-128, 128), "uint8": (0, 256), "int4": (-8, 8), "uint4": (0, 16), "int16": (-999, 999),
    "int2": (-2, 2), "uint2": (0, 4),
}  # fmt: skip


def draw_values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return RNG.integers(*RANGES[dtype], shape).astype(numpy_dtype(dtype))


def broadcast_blocks(values: np.ndarray, axis: int, size: int, rank: int, extent: int) -> np.ndarray:
    """Broadcast values of a tensor, an axis, or of blocks."""
    if size:
        return values.repeat(size, axis).take(range(extent), axis)
    return values.reshape([-1 if k == axis else 1 for k in range(rank)]) if values.ndim else values


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [dtype for dtype in RANGES if dtype != "int2"])
def test_values(dtype: str) -> None:
    case = Expectations()
    for shape, axis, size, scales in (
        ((3, 5), 1, 0, ()),
        ((3, 5), 0, 0, (3,)),
        ((2, 3, 5), -2, 0, (3,)),
        ((4, 7), 1, 3, (4, 3)),
        ((2, 8, 3), 1, 4, (2, 2, 3)),
    ):
        x, zero = draw_values(dtype, shape), draw_values(dtype, scales)
        for out in ("float32", "float16"):
            scale = RNG.uniform(0.01, 0.1, scales).astype(out)
            s, z = (
                broadcast_blocks(a.astype(np.float32), axis % x.ndim, size, x.ndim, shape[axis]) for a in (scale, zero)
            )
            exact = ((x.astype(np.float32) - z) * s).astype(out)
            case.expect("DequantizeLinear", [x, scale, zero], exact, axis=axis, block_size=size)
            case.expect(
                "DequantizeLinear", [x, scale], (x.astype(np.float32) * s).astype(out), axis=axis, block_size=size
            )
            case.expect(
                "DequantizeLinear", [x, scale, zero], exact, axis=axis, block_size=size, constant=(0, 1, 2)
            )  # other readers get floats
    case.check()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [dtype for dtype in RANGES if dtype != "uint2"])
def test_quantized_values(dtype: str) -> None:
    """Ties, values out of range, and quotients in each precision."""
    case = Expectations()
    low, high = RANGES[dtype] if dtype != "int16" else (-(2**15), 2**15)
    for shape, axis, size, scales in (
        ((3, 5), 1, 0, ()),
        ((3, 5), 1, 0, (1,)),
        ((2, 3, 5), -2, 0, (3,)),
        ((4, 7), 1, 3, (4, 3)),
    ):
        for source, precise in (("float32", ""), ("float16", ""), ("bfloat16", ""), ("float16", "float32")):
            scale = (2.0 ** RNG.integers(-1, 3, scales)).astype(source)
            x = (RNG.integers(low - 20, high + 20, shape) / 2).astype(source)
            zero = draw_values(dtype, scales)
            s, z = (
                broadcast_blocks(a.astype(np.float64), axis % x.ndim, size, x.ndim, shape[axis])
                if a.size > 1
                else a.astype(np.float64)
                for a in (scale, zero)
            )
            quotient = (x.astype(np.float64) / s).astype(precise or source).astype(np.float64)
            exact = (np.rint(quotient) + z).clip(low, high - 1).astype(numpy_dtype(dtype))
            more: dict[str, Any] = {"precision": helper.np_dtype_to_tensor_dtype(np.dtype(precise))} if precise else {}
            case.expect("QuantizeLinear", [x, scale, zero], exact, axis=axis, block_size=size, **more)
            exact = np.rint(quotient).clip(low, high - 1).astype(numpy_dtype(dtype))
            to = helper.np_dtype_to_tensor_dtype(np.dtype(numpy_dtype(dtype)))
            case.expect("QuantizeLinear", [x, scale], exact, axis=axis, block_size=size, output_dtype=to, **more)
    case.check()


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn"]
)
def test_small_floats(dtype: str) -> None:
    case = Expectations()
    x = np.append(RNG.standard_normal(40) * 4, [1e6, -1e6, 0, 3.5]).astype(np.float32)
    to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    scale = np.float32(0.5)
    largest = float(ml_dtypes.finfo(dtype).max)
    exact = (x / scale).clip(-largest, largest).astype(dtype)
    case.expect("QuantizeLinear", [x, np.array(scale)], exact, output_dtype=to)
    if dtype != "float4_e2m1fn":
        case.expect("QuantizeLinear", [x, np.array(scale)], (x / scale).astype(dtype), output_dtype=to, saturate=0)
    case.check()


@pytest.mark.parametrize(
    ("dtype", "axis", "size", "transposed"),
    [
        ("int8", 1, 0, False),
        ("uint8", 0, 0, True),
        ("int4", 0, 16, False),
        ("uint4", 1, 32, True),
        ("int2", 0, 16, False),
        ("uint2", 1, 16, True),
    ],
)
def test_matmuls_read_integers(dtype: str, axis: int, size: int, transposed: bool) -> None:
    """The weights of the artifact are at most as large as the model's integers, scales and padding."""
    rows, columns = 100, 128
    shape = (columns, rows) if transposed else (rows, columns)
    scales = tuple(-(-n // size) if k == axis else n for k, n in enumerate(shape)) if size else (shape[axis],)
    w, zero, scale = (
        draw_values(dtype, shape),
        draw_values(dtype, scales),
        RNG.uniform(0.01, 0.1, scales).astype(np.float32),
    )
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["v"], axis=axis, block_size=size),
            helper.make_node("Gemm", ["x", "v"], ["y"], transB=int(transposed)),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", rows])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", columns])],
        [numpy_helper.from_array(a, name) for name, a in (("w", w), ("scale", scale), ("zero", zero))],
    )
    opset, ir_version = (25, 13) if "2" in dtype else (21, 10)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    module = lowering.compile(model)
    quantized_bytes = w.size // (1 if "8" in dtype else 2) + scale.nbytes + zero.size
    assert sum(weight.nbytes for weight in module.manifest.weights) < 1.1 * quantized_bytes
    s, z = (broadcast_blocks(a.astype(np.float64), axis, size, 2, shape[axis]) for a in (scale, zero))
    exact = (w.astype(np.float64) - z) * s
    for m in (1, 3, 9):
        x = RNG.standard_normal((m, rows), np.float32)
        expected = x.astype(np.float64) @ (exact.T if transposed else exact)
        np.testing.assert_allclose(module.run({"x": x})["y"], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("shapes", "attributes", "message"),
    [
        (((4, 6), (2, 3), (2,)), {"block_size": 2}, "x_zero_point has rank 1"),
        (((4, 6), (3,)), {"block_size": 2}, "blocks of x need rank 2"),
        (((4, 6), (4, 6)), {}, "Set block_size"),
        (((4, 6), (5,)), {"axis": 0}, "dimension 0 of input 'x1' is 5, and must be 4"),
    ],
)
def test_refusals(shapes: tuple, attributes: dict, message: str) -> None:
    types = ("int8", "float32", "int8")
    with pytest.raises(lowering.NodeError, match=message):
        import_node("DequantizeLinear", list(zip(types, shapes)), **attributes)


def test_types_that_differ_are_refused() -> None:
    shapes = [("float32", (4,)), ("float32", ()), ("int8", ())]
    with raises("quantize_linear.dtype_mismatch"):
        import_node("QuantizeLinear", shapes, output_dtype=TensorProto.UINT8)
    with raises("quantize_linear.dtype_unsupported"):
        import_node("QuantizeLinear", shapes[:2], output_dtype=TensorProto.INT32)
