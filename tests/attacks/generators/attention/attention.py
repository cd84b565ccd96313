"""Attention, RotaryEmbedding, TensorScatter and SwiGLU of ai.onnx: wild lengths, positions and windows, odd masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.attacks.attack import Answer, Arrays, Attack, Unspecified, attacks, normalize_axis, require
from tests.attacks.draw import ANY, Draw
from tests.attention.onnx_oracle import attention as formula


@attacks("Attention")
def attention(d: Draw, op: str) -> Attack:
    flat, dtype, opset = d.chance(0.3), d.dtype(("float32", "float16", "float64")), d.pick((23, 24))
    group, kv_heads = d.pick((1, 1, 2, 3)), d.pick((1, 2))
    if flat and d.chance(0.05):
        kv_heads = d.pick((0, -1, 2**31, 3))
    q_heads = group * kv_heads
    mask_rank = d.pick((0, 0, 2, 3, 4))
    mask_type = d.pick(("bool", dtype))
    past = d.chance(0.25)
    lengths = opset > 23 and not past and d.chance(0.3)
    attributes: dict[str, Any] = d.choose(is_causal=d.int(0, 1))
    attributes |= {"softcap": d.pick((0.5, 20.0))} if d.chance(0.2) else {}
    attributes |= {"scale": 0.3} if d.chance(0.2) else {}
    attributes |= {"q_num_heads": q_heads, "kv_num_heads": kv_heads} if flat else {}
    outputs = 3 if past else 1
    size, wide = d.pick((1, 2, 8, 16, 17)), d.pick((1, 3, 8, 16))

    def feed() -> Arrays:
        batch, rows, keys = d.size(), d.size(), d.size(0.08)
        heads, kv = (max(min(h, 6), 1) for h in (q_heads, kv_heads))
        before = d.size(0.15) if past else 0
        shapes = [(batch, heads, rows, size), (batch, kv, keys, size), (batch, kv, keys, wide)]
        if d.chance(0.1):
            shapes[d.int(0, 2)] = d.corrupted(d.pick(shapes))
        arrays: Arrays = [d.array(dtype, s, scale=1.0) for s in shapes]
        if flat:
            arrays = [a.swapaxes(1, 2).reshape(a.shape[0], a.shape[2], a.shape[1] * a.shape[3]).copy() for a in arrays]  # type: ignore[union-attr]
        total = before + keys
        mask = None
        if mask_rank:
            dims = (d.pick((batch, 1)), d.pick((heads, 1)), rows, total)[4 - mask_rank :]
            mask = d.array(mask_type, d.corrupted(dims) if d.chance(0.1) else dims)
        arrays.append(mask)
        if past:
            cache_shapes = [(batch, kv, before, size), (batch, kv, before, wide)]
            cache_shapes[1] = d.corrupted(cache_shapes[1]) if d.chance(0.05) else cache_shapes[1]
            arrays += [d.array(dtype, s, scale=1.0) for s in cache_shapes]
        if lengths:
            valid = np.array([d.wild(0, keys, 0.1) for _ in range(batch)], np.int64)
            arrays += [None, None, valid if d.chance(0.95) else d.array("int64", d.corrupted((batch,)))]
        return arrays if past or lengths or mask is not None else arrays[:3]

    def rule(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any = None, *rest: Any) -> Answer:
        if flat:
            require(q_heads > 0 and kv_heads > 0, "no heads")
            widths = (q.shape[2] % q_heads, k.shape[2] % kv_heads, v.shape[2] % kv_heads)
            require(not any(widths), "heads that do not divide")
            sizes = q.shape[2] // q_heads, k.shape[2] // kv_heads
            rows, keys, values = q.shape[1], k.shape[1], v.shape[1]
        else:
            require(k.shape[1] == v.shape[1] and k.shape[1] and q.shape[1] % k.shape[1] == 0, "heads")
            sizes = q.shape[3], k.shape[3]
            rows, keys, values = q.shape[2], k.shape[2], v.shape[2]
        require(q.shape[0] == k.shape[0] == v.shape[0], "batches")
        require(sizes[0] == sizes[1], f"head sizes {sizes}")
        require(keys == values, "lengths of K and V")
        before = [*rest, None, None, None]
        if before[0] is not None:
            kv = kv_heads if flat else k.shape[1]
            width = v.shape[2] // kv_heads if flat else v.shape[3]
            p = before[0].shape[2]
            require(before[0].shape == (q.shape[0], kv, p, sizes[1]), "past_key")
            require(before[1].shape == (q.shape[0], kv, p, width), "past_value")
            keys += p
        valid = before[2]
        if valid is not None:
            require(valid.shape == (q.shape[0],), "nonpad_kv_seqlen")
            if ((valid < 0) | (valid > keys)).any() or (attributes.get("is_causal") and (valid < rows).any()):
                raise Unspecified("lengths outside of the keys")
        if mask is not None:
            heads = q_heads if flat else q.shape[1]
            whole = (q.shape[0], heads, rows, keys)
            for expected, size in zip(reversed(whole), reversed(mask.shape)):
                if size not in (1, expected) and not (expected == keys and size < keys and opset > 23):
                    require(False, f"mask {mask.shape} for {whole}")
            if mask.ndim and (mask.shape[-1] != keys or mask.shape[-2] != rows):
                raise Unspecified("a mask that is shorter or one row")
        if not (q.size and keys) or 0 in sizes:
            raise Unspecified("attention to nothing")
        answer = formula(opset, attributes, q, k, v, mask, *before[:3])
        return answer[:outputs]

    numbers = [(k, axis) for k in (0, 1, 2, 4, 5) for axis in ((2,) if flat and k < 3 else (1, 3))]
    close = 2e-2 if "16" in dtype else 1e-3
    fields: dict[str, Any] = {"outputs": outputs, "attributes": attributes, "opset": opset}
    return Attack(op, feed, rule, parameters={6}, numbers=numbers, close=close, **fields)


@attacks("RotaryEmbedding")
def rotary(d: Draw, op: str) -> Attack:
    dtype, ids, flat = d.dtype(("float32", "float16", "float64")), d.chance(0.7), d.chance(0.4)
    heads, half, extra = d.pick((1, 2, 3)), d.pick((1, 2, 4, 8)), d.pick((0, 0, 2))
    attributes: dict[str, Any] = {"interleaved": d.int(0, 1)}
    if extra or d.chance(0.3):
        attributes["rotary_embedding_dim"] = 2 * half
    if flat:
        attributes["num_heads"] = heads
    if d.chance(0.07):
        attributes[d.pick(("rotary_embedding_dim", "num_heads"))] = d.pick((-2, 3, 64, 2**31))

    def feed() -> Arrays:
        batch, rows, positions = d.size(), d.size(), d.size(0.1)
        size = 2 * half + extra
        shape = (batch, rows, heads * size) if flat else (batch, heads, rows, size)
        cache = (positions, half) if ids else (batch, rows, half)
        caches = [d.corrupted(cache) if d.chance(0.07) else cache for _ in range(2)]
        arrays: Arrays = [d.array(dtype, shape), *(d.array(dtype, c, scale=0.5) for c in caches)]
        if ids:
            where = d.indices((batch, rows), positions, 0.2, "int64")
            where = np.where((where < 0) & (where >= -positions), where + positions, where)
            arrays.append(d.array("int64", d.corrupted(where.shape)) if d.chance(0.05) else where)
        return arrays

    def rule(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, where: np.ndarray | None = None) -> Answer:
        count = attributes.get("num_heads", 0)
        if flat:
            require(count > 0 and x.shape[2] % count == 0, f"{count} heads of {x.shape[2]}")
        elif count not in (0, x.shape[1]):
            raise Unspecified("num_heads with rank 4")
        wide = x.reshape(*x.shape[:2], count, x.shape[2] // count).swapaxes(1, 2) if flat else x
        rotated = attributes.get("rotary_embedding_dim", 0) or wide.shape[3]
        require(0 < rotated <= wide.shape[3] and rotated % 2 == 0, f"{rotated} of {wide.shape[3]}")
        require(cos.shape == sin.shape and cos.shape[-1] == rotated // 2, f"caches {cos.shape} {sin.shape}")
        if where is not None:
            if where.shape == (1, wide.shape[2]) and len(x) > 1:
                raise Unspecified("positions that all batches share")
            require(where.shape == (x.shape[0], wide.shape[2]), f"position_ids {where.shape}")
            require(((where >= -len(cos)) & (where < len(cos))).all(), f"position {where} of {len(cos)}")
            if (where < 0).any():
                raise Unspecified("a position counted from the back")
            cos, sin = cos[where], sin[where]
        else:
            if cos.shape[:2] == (1, wide.shape[2]) and len(x) > 1:
                raise Unspecified("angles that all batches share")
            require(cos.shape[:2] == (x.shape[0], wide.shape[2]), f"caches {cos.shape}")
        c, s = (v.astype(np.float64)[:, None] for v in (cos, sin))
        rotated_part = wide[..., :rotated].astype(np.float64)
        pairs = rotated_part.reshape(*rotated_part.shape[:-1], rotated // 2, 2) if attributes["interleaved"] else None
        a, b = (pairs[..., 0], pairs[..., 1]) if pairs is not None else np.split(rotated_part, 2, -1)
        real, imaginary = c * a - s * b, s * a + c * b
        if pairs is not None:
            rotated_part = np.stack([real, imaginary], -1).reshape(rotated_part.shape)
        else:
            rotated_part = np.concatenate([real, imaginary], -1)
        result = np.concatenate([rotated_part, wide[..., rotated:].astype(np.float64)], -1).astype(x.dtype)
        return [result.swapaxes(1, 2).reshape(x.shape) if flat else result]

    fields: dict[str, Any] = {"attributes": attributes, "opset": d.pick((23, 24))}
    return Attack(op, feed, rule, parameters={1, 2}, numbers=[(0, 1), (0, -1), (1, -1), (2, -1)], close=1e-3, **fields)


@attacks("TensorScatter")
def tensor_scatter(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(2, 4), d.dtype(ANY)
    axis = d.int(1, rank - 1) if d.chance(0.93) else d.pick((0, rank, -rank - 1, 2**31))
    attributes: dict[str, Any] = {"axis": axis - rank if 0 < axis < rank and d.chance(0.5) else axis}
    attributes |= d.choose(mode=d.pick(("linear", "circular")))
    has_indices = d.chance(0.8)
    at = axis if 0 < axis < rank else 1

    def feed() -> Arrays:
        shape = list(d.shape(rank))
        room, rows = shape[at], d.int(0, max(shape[at], 1))
        update = (*shape[:at], rows, *shape[at + 1 :])
        update = d.corrupted(update) if d.chance(0.1) else update
        where = np.array([d.wild(0, max(room - rows, 0), 0.12) for _ in range(shape[0])], np.int64)
        where = d.array("int64", d.corrupted(where.shape)) if d.chance(0.05) else where
        return [d.array(dtype, shape), d.array(dtype, update), *([where] if has_indices else [])]

    def rule(past: np.ndarray, update: np.ndarray, where: np.ndarray | None = None) -> Answer:
        a = normalize_axis(attributes["axis"], past.ndim)
        require(a, "axis 0 is the batch")
        room, rows = past.shape[a], update.shape[a]
        require(all(k == a or n == m for k, (n, m) in enumerate(zip(past.shape, update.shape))), "shapes")
        require(rows <= room, "more rows than slots")
        starts = np.zeros(past.shape[0], np.int64) if where is None else where
        require(starts.shape == (past.shape[0],), "write_indices")
        circular = attributes.get("mode") == "circular"
        if (starts < 0).any() or (not circular and (starts > room - rows).any()):
            raise Unspecified("rows outside, which the project drops")
        out = past.copy()
        for batch, start in enumerate(starts.tolist()):
            for row in range(rows):
                slot = np.moveaxis(out[batch], a - 1, 0)
                slot[(start + row) % room] = np.moveaxis(update[batch], a - 1, 0)[row]
        return [out]

    return Attack(op, feed, rule, attributes=attributes, parameters={2})


@attacks("SwiGLU")
def swiglu(d: Draw, op: str) -> Attack:
    rank, dtype, alpha = d.int(0, 4), d.dtype(("float32", "float64")), d.pick((0.5, 1.0, 1.7))

    def feed() -> Arrays:
        shape = d.shape(rank)
        return [d.array(dtype, shape), d.array(dtype, d.corrupted(shape) if d.chance(0.15) else shape)]

    def rule(a: np.ndarray, b: np.ndarray) -> Answer:
        require(a.shape == b.shape, "two shapes")
        wide = a.astype(np.float64)
        return [(wide / (1 + np.exp(-np.float32(alpha) * wide)) * b).astype(a.dtype)]  # the reference lacks it

    return Attack(op, feed, rule, opset=28, attributes={"alpha": alpha})
