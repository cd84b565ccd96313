"""RoiAlign, AffineGrid, MaxUnpool, Col2Im and DeformConv: regions, batches, indices and sizes that do not fit."""

from __future__ import annotations

import numpy as np

from ..attack import Answer, Arrays, Attack, Unspecified, attacks, check_elements, require
from ..draw import Draw


@attacks("RoiAlign")
def roi_align(d: Draw, op: str) -> Attack:
    attributes = {"mode": d.pick(("avg", "max")), "output_height": d.pick((1, 3)), "output_width": d.pick((1, 2)),
                  "sampling_ratio": d.pick((0, 0, 2))}  # fmt: skip

    def feed() -> Arrays:
        n, c, h, w = (0 if d.chance(0.03) else d.pick((1, 2, 7)) for _ in range(4))
        r = d.pick((0, 1, 4))
        rois = d.array("float32", (r, 4 if d.chance(0.95) else 3), scale=4.0)
        if rois.size:
            rois.ravel()[0] = d.pick((np.nan, np.inf, -np.inf, 3e38, -3e38, 0))
        batch = d.indices((r if d.chance(0.95) else r + 1,), n, dtype="int64")
        return [d.array("float32", (n, c, h, w), scale=1.0), rois, batch]

    def rule(x: np.ndarray, rois: np.ndarray, batch: np.ndarray) -> Answer:
        require(rois.shape[1] == 4 and rois.shape[0] == batch.shape[0], "regions")
        require(not batch.size or (batch.min() >= 0 and batch.max() < x.shape[0]), "batches")
        require(not batch.size or 0 not in x.shape[2:], "samples of nothing")
        raise Unspecified("the values are those of tests/ops/nn/test_regions.py")

    return Attack(op, feed, rule, attributes=attributes, numbers=[(1, 1)], opset=16)


@attacks("AffineGrid")
def affine_grid(d: Draw, op: str) -> Attack:
    axes = d.pick((2, 3))

    def feed() -> Arrays:
        size = d.rng.integers(0, 6, axes + 2)
        theta = d.array("float32", (int(size[0]) if d.chance(0.9) else 7, axes, axes + 1), scale=1.0)
        if d.chance(0.25):
            size[d.int(0, axes + 1)] = d.wild(0, 3, 1.0)
        return [theta, size]

    def rule(theta: np.ndarray, size: np.ndarray) -> Answer:
        require(bool((size >= 0).all()), "negative size")
        require(int(size[0]) == theta.shape[0], "batches")
        check_elements([*map(int, (size[0], *size[2:])), axes])
        raise Unspecified("the values are those of tests/ops/nn/test_regions.py")

    return Attack(op, feed, rule, parameters=[1], numbers=[(0, 1), (0, 2), (1, 0)], opset=20)


@attacks("MaxUnpool")
def max_unpool(d: Draw, op: str) -> Attack:
    sized, stride = d.chance(0.4), d.pick((1, 2))

    def feed() -> Arrays:
        n, c, h, w = (0 if d.chance(0.03) else d.pick((1, 2, 4)) for _ in range(4))
        pooled = np.asarray([n, c, (h - 1) * stride + 2, (w - 1) * stride + 2])
        indices = np.abs(d.indices((n, c, h, w), int(pooled.prod()), 0.0, "int64"))
        if indices.size and d.chance(0.3):
            indices.ravel()[0] = d.pick((-1, int(pooled.prod()), 2**62, -(2**63)))
        shape = pooled + d.rng.integers(0, 2, 4) * [0, 0, 1, 1]
        if d.chance(0.2):
            shape[d.int(0, 3)] = d.wild(0, 4, 1.0)
        return [d.array("float32", (n, c, h, w)), indices, *([shape] if sized else [])]

    def rule(x: np.ndarray, indices: np.ndarray, shape: np.ndarray | None = None) -> Answer:
        pooled = [*x.shape[:2], *((s - 1) * stride + 2 for s in x.shape[2:])]
        require(indices.shape == x.shape and all(s >= 0 for s in pooled), "sizes")
        sizes = pooled if shape is None else [int(s) for s in shape]
        require(sizes[:2] == pooled[:2] and all(a >= b for a, b in zip(sizes, pooled)), "output_shape")
        check_elements(sizes)
        total = int(np.prod(pooled))
        require(not indices.size or (indices.min() >= 0 and indices.max() < total), "indices")
        y = np.zeros(total, np.float32)
        for index, value in zip(indices.ravel(), x.ravel()):
            y[index] = value
        result = np.zeros(sizes, np.float32)
        result[tuple(slice(0, s) for s in pooled)] = y.reshape(pooled)
        return [result]

    return Attack(op, feed, rule, attributes={"kernel_shape": [2, 2], "strides": [stride, stride]}, parameters=[2],
                  numbers=[(2, 0)], opset=11)  # fmt: skip


