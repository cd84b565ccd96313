"""FlexAttention, its gradient and its blocks, of the domain lowering.flex: hostile numbers in captured arrays, arrays
that are too short, states of blocks that nobody has, odd sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from lowering.attention.flex_node import DOMAIN, FULL, PARTIAL
from lowering.flex.captured import read_array_specs
from lowering.flex.problem import build_settings
from tests.attacks.attack import Answer, Arrays, Attack, Unspecified, attacks, require
from tests.attacks.draw import WILD, Draw

BLOCKS = (8, 16)


def _score(s: Any, b: Any, h: Any, i: Any, j: Any, *, bias: Any, index: Any) -> Any:
    return s + bias[index[j]] * (i % 3)


def _mask(b: Any, h: Any, i: Any, j: Any, *, index: Any) -> Any:
    return (i + 9 >= j) & (index[j] // index[i] != index[i] % 7)


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a // b as kernels compute it: division by 0 is division by 1."""
    return np.floor_divide(a, np.where(b == 0, 1, b))


def _seen(index: np.ndarray, rows: int, keys: int) -> np.ndarray:
    i, j = np.arange(rows)[:, None], np.arange(keys)
    with np.errstate(all="ignore"):
        return (i + 9 >= j) & (_divided(index[j], index[i]) != index[i] % 7)


def _scores(q: np.ndarray, k: np.ndarray, bias: np.ndarray, index: np.ndarray) -> np.ndarray:
    i, j = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
    at = index[j]
    at = np.clip(np.where(at < 0, at + len(bias), at), 0, len(bias) - 1)
    s = q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3) / math.sqrt(q.shape[3])
    return s + bias[at].astype(np.float64) * (i % 3)


def _draw_index(d: Draw, length: int) -> np.ndarray:
    """Draw divisors and indices; now and then a value that no index should be."""
    numbers = d.rng.integers(-6, 7, length)
    for at in range(length):
        if d.chance(0.1):
            numbers[at] = d.pick(WILD)
    return numbers


def _operands(d: Draw, heads: int, size: int) -> Callable[[], list[np.ndarray]]:
    """Return a function that draws q, k, v, index (long enough for most rows and keys) and bias."""

    def feed() -> list[np.ndarray]:
        batch, rows, keys = d.size(), d.size(), d.size()
        shapes = [(batch, heads, n, size) for n in (rows, keys, keys)]
        if d.chance(0.08):
            shapes[d.int(0, 2)] = d.corrupted(d.pick(shapes))  # type: ignore[call-overload]
        arrays = [d.array("float32", shape, scale=1.0) for shape in shapes]
        length = max(rows, keys) - (1 if d.chance(0.1) else 0)
        return [*arrays, _draw_index(d, max(length, 0)), d.array("float32", (d.pick((1, 4, 0, 9)),), scale=1.0)]

    return feed


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, index: np.ndarray, bias: np.ndarray | None) -> None:
    require(q.ndim == k.ndim == v.ndim == 4, "ranks")
    require(k.shape[0] == v.shape[0] and k.shape[0] in (1, q.shape[0]), "batches")
    require(q.shape[1] == k.shape[1] == v.shape[1], "heads")
    require(q.shape[3] == k.shape[3] and k.shape[2] == v.shape[2], "head sizes and lengths")
    if not (q.size and k.size and v.size):
        raise Unspecified("attention to nothing")
    require(len(index) >= max(q.shape[2], k.shape[2]), "a look-up outside of the array")
    require(bias is None or len(bias), "a look-up in an empty array")


def _attributes(score: Any, mask: Any, block_size: tuple[int, int] | None, size: int) -> dict[str, Any]:
    arrays = {"index": np.zeros(1, np.int64), **({} if score is None else {"bias": np.zeros(1, np.float32)})}
    return {
        "settings": build_settings(score, mask, read_array_specs(arrays), "float32", None, size, block_size).to_json()
    }


