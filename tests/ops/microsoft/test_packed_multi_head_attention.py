"""PackedMultiHeadAttention compared with float64 attention of each sequence: onnxruntime lacks a CPU kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import lowering

from .comparison import opsets
from .packed_attention_reference import packed_attention

RNG = np.random.default_rng(5)
HEADS, COUNTS, SEQUENCE = 3, (4, 0, 1, 7), 7


def draw_normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def make_model(inputs: dict[str, np.ndarray], **attributes: Any) -> onnx.ModelProto:
    order = ("query", "key", "value", "bias", "token_offset", "cumulative_sequence_length", "attention_bias")
    names = [name if name in inputs else "" for name in order]
    symbols = {"query": {0: "t"}, "key": {0: "t"}, "value": {0: "t"}, "token_offset": {0: "b", 1: "s"}}
    symbols |= {"cumulative_sequence_length": {0: "c"}}
    values = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(a.dtype),
            [symbols.get(name, {}).get(axis, size) for axis, size in enumerate(a.shape)],
        )
        for name, a in inputs.items()
    ]  # fmt: skip
    node = helper.make_node("PackedMultiHeadAttention", names, ["y"], name="packed", domain="com.microsoft",
                            num_heads=HEADS, **attributes)  # fmt: skip
    kind = helper.np_dtype_to_tensor_dtype(inputs["query"].dtype)
    graph = helper.make_graph([node], "g", values, [helper.make_tensor_value_info("y", kind, ["t", "w"])])
    return helper.make_model(graph, opset_imports=opsets(21), ir_version=10)


def tables() -> dict[str, np.ndarray]:
    starts = np.cumsum([0, *COUNTS]).astype(np.int32)
    return {"token_offset": np.zeros((len(COUNTS), SEQUENCE), np.int32), "cumulative_sequence_length": starts}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("float32", {}),
    ("float32", {"v_size": 5, "bias": True, "scale": 0.3}),
    ("float16", {"bias": True}),
    ("float32", {"packed": True, "bias": True}),
    ("float32", {"scores": (1, 1)}),
    ("float32", {"scores": (len(COUNTS), HEADS), "packed": True}),
]


@pytest.mark.parametrize("dtype, form", CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_sequences_see_their_own_tokens(dtype: str, form: dict[str, Any]) -> None:
    rows, size, v_size = sum(COUNTS), 8, form.get("v_size", 8)
    if form.get("packed"):
        inputs = {"query": draw_normal(rows, HEADS, 3, size, dtype=dtype)}
    else:
        widths = {"query": size, "key": size, "value": v_size}
        inputs = {name: draw_normal(rows, HEADS * width, dtype=dtype) for name, width in widths.items()}
    if form.get("bias"):
        inputs["bias"] = draw_normal(HEADS * (2 * size + v_size), dtype=dtype)
    if "scores" in form:
        inputs["attention_bias"] = draw_normal(*form["scores"], SEQUENCE, SEQUENCE, dtype=dtype)
    said = {"scale": form["scale"]} if "scale" in form else {}
    inputs |= tables()
    actual = lowering.compile(make_model(inputs, **said)).run(inputs)["y"]
    expected = packed_attention(inputs, HEADS, **said)
    bound = (5e-3 if dtype == "float16" else 1e-5) * np.abs(expected).max()
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=0, atol=bound)


def test_hostile_starts_stay_inside() -> None:
    rows = 6
    inputs = {name: draw_normal(rows, HEADS * 8) for name in ("query", "key", "value")}
    inputs["token_offset"] = np.zeros((3, 4), np.int32)
    compiled = lowering.compile(make_model(inputs | tables()))
    for starts in ((-5, 2**31 - 1, 3, -(2**31)), (4, 1, 9, 2)):
        feeds = inputs | {"cumulative_sequence_length": np.array(starts, np.int32)}
        assert compiled.run(feeds)["y"].shape == (rows, HEADS * 8)


@pytest.mark.parametrize(
    "corrupt, text",
    [({"bias": (5,)}, "bias"), ({"key": (12, 9)}, "key"), ({"query": (12, 25)}, "query")],
    ids=["bias", "key", "query"],
)
def test_errors_name_the_input(corrupt: dict[str, tuple[int, ...]], text: str) -> None:
    inputs = {name: draw_normal(12, HEADS * 8) for name in ("query", "key", "value")} | tables()
    inputs |= {name: draw_normal(*shape) for name, shape in corrupt.items()}
    with pytest.raises(lowering.LoweringError, match=text):
        lowering.compile(make_model(inputs))
