"""Matmuls and functions of bytes. Scales are powers of two, so that quotients are exact in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.attacks.attack import (
    MICROSOFT,
    Answer,
    Arrays,
    Attack,
    Unspecified,
    attacks,
    broadcast_shapes,
    normalize_axis,
    require,
)
from tests.attacks.draw import Draw
from tests.attacks.generators.math.matmuls import conv
from tests.attacks.generators.math.reductions import pool, whole_pool

BYTES = ("uint8", "int8")


def _size(d: Draw) -> int:
    return 0 if d.chance(0.05) else d.pick((1, 2, 3, 4, 5, 7, 16, 31, 64, 65))


def _scale(d: Draw, shape: tuple[int, ...] = ()) -> np.ndarray:
    return np.asarray(2.0 ** d.rng.integers(-4, 2, shape), np.float32)


def _zero(d: Draw, dtype: str, shape: tuple[int, ...] = ()) -> np.ndarray:
    return d.array(dtype, d.corrupted(shape) if shape and d.chance(0.1) else shape)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int64)


def _quantize(numbers: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Quantize numbers; raise Unspecified where float32 might round to the other side."""
    over = numbers / scale
    if (abs(abs(over - np.floor(over)) - 0.5) < 1e-3).any() and (abs(over * 2 - np.rint(over * 2)) > 0).any():
        raise Unspecified("numbers between two quantized values")
    ends = np.iinfo(zero.dtype)
    return np.clip(np.rint(over) + zero.astype(float), ends.min, ends.max).astype(zero.dtype)


def _centered(x: np.ndarray, zero: np.ndarray | None, axis: int) -> np.ndarray:
    """Return x less its zero point, which is one number, or a vector along an axis."""
    if zero is None:
        return _wide(x)
    if zero.ndim == 0 or zero.shape == (1,):
        return _wide(x) - _wide(zero).reshape(())
    if x.ndim != 2 and axis == -2:
        raise Unspecified("zero points of rows of more or fewer than two axes")
    require(zero.shape == (x.shape[axis],), f"zero points {zero.shape} for {x.shape}")
    return _wide(x) - _wide(zero).reshape([-1, *[1] * (-axis - 1)])


def _matmul(a: np.ndarray, b: np.ndarray, a_zero: np.ndarray | None, b_zero: np.ndarray | None) -> np.ndarray:
    require(a.shape[-1] == b.shape[-2 if b.ndim > 1 else -1], f"{a.shape} times {b.shape}")
    broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if b.ndim == 1 and b_zero is not None and b_zero.ndim and b_zero.shape != (1,):
        raise Unspecified("zero points of columns of a vector")
    return np.asarray(np.matmul(_centered(a, a_zero, -2), _centered(b, b_zero, -1)))


def _matrices(d: Draw) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    ranks, kinds = (d.int(1, 3), d.int(1, 3)), (d.pick(BYTES), d.pick(BYTES))

    def drawn() -> tuple[np.ndarray, np.ndarray]:
        m, k, n = (_size(d) for _ in range(3))
        batch = d.pick(((), (2,)))
        shapes = [(k,) if ranks[0] == 1 else (m, k), (k,) if ranks[1] == 1 else (k, n)]
        shapes = [((*(batch or (1,)), *s) if r > 2 else s) for r, s in zip(ranks, shapes)]
        if d.chance(0.1):
            shapes[1] = d.corrupted(shapes[1])
        return d.array(kinds[0], shapes[0]), d.array(kinds[1], shapes[1])

    return drawn


@attacks("DynamicQuantizeLinear")
def dynamic(d: Draw, op: str) -> Attack:
    rank = d.int(1, 3)

    def rule(x: np.ndarray) -> Answer:
        if not x.size:
            raise Unspecified("the largest of nothing")
        low, high = np.float32(min(x.min(), 0)), np.float32(max(x.max(), 0))
        scale = np.float32((high - low if high != low else np.float32(1)) / np.float32(255))
        zero = np.uint8(np.clip(np.rint(-low / scale), 0, 255))
        over = x / scale
        if (abs(abs(over - np.floor(over)) - 0.5) < 1e-3).any() or abs(abs(low / scale) % 1 - 0.5) < 1e-3:
            raise Unspecified("numbers between two quantized values")
        return [_quantize(x.astype(float), scale.astype(float), np.asarray(zero)), np.asarray(scale), np.asarray(zero)]

    return Attack(op, lambda: [d.array("float32", d.shape(rank))], rule, outputs=3)


