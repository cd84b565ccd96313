"""com.microsoft: MultiHeadAttention, Attention and GroupQueryAttention, answered by one attention in float64.

Answers and rules follow onnxruntime's documentation; the tests of tests/ops/microsoft compare with its kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.attacks.attack import MICROSOFT, Answer, Arrays, Attack, Unspecified, attacks, require
from tests.attacks.draw import Draw
from tests.attacks.generators.attention.microsoft import make_attack

# Axes that must be static: heads are counted by them.
_WIDTHS = ((0, -1), (1, -1), (2, -1))


def _softmax_matmul(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Attention of [B, H, S, D], [B, H, T, D], [B, H, T, D] with added scores, in float64."""
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2).astype(np.float64) / np.sqrt(q.shape[-1]) + bias
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return (scores / scores.sum(-1, keepdims=True)) @ v.astype(np.float64)


def _heads(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2)


def _joined(y: np.ndarray) -> np.ndarray:
    return y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], y.shape[1] * y.shape[3]).astype(np.float32)


@attacks("MultiHeadAttention", domain=MICROSOFT)
def multi_head(d: Draw, op: str) -> Attack:
    heads = d.pick((1, 2, 4)) if d.chance(0.94) else d.pick((0, -1, 3, 2**31))
    masked, mask_rank, biased = d.chance(0.5), d.int(1, 2), d.chance(0.3)
    width = 4 * d.pick((1, 2, 8))

    def feed() -> Arrays:
        batch, rows, keys = d.size(), d.size(), d.size()
        shapes = [(batch, rows, width), (batch, keys, width), (batch, keys, width)]
        if d.chance(0.1):
            k = d.int(0, 2)
            shapes[k] = d.corrupted(shapes[k])
        arrays: Arrays = [d.array("float32", s, scale=1.0) for s in shapes]
        arrays += [None, None, None]
        if masked:
            mask = d.rng.integers(0, 2, (batch, keys)).astype(np.int32)
            counts = np.array([d.wild(0, keys, 0.15) for _ in range(batch)])
            arrays[4] = mask if mask_rank == 2 else np.clip(counts, -(2**31), 2**31 - 1).astype(np.int32)
            arrays[4] = arrays[4] if d.chance(0.93) else d.array("int32", d.corrupted(arrays[4].shape))
        if biased:
            bias = (d.pick((1, batch)), d.pick((1, heads if 0 < heads < 9 else 1)), rows, keys)
            arrays[5] = d.array("float32", d.corrupted(bias) if d.chance(0.1) else bias)
        return arrays if biased else arrays[:5] if masked else arrays[:3]

    def rule(q: np.ndarray, k: np.ndarray, v: np.ndarray, _: Any = None, mask: Any = None, bias: Any = None) -> Answer:
        require(heads > 0 and q.shape[2] % heads == 0 and v.shape[2] % heads == 0, f"{heads} heads")
        require(q.shape[0] == k.shape[0] == v.shape[0], "batches")
        require(k.shape[1] == v.shape[1] and q.shape[2] == k.shape[2], "shapes")
        batch, keys = k.shape[:2]
        whole = (batch, heads, q.shape[1], keys)
        added = np.zeros(whole)
        if bias is not None:
            require(all(b in (1, w) for b, w in zip(bias.shape, whole)), f"bias {bias.shape}")
            if bias.shape[2:] != whole[2:]:
                raise Unspecified("a bias of one row or key")
            added = added + bias
        if mask is not None:
            require(mask.shape in ((batch,), (batch, keys)), f"mask {mask.shape}")
            if mask.ndim == 1 and ((mask < 0) | (mask > keys)).any():
                raise Unspecified("a count outside of the keys")
            keep = mask[:, None] > np.arange(keys) if mask.ndim == 1 else mask != 0
            if not keep.any(1).all():
                raise Unspecified("no key at all")
            added = added + np.where(keep, 0, -10000.0)[:, None, None]
        if not (q.size and v.size):
            raise Unspecified("attention to nothing")
        return [_joined(_softmax_matmul(*(_heads(x, heads) for x in (q, k, v)), added))]

    return make_attack(op, feed, rule, attributes={"num_heads": heads}, parameters={4, 5}, numbers=_WIDTHS)


