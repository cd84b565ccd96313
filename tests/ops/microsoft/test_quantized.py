"""com.microsoft operators of bytes: quantized values equal those of onnxruntime, or differ by one where it rounds
midpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import lowering
from lowering.checking.references import create_session_options

from ..expectations import value_info
from .comparison import Comparison, draw_factors, import_node, opsets

RNG = np.random.default_rng(0)
SCALES = {name: np.array(RNG.uniform(0.01, 0.05), np.float32) for name in ("s1", "s2", "s3")}


def check_node(
    name: str, arrays: dict[str, Any], dtype: str, rank: int, constant_names: str = "", **attributes: Any
) -> None:
    """Compare the node's results with onnxruntime; `constant_names` names constants."""
    constants = set(constant_names.split())
    inputs = [value_info(n, x.dtype.name, x.shape) for n, x in arrays.items() if x is not None and n not in constants]
    node = helper.make_node(
        name, [n if x is not None else "" for n, x in arrays.items()], ["y"], domain="com.microsoft", **attributes
    )
    weights = [numpy_helper.from_array(arrays[n], n) for n in sorted(constants)]
    graph = helper.make_graph([node], "g", inputs, [value_info("y", dtype, [f"d{k}" for k in range(rank)])], weights)
    model = helper.make_model(graph, opset_imports=opsets(21), ir_version=10)
    feed = {n: x for n, x in arrays.items() if x is not None and n not in constants}
    session = onnxruntime.InferenceSession(model.SerializeToString(), create_session_options())
    (want,) = session.run(None, feed)
    got = lowering.compile(onnx.load_model_from_string(model.SerializeToString())).run(feed)["y"]
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if got.dtype == np.float32:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        return
    apart = np.abs(got.astype(int) - want.astype(int))
    assert apart.max() <= 1 and (apart > 0).mean() < 0.02


def draw_quantized(dtype: str, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("name", ["QLinearAdd", "QLinearMul"])
def test_add_and_mul(name: str, dtype: str) -> None:
    a, b, zero = draw_quantized(dtype, 2, 7, 33), draw_quantized(dtype, 33), draw_quantized(dtype)
    check_node(name, {"a": a, "s1": SCALES["s1"], "z1": zero, "b": b, "s2": SCALES["s2"], "z2": draw_quantized(dtype),
                      "s3": SCALES["s3"], "z3": draw_quantized(dtype)}, dtype, 3)  # fmt: skip


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(
    ("name", "attributes"),
    [("QLinearSigmoid", {}), ("QLinearLeakyRelu", {"alpha": 0.2}), ("QLinearSoftmax", {"axis": -1, "opset": 13}),
     ("QLinearSoftmax", {"axis": 1, "opset": 11})],
)  # fmt: skip
def test_functions(name: str, attributes: dict[str, Any], dtype: str) -> None:
    arrays = {"x": draw_quantized(dtype, 3, 5, 40), "s1": SCALES["s1"], "z1": draw_quantized(dtype)}
    arrays |= {"s2": np.array(1 / 256, np.float32), "z2": np.array(-128 if dtype == "int8" else 0, dtype)}
    check_node(name, arrays, dtype, 3, constant_names="s1 z1 s2 z2", **attributes)


def test_concat() -> None:
    arrays = {"s3": SCALES["s3"], "z3": draw_quantized("uint8"), "a": draw_quantized("uint8", 2, 3),
              "s1": SCALES["s1"], "z1": draw_quantized("uint8"), "b": draw_quantized("uint8", 2, 5), "s2": SCALES["s2"],
              "z2": draw_quantized("uint8")}  # fmt: skip
    check_node("QLinearConcat", arrays, "uint8", 2, constant_names="s1 s2 s3 z1 z2 z3", axis=1)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_where(dtype: str) -> None:
    arrays = {"c": RNG.random((3, 1)) > 0.5, "a": draw_quantized(dtype, 2, 1, 5), "s1": SCALES["s1"],
              "z1": draw_quantized(dtype), "b": draw_quantized(dtype, 5), "s2": SCALES["s2"],
              "z2": draw_quantized(dtype), "s3": SCALES["s3"], "z3": draw_quantized(dtype)}  # fmt: skip
    check_node("QLinearWhere", arrays, dtype, 3, constant_names="s1 s2 s3 z1 z2 z3")


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "shape", "attributes"),
    [
        ("uint8", (2, 3, 7), {"strides": [2], "pads": [1, 1], "count_include_pad": 1}),
        ("int8", (2, 3, 7, 9), {"strides": [2, 1], "pads": [1, 0, 1, 1]}),
        ("uint8", (2, 3, 7, 9), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        # The last window along the second axis lies partly after the padding.
        ("uint8", (1, 2, 5, 4), {"ceil_mode": 1, "strides": [2, 2], "pads": [1] * 4, "count_include_pad": 1}),
        ("int8", (2, 3, 5, 4, 6), {}),
    ],
)
def test_pools(dtype: str, shape: tuple[int, ...], attributes: dict[str, Any], last: int) -> None:
    arrays = {
        "x": draw_quantized(dtype, *shape),
        "s1": SCALES["s1"],
        "z1": draw_quantized(dtype),
        "s2": SCALES["s2"],
        "z2": draw_quantized(dtype),
    }
    kernel = [3] * (len(shape) - 2)
    check_node("QLinearAveragePool", arrays, dtype, len(shape), channels_last=last, kernel_shape=kernel, **attributes)
    if not attributes:
        check_node("QLinearGlobalAveragePool", arrays, dtype, len(shape), channels_last=last)


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("of_b", ["uint8", "int8"])
def test_matmuls_of_matrices(of_b: str, by_column: bool) -> None:
    scale = RNG.uniform(0.01, 0.02, 50 if by_column else ()).astype(np.float32)
    zero, bias = draw_quantized(of_b, *scale.shape), RNG.standard_normal(50).astype(np.float32)
    b, a = draw_factors(RNG, of_b, 37, 50), RNG.standard_normal((2, 9, 37)).astype(np.float32)
    check_node("DynamicQuantizeMatMul", {"a": a, "b": b, "s2": scale, "z2": zero, "bias": bias}, "float32", 3,
               constant_names="b s2 z2 bias")  # fmt: skip
    arrays = {
        "a": draw_quantized("uint8", 2, 9, 37),
        "b": b,
        "s1": SCALES["s1"],
        "s2": scale,
        "z1": draw_quantized("uint8"),
        "z2": zero,
    }
    check_node("MatMulIntegerToFloat", {**arrays, "bias": bias}, "float32", 3, constant_names="b z2")
    check_node("MatMulIntegerToFloat", arrays, "float32", 3)


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("turned", [0, 1])
def test_gemm(turned: int, floats: bool) -> None:
    b = draw_factors(RNG, "int8", *((30, 21) if turned else (21, 30)))
    arrays = {"a": draw_quantized("uint8", 8, 21), "s1": SCALES["s1"], "z1": draw_quantized("uint8"), "b": b,
              "s2": SCALES["s2"], "z2": np.array(0, np.int8),
              "c": RNG.integers(-999, 999, 30).astype(np.int32)}  # fmt: skip
    if not floats:
        arrays |= {"s3": np.array(0.5, np.float32), "z3": np.array(99, np.uint8)}
    check_node("QGemm", arrays, "float32" if floats else "uint8", 2,
               constant_names="b z2 s1 s2 z1" + ("" if floats else " s3 z3"), transB=turned, alpha=0.5)  # fmt: skip


