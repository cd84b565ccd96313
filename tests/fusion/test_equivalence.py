"""Equivalent ways of writing attention, shuffled: each becomes one Attention node that computes the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.fusion.graphs import SIZES, count_operators, draw_feeds, fuse_model, run_model

HEAD, V_HEAD = 8, 6


class Writer:
    """A model of one attention, its operators written in ways drawn at random."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.static = (
            self.draw.random() < 0.5
        )  # numbers for B, S and T: only with these may constants be the shape of a Reshape
        self.opset = self.draw.choice([11, 13, 17, 18, 22, 23, 24, 25])
        self.dtype = self.draw.choice([np.float32, np.float32, np.float16])
        self.wide = np.float32 if self.dtype == np.float16 else np.float64
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []

    def yes(self) -> bool:
        return self.draw.random() < 0.5

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def constant(self, elements: Any, dtype: Any = np.int64) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.array(elements, dtype), name))
        return name

    def input(self, name: str, shape: list[int | str], dtype: Any) -> str:
        if self.static:
            shape = [SIZES[size] if isinstance(size, str) else size for size in shape]
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def reshape(self, x: str, shape: list[int]) -> str:
        return self.node("Reshape", x, self.constant(shape))

    def cast(self, x: str, dtype: Any) -> str:
        return self.node("Cast", x, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def model(self) -> onnx.ModelProto:
        kv_heads = self.draw.randint(1, 3)
        heads = kv_heads * self.draw.randint(1, 3)
        flat = self.static and self.yes()
        q, kt, v = self.q(heads), self.kt(heads, kv_heads), self.values("v", heads, kv_heads, V_HEAD)
        if flat:
            q, v, kt = self.reshape(q, [-1, 3, HEAD]), self.reshape(v, [-1, 5, V_HEAD]), self.reshape(kt, [-1, HEAD, 5])
        scores = self.scaled_matmul(q, kt)
        if flat:
            scores = self.reshape(scores, [2, heads, 3, 5])
        if self.yes():
            cap = self.constant(2.5, self.dtype)
            scores = self.node("Mul", self.node("Tanh", self.node("Div", scores, cap)), cap)
        for index in range(self.draw.randint(0, 2)):
            scores = self.masked(scores, heads, index)
        y = self.node("MatMul", self.probabilities(scores, [-1, 3, 5] if flat else None), v)
        if flat:
            y = self.reshape(y, [2, heads, 3, V_HEAD])
        y = self.node("Transpose", y, perm=[0, 2, 1, 3])
        output = helper.make_tensor_value_info(
            y, helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)), ["B", "S", heads, V_HEAD]
        )
        graph = helper.make_graph(self.nodes, "g", self.inputs, [output], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def q(self, heads: int) -> str:
        if self.yes():
            return self.input("q", ["B", heads, "S", HEAD], self.dtype)
        x = self.input("q", ["B", "S", heads * HEAD], self.dtype)
        return self.node("Transpose", self.reshape(x, [0, 0, heads, HEAD]), perm=[0, 2, 1, 3])

    def values(self, name: str, heads: int, kv_heads: int, size: int) -> str:
        """Return values [B, heads, T, size], repeated from kv_heads."""
        if self.yes():
            x = self.input(name, ["B", kv_heads, "T", size], self.dtype)
        else:
            x = self.input(name, ["B", "T", kv_heads, size], self.dtype)
            x = self.node("Transpose", x, perm=[0, 2, 1, 3])
        group = heads // kv_heads
        if group == 1:
            return x
        form = self.draw.choice(["Expand", "Tile", "Gather"])
        if form == "Gather":
            return self.node("Gather", x, self.constant(np.repeat(np.arange(kv_heads), group)), axis=1)
        wide = self.reshape(x, [0, kv_heads, 1, -1, size])
        return self.reshape(self.node(form, wide, self.constant([1, 1, group, 1, 1])), [0, heads, -1, size])

    def kt(self, heads: int, kv_heads: int) -> str:
        if heads == kv_heads and self.yes():
            return self.input("k", ["B", heads, HEAD, "T"], self.dtype)
        k = self.values("k", heads, kv_heads, HEAD)
        if not self.static or self.yes():
            return self.node("Transpose", k, perm=[0, 1, 3, 2])
        last = next((node for node in self.nodes if k in node.output), None)
        if last is not None and last.op_type == "Reshape" and self.yes():  # both reshapes in one
            k = last.input[0]
        turned = self.node("Transpose", self.reshape(k, [-1, 5, HEAD]), perm=[0, 2, 1])
        return self.reshape(turned, [-1, heads, HEAD, 5])

    def scaled(self, x: str) -> str:
        factor = self.draw.choice([0.25, 0.5, 1.5])
        if self.yes():
            return self.node("Div", x, self.constant([1 / factor], self.dtype))
        pair = [x, self.constant(factor, self.dtype)]
        return self.node("Mul", *(pair if self.yes() else pair[::-1]))

    def scaled_matmul(self, q: str, kt: str) -> str:
        q = self.scaled(q) if self.yes() else q
        kt = self.scaled(kt) if self.yes() else kt
        scores = self.node("MatMul", q, kt)
        return self.scaled(scores) if self.yes() else scores

    def masked(self, scores: str, heads: int, index: int) -> str:
        shape: list[int | str] = [self.draw.choice([n, 1]) for n in ("B", heads, "S")] + ["T"]
        shape = shape[self.draw.randint(0, 3) :]
        if self.yes():
            mask = self.input(f"mask_{index}", shape, self.dtype)
            return self.node("Add", *([scores, mask] if self.yes() else [mask, scores]))
        keep = self.input(f"mask_{index}", shape, np.bool_)
        fill = self.constant(self.draw.choice([-np.inf, np.finfo(self.dtype).min]), self.dtype)
        if self.yes():
            return self.node("Where", keep, scores, fill)
        return self.node("Where", self.node("Not", keep), fill, scores)

    def probabilities(self, scores: str, flat: list[int] | None) -> str:
        wide = self.yes()
        p = self.node("Softmax", self.cast(scores, self.wide) if wide else scores, axis=3)
        if self.opset >= 13 and self.yes():
            zero = self.constant(0, self.wide if wide else self.dtype)
            p = self.node("Where", self.node("IsNaN", p), zero, p)
        p = self.cast(p, self.dtype) if wide else p
        p = self.node("Dropout", p) if self.yes() else p
        return p if flat is None else self.reshape(p, flat)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**48))
def test_every_way_of_writing_attention_is_one_node(seed: int) -> None:
    writer = Writer(seed)
    model = writer.model()
    onnx.checker.check_model(model, full_check=True)
    result = fuse_model(model)
    counts = count_operators(result)
    assert counts["Attention"] == 1
    assert not any(
        counts[name] for name in ("Softmax", "MatMul", "Tanh", "Expand", "Tile", "Gather", "Dropout", "IsNaN")
    )
    inputs = draw_feeds(model, seed)
    for array in inputs.values():
        if array.dtype == np.bool_:
            array[..., 0] = True  # every query sees a key
    (expected,), (actual,) = (
        run_model(model, inputs, reference=True),
        run_model(ir.to_proto(result), inputs, reference=True),
    )
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    tolerance = 2e-2 if writer.dtype == np.float16 else 1e-5
    np.testing.assert_allclose(actual.astype(np.float64), expected.astype(np.float64), rtol=tolerance, atol=tolerance)