@attacks("MatMulInteger")
def matmul_integer(d: Draw, op: str) -> Attack:
    drawn, form = _matrices(d), (d.pick((None, "one", "each")), d.pick((None, "one", "each")))

    def feed() -> Arrays:
        a, b = drawn()
        vectors = ((a.shape[-2],) if a.ndim > 1 else (1,)), ((b.shape[-1],) if b.ndim > 1 else (1,))
        zeros = [
            None if f is None else _zero(d, x.dtype.name, s if f == "each" else ())
            for f, x, s in zip(form, (a, b), vectors)
        ]
        return [a, b, *zeros]

    def rule(a: np.ndarray, b: np.ndarray, a_zero: Any = None, b_zero: Any = None) -> Answer:
        return [_matmul(a, b, a_zero, b_zero).astype(np.int32)]

    return Attack(op, feed, rule, opset=21, parameters={1, 2, 3})


@attacks("QLinearMatMul")
def qlinear_matmul(d: Draw, op: str) -> Attack:
    drawn, by_column, to = _matrices(d), d.chance(0.4), d.pick(BYTES)

    def feed() -> Arrays:
        a, b = drawn()
        columns = (b.shape[-1],) if by_column and b.ndim > 1 else ()
        return [a, _scale(d), _zero(d, a.dtype.name), b, _scale(d, columns), _zero(d, b.dtype.name, columns),
                _scale(d) * 16, _zero(d, to)]  # fmt: skip

    def rule(*arrays: np.ndarray) -> Answer:
        a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = arrays
        matmul = _matmul(a, b, a_zero, b_zero)
        require(b_scale.ndim == 0 or b_scale.shape == b_zero.shape, "scales and zero points of B differ")
        return [_quantize(matmul * (a_scale.astype(float) * b_scale), y_scale.astype(float), y_zero)]

    return Attack(op, feed, rule, opset=21, parameters={3, 4, 5})


@attacks("ConvInteger", "QLinearConv")
def integer_conv(d: Draw, op: str) -> Attack:
    """As Conv, of numbers less their zero points."""
    base, kinds, quantized = conv(d, "Conv"), (d.pick(BYTES), d.pick(BYTES)), op == "QLinearConv"
    with_zeros, by_channel, biased = quantized or d.chance(0.6), d.chance(0.4), d.chance(0.5)

    def feed() -> Arrays:
        shapes = [x.shape for x in base.feed()[:2] if x is not None]
        x, w = (d.array(kind, shape) for kind, shape in zip(kinds, shapes))
        channels = (w.shape[0],) if by_channel else ()
        zeros = [_zero(d, x.dtype.name), _zero(d, w.dtype.name, channels)]
        if not quantized:
            return [x, w, *(zeros if with_zeros else [])]
        bias = [d.rng.integers(-999, 999, w.shape[0]).astype(np.int32)] if biased else []
        return [x, _scale(d), zeros[0], w, _scale(d, channels), zeros[1], _scale(d) * 16, _zero(d, kinds[0]), *bias]

    def accumulate(x: np.ndarray, w: np.ndarray, x_zero: Any, w_zero: Any) -> np.ndarray:
        data = x.astype(float) - (0 if x_zero is None else x_zero.astype(float))
        zero = np.zeros(()) if w_zero is None else w_zero.astype(float)
        require(zero.ndim == 0 or zero.shape in ((1,), (w.shape[0],)), f"zero points {zero.shape}")
        weights = w - (zero.reshape(()) if zero.size == 1 else zero.reshape(-1, *[1] * (w.ndim - 1)))
        answer = base.rule(data, weights)
        assert answer is not None
        return answer[0]

    def rule(*arrays: Any) -> Answer:
        if not quantized:
            x, w, x_zero, w_zero = (*arrays, None, None)[:4]
            return [accumulate(x, w, x_zero, w_zero).astype(np.int32)]
        x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = (*arrays, None)[:9]
        require(w_scale.ndim == 0 or w_scale.shape == w_zero.shape, "scales and zero points of W differ")
        y = accumulate(x, w, x_zero, w_zero)
        require(bias is None or bias.shape == (w.shape[0],), "bias")
        along = [-1, *[1] * (w.ndim - 2)]
        y = y if bias is None else y + bias.reshape(along)
        factor = x_scale.astype(float) * (w_scale.reshape(along) if w_scale.size > 1 else w_scale.reshape(()))
        return [_quantize(y * factor, y_scale.astype(float), y_zero)]

    parameters = {3, 4, 5} if quantized else {1, 3}
    return Attack(op, feed, rule, opset=21, attributes=base.attributes, parameters=parameters)


def _microsoft(op: str, feed: Any, rule: Any, to: str, rank: int, **fields: Any) -> Attack:
    return Attack(op, feed, rule, domain=MICROSOFT, opset=21, results=[(to, rank)], **fields)


