"""com.microsoft QAttention compared with onnxruntime's kernel, and with float64 where types differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import lowering

from ..expectations import value_info
from .comparison import Comparison, assert_close, draw_factors, import_node, opsets
from .test_multi_head_attention import padding_masks

RNG = np.random.default_rng(0)
B, H, S, P, D, E = 3, 2, 5, 4, 7, 11
W = 3 * H * D
DIMS = {0: ("b", "s", E), 5: ("b", "t"), 8: (2, "b", H, "p", D)}


def draw_quantized(dtype: str, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)


def draw_scales(*shape: int) -> np.ndarray:
    return np.asarray(RNG.uniform(0.004, 0.008, shape), np.float32)


def draw_projection(x: str, weights: str, columns: int) -> list[np.ndarray | None]:
    """Draw input, weights, bias, the scales, no mask, and the zero points. With `columns`, each column of the weights
    has its own scale and zero point."""
    scale_shape = (columns,) if columns else ()
    bias = RNG.standard_normal(W).astype(np.float32)
    return [draw_quantized(x, B, S, E), draw_factors(RNG, weights, E, W), bias, draw_scales(),
            draw_scales(*scale_shape), None, draw_quantized(x), draw_quantized(weights, *scale_shape)]  # fmt: skip


def test_projections() -> None:
    case = Comparison()
    past = RNG.standard_normal((2, B, H, P, D)).astype(np.float32)
    inputs = draw_projection("uint8", "uint8", 0)
    case.add("QAttention", inputs, ("float32", "float32"), dims=DIMS, constant=[1, 4, 7], num_heads=H)
    inputs = draw_projection("uint8", "int8", W)
    case.add("QAttention", inputs[:5], ("float32",), num_heads=1, unidirectional=1)
    case.add("QAttention", [*inputs, past], ("float32", "float32"), dims=DIMS, constant=[1], num_heads=H, scale=0.2,
             unidirectional=1)  # fmt: skip
    case.check()


@pytest.mark.parametrize("filter_value", [-3.0, pytest.param(-10000.0, marks=pytest.mark.slow)])
def test_masks(filter_value: float) -> None:
    case = Comparison()
    mild = filter_value > -1000
    how: dict[str, Any] = {"num_heads": H, "mask_filter_value": filter_value, "tolerance": 1 if mild else 100}
    inputs = draw_projection("uint8", "int8", 0)
    past = RNG.standard_normal((2, B, H, P, D)).astype(np.float32)
    ends_and_starts = np.array([S, 4, 2, 0, 2, 1], np.int32)  # ends, then starts
    for mask, declared in [*padding_masks(S, S), (ends_and_starts, (2 * B,)), (np.ones((B, 1), np.int32), ("b", 1))]:
        dims = {0: ("b", "s", E), 5: declared} if "b" in declared else None
        case.add("QAttention", [*inputs[:5], mask, *inputs[6:]], ("float32",), dims=dims, constant=[1], **how)
    for mask, _ in padding_masks(S, P + S) if mild else []:
        case.add("QAttention", [*inputs[:5], mask, *inputs[6:], past], ("float32", "float32"), constant=[1], **how)
    case.check()


def compute_expected(inputs: list[Any], mask: np.ndarray) -> np.ndarray:
    """Return the result of the node in float64."""
    x, weights, bias, x_scale, scale, _, x_zero, zero = (np.asarray(v, np.float64) for v in inputs)
    qkv = ((x - x_zero) * x_scale) @ ((weights - zero) * scale) + bias
    q, k, v = (projection.reshape(B, S, H, D).swapaxes(1, 2) for projection in np.split(qkv, 3, -1))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(D) + np.where(mask, 0.0, -10000.0)[:, None, None]
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return ((scores / scores.sum(-1, keepdims=True)) @ v).swapaxes(1, 2).reshape(B, S, H * D)


@pytest.mark.parametrize(("x", "weights", "floats"), [("int8", "uint8", "float32"), ("uint8", "int8", "float16")])
def test_other_types(x: str, weights: str, floats: str) -> None:
    operands = draw_projection(x, weights, W)
    operands[2:5] = [v.astype(floats) for v in operands[2:5] if v is not None]
    mask = RNG.integers(0, 2, (B, S)).astype(np.int32)
    mask[:, 0] = 1
    arrays = dict(zip("abcdefgh", [*operands[:5], mask, *operands[6:]]))
    inputs = [value_info(n, a.dtype.name, a.shape if n != "a" else ("b", "s", E)) for n, a in arrays.items()]
    node = helper.make_node("QAttention", list(arrays), ["y"], domain="com.microsoft", num_heads=H)
    graph = helper.make_graph([node], "g", inputs, [value_info("y", floats, ["b", "s", H * D])])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets(21), ir_version=10)
    got = lowering.compile(model).run(arrays)["y"]
    assert_close(got, compute_expected(operands, mask).astype(floats), f"{x} {weights} {floats}")


F, U = "float32", "uint8"
NODE: list[Any] = [(U, ("b", "s", E)), (U, (E, W)), (F, (W,)), (F, ()), (F, ())]


@pytest.mark.parametrize(
    ("k", "kind", "attributes", "message"),
    [
        (0, (U, ("b", E)), {}, "input has rank 2"),
        (0, (F, ("b", "s", E)), {}, "A is float32"),
        (1, (U, (E + 1, W)), {}, "inner dimension"),
        (1, (U, (E, W + 1)), {}, "for weights of 43 columns"),
        (2, (F, (W - 1,)), {}, "bias has 41 elements, for 42"),
        (3, (F, (W,)), {}, "'x3' is a vector of 42 elements. Give it one element"),
        (4, (F, (W - 1,)), {}, "dimension 0 of input 'x4' is 41"),
        (4, ("float16", ()), {}, "weight_scale is float16 and bias is float32"),
        (0, NODE[0], {"do_rotary": 1}, "do_rotary is 1"),
        (0, NODE[0], {"num_heads": 4}, "4 heads do not divide"),
        (0, NODE[0], {"past_present_share_buffer": 1}, "past_present_share_buffer is 1"),
    ],
)
def test_refusals(k: int, kind: Any, attributes: dict[str, Any], message: str) -> None:
    inputs = [*NODE[:k], kind, *NODE[k + 1 :]]
    with pytest.raises(lowering.NodeError, match=message):
        import_node("QAttention", inputs, **{"num_heads": H, **attributes})
