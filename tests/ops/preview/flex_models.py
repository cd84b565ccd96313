"""Models of one FlexAttention of ai.onnx.preview, and what comes out of it, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import onnx

HEADS, KV_HEADS, D = 4, 2, 16

NUMPY = {"float": "float32", "float16": "float16", "bfloat16": "bfloat16", "double": "float64"}

# i and j are the positions of queries and keys, [S, 1] and [1, T]; numbers are spelled out.
PRELUDE = """
    zero = Constant<value_int=0>() one = Constant<value_int=1>() first = Constant<value_ints=[0]>()
    second = Constant<value_ints=[1]>() middle = Constant<value_ints=[1, 2]>() last = Constant<value_ints=[3]>()
    rows = Shape<start=2, end=3>(s) row_count = Squeeze(rows) keys = Shape<start=3, end=4>(s) key_count = Squeeze(keys)
    row = Range(zero, row_count, one) i = Unsqueeze(row, second) key = Range(zero, key_count, one)
    j = Unsqueeze(key, first) d = Sub(i, j) low0 = Constant<value_float=-inf>() low = CastLike(low0, s)
"""

Change = Callable[..., np.ndarray]
"""New scores, or probabilities, of x [B, H, S, T], rows i [S, 1], keys j [1, T] and further arrays by name."""


def make_model(
    score: str = "",
    prob: str = "",
    *,
    dtype: str = "float",
    softmax: str = "",
    q: str = f"B, {HEADS}, S, {D}",
    kv: str = f"B, {KV_HEADS}, N, {D}",
    inputs: Mapping[str, str] = {},
    attributes: str = "",
    around: str = "",
    shape: str = "b, h, s_, t_",
) -> onnx.ModelProto:
    """Return a model of the node y of q, k and v with these dims. score and prob compute r from s. inputs are types of
    further inputs, by name; nodes before FlexAttention compute them. softmax is the type of the graphs' tensors."""
    softmax = softmax or ("double" if dtype == "double" else "float")
    graphs = [
        f"{name}_mod = {name} ({softmax}[{shape}] s) => ({softmax}[{shape}] r) {{ {PRELUDE} {body} }}"
        for name, body in (("score", score), ("prob", prob))
        if body
    ]
    types = {"q": f"{dtype}[{q}]", "k": f"{dtype}[{kv}]", "v": f"{dtype}[{kv}]", **inputs}
    declared = ", ".join(f"{kind} {name}" for name, kind in types.items())
    attributes = ", ".join(filter(None, [attributes, *graphs]))
    attributes = f"<{attributes}>" if attributes else ""
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 26, "ai.onnx.preview" : 1]>
        g ({declared}) => ({dtype}[y0, y1, y2, y3] y)
        {{ {around} y = ai.onnx.preview.FlexAttention{attributes} (q, k, v) }}""")


def draw_operands(
    b: int, s: int, t: int, dtype: str = "float", seed: int = 0, heads: tuple[int, int] = (HEADS, KV_HEADS)
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (b, heads[0], s, D), "k": (b, heads[1], t, D), "v": (b, heads[1], t, D)}
    kind = np.dtype(getattr(ml_dtypes, dtype, NUMPY[dtype]))
    return {name: rng.standard_normal(shape).astype(kind) for name, shape in shapes.items()}


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    score: Change | None = None,
    prob: Change | None = None,
    scale: float | None = None,
    **extra: np.ndarray,
) -> np.ndarray:
    """Compute the result of the standard, except that a row whose scores are all -inf has probabilities 0."""
    q, k, v = (x.astype(float) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    x = q @ k.swapaxes(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    i, j = np.arange(x.shape[2])[:, None], np.arange(x.shape[3])[None]
    with np.errstate(invalid="ignore"):
        x = x if score is None else np.broadcast_to(score(x, i, j, **extra), x.shape)
        m = x.max(-1, keepdims=True, initial=-np.inf)
        p = np.exp(x - np.where(m == -np.inf, 0, m))
    l = p.sum(-1, keepdims=True)
    p = np.divide(p, l, out=np.zeros_like(p), where=l != 0)
    return (p if prob is None else prob(p, i, j, **extra)) @ v
