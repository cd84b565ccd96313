"""com.microsoft activations, normalizations and matmuls against onnxruntime."""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx
import pytest
from onnx import helper

import lowering
from lowering.importing.quantized_matrix import unpack_bits
from tests.support.error_codes import raises

from .comparison import Comparison, assert_close, import_node, opsets

RNG = np.random.default_rng(0)


def draw_normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def test_activations() -> None:
    case = Comparison()
    for dtype in ("float32", "float16"):
        x, bias = 3 * draw_normal(2, 3, 5, dtype=dtype), draw_normal(5, dtype=dtype)
        for operator in ("Gelu", "FastGelu", "QuickGelu"):
            case.add(operator, [x], dims={0: ("b", "s", 5)})
        case.add("QuickGelu", [x], alpha=-0.5)
        case.add("FastGelu", [x, bias], dims={0: ("b", "s", 5)})
        case.add("BiasGelu", [x, bias], dims={0: ("b", "s", "d"), 1: ("d",)})
    case.check()


def run_node(operator: str, *inputs: np.ndarray) -> np.ndarray:
    """Return the node's result, for nodes without a CPU kernel in onnxruntime."""
    names = [f"x{k}" for k in range(len(inputs))]
    node = helper.make_node(operator, names, ["y"], domain="com.microsoft")
    values = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, x.shape) for n, x in zip(names, inputs)]
    result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [f"d{k}" for k in range(inputs[0].ndim)])
    graph = helper.make_graph([node], "g", values, [result])
    model = helper.make_model(graph, opset_imports=opsets(21), ir_version=10)
    return lowering.compile(model).run(dict(zip(names, inputs)))["y"]


def test_bias_split_gelu() -> None:
    x, bias = draw_normal(2, 3, 10), draw_normal(10)
    a, b = np.split(x.astype(np.float64) + bias, 2, axis=-1)
    expected = a * 0.5 * b * (1 + np.vectorize(math.erf)(b / math.sqrt(2)))
    assert_close(run_node("BiasSplitGelu", x, bias), expected.astype(np.float32), "BiasSplitGelu")


def test_normalizations() -> None:
    case = Comparison(opset=14)  # before LayerNormalization came into ai.onnx
    for dtype in ("float32", "float16"):
        x, skip, gamma, beta, bias = (draw_normal(*s, dtype=dtype) for s in ((2, 3, 9), (2, 3, 9), (9,), (9,), (9,)))
        dims = {0: ("b", "s", 9), 1: ("b", "s", 9)}
        outputs = ("", None, None, "")
        for b in (beta, None):
            case.add("LayerNormalization", [x, gamma, b], dims={0: ("b", "s", 9)}, domain="", epsilon=0.1)
            case.add("SkipLayerNormalization", [x, skip, gamma, b, bias], outputs, dims=dims, epsilon=0.01)
            case.add("SkipLayerNormalization", [x, skip, gamma, b], dims=dims)
        case.add("SkipLayerNormalization", [x, skip[:1], gamma], outputs, dims={0: ("b", "s", 9), 1: (1, "s", 9)})
        case.add("SkipLayerNormalization", [x, skip[0], gamma, beta], outputs, dims={0: ("b", "s", 9), 1: ("s", 9)})
        case.add("SimplifiedLayerNormalization", [x, gamma], dims={0: ("b", "s", 9)}, domain="", epsilon=0.1, axis=-1)
        case.add("SkipSimplifiedLayerNormalization", [x, skip, gamma, bias], outputs, dims=dims, epsilon=0.1)
        case.add("SkipSimplifiedLayerNormalization", [x, skip, gamma], dims=dims)
        case.add("SkipSimplifiedLayerNormalization", [x[0], skip[0], gamma], outputs, dims={0: ("t", 9), 1: ("t", 9)})
    case.check()


