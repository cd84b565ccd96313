"""Operators whose result has the sizes that an input says: Reshape, Expand, Slice, Pad, Range and their kin."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper

from ..attack import (
    Answer,
    Arrays,
    Attack,
    Unspecified,
    attacks,
    broadcast_shapes,
    check_elements,
    normalize_axis,
    require,
)
from ..draw import ANY, WILD, Draw


def _int64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def _factors(d: Draw, elements: int, count: int) -> list[int]:
    """Draw a shape of so many elements."""
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
        requested = _factors(d, size, count)
        if d.chance(0.3):
            requested[d.int(0, count - 1)] = -1
        if d.chance(0.2):
            requested[d.int(0, count - 1)] = d.pick((0, 0, -1, -2, *WILD))
        if count > 1 and size and d.chance(0.1):  # wraps to the right number in 64 bits
            requested = [1] * count
            requested[:2] = [2**62 + size, 4] if size % 4 else [2**62 + size // 4, 4]
        return [d.array(dtype, shape), _int64(*requested)]

    def rule(data: np.ndarray, requested: np.ndarray) -> Answer:
        dims = requested.tolist()
        for k, w in enumerate(dims):
            require(w >= -1, f"size {w}")
            if w == 0 and not allow_zero:
                require(k < data.ndim, "0 beyond the data's dimensions")
                dims[k] = data.shape[k]
        require(dims.count(-1) <= 1, "-1 twice")
        if -1 in dims:
            rest = int(np.prod([n for n in dims if n != -1], dtype=object))
            require(not (allow_zero and 0 in dims), "0 next to -1")
            if rest == 0 and data.size == 0:
                raise Unspecified("-1 next to an empty dimension")
            require(rest and data.size % rest == 0, "no whole number for -1")
            dims[dims.index(-1)] = data.size // rest
        require(int(np.prod(dims, dtype=object)) == data.size, f"{data.size} elements to {dims}")
        if any(n >= 1 << 40 for n in dims):
            raise Unspecified("an empty tensor with an enormous dimension")
        return [data.reshape(dims)]

    return Attack(op, feed, rule, attributes={"allowzero": allow_zero}, parameters={1}, opset=d.pick((14, 21, 24)))


@attacks("Expand")
def expand(d: Draw, op: str) -> Attack:
    rank, count, dtype = d.int(0, 4), d.int(0, 4), d.dtype(ANY)

    def feed() -> Arrays:
        requested = list(d.shape(max(rank, count)))
        shape = d.broadcast(requested)[-rank:] if rank else ()
        shape = (*(1,) * (rank - len(shape)), *shape)
        if requested and d.chance(0.2):
            requested[d.int(0, len(requested) - 1)] = d.pick((0, 1, -1, *WILD))
        if count > 1 and d.chance(0.08):
            requested[-2:] = d.pick(([2**32, 2**32], [2**61, 8], [2**31, 2**33], [2**62, 4]))
        return [d.array(dtype, shape), _int64(*requested[len(requested) - count :])]

    def rule(data: np.ndarray, requested: np.ndarray) -> Answer:
        require((requested >= 0).all(), f"{requested}")
        shape = list(np.broadcast_shapes(*_paired(data.shape, requested.tolist())))
        check_elements(shape)
        return [np.broadcast_to(data, shape)]

    return Attack(op, feed, rule, parameters={1}, opset=d.pick((13, 24)))


def _paired(shape: tuple[int, ...], requested: list[int]) -> list[tuple[int, ...]]:
    broadcast_shapes(*[[min(n, 1 << 20) for n in s] for s in (shape, requested)])
    check_elements([max(a, b) for a, b in zip([1] * len(requested) + [*shape], [1] * len(shape) + requested)])
    return [shape, tuple(requested)]


@attacks("Tile")
def tile(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(1, 4), d.dtype(ANY)
    count = rank if d.chance(0.93) else d.int(0, 5)

    def feed() -> Arrays:
        repeats = [d.wild(0, 3, 0.06) for _ in range(count)]
        if count > 1 and d.chance(0.06):
            repeats[:2] = d.pick(([2**32, 2**32], [2**62, 4]))
        return [d.array(dtype, d.shape(rank, limit=300)), _int64(*repeats)]

    def rule(data: np.ndarray, repeats: np.ndarray) -> Answer:
        require(len(repeats) == data.ndim, f"{len(repeats)} repeats of rank {data.ndim}")
        require((repeats >= 0).all(), f"{repeats}")
        sizes = [n * r for n, r in zip(data.shape, repeats.tolist())]
        check_elements(sizes)
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
        normalized = [normalize_axis(int(a), data.ndim) for a in (range(data.ndim) if axes is None else axes)]
        if len(set(normalized)) != len(normalized):
            raise Unspecified("an axis twice")
        cuts = [slice(None)] * data.ndim
        for k, axis in enumerate(normalized):
            step = 1 if steps is None else int(steps[k])
            require(step, "step 0")
            cuts[axis] = _cut(data.shape[axis], int(starts[k]), int(stops[k]), step)
        return [data[tuple(cuts)]]  # the reference takes ends as Python does, which differ for negative steps

    return Attack(op, feed, rule, parameters={1, 2, 3, 4}, opset=d.pick((11, 13, 24)))


def _cut(size: int, start: int, stop: int, step: int) -> slice:
    """Clamp as the standard does: to [0, size] for positive steps, else to [0, size - 1] and [-1, size - 1]."""
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
        shape = d.shape(rank, limit=300)
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
        normalized = [normalize_axis(int(a), data.ndim) for a in (range(data.ndim) if axes is None else axes)]
        require(len(pads) == 2 * len(normalized), f"{len(pads)} pads for {len(normalized)} axes")
        if len(set(normalized)) != len(normalized):
            raise Unspecified("an axis twice")
        amounts = [(0, 0)] * data.ndim
        for k, axis in enumerate(normalized):
            amounts[axis] = int(pads[k]), int(pads[k + len(normalized)])
        sizes = [n + a + b for n, (a, b) in zip(data.shape, amounts)]
        check_elements(sizes)
        check_elements([n + max(a, 0) + max(b, 0) for n, (a, b) in zip(data.shape, amounts)])
        cuts = [slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(data.shape, amounts)]
        lengths = [c.stop - c.start for c in cuts]
        if mode == "constant":
            if min(lengths) < 0:
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
        check_elements((int(count),))
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
        check_elements(shape.tolist())
        return [np.full(shape.tolist(), numpy_helper.to_array(value)[0])]

    return Attack(op, feed, rule, attributes={"value": value}, parameters={0})


@attacks("Split")
def split(d: Draw, op: str) -> Attack:
    rank, dtype, count = d.int(1, 4), d.dtype(ANY), d.int(1, 4)
    axis, has_lengths = d.axis(rank), d.chance(0.6)
    attributes = {"axis": axis} | ({} if has_lengths else {"num_outputs": count})

    def feed() -> Arrays:
        shape = d.shape(rank)
        size = shape[axis % rank]
        ends = sorted(d.int(0, size) for _ in range(count - 1))
        lengths = [int(n) for n in np.diff([0, *ends, size])]
        if d.chance(0.15):
            lengths[d.int(0, count - 1)] = d.pick((0, 1, size + 1, *WILD))
        if count > 1 and d.chance(0.05):
            lengths[:2] = [lengths[0] + lengths[1] + 1, -1]
        return [d.array(dtype, shape), *([_int64(*lengths)] if has_lengths else [])]

    def rule(data: np.ndarray, lengths: np.ndarray | None = None) -> Answer:
        a = normalize_axis(axis, data.ndim)
        size = data.shape[a]
        if lengths is None:
            chunk = -(-size // count)
            require(chunk * (count - 1) <= size, f"{count} parts of {size}")
            lengths = np.array([chunk] * (count - 1) + [size - chunk * (count - 1)])
        require((lengths >= 0).all() and sum(lengths.tolist()) == size, f"{lengths} of {size}")
        return np.split(data, np.cumsum(lengths)[:-1], axis=a)

    return Attack(op, feed, rule, outputs=count, attributes=attributes, parameters={1}, opset=d.pick((18, 24)))
