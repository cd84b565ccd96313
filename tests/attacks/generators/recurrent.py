"""LSTM, GRU, RNN, Resize, NonMaxSuppression, DFT and STFT: lengths, scales and sizes that do not fit."""

from __future__ import annotations

import numpy as np

from ..attack import MICROSOFT, Answer, Arrays, Attack, Unspecified, attacks, require
from ..draw import Draw

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@attacks("LSTM", "GRU", "RNN")
def recurrent(d: Draw, op: str) -> Attack:
    gates, units, width, directions = GATES[op], d.pick((1, 3, 16, 17)), d.pick((1, 4)), d.pick((1, 2))
    use = [d.chance(0.6), d.chance(0.6), d.chance(0.5)]
    attributes = {"direction": "bidirectional" if directions == 2 else d.pick(("forward", "reverse")),
                  "hidden_size": units if d.chance(0.95) else units + 1}  # fmt: skip

    def feed() -> Arrays:
        length, batch = d.pick((1, 2, 5, 0)), d.pick((1, 2, 5, 0))
        shapes = [
            (length, batch, width), (directions, gates * units, width), (directions, gates * units, units),
            (directions, 2 * gates * units), (batch,), (directions, batch, units),
        ]  # fmt: skip
        if d.chance(0.12):
            at = d.int(0, 5)
            shapes[at] = d.corrupted(shapes[at])
        arrays: Arrays = [d.array("float32", shape, scale=0.3) for shape in shapes]
        arrays[4] = d.rng.integers(-3, 9, shapes[4]).astype(np.int32)
        return [a if k < 3 or use[k - 3] else None for k, a in enumerate(arrays)]

    def rule(x: np.ndarray, w: np.ndarray, r: np.ndarray, *rest: np.ndarray | None) -> Answer:
        bias, lengths, state = rest
        require(attributes["hidden_size"] == r.shape[2] and r.shape[2] and w.shape[2], "units")
        require(w.shape == (directions, gates * r.shape[2], x.shape[2]), "W")
        require(r.shape[:2] == w.shape[:2], "R")
        require(bias is None or bias.shape == (directions, 2 * w.shape[1]), "B")
        require(lengths is None or lengths.shape == (x.shape[1],), "lengths")
        require(state is None or state.shape == (directions, x.shape[1], r.shape[2]), "state")
        raise Unspecified("the values are those of tests/ops/nn/test_recurrent.py")

    return Attack(
        op, feed, rule, attributes=attributes, parameters=[1, 2, 3],
        numbers=[(0, 2), *((k, a) for k in (1, 2) for a in range(3)), (3, 0), (3, 1), (5, 0), (5, 2)],
    )  # fmt: skip


@attacks("Resize")
def resize(d: Draw, op: str) -> Attack:
    rank, by_scales = d.pick((1, 2, 4)), d.chance(0.5)
    mode = d.pick(("nearest", "linear", "cubic"))
    hostile = d.chance(0.3)

    def feed() -> Arrays:
        shape = tuple(0 if d.chance(0.03) else d.pick((1, 2, 5)) for _ in range(rank))
        scales = d.rng.choice([0.5, 1.0, 2.0, 1.7], rank).astype(np.float32)
        sizes = d.rng.integers(1, 9, rank)
        if hostile:
            scales[d.int(0, rank - 1)] = d.pick((0.0, -1.0, np.nan, np.inf, 1e9))
            sizes[d.int(0, rank - 1)] = d.pick((0, -1, -(2**62), 2**40))
        x = d.array("float32", shape, scale=1.0)
        return [x, None, scales, None] if by_scales else [x, None, None, sizes]

    def rule(x: np.ndarray, roi: None, scales: np.ndarray | None, sizes: np.ndarray | None) -> Answer:
        if scales is not None:
            require(bool((scales > 0).all() and np.isfinite(scales).all() and (scales < 2**20).all()), "scales")
            raise Unspecified("the values are those of tests/ops/nn/test_resize.py")
        assert sizes is not None
        require(bool((sizes >= 0).all()) and int(np.prod(sizes, dtype=object)) < 2**31, "sizes")
        require(all(n or not m for n, m in zip(x.shape, sizes)), "samples of nothing")
        raise Unspecified("the values are those of tests/ops/nn/test_resize.py")

    return Attack(op, feed, rule, attributes={"mode": mode}, parameters=[2, 3], opset=19)


@attacks("NonMaxSuppression")
def suppression(d: Draw, op: str) -> Attack:
    def feed() -> Arrays:
        n, c, b = d.pick((1, 2)), d.pick((1, 3)), d.pick((1, 7, 20, 0))
        boxes = d.array("float32", (n, b, 4 if d.chance(0.95) else 3), scale=1.0)
        scores = d.array("float32", (n, c, b if d.chance(0.95) else b + 1), scale=1.0)
        limit = np.asarray([d.pick((0, 1, 5, -1, 2**62, -(2**62)))])
        return [boxes, scores, limit, np.asarray([0.5], np.float32)]

    def rule(boxes: np.ndarray, scores: np.ndarray, limit: np.ndarray, iou: np.ndarray) -> Answer:
        require(boxes.shape == (scores.shape[0], scores.shape[2], 4), "boxes")
        raise Unspecified("the values are those of tests/ops/tensor/test_places.py")

    return Attack(op, feed, rule, parameters=[2, 3], numbers=[(0, 2)], opset=11)