def test_embeddings() -> None:
    case = Comparison()
    for dtype in ("float32", "float16"):
        word_table, positions, segments = (draw_normal(n, 6, dtype=dtype) for n in (7, 9, 2))
        gamma, beta = draw_normal(6, dtype=dtype), draw_normal(6, dtype=dtype)
        ids, segment_ids = (RNG.integers(0, n, (3, 5)).astype(np.int32) for n in (7, 2))
        mask = RNG.integers(0, 2, (3, 5)).astype(np.int32)
        position_ids = RNG.integers(0, 9, (3, 5)).astype(np.int32)
        options = {"outputs": (dtype, "int32", dtype), "epsilon": 0.1}
        sizes = {0: ("b", "s"), 1: ("b", "s")}
        case.add(
            "EmbedLayerNormalization", [ids, segment_ids, word_table, positions, segments, gamma, beta, mask], **options
        )
        case.add(
            "EmbedLayerNormalization",
            [ids, None, word_table, positions, None, gamma, beta],
            dims={0: ("b", "s")},
            **options,
        )
        for ids_of_positions in (position_ids, position_ids[:1]):
            tensors = [ids, segment_ids, word_table, positions, segments, gamma, beta, None, ids_of_positions]
            dims = {**sizes, 8: ("b" if ids_of_positions.shape[0] > 1 else 1, "s")}
            case.add("EmbedLayerNormalization", tensors, outputs=(dtype, "int32"), dims=dims)
    case.check()


def test_fused_matmul() -> None:
    case = Comparison()
    for dtype in ("float32", "float16"):
        a, b = draw_normal(2, 3, 4, dtype=dtype), draw_normal(2, 4, 5, dtype=dtype)
        case.add("FusedMatMul", [a, b], alpha=0.3, dims={0: ("n", "m", 4), 1: ("n", 4, "k")})
        case.add("FusedMatMul", [a, b.swapaxes(1, 2).copy()], transB=1, alpha=-2.0)
        case.add("FusedMatMul", [a.swapaxes(1, 2).copy(), b], transA=1)
        case.add("FusedMatMul", [a, b[0]], constant=[1], alpha=2.0)
    a, b = draw_normal(3, 2, 4), draw_normal(4, 2, 5)
    case.add("FusedMatMul", [a, draw_normal(2, 4, 5)], transBatchA=1)
    case.add("FusedMatMul", [draw_normal(4, 2, 3), b], transBatchA=1, transA=1, transBatchB=1)
    case.add("FusedMatMul", [a, draw_normal(5, 2, 4)], transBatchA=1, transBatchB=1, transB=1)
    case.check()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bits", [4, 2, 8])
