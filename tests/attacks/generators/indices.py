"""Operators that read or write where an input says: Gather, Scatter and their kin, OneHot, TopK, ReverseSequence."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..attack import Answer, Arrays, Attack, Unspecified, attacks, check_elements, normalize_axis, require
from ..draw import ANY, NUMBERS, Draw


def within(indices: np.ndarray, bound: int, what: str = "index") -> None:
    """Require -bound <= index < bound, for which reference and runtimes differ and the standard does not."""
    outside = indices[(indices < -bound) | (indices >= bound)]
    require(not outside.size, f"{what} {outside[:1]} of {bound}")


@attacks("Gather")
def gather(d: Draw, op: str) -> Attack:
    rank, index_rank = d.int(1, 4), d.int(0, 3)
    axis, dtype, index_type = d.axis(rank), d.dtype(ANY), d.pick(("int64", "int32"))

    def feed() -> Arrays:
        data = d.array(dtype, d.shape(rank))
        bound = data.shape[axis % rank]
        return [data, d.indices(d.shape(index_rank, limit=100), bound, dtype=index_type)]

    def rule(data: np.ndarray, indices: np.ndarray) -> Answer:
        within(indices, data.shape[normalize_axis(axis, data.ndim)])
        return [np.take(data, indices.astype(np.int64), axis=axis)]  # the reference reads empty indices as floats

    return Attack(op, feed, rule, attributes={"axis": axis}, parameters={1}, opset=d.pick((11, 13, 24)))


@attacks("GatherElements")
def gather_elements(d: Draw, op: str) -> Attack:
    rank = d.int(1, 4)
    axis, dtype, index_type = d.axis(rank), d.dtype(ANY), d.pick(("int64", "int32"))

    def feed() -> Arrays:
        shape = d.shape(rank)
        within = [s if k == axis % rank else d.int(0, s) if d.chance(0.3) else s for k, s in enumerate(shape)]
        within[axis % rank] = d.size()
        indices = d.indices(d.corrupted(within) if d.chance(0.15) else within, shape[axis % rank], dtype=index_type)
        return [d.array(dtype, shape), indices]

    def rule(data: np.ndarray, indices: np.ndarray) -> Answer:
        a = normalize_axis(axis, data.ndim)
        smaller_elsewhere(indices, data, a)
        within(indices, data.shape[a])
        positions = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
        positions[a] = indices
        return [data[tuple(positions)]]  # the reference wants indices of the shape of the data

    return Attack(op, feed, rule, attributes={"axis": axis}, parameters={1}, opset=d.pick((11, 13, 24)))


def smaller_elsewhere(indices: np.ndarray, data: np.ndarray, axis: int) -> None:
    for k, (i, s) in enumerate(zip(indices.shape, data.shape)):
        require(k == axis or i <= s, f"indices of shape {indices.shape} for data of {data.shape}, axis {axis}")


@attacks("GatherND")
def gather_nd(d: Draw, op: str) -> Attack:
    rank = d.int(1, 4)
    batch = d.int(0, rank - 1)
    index_rank = d.int(batch + 1, 4)
    depth = d.wild(1, rank - batch, 0.05)
    depth = depth if 0 <= depth < 6 else 1
    dtype = d.dtype(ANY)
    batch = d.wild(batch, batch, 0.05)

    def feed() -> Arrays:
        shape = d.shape(rank)
        first = min(max(batch, 0), rank - 1)
        outer = [*shape[:first], *d.shape(max(index_rank - 1 - first, 0), limit=60)]
        outer = list(d.corrupted(outer)) if d.chance(0.15) else outer
        columns = [d.indices((*outer, 1), shape[min(first + k, rank - 1)], 0.15, "int64") for k in range(depth)]
        indices = np.concatenate(columns, -1) if columns else np.zeros((*outer, 0), np.int64)
        return [d.array(dtype, shape), indices]

    def rule(data: np.ndarray, indices: np.ndarray) -> Answer:
        require(0 <= batch < min(data.ndim, indices.ndim), f"batch_dims {batch}")
        require(1 <= indices.shape[-1] <= data.ndim - batch, f"depth {indices.shape[-1]}")
        require(data.shape[:batch] == indices.shape[:batch], f"batches {data.shape} and {indices.shape}")
        depth = indices.shape[-1]
        for k in range(depth):
            within(indices[..., k], data.shape[batch + k])
        out = np.empty((*indices.shape[:-1], *data.shape[batch + depth :]), data.dtype)
        for position in np.ndindex(indices.shape[:-1]):
            out[position] = data[(*position[:batch], *indices[position])]
        return [out]  # the reference gives no empty results

    return Attack(op, feed, rule, attributes={"batch_dims": batch}, parameters={1}, opset=d.pick((12, 13, 24)))


_COMBINE = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def combined(out: np.ndarray, at: tuple, new: Any, reduction: str) -> None:
    if reduction == "none":
        out[at] = new
    else:
        out[at] = _COMBINE[reduction](out[at], new)


@attacks("ScatterElements", "Scatter")
def scatter_elements(d: Draw, op: str) -> Attack:
    rank = d.int(1, 4)
    axis, dtype, index_type = d.axis(rank), d.dtype(NUMBERS), d.pick(("int64", "int32"))
    reduction = d.pick(("none", "none", "add", "mul", "max", "min")) if op == "ScatterElements" else "none"

    def feed() -> Arrays:
        shape = d.shape(rank, limit=400)
        inner = [d.int(0, s) if d.chance(0.4) else s for s in shape]
        inner = list(d.corrupted(inner)) if d.chance(0.2) else inner
        updates = d.corrupted(inner) if d.chance(0.12) else inner
        return [
            d.array(dtype, shape),
            d.indices(inner, shape[axis % rank], dtype=index_type),
            d.array(dtype, updates),
        ]

    def rule(data: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> Answer:
        a = normalize_axis(axis, data.ndim)
        require(indices.shape == updates.shape, f"indices {indices.shape} with updates {updates.shape}")
        smaller_elsewhere(indices, data, a)
        within(indices, data.shape[a])
        out, seen = data.copy(), set()
        for position in np.ndindex(indices.shape):
            target = (*position[:a], int(indices[position]) % data.shape[a], *position[a + 1 :])
            combined(out, target, updates[position], reduction)
            if reduction == "none" and target in seen:
                raise Unspecified("an element is replaced twice")
            seen.add(target)
        return [out]  # the reference loses the type of half precision and refuses smaller indices

    attributes = {"axis": axis} | ({} if op == "Scatter" else {"reduction": reduction})
    opset = 10 if op == "Scatter" else d.pick((18, 24))
    return Attack(op, feed, rule, attributes=attributes, parameters={1}, opset=opset, close=1e-2 * ("16" in dtype))


@attacks("ScatterND")
def scatter_nd(d: Draw, op: str) -> Attack:
    rank, index_rank = d.int(1, 4), d.int(1, 3)
    depth = d.int(1, rank) if d.chance(0.95) else rank + 1
    dtype, reduction = d.dtype(NUMBERS), d.pick(("none", "none", "add", "mul", "max", "min"))

    def feed() -> Arrays:
        shape = d.shape(rank, limit=400)
        outer = d.shape(index_rank - 1, limit=30)
        columns = [d.indices((*outer, 1), shape[min(k, rank - 1)], 0.15, "int64") for k in range(depth)]
        updates = (*outer, *shape[depth:])
        return [
            d.array(dtype, shape),
            np.concatenate(columns, -1),
            d.array(dtype, d.corrupted(updates) if d.chance(0.15) else updates),
        ]

    def rule(data: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> Answer:
        depth = indices.shape[-1]
        require(depth <= data.ndim, f"depth {depth} for rank {data.ndim}")
        expected = (*indices.shape[:-1], *data.shape[depth:])
        require(updates.shape == expected, f"updates {updates.shape} instead of {expected}")
        for k in range(depth):
            within(indices[..., k], data.shape[k])
        out, seen = data.copy(), set()
        for position in np.ndindex(indices.shape[:-1]):
            target = tuple(int(i) % s for i, s in zip(indices[position], data.shape))
            combined(out, target, updates[position], reduction)
            if reduction == "none" and target in seen:
                raise Unspecified("a slice is replaced twice")
            seen.add(target)
        return [out]  # the reference accepts updates of other shapes

    attributes = {"reduction": reduction}
    return Attack(
        op, feed, rule, attributes=attributes, parameters={1}, opset=d.pick((18, 24)), close=1e-2 * ("16" in dtype)
    )


@attacks("OneHot")
def one_hot(d: Draw, op: str) -> Attack:
    rank = d.int(0, 3)
    axis, index_type = d.wild(-rank - 1, rank, 0.06), d.pick(("int64", "int32", "float32"))
    depth_type, dtype, depth_rank = d.pick(("int64", "int32")), d.dtype(NUMBERS), d.int(0, 1)

    def feed() -> Arrays:
        depth = d.wild(1, 9, 0.25)
        ends = np.iinfo(depth_type)
        depth = min(max(depth, ends.min), ends.max)
        indices = d.indices(d.shape(rank, limit=100), min(abs(depth), 9), 0.3, "int64").astype(index_type)
        return [indices, np.full((1,) * depth_rank, depth, depth_type), d.array(dtype, (2,))]

    def rule(indices: np.ndarray, depth: np.ndarray, values: np.ndarray) -> Answer:
        a = normalize_axis(axis, indices.ndim + 1)
        size = int(depth.ravel()[0])
        check_elements((size, *indices.shape))
        check_elements((size, indices.size))
        wide = indices.astype(np.int64)  # outside: all off, says the standard
        wide = np.where((wide < -size) | (wide >= size), size, np.where(wide < 0, wide + size, wide))
        hot = np.expand_dims(wide, a) == np.arange(size).reshape([size if k == a else 1 for k in range(wide.ndim + 1)])
        return [np.where(hot, values[1], values[0])]  # the reference takes indices modulo depth

    return Attack(op, feed, rule, attributes={"axis": axis}, parameters={1, 2}, opset=d.pick((11, 24)))


@attacks("TopK")
def top_k(d: Draw, op: str) -> Attack:
    rank = d.int(1, 4)
    axis, dtype = d.axis(rank), d.dtype(("float32", "int64", "float16", "int32", "uint8"))
    largest = d.int(0, 1)

    def feed() -> Arrays:
        shape = d.shape(rank, limit=600)
        return [d.array(dtype, shape), np.array([d.wild(0, shape[axis % rank], 0.25)], np.int64)]

    def rule(data: np.ndarray, k: np.ndarray) -> Answer:
        a, count = normalize_axis(axis, data.ndim), int(k[0])
        require(0 <= count <= data.shape[a], f"k is {count} of {data.shape[a]}")
        wide = data.astype(np.float64)
        order = np.argsort(-wide if largest else wide, axis=a, kind="stable").take(np.arange(count), axis=a)
        return [np.take_along_axis(data, order, a), order]  # the reference breaks ties otherwise for smallest

    return Attack(
        op,
        feed,
        rule,
        outputs=2,
        attributes={"axis": axis, "largest": largest},
        parameters={1},
        opset=d.pick((11, 24)),
    )


@attacks("ReverseSequence")
def reverse_sequence(d: Draw, op: str) -> Attack:
    rank, time = d.int(2, 4), d.int(0, 1)
    dtype = d.dtype(ANY)
    attributes = {"time_axis": time, "batch_axis": 1 - time}
    if d.chance(0.06):
        attributes[d.pick(("time_axis", "batch_axis"))] = d.pick((time, 2, -1, 5))

    def feed() -> Arrays:
        shape = d.shape(rank)
        lengths = np.array([d.wild(0, shape[time], 0.12) for _ in range(shape[1 - time])], np.int64)
        return [d.array(dtype, shape), d.array("int64", d.corrupted(lengths.shape)) if d.chance(0.08) else lengths]

    def rule(data: np.ndarray, lengths: np.ndarray) -> Answer:
        t, b = attributes["time_axis"], attributes["batch_axis"]
        require(sorted((t, b)) == [0, 1], f"axes {t} and {b}")
        require(lengths.shape == (data.shape[b],), f"lengths {lengths.shape}")
        require(((lengths >= 0) & (lengths <= data.shape[t])).all(), f"lengths {lengths} of {data.shape[t]}")
        out = np.moveaxis(data, (b, t), (0, 1)).copy()
        for row, length in zip(out, lengths):
            row[:length] = row[:length][::-1].copy()
        return [np.moveaxis(out, (0, 1), (b, t))]  # the reference has trouble with length 0

    return Attack(op, feed, rule, attributes=attributes, parameters={1}, opset=d.pick((10, 24)))


@attacks("Compress")
def compress(d: Draw, op: str) -> Attack:
    rank = d.int(1, 4)
    axis, dtype = (None if d.chance(0.3) else d.axis(rank)), d.dtype(ANY)

    def feed() -> Arrays:
        shape = d.shape(rank, limit=500)
        size = int(np.prod(shape)) if axis is None else shape[axis % rank]
        count = d.pick((size, d.int(0, size), size + 1, size + 40, 5000)) if d.chance(0.5) else size
        return [d.array(dtype, shape), d.array("bool", (count,))]

    def rule(data: np.ndarray, condition: np.ndarray) -> Answer:
        a = None if axis is None else normalize_axis(axis, data.ndim)
        size = data.size if a is None else data.shape[a]
        require(not condition[size:].any(), f"{condition.size} conditions for {size}")
        if condition.size > size:
            raise Unspecified("conditions beyond the data, all false")
        return [np.compress(condition, data, axis=a)]

    return Attack(op, feed, rule, attributes={"axis": axis}, parameters={1}, opset=d.pick((11, 24)))


@attacks("CumSum", "CumProd")
def running(d: Draw, op: str) -> Attack:
    rank = d.int(1, 4)
    dtype = d.dtype(("float32", "int64", "int32", "float64"))
    exclusive, reverse = d.int(0, 1), d.int(0, 1)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank)), np.array(d.axis(rank, 0.15), np.int64)]

    def rule(data: np.ndarray, axis: np.ndarray) -> Answer:
        a = normalize_axis(int(axis), data.ndim)
        x = np.flip(data, a) if reverse else data
        with np.errstate(all="ignore"):
            totals = (np.cumsum if op == "CumSum" else np.cumprod)(x, axis=a, dtype=x.dtype)
        if exclusive:
            totals = np.roll(totals, 1, a)
            totals[(slice(None),) * a + (slice(0, 1),)] = op == "CumProd"
        return [np.flip(totals, a) if reverse else totals]  # the reference fails on empty axes

    attributes, opset = {"exclusive": exclusive, "reverse": reverse}, d.pick((11, 24)) if op == "CumSum" else 26
    return Attack(op, feed, rule, attributes=attributes, parameters={1}, opset=opset, close=1e-4)