@attacks("QLinearAdd", "QLinearMul", domain=MICROSOFT)
def binary(d: Draw, op: str) -> Attack:
    rank, kind = d.int(1, 3), d.pick(BYTES)

    def feed() -> Arrays:
        shape = d.shape(rank)
        other = d.broadcast(shape)
        a, b = d.array(kind, shape), d.array(kind, (*[1] * (rank - len(other)), *other))
        return [a, _scale(d), _zero(d, kind), b, _scale(d), _zero(d, kind), _scale(d), _zero(d, kind)]

    def rule(*arrays: np.ndarray) -> Answer:
        a, a_scale, a_zero, b, b_scale, b_zero, c_scale, c_zero = arrays
        require(broadcast_shapes(a.shape, b.shape) is not None, "shapes")
        x, y = ((_wide(v) - _wide(z)) * s.astype(float) for v, s, z in ((a, a_scale, a_zero), (b, b_scale, b_zero)))
        return [_quantize(x + y if op == "QLinearAdd" else x * y, c_scale.astype(float), c_zero)]

    return _microsoft(op, feed, rule, kind, rank)


@attacks("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", domain=MICROSOFT)
def function(d: Draw, op: str) -> Attack:
    rank, kind, axis = d.int(1, 3), d.pick(BYTES), d.int(-3, 2)
    attributes: dict[str, Any] = {
        "QLinearLeakyRelu": {"alpha": 0.25},
        "QLinearSoftmax": {"axis": axis, "opset": 13},
    }.get(op, {})

    def feed() -> Arrays:
        return [d.array(kind, d.shape(rank)), _scale(d), _zero(d, kind), _scale(d) / 64, _zero(d, kind)]

    def rule(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, y_scale: np.ndarray, y_zero: np.ndarray) -> Answer:
        y = (_wide(x) - _wide(zero)) * scale.astype(float)
        if op == "QLinearSoftmax":
            at = normalize_axis(axis, x.ndim)
            if not x.size:
                return [x]
            y = np.exp(y - y.max(at, keepdims=True))
            y = y / y.sum(at, keepdims=True)
        elif op == "QLinearSigmoid":
            y = 1 / (1 + np.exp(-y))
        else:
            y = np.where(y >= 0, y, 0.25 * y)
        return [_quantize(y, y_scale.astype(float), y_zero)]

    return _microsoft(op, feed, rule, kind, rank, attributes=attributes)


@attacks("QLinearConcat", domain=MICROSOFT)
def concat(d: Draw, op: str) -> Attack:
    rank, kind, count = d.int(1, 3), d.pick(BYTES), d.int(1, 3)
    axis = d.int(-rank - 1, rank)

    def feed() -> Arrays:
        shape, arrays = d.shape(rank), [_scale(d), _zero(d, kind)]
        for _ in range(count):
            dims = list(shape)
            dims[axis % rank] = d.size()
            dims = list(d.corrupted(dims)) if d.chance(0.05) else dims
            arrays += [d.array(kind, dims), _scale(d), _zero(d, kind)]
        return list(arrays)

    def rule(y_scale: np.ndarray, y_zero: np.ndarray, *inputs: np.ndarray) -> Answer:
        at = normalize_axis(axis, rank)
        shapes = {(*p.shape[:at], *p.shape[at + 1 :]) for p in inputs[::3]}
        require(len(shapes) == 1, f"parts {shapes}")
        numbers = [(_wide(x) - _wide(z)) * s.astype(float) for x, s, z in zip(inputs[::3], inputs[1::3], inputs[2::3])]
        return [_quantize(np.concatenate(numbers, at), y_scale.astype(float), y_zero)]

    return _microsoft(op, feed, rule, kind, rank, attributes={"axis": axis})


@attacks("QLinearWhere", domain=MICROSOFT)
def selected(d: Draw, op: str) -> Attack:
    rank, kind = d.int(1, 3), d.pick(BYTES)

    def feed() -> Arrays:
        shape = d.shape(rank)
        operand_shapes = [d.broadcast(shape) for _ in range(2)]
        shapes = [shape, *((*[1] * (rank - len(other)), *other) for other in operand_shapes)]
        turned = d.int(0, 2)
        c, x, y = (*shapes[turned:], *shapes[:turned])
        return [d.array("bool", c), d.array(kind, x), _scale(d), _zero(d, kind), d.array(kind, y), _scale(d),
                _zero(d, kind), _scale(d), _zero(d, kind)]  # fmt: skip

    def rule(*arrays: np.ndarray) -> Answer:
        c, x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero = arrays
        broadcast_shapes(c.shape, x.shape, y.shape)
        a, b = ((_wide(v) - _wide(z)) * s.astype(float) for v, s, z in ((x, x_scale, x_zero), (y, y_scale, y_zero)))
        return [_quantize(np.where(c, a, b), z_scale.astype(float), z_zero)]

    return _microsoft(op, feed, rule, kind, rank)


