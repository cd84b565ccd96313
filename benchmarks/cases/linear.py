"""Linear attention and convolutions with a state: layers of models that keep no cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .case import Arrays, Case, Work

_FLOAT = onnx.TensorProto.FLOAT


@dataclass(frozen=True, kw_only=True)
class LinearCase(Case):
    """LinearAttention of H heads [D, D], over L tokens; by_element: a decay for each element of a key."""

    group: str = "linear"
    rule: str
    L: int
    H: int = 16
    D: int = 128
    by_element: bool = False

    @property
    def source(self) -> str:
        return f"linear {self.rule} {self.H} {self.D} {self.by_element}"

    @property
    def in_place(self) -> Mapping[str, str]:
        return {"present": "state"}

    def _widths(self) -> dict[str, int]:
        rows = dict.fromkeys(("query", "key", "value"), self.H * self.D)
        if "gated" in self.rule:
            rows["decay"] = self.H * (self.D if self.by_element else 1)
        return rows | ({"beta": self.H} if "delta" in self.rule else {})

    def model(self, domain: str = "") -> onnx.ModelProto:
        """domain is that of the operator, which onnxruntime has in ai.onnx and in com.microsoft."""
        widths, state = self._widths(), [1, self.H, self.D, self.D]
        names = ["query", "key", "value", "state", *(n if n in widths else "" for n in ("decay", "beta"))]
        node = helper.make_node(
            "LinearAttention", names, ["output", "present"], domain=domain, update_rule=self.rule,
            q_num_heads=self.H, kv_num_heads=self.H,
        )  # fmt: skip
        info = helper.make_tensor_value_info
        inputs = [info(name, _FLOAT, [1, "L", width]) for name, width in widths.items()]
        outputs = [info("output", _FLOAT, [1, "L", self.H * self.D]), info("present", _FLOAT, state)]
        graph = helper.make_graph([node], "linear", [*inputs, info("state", _FLOAT, state)], outputs)
        opsets = [helper.make_opsetid("", 27), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11)

    def feeds(self) -> Arrays:
        rng = np.random.default_rng(0)
        rows = {name: rng.standard_normal((1, self.L, width)) for name, width in self._widths().items()}
        keys = rows["key"].reshape(1, self.L, self.H, self.D)
        rows["key"] = (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).reshape(rows["key"].shape)
        if "decay" in rows:
            rows["decay"] = -np.abs(rows["decay"]) / 10
        if "beta" in rows:
            rows["beta"] = 1 / (1 + np.exp(-rows["beta"]))
        rows["state"] = rng.standard_normal((1, self.H, self.D, self.D))
        return {name: x.astype(np.float32) for name, x in rows.items()}

    def expected(self) -> Arrays:
        """Compute token by token."""
        inputs = {name: x.astype(np.float64) for name, x in self.feeds().items()}
        q, k, v = (inputs[name].reshape(self.L, self.H, self.D) for name in ("query", "key", "value"))
        state, output = inputs["state"][0], np.zeros((self.L, self.H, self.D))
        for t in range(self.L):
            if "decay" in inputs:
                state = state * np.exp(inputs["decay"][0, t].reshape(self.H, -1, 1))
            u = v[t]
            if "beta" in inputs:
                u = inputs["beta"][0, t][:, None] * (u - np.einsum("hdc,hd->hc", state, k[t]))
            state = state + k[t][..., None] * u[:, None]
            output[t] = np.einsum("hdc,hd->hc", state, q[t]) / np.sqrt(self.D)
        return {"output": output.reshape(1, self.L, -1), "present": state[None]}

    def work(self) -> Work:
        """The state is read for the output, with the delta rule for u, and added to; one token waits for its bytes."""
        size = float(self.H * self.D * self.D)
        if self.L == 1:
            return Work(8 * size, "byte")
        return Work((6 if "delta" in self.rule else 4) * size * self.L, "FLOP")


@dataclass(frozen=True, kw_only=True)
class CausalConvCase(Case):
    """CausalConvWithState over L tokens [1, L, C], transposed before and after as in models, with windows of 4."""

    group: str = "linear"
    L: int
    C: int = 8192

    @property
    def source(self) -> str:
        return f"causal conv {self.C}"

    def model(self) -> onnx.ModelProto:
        turn = {"perm": [0, 2, 1]}
        nodes = [
            helper.make_node("Transpose", ["x"], ["xt"], **turn),
            helper.make_node("CausalConvWithState", ["xt", "w", "", "past"], ["yt", "present"], activation="silu"),
            helper.make_node("Transpose", ["yt"], ["y"], **turn),
        ]
        info, rows, state = helper.make_tensor_value_info, [1, "L", self.C], [1, self.C, 3]
        inputs = [info("x", _FLOAT, rows), info("past", _FLOAT, state)]
        outputs = [info("y", _FLOAT, rows), info("present", _FLOAT, state)]
        constants = [numpy_helper.from_array(self._weight(), "w")]
        graph = helper.make_graph(nodes, "causal_conv", inputs, outputs, constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)], ir_version=11)

    def _weight(self) -> np.ndarray:
        return np.random.default_rng(1).standard_normal((self.C, 1, 4)).astype(np.float32)

    def feeds(self) -> Arrays:
        rng = np.random.default_rng(0)
        shapes = {"x": (1, self.L, self.C), "past": (1, self.C, 3)}
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def expected(self) -> Arrays:
        inputs = {name: x.astype(np.float64) for name, x in self.feeds().items()}
        joined = np.concatenate([inputs["past"].transpose(0, 2, 1), inputs["x"]], axis=1)
        weight = self._weight().astype(np.float64)
        y = sum(joined[:, j : j + self.L] * weight[:, 0, j] for j in range(4))
        return {"y": np.asarray(y / (1 + np.exp(-y))), "present": joined[:, self.L :].transpose(0, 2, 1)}

    def work(self) -> Work:
        return Work(8.0 * self.L * self.C, "byte")


def cases() -> Iterator[Case]:
    for rule in ("linear", "gated", "delta", "gated_delta"):
        for length in (1, 128, 1024, 8192):
            if length < 8192 or rule == "gated_delta":
                yield LinearCase(name=f"linear_{rule}_{length}", rule=rule, L=length)
    for length in (1, 1024):
        yield LinearCase(name=f"linear_gated_by_element_{length}", rule="gated", L=length, by_element=True)
    for length in (1, 128, 1024):
        yield CausalConvCase(name=f"causal_conv_{length}", L=length)
