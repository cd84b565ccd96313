"""FlexAttention of ai.onnx.preview: graphs that look up what may not be there, odd sizes, operands that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from tests.attacks.attack import Answer, Arrays, Attack, Unspecified, attacks, require
from tests.attacks.draw import Draw
from tests.ops.preview.flex_models import PRELUDE, attend

Change = Callable[..., np.ndarray]
Needed = Callable[[int, int], int]
"""How many elements of a table so many rows and keys look up."""

# Bodies of graphs, what they make of scores (or probabilities) with a table, and how much of that they need.
BODIES: dict[str, tuple[str, Change, Needed]] = {
    "same": ("r = Identity(s)", lambda s, i, j, table: s, lambda rows, keys: 0),
    "causal": (
        "seen = GreaterOrEqual(i, j) r = Where(seen, s, low)",
        lambda s, i, j, table: np.where(i >= j, s, -np.inf),
        lambda rows, keys: 0,
    ),
    "by distance": (
        "n = Sub(key_count, one) at = Add(d, n) b = Gather(table, at) c = CastLike(b, s) r = Add(s, c)",
        lambda s, i, j, table: s + table[i - j + s.shape[3] - 1],
        lambda rows, keys: rows + keys - 1,
    ),
    "from the back": (
        "n = Neg(one) at = Sub(n, j) b = Gather(table, at) c = CastLike(b, s) r = Add(s, c)",
        lambda s, i, j, table: s + table[-1 - j],
        lambda rows, keys: keys,
    ),
    "by matmul": (
        "at = Mul(i, j) b = Gather(table, at) c = CastLike(b, s) r = Add(s, c)",
        lambda s, i, j, table: s + table[i * j],
        lambda rows, keys: (rows - 1) * (keys - 1) + 1,
    ),
    "by the sum": (
        "e = Abs(s) n = ReduceSum(e, last) o = Add(n, e) r = Div(s, o)",
        lambda s, i, j, table: s / (np.abs(s).sum(-1, keepdims=True) + np.abs(s)),
        lambda rows, keys: 0,
    ),
}


@attacks("FlexAttention", domain="ai.onnx.preview")
def flex_attention(d: Draw, op: str) -> Attack:
    dtype = d.dtype(("float32", "float16", "float64"))
    group, kv_heads = d.pick((1, 1, 2, 3)), d.pick((1, 2))
    size, wide = d.pick((1, 2, 8, 16, 17)), d.pick((1, 3, 8, 16))
    table = d.array("float32", (d.pick((1, 7, 33, 66, 300)),))
    used = {
        name: d.pick(sorted(BODIES)) for name in ("score_mod", "prob_mod") if d.chance(0.8 if name[0] == "s" else 0.2)
    }
    scale = 0.3 if d.chance(0.2) else None
    softmax = "double" if dtype == "float64" else "float"

    def graph(name: str) -> onnx.GraphProto:
        kind, numbers = f"{softmax}[b, h, rows_, keys_]", ", ".join(repr(float(x)) for x in table)
        body = BODIES[used[name]][0]
        constant = f"table = Constant<value = float[{len(table)}] {{{numbers}}}>()" if "table" in body else ""
        return onnx.parser.parse_graph(f"{name} ({kind} s) => ({kind} r) {{ {PRELUDE} {constant} {body} }}")

    def feed() -> Arrays:
        batch, rows, keys = d.size(), d.size(), d.size(0.08)
        shapes = [(batch, group * kv_heads, rows, size), (batch, kv_heads, keys, size), (batch, kv_heads, keys, wide)]
        if d.chance(0.1):
            shapes[d.int(0, 2)] = d.corrupted(d.pick(shapes))  # type: ignore[call-overload]
        return [d.array(dtype, s, scale=1.0) for s in shapes]

    def rule(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Answer:
        require(k.shape[1] == v.shape[1] and k.shape[1] and q.shape[1] % k.shape[1] == 0, "heads")
        require(q.shape[0] == k.shape[0] == v.shape[0], "batches")
        require(q.shape[3] == k.shape[3], "head sizes")
        require(k.shape[2] == v.shape[2], "lengths of K and V")
        rows, keys = q.shape[2], k.shape[2]
        if not (q.size and k.size and v.size):
            raise Unspecified("attention to nothing")
        looked_up = max(BODIES[name][2](rows, keys) for name in used.values()) if used else 0
        if looked_up > len(table) == 1:
            raise Unspecified("a look-up in one number, which it gets whatever the index")
        require(looked_up <= len(table), "a look-up outside of the table")
        changes = {name[: name.index("_")]: BODIES[body][1] for name, body in used.items()}
        return [attend(q, k, v, scale=scale, **changes, table=table).astype(dtype)]

    attributes: dict[str, Any] = {"scale": scale, **{name: graph(name) for name in used}}
    numbers = [(k, axis) for k in range(3) for axis in (1, 3)]
    close = 2e-2 if dtype == "float16" else 1e-3
    return Attack(
        op, feed, rule, domain="ai.onnx.preview", opset=26, attributes=attributes, numbers=numbers, close=close
    )
