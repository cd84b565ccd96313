"""com.microsoft PackedMultiHeadAttention: any numbers where sequences begin, and shapes that do not fit together."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.attacks.attack import MICROSOFT, Answer, Arrays, Attack, Unspecified, attacks, require
from tests.attacks.draw import Draw
from tests.ops.microsoft.packed_attention_reference import packed_attention


@attacks("PackedMultiHeadAttention", domain=MICROSOFT)
def packed(d: Draw, op: str) -> Attack:
    heads, size, biased = d.pick((1, 2, 3)), d.pick((4, 8)), d.chance(0.3)
    said: dict[str, Any] = {"num_heads": heads}
    if d.chance(0.1):
        said["num_heads"] = d.pick((0, -1, 7, 2**40))
    width = heads * size

    def feed() -> Arrays:
        counts = [d.int(0, 5) for _ in range(d.int(1, 4))]
        rows, sequence = sum(counts), max(counts)
        starts = np.cumsum([0, *counts]).astype(np.int32)
        if d.chance(0.15):
            starts = d.rng.integers(-(2**31), 2**31 - 1, starts.shape, np.int32)
        shapes = [d.corrupted((rows, width)) if d.chance(0.04) else (rows, width) for _ in range(3)]
        arrays = [d.array("float32", shape) for shape in shapes]
        bias = d.array("float32", d.corrupted((3 * width,)) if d.chance(0.05) else (3 * width,)) if biased else None
        count = len(counts) + (1 if d.chance(0.05) else 0)
        return [*arrays, bias, np.zeros((count, sequence), np.int32), starts]

    def rule(q: np.ndarray, k: np.ndarray, v: np.ndarray, *rest: np.ndarray | None) -> Answer:
        bias, offsets, starts = rest
        assert offsets is not None and starts is not None
        require(said["num_heads"] == heads, "num_heads")
        require(q.shape == k.shape == v.shape and q.shape[1] == width, f"{q.shape}, {k.shape}, {v.shape}")
        require(bias is None or bias.shape == (3 * width,), "bias")
        require(starts.shape == (len(offsets) + 1,), "starts")
        if starts[0] != 0 or starts[-1] != len(q) or (np.diff(starts) < 0).any():
            raise Unspecified("sequences that are not where rows are")
        tensors = {"query": q, "key": k, "value": v, "cumulative_sequence_length": starts}
        tensors |= {} if bias is None else {"bias": bias}
        return [packed_attention(tensors, heads).astype(np.float32)]

    return Attack(op, feed, rule, domain=MICROSOFT, opset=21, close=2e-3, attributes=said,
                  numbers={(0, 1), (1, 1), (2, 1), (3, 0)})  # fmt: skip
