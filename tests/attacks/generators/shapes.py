"""Operators that keep, choose or move elements by attributes and axes: Squeeze, Transpose, Concat and their kin."""

from __future__ import annotations

import numpy as np

from ..attack import Answer, Arrays, Attack, Unspecified, attacks, normalize_axis, require
from ..draw import ANY, WILD, Draw


def _int64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@attacks("Squeeze", "Unsqueeze")
def squeeze(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(0 if op == "Unsqueeze" else 1, 4), d.dtype(ANY)
    count = d.int(0, 2) if op == "Unsqueeze" else d.int(0, rank)
    within = rank + (count if op == "Unsqueeze" else 0)
    absent = op == "Squeeze" and d.chance(0.15)
    ones = {int(a) for a in d.rng.permutation(rank)[:count]}

    def feed() -> Arrays:
        shape = [1 if k in ones and d.chance(0.9) else n for k, n in enumerate(d.shape(rank))]
        chosen = sorted(ones) if op == "Squeeze" else [int(a) for a in d.rng.permutation(within)[:count]]
        axes = [a - within if d.chance(0.3) else a for a in chosen]
        if axes and d.chance(0.12):
            axes[0] = d.pick((within, -within - 1, axes[-1], *WILD))
        return [d.array(dtype, shape), *([] if absent else [_int64(*axes)])]

    def rule(data: np.ndarray, axes: np.ndarray | None = None) -> Answer:
        if axes is None:
            return [np.squeeze(data)]
        normalized = [normalize_axis(int(a), data.ndim + (len(axes) if op == "Unsqueeze" else 0)) for a in axes]
        if op == "Unsqueeze":
            require(len(set(normalized)) == len(normalized), "an axis twice")
            return [np.expand_dims(data, tuple(normalized))]
        require(all(data.shape[p] == 1 for p in normalized), "no dimension of size 1")
        if len(set(normalized)) != len(normalized):
            raise Unspecified("an axis twice")
        return [np.squeeze(data, tuple(normalized))]

    return Attack(op, feed, rule, parameters={1}, opset=d.pick((13, 21, 24)))


@attacks("Trilu")
def trilu(d: Draw, op: str) -> Attack:
    rank, dtype, upper = d.int(2, 4), d.dtype(ANY), d.int(0, 1)
    absent = d.chance(0.2)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank)), *([] if absent else [np.array(d.wild(-9, 9), np.int64)])]

    def rule(data: np.ndarray, k: np.ndarray | None = None) -> Answer:
        diagonal = 0 if k is None else min(max(int(k), -(2**31)), 2**31)
        return [np.triu(data, diagonal) if upper else np.tril(data, diagonal)]

    return Attack(op, feed, rule, attributes={"upper": upper}, parameters={1})


@attacks("EyeLike")
def eye_like(d: Draw, op: str) -> Attack:
    dtype, rank = d.dtype(("float32", "int64", "int32", "bool")), 2 if d.chance(0.93) else d.int(0, 3)
    k = d.wild(-9, 9)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank))]

    def rule(data: np.ndarray) -> Answer:
        require(data.ndim == 2, f"rank {data.ndim}")
        return [np.eye(*data.shape, k=min(max(k, -(2**31)), 2**31), dtype=data.dtype)]

    return Attack(op, feed, rule, attributes={"k": k})


@attacks("Flatten")
def flatten(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(0, 4), d.dtype(ANY)
    axis = d.wild(-rank, rank, 0.1)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank))]

    def rule(data: np.ndarray) -> Answer:
        require(-data.ndim <= axis <= data.ndim, f"axis {axis}")
        a = axis + data.ndim if axis < 0 else axis
        return [data.reshape(int(np.prod(data.shape[:a])), int(np.prod(data.shape[a:])))]

    return Attack(op, feed, rule, attributes={"axis": axis})


@attacks("Transpose")
def transpose(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(0, 5), d.dtype(ANY)
    order = [int(a) for a in d.rng.permutation(rank)]
    if order and d.chance(0.1):
        order[0] = d.pick((rank, -1, order[-1], 2**62))
    has_order = d.chance(0.8)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank, limit=1500))]

    def rule(data: np.ndarray) -> Answer:
        require(not has_order or sorted(order) == list(range(data.ndim)), f"perm {order}")
        return [data.transpose(order if has_order else None)]

    return Attack(op, feed, rule, attributes={"perm": order} if has_order and order else {})


