"""com.microsoft FusedConv, FusedGemm, Inverse, Trilu and 16-bit quantization against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lowering

from .comparison import Comparison, import_node

RNG = np.random.default_rng(0)
F = "float32"


def draw_normal(*shape: int, dtype: str = F) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


ACTIVATIONS: list[dict[str, Any]] = [
    {},
    {"activation": "Relu"},
    {"activation": "Tanh"},
    {"activation": "Sigmoid"},
    {"activation": "LeakyRelu", "activation_params": [0.3]},
    {"activation": "Clip", "activation_params": [-0.5, 0.25]},
    {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]},
]


def test_fused_conv() -> None:
    """Every activation, with and without bias and summand; groups, strides, and a depthwise convolution."""
    case = Comparison()
    for attributes in ACTIVATIONS:
        case.add(
            "FusedConv",
            [draw_normal(2, 4, 6, 5), draw_normal(6, 4, 3, 3), draw_normal(6)],
            constant=[1, 2],
            **attributes,
        )
    x, dims = draw_normal(1, 4, 7, 6), {0: ("n", 4, "h", "w"), 3: ("n", 8, "p", "q")}
    w, z = draw_normal(8, 4, 3, 3) / 4, draw_normal(1, 8, 7, 6)
    for attributes in ACTIVATIONS[:5:4]:
        sizes = {"pads": [1, 1, 1, 1], **attributes}
        case.add("FusedConv", [x, w, draw_normal(8), z], dims=dims, constant=[1, 2], **sizes)
    case.add("FusedConv", [x, draw_normal(8, 2, 3, 3)], group=2, strides=[2, 1], constant=[1], activation="Sigmoid")
    case.add(
        "FusedConv",
        [x, draw_normal(4, 1, 3, 3), draw_normal(4)],
        group=4,
        dilations=[2, 1],
        constant=[1],
        activation="Relu",
    )
    case.add("FusedConv", [x, draw_normal(3, 4, 1, 1)], auto_pad="SAME_UPPER", constant=[1], activation="Tanh")
    case.check()


def test_silu() -> None:
    """Newer versions of onnxruntime have a kernel for it."""
    model = import_node("FusedConv", [(F, (1, 2, 5, 5)), (F, (3, 2, 3, 3))], activation="Silu")
    assert model.outputs[0].dims == (1, 3, 3, 3)


def test_fused_gemm() -> None:
    case = Comparison()
    a, b, c = draw_normal(3, 5), draw_normal(5, 4), draw_normal(4)
    with_numbers = {
        "Elu": {"activation_alpha": 0.7},
        "HardSigmoid": {"activation_alpha": 0.3, "activation_beta": 0.4},
        "LeakyRelu": {"activation_alpha": 0.2},
        "Selu": {"activation_alpha": 1.5, "activation_gamma": 1.1},
        "ThresholdedRelu": {"activation_alpha": 0.6},
    }
    for name in ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh", *with_numbers):
        case.add("FusedGemm", [a, b, c], constant=[1, 2], activation=name, **with_numbers.get(name, {}))
    case.add("FusedGemm", [a, b], dims={0: ("m", 5)}, alpha=0.5, activation="Relu")
    case.add("FusedGemm", [a.T.copy(), b.T.copy(), draw_normal(3, 1)], transA=1, transB=1, beta=2.0, activation="Tanh")
    case.check()


def test_inverse() -> None:
    """Matrices that need pivots, stacked matrices, one of one element, and symbolic sizes."""
    case = Comparison()
    turned = np.array([[0, 2, 0], [0, 0, 4], [8, 0, 0]], F)
    case.add("Inverse", [turned])
    case.add("Inverse", [draw_normal(2, 3, 5, 5) + 4 * np.eye(5, dtype=F)], dims={0: ("a", 3, "n", "n")})
    case.add("Inverse", [draw_normal(4, 4, dtype="float64")])
    case.add("Inverse", [np.array([[[4.0]], [[-0.5]]], F)])
    case.add("Inverse", [(draw_normal(3, 3) + 3 * np.eye(3)).astype("float16")])
    case.check()


def test_trilu() -> None:
    case = Comparison()
    for k, upper in ((None, 1), (1, 1), (-2, 0), (7, 0)):
        offset = [] if k is None else [np.array(k, np.int64)]
        case.add("Trilu", [draw_normal(2, 4, 5), *offset], dims={0: ("b", "n", 5)}, upper=upper)
    case.check()


@pytest.mark.parametrize("dtype", ["uint16", "int16", "uint8", "int8"])
def test_quantization(dtype: str) -> None:
    """A scale for the tensor and along an axis, with saturation."""
    case, x = Comparison(), 40 * draw_normal(3, 4)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    step, zero = np.float32(60 / (high - low)), np.array((high + low) // 2 + 3, dtype)
    case.add("QuantizeLinear", [x, np.array(step), zero], [dtype], dims={0: ("n", 4)})
    case.add("QuantizeLinear", [x, np.array(step)], ["uint8"])
    case.add("QuantizeLinear", [x, step * np.float32([1, 2, 3, 4]), np.full(4, zero)], [dtype], axis=1)
    case.add("QuantizeLinear", [x, step * np.float32([1, 2, 3]), np.full(3, zero)], [dtype], axis=0, constant=[1, 2])
    whole = RNG.integers(low, high, (3, 4), dtype, endpoint=True)
    case.add("DequantizeLinear", [whole, np.array(step), zero], [F], dims={0: ("n", 4)})
    case.add("DequantizeLinear", [whole, np.array(step)], [F], constant=[1])
    case.add("DequantizeLinear", [whole, step * np.float32([1, 2, 3, 4]), np.full(4, zero)], [F], axis=1)
    case.check()


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "message"),
    [
        ("FusedConv", [(F, (1, 2, 5, 5)), (F, (3, 2, 3, 3))], {"activation": "Erf"}, "activation is 'Erf'"),
        (
            "FusedConv",
            [(F, (1, 2, 5, 5)), (F, (3, 2, 3, 3))],
            {"activation": "Clip", "activation_params": [1.0]},
            "activation_params has 1 numbers.*min and max",
        ),
        ("FusedConv", [(F, (1, 2, 5, 5)), (F, (3, 2, 3, 3))], {"activation": "LeakyRelu"}, "activation_params has 0"),
        ("FusedConv", [(F, (1, 2, 5, 5)), (F, (3, 2, 3, 3)), None, (F, (3, 3))], {}, "Z has rank 2"),
        ("FusedConv", [(F, (1, 2, 5, 5)), (F, (3, 2, 3, 3)), None, (F, (1, 3, 3, 4))], {}, "input Z"),
        ("FusedGemm", [(F, (2, 3)), (F, (3, 4))], {"activation": "Clip"}, "activation is 'Clip'"),
        ("FusedGemm", [(F, (2, 3)), (F, (2, 3, 4))], {}, "B has rank 3"),
        ("Inverse", [(F, (2, 3))], {}, "dimension"),
        ("Inverse", [("int32", (3, 3))], {}, "int32"),
        ("Trilu", [(F, (3,))], {}, "rank 1"),
    ],
)
def test_refusals(operator: str, inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(lowering.NodeError, match=f"(?s){operator}.*{message}"):
        import_node(operator, inputs, **attributes)