def draw_embedding(dtype: str, segments: bool, masked: bool) -> list[np.ndarray | None]:
    """Draw inputs of QEmbedLayerNormalization: 3 sequences of 5 tokens."""
    ids, kinds = (RNG.integers(0, n, (3, 5)).astype(np.int32) for n in (7, 2))
    tables: list[np.ndarray | None] = [draw_quantized(dtype, *shape) for shape in ((7, 6), (9, 6), (2, 6), (6,), (6,))]
    scales: list[np.ndarray | None] = [np.asarray(RNG.uniform(0.01, 0.05), np.float32) for _ in tables]
    zeros: list[np.ndarray | None] = [draw_quantized(dtype) for _ in tables]
    if not segments:
        tables[2] = scales[2] = zeros[2] = None
    mask = RNG.integers(0, 2, (3, 5)).astype(np.int32) if masked else None
    return [ids, kinds if segments else None, *tables, mask, *scales, *zeros]


def test_embeddings() -> None:
    case, sizes = Comparison(), {0: ("b", "s"), 1: ("b", "s")}
    for dtype, segments in (("uint8", True), ("int8", False)):
        arrays = draw_embedding(dtype, segments, masked=segments)
        how = {"outputs": ("float32", "int32"), "epsilon": 0.1}
        case.add("QEmbedLayerNormalization", arrays, constant=[2, 3], **how)
        case.add("QEmbedLayerNormalization", arrays, dims=sizes if segments else {0: ("b", "s")}, **how)
    case.check()


@pytest.mark.parametrize(
    ("k", "kind", "message"),
    [
        (0, ("int32", (15,)), "word_embedding has rank 1"),
        (0, ("int32", (1, 10)), "position_embedding has 9 rows, and there are 10 tokens"),
        (2, ("float32", (7, 6)), "word_embedding is float32"),
        (3, ("uint8", (9, 5)), "dimension 1 of input 'x3' is 5, and must be 6"),
        (8, ("float32", (7,)), "'x8' is a vector of 7"),
        (10, None, "segment_embedding_scale is missing"),
    ],
)
def test_refused_embeddings(k: int, kind: Any, message: str) -> None:
    arrays = draw_embedding("uint8", segments=True, masked=False)
    kinds: list[Any] = [None if a is None else (a.dtype.name, a.shape) for a in arrays]
    kinds[k] = kind
    with pytest.raises(lowering.NodeError, match=message):
        import_node("QEmbedLayerNormalization", kinds, results=2)
