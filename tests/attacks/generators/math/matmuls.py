"""Matmuls of matrices, convolutions, and the numbers that they multiply in fewer bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.attacks.attack import (
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
from tests.attacks.draw import Draw

_FLOATS = ("float32", "float32", "float64", "float16")


def _size(d: Draw) -> int:
    return 0 if d.chance(0.05) else d.pick((1, 2, 3, 7, 8, 16, 17, 31, 64, 65))


@attacks("MatMul")
def matmul(d: Draw, op: str) -> Attack:
    ranks, dtype = (d.int(1, 4), d.int(1, 4)), d.dtype((*_FLOATS, "int32", "int64"))

    def feed() -> Arrays:
        m, k, n = (_size(d) for _ in range(3))
        batch = d.shape(2, limit=6)
        shapes = [(k,) if ranks[0] == 1 else (m, k), (k,) if ranks[1] == 1 else (k, n)]
        batches = [d.broadcast(batch)[-max(r - 2, 0) :] if r > 2 else () for r in ranks]
        batches = [(*(1,) * (max(r - 2, 0) - len(b)), *b) for r, b in zip(ranks, batches)]
        shapes = [(*b, *s) for b, s in zip(batches, shapes)]
        if d.chance(0.1):
            shapes[1] = d.corrupted(shapes[1])
        return [d.array(dtype, s) for s in shapes]

    def rule(a: np.ndarray, b: np.ndarray) -> Answer:
        require(a.shape[-1] == b.shape[-2 if b.ndim > 1 else -1], f"{a.shape} times {b.shape}")
        broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return [np.asarray(np.matmul(*_wide(a, b))).astype(a.dtype)]

    return Attack(op, feed, rule, parameters={1}, close=2e-4)


def _wide(*arrays: np.ndarray) -> list[np.ndarray]:
    return [a.astype(np.float64) if a.dtype.kind not in "iu" else a for a in arrays]


@attacks("Gemm")
def gemm(d: Draw, op: str) -> Attack:
    dtype, turned = d.dtype(_FLOATS), (d.int(0, 1), d.int(0, 1))
    attributes = {"transA": turned[0], "transB": turned[1], "alpha": d.pick((1.0, 0.5)), "beta": d.pick((1.0, 2.0))}
    bias_rank = d.int(-1, 2)

    def feed() -> Arrays:
        m, k, n = (_size(d) for _ in range(3))
        shapes = [(k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n)]
        if d.chance(0.1):
            shapes[1] = d.corrupted(shapes[1])
        if bias_rank >= 0:
            shapes.append(d.corrupted((m, n)[2 - bias_rank :]) if d.chance(0.1) else (m, n)[2 - bias_rank :])
        return [d.array(dtype, s) for s in shapes]

    def rule(a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None) -> Answer:
        x, y = (v.T if t else v for v, t in zip(_wide(a, b), turned))
        require(x.shape[1] == y.shape[0], f"{x.shape} times {y.shape}")
        result = attributes["alpha"] * (x @ y)
        if c is not None:
            require(broadcast_shapes(result.shape, c.shape) == result.shape, f"bias {c.shape}")
            result = result + attributes["beta"] * c.astype(np.float64)
        return [result.astype(a.dtype)]

    return Attack(op, feed, rule, attributes=attributes, parameters={1, 2}, close=2e-4)


_EQUATIONS = (
    "ij,jk->ik", "bij,bjk->bik", "bhid,bhjd->bhij", "ij->ji", "ii->i", "i,j->ij", "ij,ij->", "...ij,...jk->...ik",
)  # fmt: skip
_ODD_EQUATIONS = ("ij,jk->iz", "i->", "ij,jk", "->", "ij,jk->ii", "(", "ij")


@attacks("Einsum")
def einsum(d: Draw, op: str) -> Attack:
    equation = d.pick(_EQUATIONS if d.chance(0.9) else _ODD_EQUATIONS)
    dtype = d.dtype(("float32", "float64"))
    terms = [t.replace("...", "") for t in equation.split("->")[0].split(",")]

    def feed() -> Arrays:
        sizes = {letter: d.size() for letter in "ijkbhdz"}
        shapes = [tuple(sizes.get(letter, 1) for letter in t) for t in terms]
        return [d.array(dtype, d.corrupted(s) if d.chance(0.08) else s) for s in shapes]

    def rule(*arrays: np.ndarray) -> Answer:
        sizes: dict[str, int] = {}
        for term, array in zip(terms, arrays):
            require(len(term) == array.ndim, "rank")
            for letter, size in zip(term, array.shape):
                if sizes.setdefault(letter, size) != size:
                    if 1 in (sizes[letter], size) and term.count(letter) == 1:
                        raise Unspecified("a size of 1 next to another")
                    require(False, f"'{letter}' is {size} and {sizes[letter]}")
        try:
            return [np.asarray(np.einsum(equation, *_wide(*arrays))).astype(arrays[0].dtype)]
        except ValueError as error:
            require(False, str(error))
        return None

    return Attack(op, feed, rule, attributes={"equation": equation}, close=2e-4)


@attacks("Conv")
def conv(d: Draw, op: str) -> Attack:
    rank, group, dtype = d.int(1, 2), d.pick((1, 1, 2)), d.dtype(("float32", "float64"))
    kernel, strides = [d.int(1, 3) for _ in range(rank)], [d.int(1, 2) for _ in range(rank)]
    dilations, pads = [d.int(1, 2) for _ in range(rank)], [d.int(0, 2) for _ in range(2 * rank)]
    if d.chance(0.12):
        d.pick((strides, dilations, pads))[0] = d.pick((0, -1, 2**31, 2**62))
    attributes: dict[str, Any] = d.choose(strides=strides, dilations=dilations, pads=pads)
    attributes |= {"group": group if d.chance(0.95) else d.pick((0, 3, -1))}
    if d.chance(0.1):
        attributes["kernel_shape"] = [*kernel[:-1], kernel[-1] + 1]
    bias = d.chance(0.5)

    def feed() -> Arrays:
        c, m = group * d.int(1, 3), group * d.int(0 if d.chance(0.05) else 1, 4)
        x = (d.size(), c, *(d.int(0, 2) if d.chance(0.1) else d.int(4, 9) for _ in kernel))
        shapes = [x, (m, c // group, *kernel), *([(m,)] if bias else [])]
        if d.chance(0.1):
            k = d.int(0, len(shapes) - 1)
            shapes[k] = d.corrupted(shapes[k])
        return [d.array(dtype, s) for s in shapes]

    def rule(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> Answer:
        groups, (n, c), m = attributes["group"], x.shape[:2], w.shape[0]
        require(groups > 0, f"group {groups}")
        require(w.shape[1] * groups == c and m % groups == 0, f"channels {x.shape} {w.shape} in {groups} groups")
        require(attributes.get("kernel_shape", list(w.shape[2:])) == list(w.shape[2:]), "kernel_shape")
        require(b is None or b.shape == (m,), "bias")
        steps, apart = (attributes.get(name, [1] * rank) for name in ("strides", "dilations"))
        before = attributes.get("pads", [0] * 2 * rank)
        require(all(0 < v < 1 << 20 for v in (*steps, *apart)), "strides or dilations")
        require(all(0 <= v < 1 << 20 for v in before), "pads")
        if not all(w.shape[2:]):
            raise Unspecified("a kernel of nothing")
        padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *zip(before[:rank], before[rank:])])
        reach = [e * (k - 1) + 1 for e, k in zip(apart, w.shape[2:])]
        require(all(s >= r for s, r in zip(padded.shape[2:], reach)), "a kernel larger than the data")
        out = [(s - r) // step + 1 for s, r, step in zip(padded.shape[2:], reach, steps)]
        check_elements((n, m, *out))
        result = np.zeros((n, groups, m // groups, *out))
        weight = w.astype(np.float64).reshape(groups, m // groups, *w.shape[1:])
        for tap in np.ndindex(*w.shape[2:]):
            slices = tuple(slice(p * e, p * e + (o - 1) * s + 1, s) for p, e, o, s in zip(tap, apart, out, steps))
            window = padded[(slice(None), slice(None), *slices)].reshape(n, groups, c // groups, *out)
            result += np.einsum("ngc...,gmc->ngm...", window, weight[(slice(None), slice(None), slice(None), *tap)])
        result = result.reshape(n, m, *out)
        return [(result if b is None else result + b.reshape(m, *[1] * rank)).astype(x.dtype)]

    return Attack(op, feed, rule, attributes=attributes, opset=22, parameters={1, 2}, close=1e-3)


@attacks("ConvTranspose")
def conv_transpose(d: Draw, op: str) -> Attack:
    rank, group, dtype = d.int(1, 2), d.pick((1, 1, 2)), d.dtype(("float32", "float64"))
    kernel, strides = [d.int(1, 4) for _ in range(rank)], [d.int(1, 3) for _ in range(rank)]
    dilations, pads = [d.int(1, 2) for _ in range(rank)], [d.int(0, 2) for _ in range(2 * rank)]
    padding = [d.int(0, max(s, e) - (0 if d.chance(0.1) else 1)) for s, e in zip(strides, dilations)]
    if d.chance(0.12):
        d.pick((strides, dilations, pads, padding))[0] = d.pick((0, -1, 2**31, 2**62))
    attributes: dict[str, Any] = d.choose(strides=strides, dilations=dilations, pads=pads, output_padding=padding)
    attributes |= {"group": group if d.chance(0.95) else d.pick((0, 3, -1))}
    bias = d.chance(0.5)

    def feed() -> Arrays:
        c, m = group * d.int(0 if d.chance(0.05) else 1, 3), d.int(0 if d.chance(0.05) else 1, 4)
        x = (d.size(), c, *(d.int(0, 2) if d.chance(0.1) else d.int(3, 7) for _ in kernel))
        shapes = [x, (c, m, *kernel), *([(m * group,)] if bias else [])]
        if d.chance(0.1):
            k = d.int(0, len(shapes) - 1)
            shapes[k] = d.corrupted(shapes[k])
        return [d.array(dtype, s) for s in shapes]

    def rule(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> Answer:
        groups, (n, c), m = attributes["group"], x.shape[:2], w.shape[1]
        require(groups > 0, f"group {groups}")
        require(w.shape[0] == c and c % groups == 0, f"channels {x.shape} {w.shape} in {groups} groups")
        require(b is None or b.shape == (m * groups,), "bias")
        steps, apart = (attributes.get(name, [1] * rank) for name in ("strides", "dilations"))
        margins, extra = attributes.get("pads", [0] * 2 * rank), attributes.get("output_padding", [0] * rank)
        require(all(0 < v < 1 << 20 for v in (*steps, *apart)), "strides or dilations")
        require(all(0 <= v < 1 << 20 for v in (*margins, *extra)), "pads")
        require(all(p < max(s, e) for p, s, e in zip(extra, steps, apart)), "output_padding")
        if not all(w.shape[2:]) or not all(x.shape[1:]):
            raise Unspecified("a kernel or data of nothing")
        sizes = x.shape[2:]
        full = [(v - 1) * s + (k - 1) * e + 1 + p for v, s, k, e, p in zip(sizes, steps, w.shape[2:], apart, extra)]
        ends = [f - p for f, p in zip(full, margins[rank:])]
        require(all(0 <= p <= end for p, end in zip(margins, ends)), f"pads {margins} of {full}")
        check_elements((n, m * groups, *full))
        result = np.zeros((n, groups, m, *full))
        data = x.astype(np.float64).reshape(n, groups, c // groups, *sizes)
        weight = w.astype(np.float64).reshape(groups, c // groups, *w.shape[1:])
        for tap in np.ndindex(*w.shape[2:]):
            at = tuple(slice(p * e, p * e + (v - 1) * s + 1, s) for p, e, v, s in zip(tap, apart, sizes, steps))
            update = np.einsum("ngc...,gcm->ngm...", data, weight[(slice(None), slice(None), slice(None), *tap)])
            result[(slice(None), slice(None), slice(None), *at)] += update
        result = result[(..., *(slice(p, end) for p, end in zip(margins, ends)))].reshape(n, m * groups, *[
            end - p for p, end in zip(margins, ends)])  # fmt: skip
        return [(result if b is None else result + b.reshape(-1, *[1] * rank)).astype(x.dtype)]

    return Attack(op, feed, rule, attributes=attributes, opset=22, parameters={1, 2}, close=1e-3)


# -- quantized numbers ------------------------------------------------------------------------------------------------


@attacks("QuantizeLinear", "DequantizeLinear")
def quantized(d: Draw, op: str) -> Attack:
    rank, kind, form = d.int(1, 4), d.pick(("int8", "uint8", "int16", "uint16")), d.pick(("tensor", "axis", "blocks"))
    axis, block = d.axis(rank), d.pick((1, 2, 3, *((-1, 2**62) if d.chance(0.2) else ())))
    zero = d.chance(0.7)
    attributes = {"axis": axis} | ({"block_size": block} if form == "blocks" else {})
    to = op == "QuantizeLinear"

    def feed() -> Arrays:
        shape = d.shape(rank)
        a = axis % rank
        scales: tuple[int, ...] = ()
        if form == "axis":
            scales = (shape[a],)
        if form == "blocks":
            blocks = -(-shape[a] // block) if 0 < block < 9 else 1
            scales = (*shape[:a], blocks, *shape[a + 1 :])
        scales = d.corrupted(scales) if d.chance(0.12) else scales
        scale = (abs(d.array("float32", scales)) + np.float32(0.1)).astype(np.float32)
        data = d.array("float32" if to else kind, shape, 0.0, 30.0)
        return [data, scale, *([d.array(kind, scales)] if zero else [])]

    def rule(x: np.ndarray, scale: np.ndarray, point: np.ndarray | None = None) -> Answer:
        one_of_several = scale.shape == (1,) and x.shape[axis % x.ndim] != 1
        if form == "axis" and (one_of_several or (scale.shape == (1,) and not -x.ndim <= axis < x.ndim)):
            raise Unspecified("one scale in a vector, which many take for that of the tensor, without an axis")
        a = normalize_axis(axis, x.ndim) if form != "tensor" else 0
        require(point is None or point.shape == scale.shape, "zero points of another shape than the scales")
        if form == "axis":
            require(scale.shape == (x.shape[a],), f"scales {scale.shape}")
        if form == "blocks":
            if block <= 0:
                raise Unspecified("block_size below 1")
            expected = (*x.shape[:a], -(-x.shape[a] // block), *x.shape[a + 1 :])
            require(scale.shape == expected, f"scales {scale.shape} instead of {expected}")
        s, z = (_spread(v, x, a, form, block) for v in (scale, np.zeros(scale.shape) if point is None else point))
        if not to:
            return [((x.astype(np.float64) - z) * s).astype(np.float32)]
        target = np.dtype("uint8" if point is None else kind)
        ends = np.iinfo(target)
        ratio = (x / s.astype(np.float32)).astype(np.float64)
        return [np.clip(np.rint(ratio) + z, ends.min, ends.max).astype(target)]

    # kinds of one zero point: 16 bits came with 21
    return Attack(op, feed, rule, attributes=attributes, opset=d.pick((21, 24)), parameters={1, 2})


def _spread(v: np.ndarray, x: np.ndarray, axis: int, form: str, block: int) -> np.ndarray:
    v = v.astype(np.float64)
    if form == "tensor":
        return v
    if form == "axis":
        return v.reshape([-1 if k == axis else 1 for k in range(x.ndim)])
    return np.repeat(v, min(block, max(x.shape[axis], 1)), axis).take(np.arange(x.shape[axis]), axis)
