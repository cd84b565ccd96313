"""LSTM, GRU and RNN in float64, by the equations of ONNX's pages, step by step and batch by batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Function = Callable[[np.ndarray], np.ndarray]


def make_activations(alpha: float, beta: float) -> dict[str, Function]:
    """Return the activations; alpha and beta are the parameters of those that have some."""
    return {
        "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "Tanh": np.tanh,
        "Relu": lambda x: np.maximum(x, 0),
        "Affine": lambda x: alpha * x + beta,
        "LeakyRelu": lambda x: np.where(x >= 0, x, alpha * x),
        "ThresholdedRelu": lambda x: np.where(x > alpha, x, 0),
        "ScaledTanh": lambda x: alpha * np.tanh(beta * x),
        "HardSigmoid": lambda x: np.clip(alpha * x + beta, 0, 1),
        "Elu": lambda x: np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0))),
        "Softsign": lambda x: x / (1 + np.abs(x)),
        "Softplus": lambda x: np.logaddexp(0, x),
    }


def run_recurrence(
    kind: str,
    inputs: dict[str, np.ndarray],
    acts: list[list[Function]],
    reverses: list[bool],
    clip: float = 0.0,
    input_forget: bool = False,
    linear_before_reset: bool = False,
) -> list[np.ndarray]:
    """Return Y, Y_h and, for LSTM, Y_c. inputs has x, w, r and optional inputs: b, lens, h, c, p."""
    wide = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in inputs.items()}
    x, w, r = wide["x"], wide["w"], wide["r"]
    length, batch, _ = x.shape
    directions, _, H = r.shape
    gates = w.shape[1] // H
    y = np.zeros((length, directions, batch, H))
    last_h, last_c = np.zeros((directions, batch, H)), np.zeros((directions, batch, H))

    def clipped(v: np.ndarray) -> np.ndarray:
        return np.clip(v, -clip, clip) if clip else v

    for d in range(directions):
        bias = wide.get("b", np.zeros((directions, 2 * gates * H)))[d].reshape(2, gates, H)
        W, R = w[d].reshape(gates, H, -1), r[d].reshape(gates, H, H)
        p = wide.get("p", np.zeros((directions, 3 * H)))[d].reshape(3, H)
        for b in range(batch):
            h = wide["h"][d, b] if "h" in wide else np.zeros(H)
            c = wide["c"][d, b] if "c" in wide else np.zeros(H)
            count = int(np.clip(wide["lens"][b], 0, length)) if "lens" in wide else length
            for step in range(count):
                t = count - 1 - step if reverses[d] else step
                xs, f = W @ x[t, b] + bias[0], acts[d]
                if kind == "RNN":
                    h = f[0](clipped(xs[0] + R[0] @ h + bias[1, 0]))
                elif kind == "GRU":
                    z, reset = (f[0](clipped(xs[k] + R[k] @ h + bias[1, k])) for k in (0, 1))
                    inner = reset * (R[2] @ h + bias[1, 2]) if linear_before_reset else R[2] @ (reset * h) + bias[1, 2]
                    h = (1 - z) * f[1](clipped(xs[2] + inner)) + z * h
                else:
                    i, o, forget, new = (xs[k] + R[k] @ h + bias[1, k] for k in range(4))
                    i = f[0](clipped(i + p[0] * c))
                    forget = 1 - i if input_forget else f[0](clipped(forget + p[2] * c))
                    c = forget * c + i * f[1](clipped(new))
                    h = f[0](clipped(o + p[1] * c)) * f[2](c)
                y[t, d, b] = h
            last_h[d, b], last_c[d, b] = h, c
    return [y, last_h, last_c] if kind == "LSTM" else [y, last_h]