@attacks("QLinearAveragePool", "QLinearGlobalAveragePool", domain=MICROSOFT)
def qlinear_pool(d: Draw, op: str) -> Attack:
    """As the pools of floats, of numbers with channels second or last."""
    base = (whole_pool if "Global" in op else pool)(d, op.removeprefix("QLinear"))
    kind, last = d.pick(BYTES), d.int(0, 1)
    base.attributes.pop("dilations", None)
    (first,) = base.feed()
    assert first is not None

    def feed() -> Arrays:
        (x,) = base.feed()
        assert x is not None
        quantized = d.array(kind, np.moveaxis(x, 1, -1).shape if last else x.shape)
        return [quantized, _scale(d), _zero(d, kind), _scale(d), _zero(d, kind)]

    def rule(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, y_scale: np.ndarray, y_zero: np.ndarray) -> Answer:
        numbers = (_wide(x) - _wide(zero)) * scale.astype(float)
        answer = base.rule(np.moveaxis(numbers, -1, 1) if last else numbers)
        assert answer is not None
        return [_quantize(np.moveaxis(answer[0], 1, -1) if last else answer[0], y_scale.astype(float), y_zero)]

    return _microsoft(op, feed, rule, kind, first.ndim, attributes={**base.attributes, "channels_last": last})


@attacks("MatMulIntegerToFloat", "DynamicQuantizeMatMul", domain=MICROSOFT)
def to_float(d: Draw, op: str) -> Attack:
    kinds, by_column, biased = (d.pick(BYTES), d.pick(BYTES)), d.chance(0.5), d.chance(0.5)
    has_scale = op == "MatMulIntegerToFloat"

    def feed() -> Arrays:
        m, k, n = _size(d), _size(d) or 1, _size(d)
        b = d.array(kinds[1], d.corrupted((k, n)) if d.chance(0.1) else (k, n))
        columns = (n,) if by_column else ()
        bias = [d.array("float32", (n,))] if biased else []
        if has_scale:
            a = d.array(kinds[0], (m, k))
            return [a, b, _scale(d), _scale(d, columns), _zero(d, kinds[0]), _zero(d, kinds[1], columns), *bias]
        # Numbers that quantize to themselves: scale 1 and zero point 0.
        a = d.rng.integers(0, 256, (max(m, 1), k)).astype(np.float32)
        a.flat[0] = 255
        return [a, b, _scale(d, columns), _zero(d, kinds[1], columns), *bias]

    def rule(*arrays: Any) -> Answer:
        if has_scale:
            a, b, a_scale, b_scale, a_zero, b_zero, bias = (*arrays, None)[:7]
        else:
            a, b, b_scale, b_zero, bias = (*arrays, None)[:5]
            a_scale, a_zero, a = np.float32(1), np.zeros((), np.uint8), a.astype(np.uint8)
        require(b_scale.ndim == 0 or b_scale.shape == b_zero.shape, "scales and zero points of B differ")
        y = _matmul(a, b, a_zero, b_zero) * (a_scale.astype(float) * b_scale)
        require(bias is None or bias.shape == y.shape[-1:], "bias")
        return [(y if bias is None else y + bias).astype(np.float32)]

    return _microsoft(op, feed, rule, "float32", 2, parameters={1}, close=1e-5)


@attacks("QGemm", domain=MICROSOFT)
def qgemm(d: Draw, op: str) -> Attack:
    kinds, turned, floats, biased = (
        (d.pick(BYTES), d.pick(BYTES)),
        (d.int(0, 1), d.int(0, 1)),
        d.chance(0.5),
        d.chance(0.5),
    )

    def feed() -> Arrays:
        m, k, n = (_size(d) for _ in range(3))
        shapes = [(k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n)]
        if d.chance(0.1):
            shapes[1] = d.corrupted(shapes[1])
        a, b = (d.array(kind, shape) for kind, shape in zip(kinds, shapes))
        c = d.rng.integers(-999, 999, n).astype(np.int32) if biased else None
        rest = [] if floats else [_scale(d) * 16, _zero(d, kinds[0])]
        return [a, _scale(d), _zero(d, kinds[0]), b, _scale(d), _zero(d, kinds[1]), c, *rest]

    def rule(*arrays: Any) -> Answer:
        a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = (*arrays, None, None, None)[:9]
        y = _matmul(a.T if turned[0] else a, b.T if turned[1] else b, a_zero, b_zero)
        require(c is None or c.shape in (y.shape[-1:], (1,)), "C")
        y = (y if c is None else y + c) * (0.5 * a_scale.astype(float) * b_scale)
        return [y.astype(np.float32) if y_scale is None else _quantize(y, y_scale.astype(float), y_zero)]

    attributes = {"transA": turned[0], "transB": turned[1], "alpha": 0.5}
    return _microsoft(op, feed, rule, "float32" if floats else kinds[0], 2, attributes=attributes, parameters={3})
