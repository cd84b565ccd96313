"""Linear attentions for tests: models of one node, inputs, and what must come of them in float64."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from onnx import helper

RULES = ("linear", "gated", "delta", "gated_delta")


@dataclass(frozen=True)
class LinearCase:
    rule: str = "gated_delta"
    batch: int = 1
    q_heads: int = 2
    k_heads: int = 2
    v_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    by_element: bool = False
    """The decay is by element of a key."""
    shared_beta: bool = False
    past: bool = True
    dtype: str = "float32"
    state_dtype: str = "float32"
    scale: float = 0.0

    @property
    def domain(self) -> str:
        """The domain of the operator that supports such heads."""
        return "" if self.k_heads == self.v_heads and self.q_heads >= self.v_heads else "com.microsoft"

    @property
    def y_heads(self) -> int:
        return max(self.q_heads, self.v_heads)

    def widths(self) -> dict[str, int]:
        """Return the row widths of the inputs that are present."""
        rows = {
            "q": self.q_heads * self.head_dim,
            "k": self.k_heads * self.head_dim,
            "v": self.v_heads * self.v_head_dim,
        }
        if "gated" in self.rule:
            rows["decay"] = self.v_heads * (self.head_dim if self.by_element else 1)
        if "delta" in self.rule:
            rows["beta"] = 1 if self.shared_beta else self.v_heads
        return rows

    def model(self, batch: int | str = "B", length: int | str = "L") -> onnx.ModelProto:
        def info(name: str, dtype: str, dims: list[int | str]) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(_numpy(dtype)), dims)

        widths, state = self.widths(), [batch, self.v_heads, self.head_dim, self.v_head_dim]
        names = ["q", "k", "v", "state" if self.past else "", *(n if n in widths else "" for n in ("decay", "beta"))]
        inputs = [info(name, self.dtype, [batch, length, width]) for name, width in widths.items()]
        inputs += [info("state", self.state_dtype, state)] if self.past else []
        outputs = [
            info("y", self.dtype, [batch, length, self.y_heads * self.v_head_dim]),
            info("present", self.state_dtype if self.past else self.dtype, state),
        ]
        node = helper.make_node(
            "LinearAttention", names, ["y", "present"], domain=self.domain, update_rule=self.rule, scale=self.scale,
            q_num_heads=self.q_heads, kv_num_heads=self.v_heads,
        )  # fmt: skip
        opsets = [helper.make_opsetid("", 27), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets, ir_version=11)

    def feeds(self, length: int, seed: int) -> dict[str, np.ndarray]:
        """Draw inputs. Keys have length 1, as the delta rule requires, and decays are at most 1."""
        rng = np.random.default_rng(seed)
        rows = {name: rng.standard_normal((self.batch, length, width)) for name, width in self.widths().items()}
        keys = rows["k"].reshape(self.batch, length, self.k_heads, -1)
        rows["k"] = (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).reshape(rows["k"].shape)
        if "decay" in rows:
            rows["decay"] = -np.abs(rows["decay"]) * 0.3
        if "beta" in rows:
            rows["beta"] = 1 / (1 + np.exp(-rows["beta"]))
        feeds = {name: x.astype(_numpy(self.dtype)) for name, x in rows.items()}
        if self.past:
            state = rng.standard_normal((self.batch, self.v_heads, self.head_dim, self.v_head_dim))
            feeds["state"] = state.astype(_numpy(self.state_dtype))
        return feeds

    def expected(self, feeds: dict[str, np.ndarray], dtype: type = np.float64) -> dict[str, np.ndarray]:
        """Return y and present, computed token by token in float64 or another type."""
        wide = {name: x.astype(dtype) for name, x in feeds.items()}
        batch, length, _ = wide["q"].shape
        heads = {name: wide[name].reshape(batch, length, n, size) for name, n, size in (
            ("q", self.q_heads, self.head_dim), ("k", self.k_heads, self.head_dim),
            ("v", self.v_heads, self.v_head_dim))}  # fmt: skip
        q = np.repeat(heads["q"], self.y_heads // self.q_heads, axis=2)
        k = np.repeat(heads["k"], self.v_heads // self.k_heads, axis=2)
        state = wide.get("state", np.zeros((batch, self.v_heads, self.head_dim, self.v_head_dim), dtype))
        decays = wide["decay"].shape[2] // self.v_heads if "decay" in wide else 0
        y = np.zeros((batch, length, self.y_heads, self.v_head_dim), dtype)
        for t in range(length):
            if "decay" in wide:
                state = state * np.exp(wide["decay"][:, t].reshape(batch, self.v_heads, decays, 1))
            u = heads["v"][:, t]
            if "beta" in wide:
                u = wide["beta"][:, t][..., None] * (u - np.einsum("bhdc,bhd->bhc", state, k[:, t]))
            state = state + k[:, t][..., None] * u[..., None, :]
            seen = np.repeat(state, self.y_heads // self.v_heads, axis=1)
            y[:, t] = np.einsum("bhdc,bhd->bhc", seen, q[:, t])
        scale = self.scale or self.head_dim**-0.5
        return {"y": (scale * y).reshape(batch, length, self.y_heads * self.v_head_dim), "present": state}


def _numpy(dtype: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference as a share of the largest expected value."""
    return float(np.abs(actual - expected).max(initial=0.0) / max(np.abs(expected).max(initial=0.0), 1e-30))


def differences(case: LinearCase, results: dict[str, np.ndarray], feeds: dict[str, np.ndarray]) -> list[str]:
    """Return the outputs that differ from float64 by more than the type's rounding."""
    wrong = []
    for name, expected in case.expected(feeds).items():
        actual = np.asarray(results[name]).astype(np.float64)
        tolerance = TOLERANCE[case.dtype if name == "y" or not case.past else case.state_dtype]
        error = relative_error(actual, expected)
        if actual.shape != expected.shape or not error <= tolerance:
            wrong.append(f"{name} of {case}: {error:.1e}, at most {tolerance:.0e}")
    return wrong