def test_weights_of_few_bits(bits: int) -> None:
    case = Comparison()
    for dtype in ("float32", "float16")[: 1 if bits == 8 else 2]:
        for rows, size in ((40, 16), (64, 32), (30, 64)):
            blocks = -(-rows // size)
            packed = RNG.integers(0, 256, (7, blocks, size * bits // 8)).astype(np.uint8)
            scales = (draw_normal(7, blocks) / 2**bits).astype(dtype)
            zeros = RNG.integers(0, 256, (7, -(-blocks * bits // 8))).astype(np.uint8)
            floats = RNG.integers(0, 2**bits, (7, blocks)).astype(dtype)
            sizes = {"bits": bits, "block_size": size, "K": rows, "N": 7, "accuracy_level": 1, "dims": {0: ("b", rows)}}
            weights = range(1, 6)
            x, bias = draw_normal(3, rows, dtype=dtype), draw_normal(7, dtype=dtype)
            case.add("MatMulNBits", [x, packed, scales], constant=weights, **sizes)
            case.add("MatMulNBits", [x, packed, scales, zeros, None, bias], constant=weights, **sizes)
            if bits < 8:  # onnxruntime has kernels for fewer than 8 bits only
                case.add("MatMulNBits", [x, packed, scales.reshape(-1), floats], constant=weights, **sizes)
    case.check()


@pytest.mark.parametrize("bits", [4, 2, 8])
def test_blocks_of_act_order(bits: int) -> None:
    """g_idx is the block of each k. onnxruntime takes it with 4 bits and without zero points, and so checks the rest.

    With zero points its answers are not those of the formula, even where g_idx is what blocks are without it.
    """
    case, size, rows = Comparison(), 16, 40
    packed = RNG.integers(0, 256, (7, 3, size * bits // 8)).astype(np.uint8)
    scales = (draw_normal(7, 3) / 2**bits).astype(np.float32)
    zeros = RNG.integers(0, 256, (7, -(-3 * bits // 8))).astype(np.uint8)
    sizes = {"bits": bits, "block_size": size, "K": rows, "N": 7}
    x, successive = draw_normal(3, rows), np.arange(rows) // size
    values, unpacked_zeros = (unpack_bits(a, bits).astype(np.float64) for a in (packed.reshape(7, -1), zeros))
    for order in (successive, RNG.permutation(successive), RNG.integers(0, 3, rows)):
        g_idx = order.astype(np.int32)
        if bits == 4:
            case.add("MatMulNBits", [x, packed, scales, None, g_idx], constant=range(1, 6), **sizes)
        for zero, level in itertools.product((None, zeros), (1, 4)):
            inputs = {"packed": packed, "scales": scales, "zeros": zero, "g_idx": g_idx}
            node = helper.make_node(
                "MatMulNBits", ["x", *(name if a is not None else "" for name, a in inputs.items())], ["y"],
                domain="com.microsoft", accuracy_level=level, **sizes,
            )  # fmt: skip
            graph = helper.make_graph(
                [node], "g", [helper.make_tensor_value_info("x", 1, ["n", rows])],
                [helper.make_tensor_value_info("y", 1, ["n", 7])],
                [onnx.numpy_helper.from_array(a, name) for name, a in inputs.items() if a is not None],
            )  # fmt: skip
            versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
            y = lowering.compile(helper.make_model(graph, opset_imports=versions, ir_version=10)).run({"x": x})["y"]
            offsets = np.full((7, 3), 2.0 ** (bits - 1)) if zero is None else unpacked_zeros[:, :3]
            weight = (values[:, :rows] - offsets[:, order]) * scales[:, order]
            expected = x.astype(np.float64) @ weight.T
            np.testing.assert_allclose(y, expected, atol=1e-5 if level == 1 else 0.03 * np.abs(expected).max())
    if bits == 4:
        case.check()


F = "float32"


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "message"),
    [
        ("BiasGelu", [(F, (2, 4)), (F, (2, 4))], {}, "bias has rank 2"),
        ("BiasSplitGelu", [(F, (2, 5)), (F, (5,))], {}, "last dimension of X is 5"),
        ("BiasSplitGelu", [(F, (2, 4)), (F, (3,))], {}, "dimension 0 of input 'x1' is 3"),
        ("SkipLayerNormalization", [(F, (2, 3, 4)), (F, (2, 3, 4)), (F, (4,))], {"results": 2}, "statistic"),
        ("SimplifiedLayerNormalization", [(F, (2, 4)), (F, (4,))], {"results": 2}, "statistic"),
        (
            "EmbedLayerNormalization",
            [("int32", (2, 3)), ("int32", (2, 3)), (F, (5, 4)), (F, (5, 4)), None, (F, (4,)), (F, (4,))],
            {},
            "segment_embedding",
        ),
        ("FusedMatMul", [(F, (2, 3)), (F, (4, 5))], {}, "inner dimension"),
        (
            "MatMulNBits",
            [(F, (2, 32)), ("uint8", (5, 1, 16)), (F, (5,)), None, ("int32", (32,))],
            {"N": 5, "K": 32, "block_size": 32},
            "initializers",
        ),
        (
            "MatMulNBits",
            [(F, (2, 32)), ("uint8", (5, 1, 16)), (F, (5,))],
            {"N": 5, "K": 32, "block_size": 32},
            "initializers",
        ),
        (
            "MatMulNBits",
            [(F, (2, 32)), ("uint8", (5, 1, 16)), (F, (5,))],
            {"N": 5, "K": 32, "block_size": 32, "bits": 3},
            "bits is 3",
        ),
        (
            "MatMulNBits",
            [(F, (2, 32)), ("uint8", (5, 1, 16)), (F, (5,))],
            {"N": 5, "K": 32, "block_size": 32, "weight_prepacked": 1},
            "weight_prepacked",
        ),
    ],
)
def test_refusals(operator: str, inputs: list, attributes: dict, message: str) -> None:
    with pytest.raises(lowering.NodeError, match=message):
        import_node(operator, inputs, **attributes)


def test_operators_of_other_domains_are_others() -> None:
    """Attention-1 of com.microsoft has weights; ai.onnx Attention does not have them."""
    with raises("node.rank_unsupported"):
        import_node("Attention", [(F, (1, 2, 3, 4))] * 2, num_heads=2)
