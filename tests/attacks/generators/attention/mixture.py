"""com.microsoft MoE and QMoE: shapes that do not fit together, any routing, and numbers of tokens that differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.attacks.attack import MICROSOFT, Answer, Arrays, Attack, attacks, require
from tests.attacks.draw import Draw
from tests.ops.microsoft.mixture_reference import mixture


@attacks("MoE", "QMoE", domain=MICROSOFT)
def experts(d: Draw, op: str) -> Attack:
    quantized = op == "QMoE"
    count, width, inner, k = d.pick((1, 2, 5)), 16, 16, d.pick((1, 1, 2))
    said: dict[str, Any] = {"k": k, "activation_type": d.pick(("relu", "silu", "swiglu")), "swiglu_fusion": 1}
    said["normalize_routing_weights"] = d.int(0, 1)
    columns = inner * (2 if said["activation_type"] == "swiglu" else 1)
    attributes = {**said, **({"expert_weight_bits": 8, "block_size": 16} if quantized else {})}
    legal = dict(attributes)
    if d.chance(0.12):
        attributes[d.pick(("k", *(("expert_weight_bits", "block_size") if quantized else ())))] = d.pick(
            (0, -1, 3, 2**40)
        )
    sizes = ((count, columns, width), (count, width, inner))

    def feed() -> Arrays:
        tokens = d.size(0)
        rows = d.size(0) if d.chance(0.08) else tokens
        arrays: Arrays = [d.array("float32", (tokens, width)), d.array("float32", (rows, count))]
        for size in sizes:
            size = d.corrupted(size) if d.chance(0.06) else size
            if quantized:
                scales = (d.rng.random((*size[:2], 1)) * 0.1).astype(np.float32)
                arrays += [d.rng.integers(0, 256, size, np.uint8), scales, None]
            else:
                arrays += [d.array("float32", size), None]
        return arrays[:-1]

    def rule(x: np.ndarray, router: np.ndarray, *rest: np.ndarray | None) -> Answer:
        require(attributes == legal, "attributes")
        require(0 < k <= count, f"{k} of {count} experts")
        require(len(router) == len(x), "another number of tokens")
        first, second = rest[0], rest[3 if quantized else 2]
        assert first is not None and second is not None
        require((first.shape, second.shape) == sizes, f"weights {first.shape} and {second.shape}")
        weights: dict[str, np.ndarray | None] = {"fc1": first, "fc2": second}
        if quantized:
            scales = rest[1], rest[4]
            pairs = zip(("fc1", "fc2"), (first, second), scales)
            weights = {name: (w.astype(np.float64) - 128) * s for name, w, s in pairs if s is not None}
        return [mixture(x, router, weights, None, **said, chosen=quantized).astype(np.float32)]

    fixed = range(2, 9)
    return Attack(op, feed, rule, domain=MICROSOFT, opset=21, close=2e-3, fixed=fixed, attributes=attributes)
