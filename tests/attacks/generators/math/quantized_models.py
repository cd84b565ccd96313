"""QAttention and QEmbedLayerNormalization: what onnxruntime's quantizer makes of the operators of floats, by whose
rules the numbers go."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.attacks.attack import MICROSOFT, Answer, Arrays, Attack, attacks, require
from tests.attacks.draw import Draw
from tests.attacks.generators.attention.microsoft import embedding
from tests.attacks.generators.attention.microsoft_attention import projected

_BYTES = ("uint8", "int8")


def _scale(d: Draw, shape: tuple[int, ...] = ()) -> np.ndarray:
    return np.asarray(2.0 ** d.rng.integers(-6, -3, shape), np.float32)


def _numbers(quantized: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    return (quantized.astype(np.float64) - zero) * scale


@attacks("QAttention", domain=MICROSOFT)
def attention(d: Draw, op: str) -> Attack:
    base, kinds, by_column = projected(d, op), (d.pick(_BYTES), d.pick(_BYTES)), d.chance(0.5)

    def feed() -> Arrays:
        x, w, bias, mask = (*base.feed(), None, None)[:4]
        assert x is not None and w is not None
        bias = d.array("float32", w.shape[1:], scale=0.5) if bias is None else bias
        columns = w.shape[1:] if by_column else ()
        columns = d.corrupted(columns) if d.chance(0.06) else columns
        zeros = [d.array(kind, shape) for kind, shape in zip(kinds, ((), columns))]
        x, w = (d.array(kind, v.shape) for kind, v in zip(kinds, (x, w)))
        return [x, w, bias, _scale(d), _scale(d, columns), mask, *zeros]

    def rule(x: np.ndarray, w: np.ndarray, bias: Any, *rest: Any) -> Answer:
        x_scale, w_scale, mask, x_zero, w_zero = rest
        require(w_scale.shape in ((), (1,), w.shape[1:]), f"scales {w_scale.shape}")
        return base.rule(_numbers(x, x_scale, x_zero), _numbers(w, w_scale, w_zero), bias, mask)

    return Attack(op, feed, rule, domain=MICROSOFT, opset=21, close=2e-3, attributes=base.attributes,
                  parameters={1, 2}, numbers=base.numbers)  # fmt: skip


@attacks("QEmbedLayerNormalization", domain=MICROSOFT)
def q_embedding(d: Draw, op: str) -> Attack:
    kind, base = d.pick(_BYTES), embedding(d, op)

    def feed() -> Arrays:
        ids, kinds, *tables = base.feed()[:7]
        bytes_ = [None if t is None else d.array(kind, t.shape) for t in tables]
        scales = [None if t is None else _scale(d) for t in tables]
        zeros = [None if t is None else d.array(kind, ()) for t in tables]
        return [ids, kinds, *bytes_, None, *scales, *zeros]

    def rule(ids: np.ndarray, kinds: Any, *rest: Any) -> Answer:
        tables, scales, zeros = rest[:5], rest[6:11], rest[11:]
        floats = (None if t is None else _numbers(t, s, z) for t, s, z in zip(tables, scales, zeros))
        return base.rule(ids, kinds, *floats)

    return Attack(op, feed, rule, outputs=2, domain=MICROSOFT, opset=21, close=2e-3, attributes=base.attributes,
                  parameters={2, 3, 4, 5, 6})  # fmt: skip
