"""Operators that reduce or normalize along axes: Reduce*, ArgMax, Softmax, the norms, the pools."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.attacks.attack import Answer, Arrays, Attack, Unspecified, attacks, broadcast_shapes, normalize_axis, require
from tests.attacks.draw import WILD, Draw

_FLOATS = ("float32", "float32", "float64", "float16")


@attacks(
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip
def reduction(d: Draw, op: str) -> Attack:
    rank = d.int(0, 4)
    exact = op in ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd", "ReduceSumSquare", "ReduceL1")
    dtype = d.dtype(("float32", "float64", *(("int64", "int32") if exact else ())))
    keep, no_op, absent = d.int(0, 1), d.int(0, 1), d.chance(0.2)
    count = d.int(0, rank)
    old = op == "ReduceSum" and d.chance(0.3)

    def feed() -> Arrays:
        axes = [int(a) - (rank if d.chance(0.3) else 0) for a in d.rng.permutation(rank)[:count]]
        if axes and d.chance(0.12):
            axes[0] = d.pick((rank, -rank - 1, axes[-1], *WILD))
        data = d.array(dtype, d.shape(rank, limit=500), scale=1.0)
        data = abs(data) if op == "ReduceLogSum" else data
        return [data, *([] if absent else [np.array(axes, np.int64)])]

    def rule(data: np.ndarray, axes: np.ndarray | None = None) -> Answer:
        normalized = [normalize_axis(int(a), data.ndim) for a in (() if axes is None else axes)]
        if len(set(normalized)) != len(normalized):
            raise Unspecified("an axis twice")
        reduced = tuple(normalized) or (() if no_op else tuple(range(data.ndim)))
        if not normalized and no_op:
            if op in ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"):
                raise Unspecified("a reduction over no axis is none, or one of single elements")
            return [data]
        if any(data.shape[p] == 0 for p in reduced) and op in ("ReduceMean", "ReduceMax", "ReduceMin"):
            raise Unspecified("the mean or the best of nothing")
        return [_reduced(op, data, reduced, bool(keep))]  # the reference does not know axes of rank 0

    attributes = {"keepdims": keep, "noop_with_empty_axes": no_op}
    close, opset = 1e-4 if exact else 1e-3, 13 if old else d.pick((18, 24))
    return Attack(op, feed, rule, attributes=attributes, parameters={1}, opset=opset, close=close)


def _reduced(op: str, x: np.ndarray, axes: tuple[int, ...], keep: bool) -> np.ndarray:
    def total(v: np.ndarray) -> np.ndarray:
        return np.sum(v, axes, x.dtype, keepdims=keep)

    compute: dict[str, Any] = {
        "ReduceL1": lambda: total(abs(x)),
        "ReduceL2": lambda: np.sqrt(total(x * x)),
        "ReduceLogSum": lambda: np.log(total(x)),
        "ReduceLogSumExp": lambda: np.log(total(np.exp(x))),
        "ReduceSum": lambda: total(x),
        "ReduceSumSquare": lambda: total(x * x),
        "ReduceMean": lambda: np.mean(x, axes, keepdims=keep, dtype=x.dtype),
        "ReduceMax": lambda: np.max(x, axes, keepdims=keep),
        "ReduceMin": lambda: np.min(x, axes, keepdims=keep),
        "ReduceProd": lambda: np.prod(x, axes, x.dtype, keepdims=keep),
    }
    return np.asarray(compute[op]()).astype(x.dtype)


@attacks("ArgMax", "ArgMin")
def best(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(1, 4), d.dtype(("float32", "int64", "float16", "int32", "uint8"))
    axis, keep, last = d.axis(rank), d.int(0, 1), d.int(0, 1)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank))]

    def rule(data: np.ndarray) -> Answer:
        a = normalize_axis(axis, data.ndim)
        require(data.shape[a], "the best of nothing")
        find = np.argmax if op == "ArgMax" else np.argmin
        indices = find(np.flip(data, a) if last else data, axis=a)
        indices = data.shape[a] - 1 - indices if last else indices
        return [np.expand_dims(indices, a) if keep else np.asarray(indices)]  # the reference fails on empty results

    attributes = {"axis": axis, "keepdims": keep, "select_last_index": last}
    return Attack(op, feed, rule, attributes=attributes, opset=d.pick((13, 24)))


@attacks("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")
def along_an_axis(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(1, 4), d.dtype(("float32", "float64", "float16"))
    axis, power = d.axis(rank), d.int(1, 2)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank))]

    def rule(data: np.ndarray) -> Answer:
        a = normalize_axis(axis, data.ndim)
        if not data.size:
            return [data]
        x = data.astype(np.float64)
        if op == "Hardmax":
            hot = np.expand_dims(np.argmax(x, a), a) == np.indices(x.shape)[a]
            return [hot.astype(data.dtype)]
        if op == "LpNormalization":
            norm = np.sum(abs(x) ** power, a, keepdims=True) ** (1 / power)
            if (norm < 1e-3).any():
                raise Unspecified("0 by 0")
            return [(x / norm).astype(data.dtype)]
        x = x - x.max(a, keepdims=True)
        x = x - np.log(np.exp(x).sum(a, keepdims=True))
        return [(np.exp(x) if op == "Softmax" else x).astype(data.dtype)]

    attributes = {"axis": axis} | ({"p": power} if op == "LpNormalization" else {})
    return Attack(op, feed, rule, attributes=attributes, opset=d.pick((13, 22)), close=1e-4)


# -- norms with weights -----------------------------------------------------------------------------------------------


@attacks("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def over_last_axes(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(1, 4), d.dtype(_FLOATS)
    axis = -1 if op.startswith("Simplified") else d.axis(rank)
    bias = op == "LayerNormalization" and d.chance(0.5)
    whole = d.chance(0.6)
    first = axis % rank
    less = 0 if whole else d.int(0, rank - 1 - first)

    def feed() -> Arrays:
        shape = d.shape(rank)
        suffix = shape[first + less :]
        shapes = [d.corrupted(suffix) if d.chance(0.1) else suffix for _ in range(1 + bias)]
        return [d.array(dtype, shape), *(d.array(dtype, p) for p in shapes)]

    def rule(x: np.ndarray, scale: np.ndarray, offset: np.ndarray | None = None) -> Answer:
        a = normalize_axis(axis, x.ndim)
        for vector in (scale, *([] if offset is None else [offset])):
            require(broadcast_shapes(x.shape[a:], vector.shape) == x.shape[a:], f"scale or bias of {vector.shape}")
        if not x.size:
            return [x]
        axes, wide = tuple(range(a, x.ndim)), x.astype(np.float64)
        centered = wide - wide.mean(axes, keepdims=True) if op == "LayerNormalization" else wide
        normal = centered / np.sqrt((centered**2).mean(axes, keepdims=True) + 1e-5)
        if dtype == "float16":
            normal = normal.astype(np.float16).astype(np.float64)
        result = normal * scale.astype(np.float64) + (0 if offset is None else offset.astype(np.float64))
        return [result.astype(x.dtype)]

    attributes: dict[str, Any] = {"axis": axis}
    if op == "SimplifiedLayerNormalization":
        attributes["epsilon"] = 1e-5
    return Attack(op, feed, rule, attributes=attributes, opset=24, parameters={1, 2}, close=1e-3)


@attacks("BatchNormalization", "InstanceNormalization", "GroupNormalization")
def over_spatial_axes(d: Draw, op: str) -> Attack:
    rank, dtype, groups = d.int(2, 4), d.dtype(("float32", "float64")), d.pick((1, 2, 3))
    if op == "InstanceNormalization":
        rank = max(rank, 3)
    if op == "GroupNormalization" and d.chance(0.05):
        groups = d.pick((0, -1, 2**62))

    def feed() -> Arrays:
        n, c, *spatial = d.shape(rank)
        c = c * groups if op == "GroupNormalization" and 0 < groups < 4 and d.chance(0.9) else c
        count = 4 if op == "BatchNormalization" else 2
        vectors = [d.array(dtype, (d.size() if d.chance(0.05) else c,)) for _ in range(count)]
        if op == "BatchNormalization":
            vectors[3] = abs(vectors[3]) + np.array(0.5, dtype)
        return [d.array(dtype, (n, c, *spatial)), *vectors]

    def rule(x: np.ndarray, *vectors: np.ndarray) -> Answer:
        n, c = x.shape[:2]
        require(all(v.shape == (c,) for v in vectors), "a vector of another length")
        scale, bias, *moments = (v.reshape(c, *[1] * (x.ndim - 2)).astype(np.float64) for v in vectors)
        if op == "BatchNormalization":
            mean, variance = moments
            return [((x - mean) / np.sqrt(variance + 1e-5) * scale + bias).astype(x.dtype)]
        count = c if op == "InstanceNormalization" else groups
        if c == 0 and count == 0:
            raise Unspecified("no channels")
        require(count > 0 and c % count == 0, f"{c} channels in {count} groups")
        if not x.size:
            return [x]
        rows = x.astype(np.float64).reshape(n, count, -1)
        normal = (rows - rows.mean(2, keepdims=True)) / np.sqrt(rows.var(2, keepdims=True) + 1e-5)
        return [(normal.reshape(x.shape) * scale + bias).astype(x.dtype)]

    attributes = {"num_groups": groups} if op == "GroupNormalization" else {}
    opset = 24 if op == "GroupNormalization" else d.pick((15, 24))
    return Attack(op, feed, rule, attributes=attributes, opset=opset, parameters={1, 2, 3, 4}, close=1e-3)


# -- windows ----------------------------------------------------------------------------------------------------------


@attacks("LRN")
def across_channels(d: Draw, op: str) -> Attack:
    rank, dtype, size = d.int(1 if d.chance(0.05) else 2, 5), d.dtype(("float32", "float64")), d.wild(1, 6)
    settings: dict[str, float] = {"alpha": 1e-4, "beta": 0.75, "bias": 1.0}
    chosen = d.choose(alpha=0.5, beta=d.pick((0.5, 0.75, 2.0)), bias=2.0)
    settings |= chosen

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank))]

    def rule(x: np.ndarray) -> Answer:
        require(x.ndim >= 2 and 1 <= size < 1 << 31, f"rank {x.ndim}, size {size}")
        if size > 1 << 20:
            raise Unspecified("too long for this rule")
        squares, totals = x.astype(np.float64) ** 2, np.zeros(x.shape)
        for c in range(x.shape[1]):
            first = c - (size - 1) // 2
            totals[:, c] = squares[:, max(first, 0) : first + size].sum(1)
        return [(x / (settings["bias"] + settings["alpha"] / size * totals) ** settings["beta"]).astype(x.dtype)]

    return Attack(op, feed, rule, attributes={"size": size, **chosen}, opset=13)


@attacks("Det")
def determinant(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(1 if d.chance(0.05) else 2, 4), d.dtype(("float32", "float64"))

    def feed() -> Arrays:
        *outer, n = d.shape(max(rank - 1, 1))
        n = min(n, 7)
        shape = [*outer, n, n][-rank:]
        return [d.array(dtype, d.corrupted(shape) if d.chance(0.1) else shape)]

    def rule(x: np.ndarray) -> Answer:
        require(x.ndim >= 2 and x.shape[-1] == x.shape[-2], f"shape {x.shape}")
        return [np.asarray(np.linalg.det(x.astype(np.float64)), x.dtype)]

    return Attack(op, feed, rule, opset=22)


@attacks("MaxPool", "AveragePool", "LpPool")
def pool(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(1, 2), d.dtype(("float32", "float64"))
    kernel = [d.pick((1, 2, 3)) for _ in range(rank)]
    strides, dilations = ([d.pick((1, 1, 2, 3)) for _ in range(rank)] for _ in range(2))
    pads = [d.pick((0, 0, 1)) for _ in range(2 * rank)]
    if d.chance(0.1):
        d.pick((kernel, strides, dilations, pads))[0] = d.pick((0, -1, 2**31, 2**62))
    if d.chance(0.05):
        kernel = kernel[:-1] if d.chance(0.5) else [*kernel, 2]
    attributes: dict[str, Any] = {"kernel_shape": kernel}
    attributes |= d.choose(strides=strides, dilations=dilations, pads=pads, ceil_mode=d.int(0, 1))
    if op == "AveragePool":
        attributes |= d.choose(count_include_pad=d.int(0, 1))
    power = d.int(1, 3)
    if op == "LpPool":
        attributes["p"] = power

    def feed() -> Arrays:
        shape = (d.size(), d.size(), *(d.int(0, 3) if d.chance(0.1) else d.int(4, 9) for _ in range(rank)))
        return [d.array(dtype, shape)]

    def rule(x: np.ndarray) -> Answer:
        window = _window(x, attributes, rank)
        if window is None:
            raise Unspecified("a window of which no element is inside")
        out, cells = window
        result = np.zeros((*x.shape[:2], *out))
        for position in np.ndindex(*out):
            inside, count = cells(position)
            if not inside:
                raise Unspecified("a window of which no element is inside")
            values = np.stack([x[(slice(None), slice(None), *cell)] for cell in inside], -1).astype(np.float64)
            if op == "LpPool":
                result[(slice(None), slice(None), *position)] = (abs(values) ** power).sum(-1) ** (1 / power)
            elif op == "MaxPool":
                result[(slice(None), slice(None), *position)] = values.max(-1) if values.size else 0
            else:
                if attributes.get("count_include_pad") and attributes.get("ceil_mode"):
                    raise Unspecified("cells beyond the padding")
                number = count if attributes.get("count_include_pad") else len(inside)
                result[(slice(None), slice(None), *position)] = values.sum(-1) / number
        return [result.astype(x.dtype)]  # the reference has trouble with dilations and ceil_mode

    return Attack(op, feed, rule, attributes=attributes, opset=d.pick((19, 22)))


def _window(x: np.ndarray, attributes: dict[str, Any], rank: int) -> Any:
    kernel = attributes["kernel_shape"]
    strides, dilations = (attributes.get(n, [1] * rank) for n in ("strides", "dilations"))
    pads = attributes.get("pads", [0] * 2 * rank)
    require(len(kernel) == rank, f"a kernel of {len(kernel)} dimensions")
    for name, numbers in (("kernel", kernel), ("stride", strides), ("dilation", dilations)):
        require(all(0 < n < 1 << 20 for n in numbers), f"{name} {numbers}")
    require(all(0 <= n < 1 << 20 for n in pads), f"pads {pads}")
    out = []
    for k in range(rank):
        reach = dilations[k] * (kernel[k] - 1) + 1
        room = x.shape[2 + k] + pads[k] + pads[rank + k] - reach
        require(room >= 0, "a window larger than the data")
        if max(pads[k], pads[rank + k]) >= reach:
            raise Unspecified("pads as large as the window")
        number = (-(-room // strides[k]) if attributes.get("ceil_mode") else room // strides[k]) + 1
        if attributes.get("ceil_mode") and (number - 1) * strides[k] >= x.shape[2 + k] + pads[k]:
            number -= 1
        out.append(number)

    def cells(position: tuple[int, ...]) -> tuple[list[tuple[int, ...]], int]:
        inside = []
        for step in np.ndindex(*kernel):
            cell = tuple(p * s + t * e - b for p, s, t, e, b in zip(position, strides, step, dilations, pads))
            if all(0 <= c < n for c, n in zip(cell, x.shape[2:])):
                inside.append(cell)
        return inside, int(np.prod(kernel))

    return out, cells


@attacks("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def whole_pool(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(3, 5), d.dtype(("float32", "float64"))
    power = d.wild(1, 4)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank))]

    def rule(x: np.ndarray) -> Answer:
        axes = tuple(range(2, x.ndim))
        require(op != "GlobalLpPool" or 1 <= power <= 64, f"p {power}")
        if any(x.shape[a] == 0 for a in axes):
            raise Unspecified("the mean, the norm or the best of nothing")
        if op == "GlobalLpPool":
            return [np.sum(abs(x) ** power, axis=axes, keepdims=True) ** np.array(1 / power, x.dtype)]
        find = np.mean if op == "GlobalAveragePool" else np.max
        return [np.asarray(find(x, axis=axes, keepdims=True), x.dtype)]

    return Attack(op, feed, rule, attributes={"p": power} if op == "GlobalLpPool" else {}, opset=22)
