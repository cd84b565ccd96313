"""MoE and QMoE, compared with onnxruntime where it has a kernel, and with their documentation elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lowering

from .comparison import Comparison, opsets
from .mixture_reference import mixture

RNG = np.random.default_rng(38)
EXPERTS, WIDTH, INNER = 5, 32, 16


def draw_normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def draw_weights(fused: bool, third: bool = False, dtype: str = "float32") -> dict[str, np.ndarray | None]:
    columns = 2 * INNER if fused else INNER
    sizes = {1: (columns, WIDTH), 2: (WIDTH, INNER), **({3: (INNER, WIDTH)} if third else {})}
    weights: dict[str, np.ndarray | None] = {}
    for n, size in sizes.items():
        weights[f"fc{n}"] = draw_normal(EXPERTS, *size, dtype=dtype) / np.float32(4).astype(dtype)
        weights[f"bias{n}"] = draw_normal(EXPERTS, size[0], dtype=dtype)
    return weights


def list_inputs(weights: dict[str, np.ndarray | None], biased: bool = True) -> list[np.ndarray | None]:
    return [
        array for n in (1, 2, 3)
        for array in (weights.get(f"fc{n}"), weights.get(f"bias{n}") if biased else None)
    ]  # fmt: skip


SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1}


def test_like_onnxruntime() -> None:
    case = Comparison()
    for dtype in ("float32", "float16"):
        x, router = draw_normal(9, WIDTH, dtype=dtype), draw_normal(9, EXPERTS, dtype=dtype)
        sizes = {0: ("t", WIDTH), 1: ("t", EXPERTS)}
        for kind, k, normalizes in (("relu", 1, 0), ("silu", 3, 1), ("gelu", 2, 0), ("identity", EXPERTS, 1)):
            said = {"activation_type": kind, "k": k, "normalize_routing_weights": normalizes}
            inputs = [x, router, *list_inputs(draw_weights(False, dtype=dtype), kind != "relu")]
            case.add("MoE", inputs, constant=range(2, 8), dims=sizes, **said)
        said = {**SWIGLU, "activation_alpha": 1.7, "activation_beta": 1.0, "swiglu_limit": 1.5, "k": 2}
        inputs = [x, router, *list_inputs(draw_weights(True, dtype=dtype))]
        case.add("MoE", inputs, constant=range(2, 8), dims=sizes, **said)
        batch, router = draw_normal(2, 3, WIDTH, dtype=dtype), draw_normal(6, EXPERTS, dtype=dtype)
        inputs = [batch, router, *list_inputs(draw_weights(False, dtype=dtype))]
        case.add("MoE", inputs, constant=range(2, 8), dims={0: ("b", "s", WIDTH), 1: ("t", EXPERTS)}, k=2)
    case.check()


def draw_packed(n: int, k: int, bits: int, block: int, zeros: bool) -> tuple[np.ndarray, list[np.ndarray | None]]:
    """Return a matrix [E, n, k] and its stored form: integers, scales and zero points."""
    blocks, size = (k // block if block else 1), block or k
    integers = RNG.integers(0, 2**bits, (EXPERTS, n, k))
    scales = (RNG.random((EXPERTS, n, blocks)) * 0.1 + 0.05).astype(np.float32)
    zero = RNG.integers(0, 2**bits, scales.shape) if zeros else np.full(scales.shape, 2 ** (bits - 1))
    matrix = (integers - zero.repeat(size, 2)) * scales.repeat(size, 2)

    def pack(values: np.ndarray) -> np.ndarray:
        lanes_per_byte = 8 // bits
        padded = np.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, -values.shape[-1] % lanes_per_byte)])
        padded = padded.reshape(*values.shape[:-1], -1, lanes_per_byte)
        return sum(padded[..., n] << bits * n for n in range(lanes_per_byte)).astype(np.uint8)

    stored = [pack(integers), scales, pack(zero)] if block else [pack(integers), scales[..., 0], pack(zero[..., 0])]
    return matrix, [*stored[:2], stored[2] if zeros else None]


def draw_quantized_case(
    bits: int, block: int, zeros: bool, fused: bool, has_router_weights: bool
) -> tuple[list[np.ndarray | None], dict[str, np.ndarray | None]]:
    columns = 2 * INNER if fused else INNER
    (first_matrix, first), (second_matrix, second) = (
        draw_packed(columns, WIDTH, bits, block, zeros),
        draw_packed(WIDTH, INNER, bits, block, zeros),
    )
    biases = draw_normal(EXPERTS, columns), draw_normal(EXPERTS, WIDTH)
    inputs: list[np.ndarray | None] = [
        draw_normal(9, WIDTH), draw_normal(9, EXPERTS), *first[:2], biases[0], *second[:2], biases[1], None, None, None,
        first[2], second[2], None, RNG.random((9, EXPERTS)).astype(np.float32) if has_router_weights else None,
    ]  # fmt: skip
    return inputs, {"fc1": first_matrix, "bias1": biases[0], "fc2": second_matrix, "bias2": biases[1]}


Q_CASES = [
    (4, 16, False, True, False, {"k": 2, **SWIGLU}),
    (4, 16, True, True, True, {"k": 3, **SWIGLU, "normalize_routing_weights": 1}),
    (2, 16, False, False, True, {"k": 2, "activation_type": "silu"}),
    (8, 0, False, False, False, {"k": 1, "activation_type": "relu"}),
    (4, 0, True, True, False, {"k": EXPERTS, **SWIGLU, "swiglu_limit": 2.0}),
]


def test_quantized_like_onnxruntime() -> None:
    case = Comparison()
    for bits, block, zeros, fused, has_router_weights, said in Q_CASES:
        inputs, _ = draw_quantized_case(bits, block, zeros, fused, has_router_weights)
        more = {"expert_weight_bits": bits, **({"block_size": block} if block else {})}
        case.add("QMoE", inputs, constant=range(2, 14), dims={0: ("t", WIDTH)}, **said, **more)
    case.check()


def make_model(operator: str, inputs: list[np.ndarray | None], **said: Any) -> onnx.ModelProto:
    """Return a model of one node. Its inputs are the first two inputs and router_weights."""
    names = ["" if array is None else f"x{n}" for n, array in enumerate(inputs)]
    while not names[-1]:
        names.pop()
    free = [n for n in (0, 1, 14) if n < len(names) and names[n]]
    values = [
        helper.make_tensor_value_info(names[n], onnx.TensorProto.FLOAT, ["t", a.shape[-1]])
        for n in free if (a := inputs[n]) is not None
    ]  # fmt: skip
    constants = [numpy_helper.from_array(a, names[n]) for n, a in enumerate(inputs) if a is not None and n not in free]
    node = helper.make_node(operator, names, ["y"], name="experts", domain="com.microsoft", **said)
    result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["t", WIDTH])
    graph = helper.make_graph([node], "g", values, [result], constants)
    return helper.make_model(graph, opset_imports=opsets(21), ir_version=10)


@pytest.mark.parametrize(
    "said",
    [
        {"activation_type": "swiglu", "swiglu_fusion": 2, "k": 2},
        {"activation_type": "geglu", "swiglu_fusion": 1, "k": 2},
        {"activation_type": "relu2", "k": 2},
        {"activation_type": "swiglu", "k": 2, "third": True, "activation_beta": 0.5},
        {"activation_type": "silu", "k": 2, "third": True, "normalize_routing_weights": 1},
    ],
    ids=lambda said: said["activation_type"],
)
def test_nodes_without_a_kernel_in_onnxruntime(said: dict[str, Any]) -> None:
    third = said.pop("third", False)
    weights = draw_weights(bool(said.get("swiglu_fusion")), third)
    x, router = draw_normal(7, WIDTH), draw_normal(7, EXPERTS)
    actual = lowering.compile(make_model("MoE", [x, router, *list_inputs(weights)], **said)).run(
        {"x0": x, "x1": router}
    )["y"]
    expected = mixture(x, router, weights, None, **said)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_any_number_of_tokens(rows: int) -> None:
    weights = draw_weights(True)
    x, router = draw_normal(rows, WIDTH), draw_normal(rows, EXPERTS)
    compiled = lowering.compile(make_model("MoE", [x, router, *list_inputs(weights)], k=2, **SWIGLU))
    actual = compiled.run({"x0": x, "x1": router})["y"]
    expected = mixture(x, router, weights, None, k=2, **SWIGLU)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max(initial=1))


@pytest.mark.parametrize(
    "corrupt, said, text",
    [
        ({"fc1": (4, INNER, WIDTH)}, {}, "has 4 experts"),
        ({"fc2": (EXPERTS, WIDTH + 1, INNER)}, {}, "33 x 16"),
        ({"bias1": (EXPERTS, 3)}, {}, "the bias of"),
        ({}, {"k": EXPERTS + 1}, "attribute k is 6"),
        ({}, {"activation_type": "tanh"}, "activation_type is 'tanh'"),
        ({}, {"use_sparse_mixer": 1}, "use_sparse_mixer"),
        ({}, {"activation_type": "swiglu"}, "fc3_experts_weights is missing"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_errors_name_the_node(corrupt: dict[str, tuple[int, ...]], said: dict[str, Any], text: str) -> None:
    weights = {**draw_weights(False), **{name: draw_normal(*shape) for name, shape in corrupt.items()}}
    with pytest.raises(lowering.NodeError) as raised:
        lowering.compile(
            make_model("MoE", [draw_normal(3, WIDTH), draw_normal(3, EXPERTS), *list_inputs(weights)], **said)
        )
    assert text in str(raised.value)


def test_precision_narrows_experts() -> None:
    weights = draw_weights(True)
    x, router = draw_normal(7, WIDTH), draw_normal(7, EXPERTS)
    proto = make_model("MoE", [x, router, *list_inputs(weights)], k=2, **SWIGLU)
    compiled = lowering.compile(proto, precision="float16")
    actual = compiled.run({"x0": x, "x1": router})["y"]
    expected = mixture(x, router, weights, None, k=2, **SWIGLU)
    assert any("1 matmuls" in note for note in compiled.manifest.notes)
    assert {weight.storage for weight in compiled.manifest.weights} == {"float16"}
    np.testing.assert_allclose(actual, expected, rtol=0, atol=6e-3 * np.abs(expected).max())


def test_blocks_that_are_incomplete() -> None:
    """48 columns in blocks of 32: onnxruntime gives the same results."""
    inner, width, block = 16, 48, 32
    arrays: list[list[np.ndarray]] = []
    matrices = []
    for n, k in ((2 * inner, width), (width, inner)):
        integers, blocks = RNG.integers(0, 16, (EXPERTS, n, k)), -(-k // block)
        scales = (RNG.random((EXPERTS, n, blocks)) * 0.1 + 0.05).astype(np.float32)
        matrices.append((integers - 8) * scales.repeat(block, 2)[:, :, :k])
        arrays.append([(integers[..., ::2] | integers[..., 1::2] << 4).astype(np.uint8), scales])
    x, router = draw_normal(5, width), draw_normal(5, EXPERTS)
    inputs = [x, router, *arrays[0], None, *arrays[1], None]
    proto = make_model("QMoE", inputs, k=2, expert_weight_bits=4, block_size=block, **SWIGLU)
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = width
    actual = lowering.compile(proto).run({"x0": x, "x1": router})["y"]
    weights: dict[str, np.ndarray | None] = {"fc1": matrices[0], "fc2": matrices[1]}
    expected = mixture(x, router, weights, None, k=2, chosen=True, **SWIGLU)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