@attacks("Attention", domain=MICROSOFT)
def projected(d: Draw, op: str) -> Attack:
    heads = d.pick((1, 2, 4)) if d.chance(0.94) else d.pick((0, -1, 3, 2**31))
    biased, masked, causal = d.chance(0.8), d.chance(0.4), d.int(0, 1)
    inner, width = d.size(0), 4 * d.pick((1, 2, 8))

    def feed() -> Arrays:
        batch, rows = d.size(), d.size()
        shapes = [(batch, rows, inner), (inner, 3 * width), (3 * width,)]
        if d.chance(0.12):
            k = d.int(0, 2)
            shapes[k] = d.corrupted(shapes[k])
        arrays: Arrays = [d.array("float32", s, scale=0.5) for s in shapes]
        arrays[2] = arrays[2] if biased else None
        if masked:
            mask = d.rng.integers(0, 2, (batch, rows)).astype(np.int32)
            return [*arrays, mask if d.chance(0.9) else d.array("int32", d.corrupted(mask.shape))]
        return arrays if biased else arrays[:2]

    def rule(x: np.ndarray, w: np.ndarray, b: Any = None, mask: Any = None) -> Answer:
        require(x.shape[2] == w.shape[0] and w.shape[1] % 3 == 0, "weights")
        require(heads > 0 and (w.shape[1] // 3) % heads == 0, f"{heads} heads")
        require(b is None or b.shape == w.shape[1:], "bias")
        batch, rows = x.shape[:2]
        qkv = x.astype(np.float64) @ w + (0 if b is None else b)
        q, k, v = (_heads(projection, heads) for projection in np.split(qkv, 3, -1))
        added = np.zeros((batch, heads, rows, rows))
        if causal:
            added = added + np.triu(np.full((rows, rows), -10000.0), 1)
        if mask is not None:
            require(mask.shape == (batch, rows), f"mask {mask.shape}")
            if causal or not (mask != 0).any(1).all():
                raise Unspecified("a row that may see no key")
            added = added + np.where(mask != 0, 0, -10000.0)[:, None, None]
        if not (x.size and v.size):
            raise Unspecified("attention to nothing")
        return [_joined(_softmax_matmul(q, k, v, added))]

    attributes = {"num_heads": heads, "unidirectional": causal}
    return make_attack(op, feed, rule, attributes=attributes, parameters={1, 2}, numbers=_WIDTHS)


@attacks("GroupQueryAttention", domain=MICROSOFT)
def grouped(d: Draw, op: str) -> Attack:
    kv, group, size = d.pick((1, 2)), d.pick((1, 2)), d.pick((2, 8, 16))
    said = {"num_heads": kv * group, "kv_num_heads": kv}
    if d.chance(0.07):
        said[d.pick(tuple(said))] = d.pick((0, -1, 3, 2**31))
    window = d.wild(1, 9, 0.2) if d.chance(0.3) else -1
    cached, room = d.chance(0.6), d.chance(0.5)

    def feed() -> Arrays:
        batch, rows, before = d.size(), d.size(), d.size(0.1) if cached else 0
        rows = max(rows, 1) if not cached else d.pick((1, 1, max(rows, 1)))
        widths = (kv * group * size, kv * size, kv * size)
        shapes = [(batch, rows, w) for w in widths]
        slots = before + rows if room else before
        shapes += [(batch, kv, slots, size)] * 2 if cached else []
        if d.chance(0.1):
            k = d.int(0, len(shapes) - 1)
            shapes[k] = d.corrupted(shapes[k])
        arrays: Arrays = [d.array("float32", s, scale=1.0) for s in shapes]
        arrays += [] if cached else [None, None]
        total = before + rows
        ends = np.full(batch, total - 1)
        if d.chance(0.3):
            ends = np.array([d.wild(0, total - 1, 0.3) for _ in range(batch)])
        ends = np.clip(ends, -(2**31), 2**31 - 1).astype(np.int32)
        said_total = total if d.chance(0.9) else d.pick((0, -1, 2**31 - 1, total + 3, -(2**31)))
        return [*arrays, ends, np.array(said_total, np.int32)]

    def rule(q: np.ndarray, k: np.ndarray, v: np.ndarray, pk: Any, pv: Any, ends: Any, said_total: Any) -> Answer:
        require(said == {"num_heads": kv * group, "kv_num_heads": kv}, f"{said}")
        batch, rows = q.shape[:2]
        require(k.shape == v.shape == (batch, rows, kv * size), "key or value")
        require(q.shape[2] == kv * group * size, "query")
        require(ends.shape == (batch,), "seqlens_k")
        slots = 0
        if cached:
            require(pk.shape == pv.shape == (batch, kv, pk.shape[2], size), "past")
            slots = pk.shape[2]
        total = int(said_total)
        before = total - rows
        if not (q.size and batch) or window != -1 or not (ends == total - 1).all() or before < 0 or before > slots:
            raise Unspecified("lengths that do not belong together, or windows")
        if not cached and before:
            raise Unspecified("a total beyond the keys")
        keys, values = _heads(k, kv), _heads(v, kv)
        if cached:
            keys, values = (np.concatenate([p[:, :, :before], x], 2) for p, x in ((pk, keys), (pv, values)))
        hidden = np.arange(total) > np.arange(rows)[:, None] + before
        added = np.where(hidden, -np.inf, 0.0)
        keys, values = (np.repeat(x, group, 1) for x in (keys, values))
        return [_joined(_softmax_matmul(_heads(q, kv * group), keys, values, added))]

    attributes = {**said, **({"local_window_size": window} if window != -1 else {})}
    numbers = [*_WIDTHS, (3, 1), (3, 3), (4, 1), (4, 3)]
    return make_attack(op, feed, rule, attributes=attributes, numbers=numbers)
