"""A step of a decoder's cache: TensorScatter writes one new row per sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from .attention import port
from .case import Arrays, Bar, Case, Work


@dataclass(frozen=True, kw_only=True)
class ScatterCase(Case):
    """past_cache [B, H, T, D] donated, update [B, H, S, D] at write_indices [B] -> present_cache [B, H, T, D]"""

    B: int = 8
    H: int = 8
    S: int = 1
    T: int
    D: int = 128

    @property
    def in_place(self) -> dict[str, str]:
        return {"present_cache": "past_cache"}

    def feeds(self) -> Arrays:
        rng = np.random.default_rng(0)
        return {
            "past_cache": rng.standard_normal((self.B, self.H, self.T, self.D), np.float32),
            "update": rng.standard_normal((self.B, self.H, self.S, self.D), np.float32),
            "write_indices": np.arange(self.B) * (self.T - self.S) // self.B,
        }

    def model(self) -> onnx.ModelProto:
        cache = ["B", self.H, "T", self.D]
        node = onnx.helper.make_node("TensorScatter", ["past_cache", "update", "write_indices"], ["present_cache"])
        inputs = [
            port("past_cache", np.dtype(np.float32), cache),
            port("update", np.dtype(np.float32), ["B", self.H, "S", self.D]),
            port("write_indices", np.dtype(np.int64), ["B"]),
        ]
        graph = onnx.helper.make_graph([node], "cache", inputs, [port("present_cache", np.dtype(np.float32), cache)])
        return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)], ir_version=11)

    def expected(self) -> Arrays:
        feeds = self.feeds()
        cache = feeds["past_cache"].astype(np.float64)
        for b, start in enumerate(feeds["write_indices"]):
            cache[b, :, start : start + self.S] = feeds["update"][b]
        return {"present_cache": cache}

    def work(self) -> Work:
        """The cache is not read, and the rows are small: the limit does not matter."""
        return Work(0.0, "byte")


def cases() -> list[ScatterCase]:
    bar = Bar(seconds=6e-6, ratio=0.95)
    return [
        ScatterCase(name=f"TensorScatter, {8 * 8 * T * 128 * 4 / 1e6:.0f} MB", group="caches", bar=bar, T=T)
        for T in (512, 4096)
    ]