@attacks("GridSample")
def grid_sample(d: Draw, op: str) -> Attack:
    attributes = {"mode": d.pick(("nearest", "linear", "cubic")), "align_corners": d.pick((0, 1)),
                  "padding_mode": d.pick(("zeros", "border", "reflection"))}  # fmt: skip

    def feed() -> Arrays:
        n, c, h, w = (0 if d.chance(0.03) else d.pick((1, 2, 7)) for _ in range(4))
        grid = d.array("float32", (n if d.chance(0.95) else n + 1, d.pick((1, 4)), 3, 2), scale=1.5)
        if grid.size:
            grid.ravel()[0] = d.pick((np.nan, np.inf, -np.inf, 3e38, 0))
        return [d.array("float32", (n, c, h, w), scale=1.0), grid]

    def rule(x: np.ndarray, grid: np.ndarray) -> Answer:
        require(x.shape[0] == grid.shape[0] and 0 not in x.shape[2:], "sizes")
        raise Unspecified("the values are those of tests/ops/tensor/test_places.py")

    return Attack(op, feed, rule, attributes=attributes, numbers=[(1, 3)], opset=20)


@attacks("Upsample")
def upsample(d: Draw, op: str) -> Attack:
    rank, mode = d.pick((1, 2, 4)), d.pick(("nearest", "linear"))

    def feed() -> Arrays:
        scales = d.rng.choice([1.0, 2.0, 1.5], rank).astype(np.float32)
        if d.chance(0.2):
            scales[d.int(0, rank - 1)] = d.pick((0.0, -1.0, np.nan, np.inf))
        return [d.array("float32", tuple(d.pick((1, 2, 5)) for _ in range(rank)), scale=1.0), scales]

    def rule(x: np.ndarray, scales: np.ndarray) -> Answer:
        require(bool((scales > 0).all() and np.isfinite(scales).all()), "scales")
        raise Unspecified("the values are those of tests/ops/nn/test_resize.py")

    return Attack(op, feed, rule, attributes={"mode": mode}, parameters=[1], opset=9)


@attacks("DFT", "STFT")
def transforms(d: Draw, op: str) -> Attack:
    components = d.pick((1, 1, 2, 3))
    length, with_length = d.pick((1, 5, 8, 0, -1, 2**40)), d.chance(0.5)

    def feed() -> Arrays:
        x = d.array("float32", (d.pick((1, 2)), d.pick((1, 8, 20)), components), scale=1.0)
        if op == "DFT":
            return [x, np.asarray(length) if with_length else None, np.asarray(d.pick((1, -2, 2, 7)))]
        return [x, np.asarray(d.pick((1, 3, 0, -4, 2**40))), None, np.asarray(length)]

    def rule(x: np.ndarray, *rest: np.ndarray | None) -> Answer:
        require(x.shape[2] in (1, 2), "components")
        raise Unspecified("the values are those of tests/ops/math/test_spectral.py")

    return Attack(op, feed, rule, parameters=[1, 2, 3], numbers=[(0, 2)], opset=20)


@attacks("DynamicQuantizeLSTM", domain=MICROSOFT)
def quantized_lstm(d: Draw, op: str) -> Attack:
    units, width, by_column = d.pick((1, 3, 16)), d.pick((1, 4)), d.chance(0.5)

    def feed() -> Arrays:
        shapes = [(1, width, 4 * units), (1, units, 4 * units)]
        if d.chance(0.15):
            shapes[d.int(0, 1)] = d.corrupted(d.pick(shapes))  # type: ignore[call-overload]
        w, r = (d.rng.integers(-100, 100, shape).astype(np.int8) for shape in shapes)
        scales = (1, 4 * units) if by_column else (1,)
        scale, zero = np.full(scales, 0.01, np.float32), np.zeros(scales, np.int8)
        x = d.array("float32", (d.pick((1, 3, 0)), d.pick((1, 2)), width), scale=1.0)
        return [x, w, r, None, None, None, None, None, scale, zero, scale, zero]

    def rule(x: np.ndarray, w: np.ndarray, r: np.ndarray, *rest: np.ndarray | None) -> Answer:
        require(r.shape[2] == 4 * r.shape[1] and r.shape[1] and w.shape[2] == r.shape[2], "R and W")
        require(w.shape[:2] == (1, x.shape[2]) and r.shape[0] == 1, "W")
        require(rest[5] is None or rest[5].ndim == 1 or rest[5].shape == (1, w.shape[2]), "scales")
        raise Unspecified("the values are those of tests/ops/nn/test_recurrent.py")

    return Attack(
        op, feed, rule, domain=MICROSOFT, attributes={"hidden_size": units}, parameters=[1, 2], fixed=[8, 9, 10, 11],
        numbers=[(0, 2), *((k, a) for k in (1, 2) for a in range(3))], results=[("float32", 4)],
    )  # fmt: skip
