"""Attention under masks that the model computes from positions and ids: nodes, where `attention.py` has attributes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from .attention import AttentionCase
from .case import Arrays

# i and j: positions, [S, 1] and [1, S].
_POSITIONS = """
    zero = Constant<value_int=0>() one = Constant<value_int=1>() first = Constant<value_ints=[0]>()
    second = Constant<value_ints=[1]>() third = Constant<value_ints=[2]>() outer = Constant<value_ints=[0, 1]>()
    middle = Constant<value_ints=[1, 2]>() S1 = Shape<start=2, end=3>(Q) S = Squeeze(S1) seq = Range(zero, S, one)
    i = Unsqueeze(seq, second) j = Unsqueeze(seq, first) causal = LessOrEqual(j, i)
"""
_RULES = {
    "causal": "mask = Unsqueeze (causal, outer)",
    "causal and padding": "valid = Cast<to=9> (ids) p = Unsqueeze (valid, middle) mask = And (causal, p)",
    "window of 256": """w = Constant<value_int=256>() d = Sub (i, j) near = Less (d, w) both = And (causal, near)
        mask = Unsqueeze (both, outer)""",
    "packed documents": """a = Unsqueeze (ids, third) b = Unsqueeze (ids, second) same = Equal (a, b)
        s4 = Unsqueeze (same, second) mask = And (s4, causal)""",
}


@dataclass(frozen=True, kw_only=True)
class ComputedMaskCase(AttentionCase):
    """rule names the nodes that compute the mask; ids int64 [B, S] is 1 for tokens and 0 after them, or numbers the
    documents."""

    rule: str

    def feeds(self) -> Arrays:
        return {**super().feeds(), "ids": self.ids()[None].repeat(self.B, axis=0)}

    def ids(self) -> np.ndarray:
        """Return the ids of a sequence: a fifth of it is padding, or it consists of five documents."""
        tokens = np.arange(self.S)
        if self.rule == "packed documents":
            return tokens * 5 // self.S
        return (tokens < self.S - self.S // 5).astype(np.int64)

    def visible(self) -> np.ndarray:
        i, j, ids = np.arange(self.S)[:, None], np.arange(self.S), self.ids()
        seen = {
            "causal": j <= i,
            "causal and padding": (j <= i) & (ids[None] == 1),
            "window of 256": (j <= i) & (i - j < 256),
            "packed documents": (j <= i) & (ids[:, None] == ids[None]),
        }
        return seen[self.rule][None, None]

    def model(self) -> onnx.ModelProto:
        tensors = ", ".join(f"float[B, {self.Hq}, S, {self.D}] {x}" for x in "QKV")
        return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 23]>
            attention ({tensors}, int64[B, S] ids) => (float[B, {self.Hq}, S, {self.D}] Y)
            {{ {_POSITIONS} {_RULES[self.rule]} Y = Attention (Q, K, V, mask) }}""")


def cases() -> list[ComputedMaskCase]:
    return [ComputedMaskCase(name=f"computed mask, {rule}", group="masks", rule=rule) for rule in _RULES]
