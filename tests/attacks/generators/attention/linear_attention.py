"""LinearAttention and CausalConvWithState: heads that do not divide, states of other sizes, no tokens at all."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.attacks.attack import MICROSOFT, Answer, Arrays, Attack, attacks, require
from tests.attacks.draw import Draw
from tests.cases.linear_cases import RULES, LinearCase


def _linear(d: Draw, domain: str) -> Attack:
    rule, dtype = d.pick(RULES), d.dtype(("float32", "float16", "bfloat16"))
    kv_heads, size, wide = d.pick((1, 2, 3)), d.pick((1, 3, 16, 17)), d.pick((1, 5, 16, 33))
    q_heads = kv_heads * d.pick((1, 1, 2)) if not domain or d.chance(0.6) else 1
    k_heads = kv_heads if not domain or d.chance(0.6) else 1
    attributes = {"q_num_heads": q_heads, "kv_num_heads": kv_heads, "update_rule": rule}
    if d.chance(0.08):
        attributes[d.pick(("q_num_heads", "kv_num_heads"))] = d.pick((0, -1, 5))
    by_element, shared, past = d.chance(0.5), d.chance(0.5), d.chance(0.7)
    there = ("gated" in rule) != d.chance(0.05), ("delta" in rule) != d.chance(0.05)
    case = LinearCase(rule, 1, q_heads, k_heads, kv_heads, size, wide, by_element, shared, past, dtype, dtype)
    types = np.dtype(getattr(ml_dtypes, dtype, dtype))

    def feed() -> Arrays:
        batch, length = d.pick((1, 2, 0)), d.pick((1, 2, 9, 17, 33, 0))
        rows = {**case.widths(), **({"decay": kv_heads} if there[0] and "gated" not in rule else {})}
        rows |= {"beta": kv_heads} if there[1] and "delta" not in rule else {}
        shapes = {name: (batch, length, width) for name, width in rows.items()}
        shapes |= {"state": (batch, kv_heads, size, wide)} if past else {}
        if d.chance(0.12):
            name = d.pick(sorted(shapes))
            shapes[name] = d.corrupted(shapes[name])
        arrays = {name: (d.array("float32", shape, scale=0.3)).astype(types) for name, shape in shapes.items()}
        if "decay" in arrays:
            arrays["decay"] = -np.abs(arrays["decay"])
        use = {"decay": there[0], "beta": there[1]}
        return [arrays.get(n) if use.get(n, True) else None for n in ("q", "k", "v", "state", "decay", "beta")]

    def answer(*arrays: np.ndarray | None) -> Answer:
        q, k, v, state, decay, beta = arrays
        assert q is not None and k is not None and v is not None
        heads, groups = attributes["q_num_heads"], attributes["kv_num_heads"]
        require(min(heads, groups) > 0, "numbers of heads")
        few, many = sorted((heads, groups))
        require(many % few == 0 and (domain or heads >= groups), "heads that divide")
        require(
            (decay is not None) == ("gated" in rule) and (beta is not None) == ("delta" in rule), "what a rule reads"
        )
        require(q.shape[2] and q.shape[2] % heads == 0 and v.shape[2] and v.shape[2] % groups == 0, "widths")
        own, width = q.shape[2] // heads, v.shape[2] // groups
        require(k.shape[2] and k.shape[2] % own == 0, "keys")
        keys = k.shape[2] // own
        require(keys == groups or (domain and groups % keys == 0), "heads of keys")
        for x in (k, v, decay, beta):
            require(x is None or x.shape[:2] == q.shape[:2], "batch and length")
        require(decay is None or decay.shape[2] in (groups, groups * own), "decay")
        require(beta is None or beta.shape[2] in (1, groups), "beta")
        require(state is None or state.shape == (q.shape[0], groups, own, width), "state")
        call_case = LinearCase(rule, q.shape[0], heads, keys, groups, own, width, past=state is not None, dtype=dtype)
        names = ("q", "k", "v", "state", "decay", "beta")
        results = call_case.expected({name: x for name, x in zip(names, arrays) if x is not None})
        return [results["y"].astype(types), results["present"].astype(types)]

    return Attack(
        "LinearAttention", feed, answer, outputs=2, domain=domain, opset=27, attributes=attributes, close=1e-3,
        numbers=[(0, 2), (1, 2), (2, 2), (4, 2), (5, 2)],
    )  # fmt: skip


@attacks("LinearAttention")
def linear_attention(d: Draw, op: str) -> Attack:
    return _linear(d, "")


@attacks("LinearAttention", domain=MICROSOFT)
def microsoft_linear_attention(d: Draw, op: str) -> Attack:
    return _linear(d, MICROSOFT)


@attacks("CausalConvWithState")
def causal_conv(d: Draw, op: str) -> Attack:
    return _causal_conv(d, "")


@attacks("CausalConvWithState", domain=MICROSOFT)
def microsoft_causal_conv(d: Draw, op: str) -> Attack:
    return _causal_conv(d, MICROSOFT)


def _causal_conv(d: Draw, domain: str) -> Attack:
    channels, k, past, bias = d.pick((1, 3, 17)), d.pick((1, 2, 4)), d.chance(0.7), d.chance(0.5)
    activation = d.pick(("none", "silu", "swish"))

    def feed() -> Arrays:
        batch, length = d.pick((1, 2, 0)), d.pick((1, 2, 5, 16, 0))
        shapes = [(batch, channels, length), (channels, 1, k), (channels,), (batch, channels, k - 1)]
        if d.chance(0.12):
            at = d.int(0, 3)
            shapes[at] = d.corrupted(shapes[at])
        x, w, b, s = (d.array("float32", shape, scale=1.0) for shape in shapes)
        return [x, w, b if bias else None, s if past else None]

    def answer(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, s: np.ndarray | None) -> Answer:
        require(w.shape[1] == 1 and w.shape[2] > 0 and w.shape[0] > 0 and x.shape[1] == w.shape[0], "channels")
        require(b is None or b.shape == w.shape[:1], "bias")
        state_shape = (*x.shape[:2], w.shape[2] - 1)
        require(s is None or s.shape == state_shape, "state")
        before = np.zeros(state_shape) if s is None else s
        joined = np.concatenate([before, x], axis=2).astype(np.float64)
        y = sum(joined[:, :, j : j + x.shape[2]] * w[:, 0, j, None] for j in range(w.shape[2]))
        y = y + (0 if b is None else b[:, None])
        y = y if activation == "none" else y / (1 + np.exp(-y))
        return [y.astype(np.float32), joined[:, :, x.shape[2] :].astype(np.float32)]

    return Attack(
        "CausalConvWithState", feed, answer, outputs=2, domain=domain, opset=27,
        attributes={"activation": activation}, close=1e-4, parameters=[1, 2], numbers=[(1, 0), (1, 1), (1, 2)],
    )  # fmt: skip