@attacks("Col2Im")
def col2im(d: Draw, op: str) -> Attack:
    axes = d.int(1, 3)
    strides, dilations = ([d.pick((1, 1, 2, 3)) for _ in range(axes)] for _ in range(2))
    pads = [d.pick((0, 0, 1)) for _ in range(2 * axes)]
    if d.chance(0.1):
        d.pick((strides, dilations, pads))[0] = d.pick((0, -1, 2**31, 2**62))
    attributes = d.choose(strides=strides, dilations=dilations, pads=pads)
    steps, holes = (attributes.get(name, [1] * axes) for name in ("strides", "dilations"))
    around = attributes.get("pads", [0] * 2 * axes)

    def counts(image: np.ndarray, block: np.ndarray) -> list[int]:
        sizes = zip(image.tolist(), block.tolist(), around[:axes], around[axes:], steps, holes)
        return [(i + a + b - h * (k - 1) - 1) // max(s, 1) + 1 for i, k, a, b, s, h in sizes]

    def feed() -> Arrays:
        block, image = d.rng.integers(1, 4, axes), d.rng.integers(0 if d.chance(0.1) else 7, 10, axes)
        n, c = (0 if d.chance(0.05) else d.pick((1, 2, 3)) for _ in range(2))
        number = int(np.prod([min(max(k, 0), 12) for k in counts(image, block)]))
        if d.chance(0.15):
            d.pick((block, image))[d.int(0, axes - 1)] = d.wild(0, 4, 1.0)
        data = d.array("float32", (n, c * int(np.prod(d.rng.integers(1, 4, axes) if d.chance(0.05) else
                       np.clip(block, 0, 4))), number + d.chance(0.05)))  # fmt: skip
        return [data, image, block[: axes - d.chance(0.03)]]

    def rule(data: np.ndarray, image: np.ndarray, block: np.ndarray) -> Answer:
        require(len(image) == len(block), "axes")
        require(all(0 < n < 1 << 31 for n in (*steps, *holes)), "attributes")
        require(all(0 <= n < 1 << 31 for n in around), "pads")
        require(bool((block > 0).all() and (image >= 0).all()), "sizes")
        windows, elements = counts(image, block), int(np.prod([int(k) for k in block], dtype=object))
        require(all(k > 0 for k in windows) and data.shape[1] % elements == 0, "blocks")
        require(data.shape[2] == int(np.prod(windows, dtype=object)), "number of blocks")
        n, channels = data.shape[0], data.shape[1] // elements
        check_elements([n, channels, *map(int, image)])
        result = np.zeros((n, channels, *image), np.float64)
        for at, window in enumerate(np.ndindex(*windows)):
            for k, inner in enumerate(np.ndindex(*block)):
                cell = [w * s + i * h - a for w, s, i, h, a in zip(window, steps, inner, holes, around)]
                if all(0 <= p < size for p, size in zip(cell, image)):
                    result[(slice(None), slice(None), *cell)] += data[:, k::elements, at]
        return [result.astype(np.float32)]

    return Attack(op, feed, rule, attributes=attributes, parameters=[1, 2], opset=18)


@attacks("DeformConv")
def deform_conv(d: Draw, op: str) -> Attack:
    group, groups, inner, kernel = d.pick((1, 2)), d.pick((1, 2)), d.pick((1, 2)), d.pick((1, 2))
    attributes = {"group": group, "offset_group": groups, "pads": [d.int(0, 1) for _ in range(4)]}
    use_mask = d.chance(0.5)

    def feed() -> Arrays:
        n, h, w = (0 if d.chance(0.03) else d.pick((1, 2, 5)) for _ in range(3))
        before = attributes["pads"]
        sizes = [h + before[0] + before[2] - kernel + 1, w + before[1] + before[3] - kernel + 1]
        sizes = [max(size, 0) if d.chance(0.95) else d.int(0, 6) for size in sizes]
        count = groups * kernel * kernel
        offset = d.array("float32", (n, 2 * count if d.chance(0.95) else count, *sizes), odd=0.3, scale=2.0)
        if offset.size:
            offset.ravel()[0] = d.pick((np.nan, np.inf, -np.inf, 3e38, -1e30, 0))
        x = d.array("float32", (n, group * inner, h, w), scale=1.0)
        weights = d.array("float32", (group * 2, inner, kernel, kernel), scale=1.0)
        mask = d.array("float32", (n if d.chance(0.95) else n + 1, count, *sizes), scale=1.0) if use_mask else None
        return [x, weights, offset, None, mask]

    def rule(x: np.ndarray, w: np.ndarray, offset: np.ndarray, bias: None, mask: np.ndarray | None = None) -> Answer:
        require(w.shape[1] * group % groups == 0, "groups")
        require(offset.shape[0] == len(x) and offset.shape[1] == 2 * groups * kernel * kernel, "offsets")
        require(mask is None or len(mask) == len(x), "masks")
        raise Unspecified("the values are those of tests/ops/nn/test_deform_conv.py")

    return Attack(
        op, feed, rule, attributes=attributes, parameters=[1], numbers=[(0, 1), *((1, a) for a in range(4)), (2, 1)],
        opset=22,
    )  # fmt: skip
