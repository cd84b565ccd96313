"""Operators whose result has the sizes that an input says: Reshape, Expand, Slice, Pad, Range and their kin."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper

from ..attack import Answer, Arrays, Attack, Unspecified, attacks, axis_of, bounded, broadcast_of, require
from ..draw import ANY, WILD, Draw


def _int64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def _factors(d: Draw, elements: int, count: int) -> list[int]:
    """A shape of so many elements."""
    if not elements:
        return [0, *(d.int(0, 3) for _ in range(count - 1))][:count]
    shape = [1] * count
    for prime in (2, 3, 5, 7, 11, 17):
        while elements % prime == 0:
            elements //= prime
            shape[d.int(0, count - 1)] *= prime
    shape[d.int(0, count - 1)] *= elements
    return shape


@attacks("Reshape")
def reshape(d: Draw, op: str) -> Attack:
    rank, count, dtype = d.int(0, 4), d.int(1, 4), d.dtype(ANY)
    allow_zero = d.int(0, 1)

    def feed() -> Arrays:
        shape = d.shape(rank)
        size = int(np.prod(shape))
        wanted = _factors(d, size, count)
        if d.chance(0.3):
            wanted[d.int(0, count - 1)] = -1
        if d.chance(0.2):
            wanted[d.int(0, count - 1)] = d.pick((0, 0, -1, -2, *WILD))
        if count > 1 and size and d.chance(0.1):  # wraps to the right number in 64 bits
            wanted = [1] * count
            wanted[:2] = [2**62 + size, 4] if size % 4 else [2**62 + size // 4, 4]
        return [d.array(dtype, shape), _int64(*wanted)]

    def rule(data: np.ndarray, wanted: np.ndarray) -> Answer:
        dims = wanted.tolist()
        for k, w in enumerate(dims):
            require(w >= -1, f"size {w}")
            if w == 0 and not allow_zero:
                require(k < data.ndim, "0 beyond the data's dimensions")
                dims[k] = data.shape[k]
        require(dims.count(-1) <= 1, "-1 twice")
        if -1 in dims:
            others = int(np.prod([n for n in dims if n != -1], dtype=object))
            require(not (allow_zero and 0 in dims), "0 beside -1")
            if others == 0 and data.size == 0:
                raise Unspecified("-1 beside an empty dimension")
            require(others and data.size % others == 0, "no whole number for -1")
            dims[dims.index(-1)] = data.size // others
        require(int(np.prod(dims, dtype=object)) == data.size, f"{data.size} elements to {dims}")
        if any(n >= 1 << 40 for n in dims):
            raise Unspecified("an empty tensor with an enormous dimension")
        return [data.reshape(dims)]

    return Attack(op, feed, rule, attributes={"allowzero": allow_zero}, parameters={1}, opset=d.pick((14, 21, 24)))


@attacks("Expand")
def expand(d: Draw, op: str) -> Attack:
    rank, count, dtype = d.int(0, 4), d.int(0, 4), d.dtype(ANY)

    def feed() -> Arrays:
        wanted = list(d.shape(max(rank, count)))
        shape = d.broadcast(wanted)[-rank:] if rank else ()
        shape = (*(1,) * (rank - len(shape)), *shape)
        if wanted and d.chance(0.2):
            wanted[d.int(0, len(wanted) - 1)] = d.pick((0, 1, -1, *WILD))
        if count > 1 and d.chance(0.08):
            wanted[-2:] = d.pick(([2**32, 2**32], [2**61, 8], [2**31, 2**33], [2**62, 4]))
        return [d.array(dtype, shape), _int64(*wanted[len(wanted) - count :])]

    def rule(data: np.ndarray, wanted: np.ndarray) -> Answer:
        require((wanted >= 0).all(), f"{wanted}")
        shape = list(np.broadcast_shapes(*_paired(data.shape, wanted.tolist())))
        bounded(shape)
        return [np.broadcast_to(data, shape)]

    return Attack(op, feed, rule, parameters={1}, opset=d.pick((13, 24)))


def _paired(shape: tuple[int, ...], wanted: list[int]) -> list[tuple[int, ...]]:
    broadcast_of(*[[min(n, 1 << 20) for n in s] for s in (shape, wanted)])
    bounded([max(a, b) for a, b in zip([1] * len(wanted) + [*shape], [1] * len(shape) + wanted)])
    return [shape, tuple(wanted)]


@attacks("Tile")
def tile(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(1, 4), d.dtype(ANY)
    count = rank if d.chance(0.93) else d.int(0, 5)

    def feed() -> Arrays:
        repeats = [d.wild(0, 3, 0.06) for _ in range(count)]
        if count > 1 and d.chance(0.06):
            repeats[:2] = d.pick(([2**32, 2**32], [2**62, 4]))
        return [d.array(dtype, d.shape(rank, most=300)), _int64(*repeats)]

    def rule(data: np.ndarray, repeats: np.ndarray) -> Answer:
        require(len(repeats) == data.ndim, f"{len(repeats)} repeats of rank {data.ndim}")
        require((repeats >= 0).all(), f"{repeats}")
        sizes = [n * r for n, r in zip(data.shape, repeats.tolist())]
        bounded(sizes)
        if 0 in sizes:  # NumPy repeats before it finds nothing
            return [np.empty(sizes, data.dtype)]
        return [np.tile(data, repeats)]

    return Attack(op, feed, rule, parameters={1}, opset=d.pick((13, 24)))


@attacks("Slice")
def slices(d: Draw, op: str) -> Attack:
    rank, dtype, kind = d.int(1, 4), d.dtype(ANY), d.pick(("int64", "int64", "int32"))
    count = d.int(1, rank)
    axes = [int(a) for a in d.rng.permutation(rank)[:count]]
    axes = [a - rank if d.chance(0.3) else a for a in axes]
    if d.chance(0.08):
        axes[0] = d.pick((rank, -rank - 1, axes[-1], 2**31 - 1))
    holes = count == rank and d.chance(0.2), d.chance(0.4)
    if holes[0]:
        axes = list(range(rank))
    ends = np.iinfo(kind)

    def fit(numbers: list[int]) -> np.ndarray:
        return np.array([min(max(n, ends.min), ends.max) for n in numbers], kind)

    def feed() -> Arrays:
        shape = d.shape(rank)
        starts = [d.wild(-shape[a % rank] - 1, shape[a % rank] + 1) for a in axes]
        stops = [d.wild(-shape[a % rank] - 1, shape[a % rank] + 1) for a in axes]
        steps = [d.pick((1, 1, 2, 3, -1, -2)) if d.chance(0.9) else d.pick((0, *WILD)) for _ in axes]
        result: Arrays = [d.array(dtype, shape), fit(starts), fit(stops)]
        return [*result, None if holes[0] else fit(axes), *([] if holes[1] else [fit(steps)])]

    def rule(
        data: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
        axes: np.ndarray | None = None,
        steps: np.ndarray | None = None,
    ) -> Answer:
        places = [axis_of(int(a), data.ndim) for a in (range(data.ndim) if axes is None else axes)]
        if len(set(places)) != len(places):
            raise Unspecified("an axis twice")
        cuts = [slice(None)] * data.ndim
        for k, axis in enumerate(places):
            step = 1 if steps is None else int(steps[k])
            require(step, "step 0")
            cuts[axis] = _cut(data.shape[axis], int(starts[k]), int(stops[k]), step)
        return [data[tuple(cuts)]]  # the reference takes ends as Python does, which differ for negative steps

    return Attack(op, feed, rule, parameters={1, 2, 3, 4}, opset=d.pick((11, 13, 24)))


def _cut(size: int, start: int, stop: int, step: int) -> slice:
    """As the standard clamps: to [0, size] for positive steps, else to [0, size - 1] and [-1, size - 1]."""
    start, stop = (n + size if n < 0 else n for n in (start, stop))
    if step > 0:
        return slice(min(max(start, 0), size), min(max(stop, 0), size), step)
    start, stop = min(max(start, 0), size - 1), min(max(stop, -1), size - 1)
    return slice(0, 0) if size == 0 else slice(start, None if stop < 0 else stop, step)


@attacks("Pad")
def pad(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(1, 4), d.dtype(ANY)
    mode = d.pick(("constant", "constant", "reflect", "edge", "wrap", "mirror" if d.chance(0.2) else "edge"))
    with_axes = d.chance(0.4)
    count = d.int(1, rank) if with_axes else rank
    axes = [int(a) for a in d.rng.permutation(rank)[:count]]
    if with_axes and d.chance(0.1):
        axes[0] = d.pick((rank, -rank - 1, -1, 2**62))
    length = 2 * count + d.pick((0, 0, 0, 0, 0, 0, 0, 1, -1))

    def feed() -> Arrays:
        shape = d.shape(rank, most=300)
        pads = [d.wild(-1, 3, 0.05) for _ in range(length)]
        result: Arrays = [d.array(dtype, shape), _int64(*pads)]
        if mode == "constant" and d.chance(0.999):
            result.append(d.array(dtype, ()))
        elif with_axes:
            result.append(None)
        return [*result, *([_int64(*axes)] if with_axes else [])]

    def rule(
        data: np.ndarray, pads: np.ndarray, value: np.ndarray | None = None, axes: np.ndarray | None = None
    ) -> Answer:
        require(mode in ("constant", "reflect", "edge", "wrap"), f"mode {mode}")
        places = [axis_of(int(a), data.ndim) for a in (range(data.ndim) if axes is None else axes)]
        require(len(pads) == 2 * len(places), f"{len(pads)} pads for {len(places)} axes")
        if len(set(places)) != len(places):
            raise Unspecified("an axis twice")
        amounts = [(0, 0)] * data.ndim
        for k, axis in enumerate(places):
            amounts[axis] = int(pads[k]), int(pads[k + len(places)])
        sizes = [n + a + b for n, (a, b) in zip(data.shape, amounts)]
        bounded(sizes)
        bounded([n + max(a, 0) + max(b, 0) for n, (a, b) in zip(data.shape, amounts)])
        cuts = [slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(data.shape, amounts)]
        kept = [c.stop - c.start for c in cuts]
        if mode == "constant":
            if min(kept) < 0:
                raise Unspecified("more is taken away than there is")
            grown = [(max(a, 0), max(b, 0)) for a, b in amounts]
            return [np.pad(data[tuple(cuts)], grown, constant_values=0 if value is None else value.astype(data.dtype))]
        require(all(n or not m for n, m in zip(data.shape, sizes)), f"mode {mode} of an empty dimension")
        if any(a < 0 or b < 0 for a, b in amounts):
            raise Unspecified(f"mode {mode} with negative pads")
        if mode == "reflect" and any(max(a, b) >= max(n, 1) for n, (a, b) in zip(data.shape, amounts) if a or b):
            raise Unspecified("reflect by more than there is")
        if not data.size:
            raise Unspecified("nothing to repeat")
        return [np.pad(data, amounts, mode=mode)]

    return Attack(op, feed, rule, attributes={"mode": mode}, parameters={1, 2, 3}, opset=d.pick((19, 24)))


@attacks("Range")
def range_(d: Draw, op: str) -> Attack:
    dtype = d.pick(("int64", "int64", "int32", "float32", "float64", "int16"))

    def feed() -> Arrays:
        if "int" in dtype:
            ends = np.iinfo(dtype)
            numbers = [d.wild(-20, 20, 0.12) for _ in range(2)] + [d.pick((1, 1, 2, 3, -1, -3, 0, *WILD[:3], 2**62))]
            return [np.array(min(max(n, ends.min), ends.max), dtype) for n in numbers]
        wild = d.pick((0.0, np.inf, -np.inf, np.nan, 1e30, 1e-30))
        numbers = [d.int(-40, 40) / 4, d.int(-40, 40) / 4, d.pick((1.0, 0.5, 0.25, -0.5, -2.0))]
        if d.chance(0.25):
            numbers[d.int(0, 2)] = wild
        return [np.array(n, dtype) for n in numbers]

    def rule(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> Answer:
        require(delta != 0, "step 0")
        a, b, s = (x.item() for x in (start, limit, delta))
        require(all(np.isfinite(x) for x in (a, b, s)), "no finite number")
        count = max(-(-(b - a) // s), 0) if isinstance(a, int) else max(np.ceil((b - a) / s), 0)
        bounded((int(count),))
        numbers = [a + k * s for k in range(int(count))]
        return [np.array(numbers).astype(start.dtype)]

    return Attack(op, feed, rule, parameters={0, 1, 2}, opset=d.pick((11, 24)))


@attacks("ConstantOfShape")
def constant_of_shape(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(0, 4), d.dtype(ANY)
    value = numpy_helper.from_array(d.array(dtype, (1,)), "value")

    def feed() -> Arrays:
        shape = list(d.shape(rank))
        if shape and d.chance(0.2):
            shape[d.int(0, rank - 1)] = d.pick(WILD)
        if rank > 1 and d.chance(0.08):
            shape[:2] = d.pick(([2**61, 2], [2**32, 2**32], [2**31, 2**31]))
        return [_int64(*shape)]

    def rule(shape: np.ndarray) -> Answer:
        bounded(shape.tolist())
        return [np.full(shape.tolist(), numpy_helper.to_array(value)[0])]

    return Attack(op, feed, rule, attributes={"value": value}, parameters={0})


@attacks("Split")
def split(d: Draw, op: str) -> Attack:
    rank, dtype, parts = d.int(1, 4), d.dtype(ANY), d.int(1, 4)
    axis, given = d.axis(rank), d.chance(0.6)
    attributes = {"axis": axis} | ({} if given else {"num_outputs": parts})

    def feed() -> Arrays:
        shape = d.shape(rank)
        size = shape[axis % rank]
        ends = sorted(d.int(0, size) for _ in range(parts - 1))
        lengths = [int(n) for n in np.diff([0, *ends, size])]
        if d.chance(0.15):
            lengths[d.int(0, parts - 1)] = d.pick((0, 1, size + 1, *WILD))
        if parts > 1 and d.chance(0.05):
            lengths[:2] = [lengths[0] + lengths[1] + 1, -1]
        return [d.array(dtype, shape), *([_int64(*lengths)] if given else [])]

    def rule(data: np.ndarray, lengths: np.ndarray | None = None) -> Answer:
        a = axis_of(axis, data.ndim)
        size = data.shape[a]
        if lengths is None:
            each = -(-size // parts)
            require(each * (parts - 1) <= size, f"{parts} parts of {size}")
            lengths = np.array([each] * (parts - 1) + [size - each * (parts - 1)])
        require((lengths >= 0).all() and sum(lengths.tolist()) == size, f"{lengths} of {size}")
        return np.split(data, np.cumsum(lengths)[:-1], axis=a)

    return Attack(op, feed, rule, outputs=parts, attributes=attributes, parameters={1}, opset=d.pick((18, 24)))
