"""com.microsoft: operators that onnxruntime's optimizers write, for which onnx does not have a reference.

Answers and rules follow onnxruntime's documentation; the tests of tests/ops/microsoft compare with its kernels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.attacks.attack import MICROSOFT, Answer, Arrays, Attack, Unspecified, attacks, broadcast_shapes, require
from tests.attacks.draw import WILD, Draw
from tests.attacks.generators.indices import within


def make_attack(op: str, feed: Any, rule: Any, close: float = 2e-3, **fields: Any) -> Attack:
    """Return an attack on an operator of com.microsoft."""
    return Attack(op, feed, rule, domain=MICROSOFT, opset=21, close=close, **fields)


@attacks("Gelu", "QuickGelu", "FastGelu", "BiasGelu", "BiasSplitGelu", domain=MICROSOFT)
def activation(d: Draw, op: str) -> Attack:
    rank, biased = (
        (3 if op == "BiasSplitGelu" else d.int(1, 3)),
        op.startswith("Bias") or (op == "FastGelu" and d.chance(0.5)),
    )

    def feed() -> Arrays:
        shape = d.shape(rank)
        shape = (*shape[:-1], 2 * shape[-1] if op == "BiasSplitGelu" and d.chance(0.9) else shape[-1])
        bias = d.corrupted(shape[-1:]) if d.chance(0.12) else shape[-1:]
        return [d.array("float32", shape), *([d.array("float32", bias)] if biased else [])]

    def rule(x: np.ndarray, bias: np.ndarray | None = None) -> Answer:
        if op == "BiasSplitGelu":
            require(x.shape[-1] % 2 == 0, "an odd width")
        if bias is not None:
            require(bias.shape == x.shape[-1:], f"bias {bias.shape} for {x.shape}")
            x = x + bias
        gate = None
        if op == "BiasSplitGelu":
            gate, x = np.split(x, 2, -1)
        y = x.astype(np.float64)
        if op == "QuickGelu":
            y = y / (1 + np.exp(-1.702 * y))
        elif op == "FastGelu":
            y = y * 0.5 * (1 + np.tanh(0.7978845608 * (y + 0.044715 * y**3)))
        else:
            y = np.asarray([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in y.ravel()]).reshape(y.shape)
        return [((y if gate is None else gate * y).astype(np.float32))]

    return make_attack(op, feed, rule, parameters={1})


@attacks("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(d: Draw, op: str) -> Attack:
    rank, turned = d.int(2, 3), (d.int(0, 1), d.int(0, 1))

    def feed() -> Arrays:
        batch, m, k, n = d.shape(rank - 2), d.size(), d.size(0), d.size()
        shapes = [(*batch, *((k, m) if turned[0] else (m, k))), (*batch, *((n, k) if turned[1] else (k, n)))]
        shapes[1] = d.corrupted(shapes[1]) if d.chance(0.12) else shapes[1]
        return [d.array("float32", s) for s in shapes]

    def rule(a: np.ndarray, b: np.ndarray) -> Answer:
        a, b = (v.swapaxes(-1, -2) if t else v for v, t in zip((a, b), turned))
        require(a.shape[-1] == b.shape[-2], "inner sizes")
        broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return [(0.5 * (a.astype(np.float64) @ b.astype(np.float64))).astype(np.float32)]

    return make_attack(
        op, feed, rule, attributes={"transA": turned[0], "transB": turned[1], "alpha": 0.5}, parameters={1}
    )


@attacks("MatMulNBits", domain=MICROSOFT)
def n_bits(d: Draw, op: str) -> Attack:
    bits, block = d.pick((4, 8)), d.pick((16, 32))
    columns, rows = d.pick((1, 5, 16, 33)), d.pick((16, 32, 40, 64))
    said = {"N": columns, "K": rows, "bits": bits, "block_size": block}
    legal, has_int8_rows = dict(said), d.chance(0.3)
    if d.chance(0.12):
        said[d.pick(tuple(said))] = d.pick((0, -1, 3, 2**31, 2**62))
    rank, bias, in_order = d.int(1, 3), d.chance(0.3), d.chance(0.8)

    def feed() -> Arrays:
        blocks = -(-rows // block)
        shapes = [(columns, blocks, block * bits // 8), (columns, blocks)]
        shapes = [d.corrupted(s) if d.chance(0.05) else s for s in shapes]
        x = (*d.shape(rank - 1), rows)
        x = d.corrupted(x) if d.chance(0.05) else x
        weight = d.rng.integers(0, 256, shapes[0], np.uint8)
        scales = (d.rng.random(shapes[1]) * 0.1).astype(np.float32)
        numbers = d.rng.permutation(np.arange(rows) // block) if d.chance(0.5) else d.rng.integers(0, blocks, rows)
        if d.chance(0.1):
            numbers[d.int(0, rows - 1)] = d.pick(WILD)
        g_idx = None if in_order else numbers.astype(np.int32)
        last = d.array("float32", (columns,)) if bias else None
        return [d.array("float32", x), weight, scales, None, g_idx, last]

    def rule(x: np.ndarray, weight: np.ndarray, scales: np.ndarray, *rest: Any) -> Answer:
        require(said == legal, "attributes")
        blocks = -(-rows // block)
        require(weight.shape == (columns, blocks, block * bits // 8), f"weight {weight.shape}")
        require(scales.size == columns * blocks, f"scales {scales.shape}")
        require(x.shape[-1] == rows, f"x {x.shape}")
        if scales.shape != (columns, blocks):
            raise Unspecified("scales of another shape")
        quantized = weight if bits == 8 else np.stack([weight & 15, weight >> 4], -1).reshape(columns, blocks, block)
        _, g_idx, last = rest
        require(g_idx is None or ((g_idx >= 0) & (g_idx < blocks)).all(), "g_idx")
        numbers = np.arange(rows) // block if g_idx is None else g_idx
        values = quantized.reshape(columns, -1)[:, :rows].astype(np.float64) - 2 ** (bits - 1)
        if has_int8_rows and not np.isfinite(x).all():
            raise Unspecified("a scale that is not finite")
        y = x.astype(np.float64) @ (values * scales[:, numbers]).T
        return [(y + (0 if last is None else last)).astype(np.float32)]

    attributes, close = (said | {"accuracy_level": 4}, 0.05) if has_int8_rows else (said, 2e-3)
    return make_attack(op, feed, rule, attributes=attributes, fixed={1, 2, 4}, close=close)


@attacks("GatherBlockQuantized", domain=MICROSOFT)
def gather_quantized(d: Draw, op: str) -> Attack:
    """Indices out of range give zeros."""
    bits, block, index_type = d.pick((4, 8)), d.pick((16, 32)), d.pick(("int64", "int32"))
    said = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    legal = dict(said)
    if d.chance(0.12):
        said[d.pick(("bits", "block_size", "quantize_axis"))] = d.pick((0, -1, 3, 2**31, 2**62))
    index_rank = d.int(0, 2)

    def feed() -> Arrays:
        rows, width = d.size(0), d.pick((16, 32, 40, 64))
        quantized = d.rng.integers(0, 256, (rows, width * bits // 8), np.uint8)
        shape = (rows, -(-width // block))
        scales = d.rng.random(d.corrupted(shape) if d.chance(0.08) else shape).astype(np.float32)
        return [quantized, d.indices(d.shape(index_rank), rows, dtype=index_type), scales]

    def rule(data: np.ndarray, indices: np.ndarray, scales: np.ndarray) -> Answer:
        if said != legal and said["quantize_axis"] == -1 and {**said, "quantize_axis": 1} == legal:
            pass  # the last of two axes
        else:
            require(said == legal, "attributes")
        quantized = data if bits == 8 else np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)
        require(scales.shape == (len(data), -(-quantized.shape[1] // block)), f"scales {scales.shape}")
        table = (quantized.astype(np.float32) - 2 ** (bits - 1)) * np.repeat(scales, block, axis=1)[
            :, : quantized.shape[1]
        ]
        there = (indices >= -len(data)) & (indices < len(data))
        if not len(data):
            return [np.zeros((*indices.shape, quantized.shape[1]), np.float32)]
        return [np.where(there[..., None], table[np.where(there, indices, 0)], 0).astype(np.float32)]

    return make_attack(op, feed, rule, attributes=said, fixed={0, 2})


@attacks("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization", domain=MICROSOFT)
def normalization(d: Draw, op: str) -> Attack:
    skip, centered = op.startswith("Skip"), op == "SkipLayerNormalization"
    extra = d.int(0, 2 if centered else 1) if skip else 0

    def feed() -> Arrays:
        shape = d.shape(3)
        vectors = [d.corrupted(shape[-1:]) if d.chance(0.06) else shape[-1:] for _ in range(1 + extra)]
        other = [d.corrupted(shape) if d.chance(0.08) else shape] if skip else []
        return [d.array("float32", s) for s in (shape, *other, *vectors)]

    def rule(x: np.ndarray, *rest: np.ndarray) -> Answer:
        other, vectors = (rest[0], rest[1:]) if skip else (None, rest)
        if not skip and vectors[0].shape == (1,) != x.shape[-1:]:
            raise Unspecified("one number, where RMSNormalization broadcasts")
        require(all(v.shape == x.shape[-1:] for v in vectors), "a vector of another length")
        if other is not None and other.shape != x.shape:
            require(other.shape[-2:] == x.shape[-2:] and other.shape[0] == 1, f"skip {other.shape}")
        if not x.size:
            raise Unspecified("a mean of nothing")
        gamma, *more = (v.astype(np.float64) for v in vectors)
        beta = more.pop(0) if centered and more else 0.0
        total = x.astype(np.float64) + (0 if other is None else other) + (more[0] if more else 0.0)
        y = total - total.mean(-1, keepdims=True) if centered else total
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * gamma + beta
        return [y.astype(np.float32)]

    return make_attack(op, feed, rule, attributes={"epsilon": 1e-5}, parameters={2, 3, 4})


def _from_the_front(d: Draw, shape: tuple[int, ...], bound: int) -> np.ndarray:
    """Indices of which those that count from the back are folded into the front, most of the time."""
    indices = d.indices(shape, bound, 0.15, "int32")
    return indices if d.chance(0.05) else np.where((indices < 0) & (indices >= -bound), indices + bound, indices)


@attacks("EmbedLayerNormalization", domain=MICROSOFT)
def embedding(d: Draw, op: str) -> Attack:
    segments, has_positions = d.chance(0.5), d.chance(0.4) and not op.startswith("Q")

    def feed() -> Arrays:
        batch, length, width, vocabulary, position_count = (
            d.size(),
            d.size(),
            d.size(0),
            d.size(0.05),
            d.pick((8, 17, 40)),
        )
        ids, kinds, position_ids = (_from_the_front(d, (batch, length), n) for n in (vocabulary, 2, position_count))
        tables = [
            d.array("float32", (n, d.size(0) if d.chance(0.04) else width)) for n in (vocabulary, position_count, 2)
        ]
        arrays: Arrays = [ids, kinds if segments else None, *tables[:2], tables[2] if segments else None]
        arrays += [d.array("float32", (width,)) for _ in range(2)]
        return [*arrays, None, position_ids] if has_positions else arrays

    def rule(
        ids: np.ndarray, kinds: Any, word_table: np.ndarray, position_table: np.ndarray, table: Any, *rest: Any
    ) -> Answer:
        width = word_table.shape[1]
        require(position_table.shape[1] == width and (table is None or table.shape[1] == width), "widths")
        require(all(v.shape == (width,) for v in rest[:2]), "widths")
        position_ids = rest[3] if has_positions else np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        for index, rows in (
            (ids, word_table),
            (position_ids, position_table),
            *(((kinds, table),) if segments else ()),
        ):
            require(index.shape == ids.shape, f"{index.shape} next to {ids.shape}")
            require((index >= 0).all(), "a negative index")
            within(index, len(rows))
        x = word_table[ids].astype(np.float64) + position_table[position_ids] + (table[kinds] if segments else 0)
        if not x.size:
            raise Unspecified("nothing to normalize")
        x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * rest[0] + rest[1]
        return [y.astype(np.float32), np.zeros(ids.shape[0], np.int32)]

    return make_attack(op, feed, rule, outputs=2, attributes={"epsilon": 1e-5}, parameters={2, 3, 4})


_ANGLES = ((0, 1), (0, 3), (2, 1), (3, 1))


@attacks("RotaryEmbedding", domain=MICROSOFT)
def rotary(d: Draw, op: str) -> Attack:
    half, offset, heads = d.pick((1, 2, 4, 8)), d.chance(0.4), d.pick((1, 2, 3))
    interleaved = d.int(0, 1)

    def feed() -> Arrays:
        batch, rows, positions = d.size(), d.size(0), d.pick((8, 17, 33, 40))
        rows = min(rows, positions)
        if offset:
            where = np.array([d.wild(0, positions - rows, 0.2)], np.int64)
        else:
            where = _from_the_front(d, (batch, rows), positions).astype(np.int64)
        caches = [d.corrupted((positions, half)) if d.chance(0.05) else (positions, half) for _ in range(2)]
        return [d.array("float32", (batch, heads, rows, 2 * half)), where, *(d.array("float32", c) for c in caches)]

    def rule(x: np.ndarray, where: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> Answer:
        rows = x.shape[2]
        require(cos.shape == sin.shape and cos.shape[1] == half, "caches")
        require(offset or where.shape == (x.shape[0], rows), "position_ids")
        require(rows <= len(cos), "more rows than positions")
        positions = where[:1, None].astype(object) + np.arange(rows) if offset else where
        require(((positions >= 0) & (positions < len(cos))).all(), f"positions {where} of {len(cos)}")
        positions = np.broadcast_to(positions.astype(np.int64), (x.shape[0], rows))
        c, s = (v.astype(np.float64)[positions][:, None] for v in (cos, sin))
        wide = x.astype(np.float64)
        a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else np.split(wide, 2, -1)
        rotated = c * a - s * b, s * a + c * b
        y = np.stack(rotated, -1).reshape(x.shape) if interleaved else np.concatenate(rotated, -1)
        return [y.astype(np.float32)]

    return make_attack(op, feed, rule, attributes={"interleaved": interleaved}, parameters={2, 3}, numbers=_ANGLES)
