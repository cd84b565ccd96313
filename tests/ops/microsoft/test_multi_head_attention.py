"""com.microsoft MultiHeadAttention and Attention against onnxruntime: packings, biases, masks, caches, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import lowering

from .comparison import Comparison, assert_close, import_node, opsets

RNG = np.random.default_rng(0)
B, H, S, T, P, D, DV, E = 3, 2, 5, 7, 4, 8, 6, 10
MHA = {"num_heads": H}


def draw_normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def padding_masks(rows: int, keys: int) -> list[tuple[np.ndarray, tuple[int | str, ...]]]:
    """Return masks of every shape that MultiHeadAttention and Attention share, and their declared shapes.

    In the first, third and fourth mask the second sequence does not see any key: a softmax of shifted scores.
    """
    ends = np.array([keys, 0, 3], np.int32)
    ragged = np.concatenate([ends, np.arange(B + 1) * rows, np.arange(B + 1) * keys]).astype(np.int32)
    by_key, by_row = (RNG.integers(0, 2, shape).astype(np.int32) for shape in ((B, keys), (B, rows, keys)))
    by_key[1], by_row[1, 0] = 0, 0
    return [
        (ends, ("b",)),
        (ragged, (3 * B + 2,)),
        (by_key, ("b", "t")),
        (by_row, ("b", "s", "t")),
    ]


def declare_sizes(*inputs: Any) -> dict[int, tuple[int | str, ...]]:
    return {k: dims for k, dims in enumerate(inputs) if dims is not None}


FLAT = declare_sizes(("b", "s", H * D), ("b", "l", H * D), ("b", "l", H * DV))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_multi_head_attention(dtype: str) -> None:
    case = Comparison()
    q, k, v = (
        draw_normal(B, S, H * D, dtype=dtype),
        draw_normal(B, T, H * D, dtype=dtype),
        draw_normal(B, T, H * DV, dtype=dtype),
    )
    new_k, new_v = draw_normal(B, S, H * D, dtype=dtype), draw_normal(B, S, H * D, dtype=dtype)
    past = draw_normal(B, H, P, D, dtype=dtype), draw_normal(B, H, P, D, dtype=dtype)
    bias = draw_normal(3 * H * D, dtype=dtype)
    case.add("MultiHeadAttention", [q, k, v], dims=FLAT, **MHA)
    case.add(
        "MultiHeadAttention",
        [q, k, v, draw_normal(H * (2 * D + DV), dtype=dtype)],
        ("", "", ""),
        dims=FLAT,
        scale=0.2,
        **MHA,
    )
    case.add("MultiHeadAttention", [q, new_k, new_v, bias], unidirectional=1, **MHA)
    projected = draw_normal(B, H, T, D, dtype=dtype), draw_normal(B, H, T, D, dtype=dtype)
    dims = declare_sizes(("b", "s", H * D), ("b", H, "l", D), ("b", H, "l", D))
    case.add("MultiHeadAttention", [q, *projected], dims=dims, **MHA)
    case.add("MultiHeadAttention", [q, *projected, bias], dims=dims, **MHA)
    attention_biases = [draw_normal(b, h, S, T, dtype=dtype) for b, h in ((B, H), (1, H), (B, 1), (1, 1))]
    for extra in attention_biases if dtype == "float32" else attention_biases[1:2]:
        case.add("MultiHeadAttention", [q, k, v, None, None, extra], **MHA)
    dims = declare_sizes(*[("b", "s", H * D)] * 3) | {6: ("b", H, "p", D), 7: ("b", H, "p", D)}
    for causal in (0, 1):
        inputs = [q, new_k, new_v, bias, None, None, *past]
        case.add("MultiHeadAttention", inputs, ("", "", ""), dims=dims, unidirectional=causal, **MHA)
    inputs = [q[:, :1], new_k[:, :1], new_v[:, :1], None, None, None, *past]
    case.add("MultiHeadAttention", inputs, ("", "", ""), unidirectional=1, **MHA)
    case.check()


@pytest.mark.parametrize("filter_value", [-10000.0, -3.0])
def test_padding_masks(filter_value: float) -> None:
    """A mild filter value shifts the scores slightly. The default loses digits of them, as in onnxruntime."""
    case = Comparison()
    mild = filter_value > -1000
    how = {**MHA, "mask_filter_value": filter_value, "tolerance": 1 if mild else 100}
    q, k, v = draw_normal(B, S, H * D), draw_normal(B, T, H * D), draw_normal(B, T, H * DV)
    past = draw_normal(B, H, P, D), draw_normal(B, H, P, D)
    extra = draw_normal(B, H, S, T)
    for mask, declared in padding_masks(S, T):
        dims = {**FLAT, 4: declared} if "b" in declared else None
        case.add("MultiHeadAttention", [q, k, v, None, mask], dims=dims if mild else None, **how)
        if mild:
            case.add("MultiHeadAttention", [q, k, v, None, mask, extra], **how)
    new_k, new_v = draw_normal(B, S, H * D), draw_normal(B, S, H * D)
    for mask, _ in padding_masks(S, P + S) if mild else []:
        case.add("MultiHeadAttention", [q, new_k, new_v, None, mask, None, *past], ("", "", ""), **how)
    for mask, _ in padding_masks(S, S):
        mask[..., 0] = mask[..., 0].clip(1)  # a causal row without visible keys is not comparable
        case.add("MultiHeadAttention", [q, new_k, new_v, None, mask], unidirectional=1, **how)
    case.check()


def test_scores_as_an_output() -> None:
    case = Comparison()
    q, k, v = draw_normal(B, S, H * D), draw_normal(B, T, H * D), draw_normal(B, T, H * DV)
    kinds = ("", None, None, "")
    case.add("MultiHeadAttention", [q, k, v], kinds, dims=FLAT, **MHA)
    mask, _ = padding_masks(S, T)[3]
    inputs = [q, k, v, None, mask, draw_normal(B, H, S, T)]
    case.add("MultiHeadAttention", inputs, kinds, dims=FLAT, mask_filter_value=-3.0, **MHA)
    case.check()


def test_packed_inputs() -> None:
    """Compared with the same node with separate inputs: onnxruntime lacks a kernel for a CPU."""
    qkv, query, kv = draw_normal(B, S, H, 3, D), draw_normal(B, S, H * D), draw_normal(B, T, H, 2, D)
    bias = draw_normal(3 * H * D)
    pairs = [
        ([qkv, None, None, b], [*(np.ascontiguousarray(qkv[:, :, :, n]).reshape(B, S, H * D) for n in range(3)), b])
        for b in (bias, None)
    ] + [
        ([query, kv, None, b], [query, *(np.ascontiguousarray(kv[:, :, :, n]).reshape(B, T, H * D) for n in (0, 1)), b])
        for b in (bias, None)
    ]
    nodes, feeds = [], {}
    for k, (packed, separate) in enumerate(pairs):
        for kind, inputs in (("p", packed), ("s", separate)):
            names = ["" if x is None else f"{kind}{k}_{j}" for j, x in enumerate(inputs)]
            feeds |= {name: x for name, x in zip(names, inputs) if x is not None}
            nodes.append(helper.make_node("MultiHeadAttention", names, [f"y{kind}{k}"], domain="com.microsoft", **MHA))
    values = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, x.shape) for n, x in feeds.items()]
    outputs = [helper.make_tensor_value_info(n.output[0], onnx.TensorProto.FLOAT, ["b", "s", "w"]) for n in nodes]
    graph = helper.make_graph(nodes, "g", values, outputs)
    results = lowering.compile(helper.make_model(graph, opset_imports=opsets(21), ir_version=10)).run(feeds)
    for k in range(len(pairs)):
        assert_close(results[f"yp{k}"], results[f"ys{k}"], f"packing {k}")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_attention(dtype: str) -> None:
    case = Comparison()
    x, weights, bias = (draw_normal(*shape, dtype=dtype) for shape in ((B, S, E), (E, 3 * H * D), (3 * H * D,)))
    dims = declare_sizes(("b", "s", E))
    case.add("Attention", [x, weights, bias], ("", ""), dims=dims, **MHA)
    case.add("Attention", [x, weights, bias], dims=dims, constant=[1, 2], unidirectional=1, scale=0.3, **MHA)
    widths = [H * D, H * D, H * DV]
    uneven = draw_normal(E, sum(widths), dtype=dtype), draw_normal(sum(widths), dtype=dtype)
    case.add("Attention", [x, *uneven], dims=dims, constant=[1], qkv_hidden_sizes=widths, **MHA)
    past = draw_normal(2, B, H, P, D, dtype=dtype)
    dims = {**dims, 4: (2, "b", H, "p", D)}
    for causal in (0, 1):
        case.add("Attention", [x, weights, bias, None, past], ("", ""), dims=dims, unidirectional=causal, **MHA)
    case.add("Attention", [x[:, :1], weights, bias, None, past], ("", ""), unidirectional=1, **MHA)
    case.add("Attention", [x, weights, bias, None, None, draw_normal(B, 1, S, S, dtype=dtype)], **MHA)
    case.check()


@pytest.mark.parametrize("filter_value", [-10000.0, -3.0])
def test_masks_of_attention(filter_value: float) -> None:
    case = Comparison()
    mild = filter_value > -1000
    how = {**MHA, "mask_filter_value": filter_value, "tolerance": 1 if mild else 100}
    x, weights, bias, past = (
        draw_normal(B, S, E),
        draw_normal(E, 3 * H * D),
        draw_normal(3 * H * D),
        draw_normal(2, B, H, P, D),
    )
    starts = np.array([0, 2, S, S, 4, 2], np.int32)[
        [3, 4, 5, 0, 1, 2]
    ]  # ends, then starts; the last batch sees none of the keys
    for mask, declared in [*padding_masks(S, S), (starts, (2 * B,)), (np.ones((B, 1), np.int32), ("b", 1))]:
        dims = declare_sizes(("b", "s", E), None, None, declared) if mild and "b" in declared else {}
        case.add("Attention", [x, weights, bias, mask], dims=dims, **how)
    for mask, _ in padding_masks(S, P + S) if mild else []:
        case.add("Attention", [x, weights, bias, mask, past], ("", ""), **how)
    case.check()


F, I = "float32", "int32"
QKV: list[Any] = [(F, ("b", "s", 16))] * 3
BERT: list[Any] = [(F, ("b", "s", 10)), (F, (10, 48)), (F, (48,))]


def append_input(inputs: list[Any], k: int, dtype: str, *dims: int | str) -> list[Any]:
    return [*inputs, *[None] * (k - len(inputs)), (dtype, dims)]


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "message"),
    [
        ("MultiHeadAttention", append_input(QKV, 8, I, 1), {}, "past_sequence_length"),
        (
            "MultiHeadAttention",
            append_input(QKV, 9, I, "b", 1, "m"),
            {},
            "and past_sequence_length is missing",
        ),
        ("MultiHeadAttention", append_input(QKV, 6, F, "b", 2, "p", 8), {}, "past_key and past_value"),
        ("MultiHeadAttention", QKV, {"num_heads": 3}, "3 heads do not divide"),
        ("MultiHeadAttention", QKV, {"mask_filter_value": float("-inf")}, "mask_filter_value is -inf"),
        ("MultiHeadAttention", QKV[:1], {}, "ranks .3, 0, 0."),
        ("MultiHeadAttention", [(F, ("b", "s", 4, 3, 8))], {}, "packed query"),
        ("MultiHeadAttention", append_input(QKV, 3, F, 47), {}, "bias has 47 elements"),
        ("MultiHeadAttention", append_input(QKV, 4, I, "b", 1, 1, "s"), {}, "key_padding_mask has rank 4"),
        ("MultiHeadAttention", append_input(QKV, 4, F, "b", "s"), {}, "key_padding_mask is float32"),
        ("MultiHeadAttention", append_input(QKV, 5, F, "s", "s"), {}, "attention_bias has rank 2"),
        ("MultiHeadAttention", [*QKV[:2], ("float16", ("b", "s", 16))], {}, "value is float16"),
        ("MultiHeadAttention", [(F, (1, 5, 16)), (F, (1, 7, 16)), (F, (1, 7, 16))], {"unidirectional": 1}, "5 and 7"),
        ("Attention", BERT, {"do_rotary": 1}, "do_rotary is 1"),
        ("Attention", BERT, {"past_present_share_buffer": 1}, "past_present_share_buffer"),
        ("Attention", BERT, {"qkv_hidden_sizes": [16, 12, 20]}, "qkv_hidden_sizes"),
        ("Attention", BERT, {"qkv_hidden_sizes": [12, 12, 24], "results": 2}, "qkv_hidden_sizes"),
        ("Attention", append_input(BERT, 3, I, "b", 1, "m", "m"), {}, "mask_index has rank 4"),
        ("Attention", append_input(BERT, 4, F, 2, "b", 2, 8), {}, "past has rank 4"),
        ("Attention", [BERT[0], (F, (11, 48))], {}, "inner dimension"),
    ],
)
def test_refusals(operator: str, inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(lowering.NodeError, match=message):
        import_node(operator, inputs, **{**MHA, **attributes})
