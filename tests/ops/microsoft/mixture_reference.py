"""com.microsoft MoE and QMoE in float64, token by token, from the operators' documentation."""

from __future__ import annotations

from typing import Any

import numpy as np


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def apply_activation(kind: str, gate: np.ndarray, linear: np.ndarray | float, attributes: dict[str, Any]) -> np.ndarray:
    if kind == "swiglu":
        limit = attributes.get("swiglu_limit", np.inf)
        gate, linear = np.minimum(gate, limit), np.clip(linear, -limit, limit) + attributes.get("activation_beta", 0.0)
        return gate / (1 + np.exp(-attributes.get("activation_alpha", 1.0) * gate)) * linear
    if kind in ("gelu", "geglu"):
        return linear * 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    if kind == "silu":
        return linear * gate / (1 + np.exp(-gate))
    return linear * {"relu": np.maximum(gate, 0), "relu2": np.maximum(gate, 0) ** 2, "identity": gate}[kind]


def mixture(
    x: np.ndarray,
    router: np.ndarray,
    weights: dict[str, np.ndarray | None],
    router_weights: np.ndarray | None,
    **attributes: Any,
) -> np.ndarray:
    """Return the output. weights has fc1 to fc3 [E, N, K] and bias1 to bias3 [E, N].
    QMoE sets `chosen`: the shares of experts are a softmax over the chosen experts."""
    kind, fusion, k = (
        attributes.get("activation_type", "relu"),
        attributes.get("swiglu_fusion", 0),
        attributes.get("k", 1),
    )
    result = np.zeros((*router.shape[:1], x.shape[-1]))
    for t, token in enumerate(x.reshape(-1, x.shape[-1]).astype(np.float64)):
        chosen = np.argsort(-router[t], kind="stable")[:k]
        if router_weights is not None:
            shares = router_weights[t, chosen].astype(np.float64)
        else:
            shares = softmax(router[t, chosen].astype(np.float64)) if attributes.get("chosen") else softmax(
                router[t].astype(np.float64))[chosen]  # fmt: skip
        if attributes.get("normalize_routing_weights", 0):
            shares = shares / shares.sum()

        def layer(n: int, expert: int, row: np.ndarray) -> np.ndarray:
            matrix, bias = weights[f"fc{n}"], weights.get(f"bias{n}")
            assert matrix is not None
            return matrix[expert].astype(np.float64) @ row + (0 if bias is None else bias[expert])

        for expert, share in zip(chosen, shares):
            gate, linear = layer(1, expert, token), 1.0
            if kind in ("swiglu", "geglu") and fusion == 1:
                gate, linear = gate[::2], gate[1::2]
            elif kind in ("swiglu", "geglu") and fusion == 2:
                gate, linear = np.split(gate, 2)
            elif weights.get("fc3") is not None:
                linear = layer(3, expert, token)
            result[t] += share * layer(2, expert, apply_activation(kind, gate, linear, attributes))
    return result.reshape(x.shape)