@attacks("FlexAttention", domain=DOMAIN)
def flex_attention(d: Draw, op: str) -> Attack:
    heads, size, blocked = d.pick((1, 2, 3)), d.pick((1, 8, 16, 17)), d.chance(0.5)
    operands = _operands(d, heads, size)

    def feed() -> Arrays:
        q, k, v, index, bias = operands()
        shape = (1, 1, *(-(-x.shape[2] // n) if x.ndim == 4 else 1 for x, n in zip((q, k), BLOCKS)))
        if d.chance(0.08):
            shape = d.corrupted(shape)  # type: ignore[assignment]
        states = d.rng.integers(-128, 128, shape) if d.chance(0.2) else d.rng.integers(0, 3, shape)
        return [q, k, v, states.astype(np.int8) if blocked else None, index, bias]

    def rule(q: Any, k: Any, v: Any, states: Any, index: Any, bias: Any) -> Answer:
        _check(q, k, v, index, bias)
        if states is not None and states.ndim == 4:
            require(states.shape[0] in (1, q.shape[0]) and states.shape[1] in (1, q.shape[1]), "states of others")
        rows, keys = q.shape[2], k.shape[2]
        seen = np.broadcast_to(_seen(index, rows, keys), (*q.shape[:2], rows, keys))
        if states is not None:
            require(states.shape[2:] == tuple(-(-n // size) for n, size in zip((rows, keys), BLOCKS)), "blocks")
            state = states.repeat(BLOCKS[0], axis=2).repeat(BLOCKS[1], axis=3)[:, :, :rows, :keys]
            seen = (state == FULL) | ((state == PARTIAL) & seen)
        with np.errstate(all="ignore"):
            s = np.where(seen, _scores(q, k, bias, index), -np.inf)
            if not (np.isfinite(s) | ~seen).all() or not np.isfinite(v).all():
                raise Unspecified("numbers that are not finite")
            m = s.max(axis=-1, keepdims=True)
            p = np.exp(s - np.where(np.isinf(m), 0.0, m))
            l = p.sum(axis=-1, keepdims=True)
            return [(p / np.where(l == 0, 1.0, l) @ v.astype(np.float64)).astype(np.float32)]

    attributes = _attributes(_score, _mask, BLOCKS if blocked else None, size)
    numbers = [(k, axis) for k in range(4) for axis in (1, 3)] + [(3, 0)]
    return Attack(op, feed, rule, domain=DOMAIN, attributes=attributes, numbers=numbers, close=1e-3)


@attacks("FlexAttentionGradient", domain=DOMAIN)
def flex_attention_gradient(d: Draw, op: str) -> Attack:
    heads, size = d.pick((1, 2, 3)), d.pick((1, 8, 16, 17))
    operands = _operands(d, heads, size)

    def feed() -> Arrays:
        q, k, v, index, bias = operands()
        shape = (*q.shape[:3], v.shape[3]) if q.ndim == v.ndim == 4 else (1, 1, 1, 1)
        y, dy = (d.array("float32", shape, scale=1.0) for _ in range(2))
        lse = d.array("float32", shape[:3], scale=1.0) + np.float32(40)
        return [q, k, v, None, y, lse, dy if not d.chance(0.05) else dy[:, :, :-1], index, bias]

    def rule(q: Any, k: Any, v: Any, states: Any, y: Any, lse: Any, dy: Any, index: Any, bias: Any) -> Answer:
        _check(q, k, v, index, bias)
        require(y.shape == dy.shape == (*q.shape[:3], v.shape[3]) and lse.shape == q.shape[:3], "what came forward")
        raise Unspecified("tests/flex/test_gradients.py says what comes")

    attributes = _attributes(_score, _mask, None, size)
    numbers = [(k, axis) for k in (0, 1, 2, 4, 6) for axis in (1, 3)] + [(5, 1)]
    results = [("float32", 4)] * 3 + [("float32", 1)]
    return Attack(op, feed, rule, 4, DOMAIN, attributes=attributes, numbers=numbers, close=1e-2, results=results)


@attacks("BlockStates", domain=DOMAIN)
def block_states(d: Draw, op: str) -> Attack:
    def feed() -> Arrays:
        lengths = [d.size(), d.size(), d.size(), d.size()]
        longest = max(lengths[2:])
        if d.chance(0.1):
            lengths[d.int(0, 3)] = d.pick(WILD)
        return [np.array(lengths, np.int64), _draw_index(d, longest)]

    def rule(lengths: np.ndarray, index: np.ndarray) -> Answer:
        require((lengths >= 0).all(), "negative lengths")
        batch, heads, rows, keys = map(int, lengths)
        blocks = [-(-n // size) for n, size in zip((rows, keys), BLOCKS)]
        require(batch * heads * blocks[0] * blocks[1] < 2**31, "more blocks than memory")
        if not lengths.all() or max(rows, keys) > 4096:
            raise Unspecified("no blocks, or very many")
        require(len(index) >= max(rows, keys), "a look-up outside of the array")
        padded = np.zeros((blocks[0] * BLOCKS[0], blocks[1] * BLOCKS[1]), bool)
        padded[:rows, :keys] = _seen(index, rows, keys)
        count = padded.reshape(blocks[0], BLOCKS[0], blocks[1], BLOCKS[1]).sum(axis=(1, 3))
        states = np.where(count == 0, 0, np.where(count == BLOCKS[0] * BLOCKS[1], FULL, PARTIAL))
        return [np.broadcast_to(states, (batch, heads, *blocks)).astype(np.int8)]

    return Attack(op, feed, rule, domain=DOMAIN, attributes=_attributes(None, _mask, BLOCKS, 1), results=[("int8", 4)])