@attacks("Concat")
def concat(d: Draw, op: str) -> Attack:
    rank, dtype, count = d.int(1, 4), d.dtype(ANY), d.int(1, 4)
    axis = d.axis(rank)
    last = rank if d.chance(0.95) else d.int(1, 4)

    def feed() -> Arrays:
        shape = list(d.shape(rank))
        shapes = []
        for _ in range(count):
            shape[axis % rank] = d.size(0.15)
            shapes.append(d.corrupted(shape) if d.chance(0.04) else tuple(shape))
        shapes[-1] = (*shapes[-1], 1, 1, 1)[:last]
        return [d.array(dtype, s) for s in shapes]

    def rule(*arrays: np.ndarray) -> Answer:
        require(len({a.ndim for a in arrays}) == 1, "ranks")
        a = normalize_axis(axis, arrays[0].ndim)
        require(len({(*x.shape[:a], *x.shape[a + 1 :]) for x in arrays}) == 1, "shapes")
        return [np.concatenate(arrays, a)]

    return Attack(op, feed, rule, attributes={"axis": axis})


@attacks("DepthToSpace", "SpaceToDepth")
def blocks(d: Draw, op: str) -> Attack:
    size = d.pick((1, 2, 2, 3, *((0, -2, 2**31, 2**62) if d.chance(0.2) else ())))
    dtype, mode = d.dtype(("float32", "int64", "float16", "uint8")), d.pick(("DCR", "CRD"))
    rank = 4 if d.chance(0.95) else d.int(1, 5)

    def feed() -> Arrays:
        b = max(abs(size) if size < 9 else 2, 1)
        n, c, h, w = d.size(), d.int(0, 3), d.size(), d.size()
        shape = (n, c * b * b, h, w) if op == "DepthToSpace" else (n, c, h * b, w * b)
        shape = d.corrupted(shape) if d.chance(0.12) else shape
        return [d.array(dtype, (*shape, 1)[:rank])]

    def rule(data: np.ndarray) -> Answer:
        require(data.ndim == 4 and size > 0, f"rank {data.ndim}, blocks of {size}")
        n, c, h, w = data.shape
        if not data.size:
            raise Unspecified("blocks of nothing")
        if op == "SpaceToDepth":
            require(h % size == 0 and w % size == 0, "blocks that do not fit")
            x = data.reshape(n, c, h // size, size, w // size, size).transpose(0, 3, 5, 1, 2, 4)
            return [x.reshape(n, c * size * size, h // size, w // size)]
        require(c % (size * size) == 0, "blocks that do not fit")
        c //= size * size
        if mode == "DCR":
            x = data.reshape(n, size, size, c, h, w).transpose(0, 3, 4, 1, 5, 2)
        else:
            x = data.reshape(n, c, size, size, h, w).transpose(0, 1, 4, 2, 5, 3)
        return [x.reshape(n, c, h * size, w * size)]

    attributes = {"blocksize": size} | ({"mode": mode} if op == "DepthToSpace" else {})
    return Attack(op, feed, rule, attributes=attributes)


@attacks("Shape")
def shape_(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(0, 4), d.dtype(ANY)
    start, end = d.wild(-rank, rank, 0.2), d.wild(-rank, rank, 0.2)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank))]

    def rule(data: np.ndarray) -> Answer:
        return [np.array(data.shape[start:end], np.int64)]

    return Attack(op, feed, rule, attributes={"start": start, "end": end})


@attacks("Size", "NonZero")
def of_the_whole(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(0, 4) if op == "Size" else d.int(1, 4), d.dtype(ANY)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank))]

    def rule(data: np.ndarray) -> Answer:
        if op == "Size":
            return [np.array(data.size, np.int64)]
        return [np.array(np.nonzero(data.astype(np.float64)), np.int64).reshape(data.ndim, -1)]

    return Attack(op, feed, rule)
