"""Operators that compute each element from those at one index: of any shape, empty ones too, and of shapes that
broadcast or do not."""

from __future__ import annotations

from collections.abc import Sequence
from math import erfc
from typing import Any

import numpy as np
from onnx import helper

from tests.attacks.attack import Answer, Arrays, Attack, Unspecified, attacks, broadcast_shapes, require
from tests.attacks.draw import ANY, INTEGERS, SIGNED, UNSIGNED, Draw

# Types in which the reference computes; some of its operators compute half precision in float32, others do not.
_FLOATS = ("float32", "float32", "float64", "float16")
_ARGUMENTS = ("Sin", "Cos", "Tan", "Sinh", "Cosh", "Asinh", "Atan")


_SINGLE = 1e-6  # the reference computes some of these, and all attributes, in float32, whatever the type is


def _one_input(d: Draw, op: str, types: Sequence[str], odd: float = 0.2, **attributes: Any) -> Attack:
    rank, dtype = d.int(0, 4), d.dtype(types)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank), odd)]

    return Attack(op, feed, lambda x: None, attributes=attributes, opset=24)


@attacks(
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "HardSwish",
    "Log", "Mish", "Reciprocal", "Round", "Sigmoid", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh",
)  # fmt: skip
def function(d: Draw, op: str) -> Attack:
    # Sines of 1e38 do not concern memory or form.
    attack = _one_input(d, op, _FLOATS, 0.0 if op in _ARGUMENTS else 0.2)
    attack.close = _SINGLE
    if op == "Softsign":  # the reference gives no array for a scalar

        def rule(x: np.ndarray) -> Answer:
            return [np.asarray(x / (1 + abs(x)), x.dtype)]

        attack.rule = rule
    return attack


@attacks("Abs", "Neg", "Sign", "Relu")
def of_numbers(d: Draw, op: str) -> Attack:
    return _one_input(d, op, (*_FLOATS, *SIGNED))


@attacks("Not", "BitwiseNot", "IsNaN", "IsInf", "Identity")
def of_other_types(d: Draw, op: str) -> Attack:
    types = {"Not": ("bool",), "BitwiseNot": INTEGERS, "Identity": ANY}.get(op, _FLOATS)
    attributes = d.choose(detect_negative=d.int(0, 1), detect_positive=d.int(0, 1)) if op == "IsInf" else {}
    return _one_input(d, op, types, **attributes)


@attacks(
    "Celu", "Elu", "Gelu", "HardSigmoid", "LeakyRelu", "Selu", "Shrink", "Swish", "ThresholdedRelu",
)  # fmt: skip
def activation(d: Draw, op: str) -> Attack:
    alpha, other = d.pick((0.5, 1.0, 1.7)), d.pick((0.0, 0.5, 1.25))
    attributes: dict[str, Any] = {
        "Celu": {"alpha": alpha},
        "Gelu": {"approximate": d.pick(("none", "tanh", "tanh", "exact"))},
        "HardSigmoid": {"alpha": alpha, "beta": other},
        "Selu": {"alpha": alpha, "gamma": alpha + other},
        "Shrink": {"lambd": alpha, "bias": other},
    }.get(op, {"alpha": alpha})
    attributes = d.choose(**attributes)
    attack = _one_input(d, op, ("float32",) if op == "Celu" else _FLOATS, **attributes)

    def rule(x: np.ndarray) -> Answer:
        require(attributes.get("approximate") != "exact", "attribute approximate")
        if op != "Gelu":
            return None
        v = x.astype(np.float64)  # 1 + tanh u and 1 + erf u cancel in the reference
        if attributes.get("approximate") == "tanh":
            return [np.asarray(v / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))).astype(x.dtype)]
        if (v < -4).any():
            raise Unspecified("1 + erf u cancels for us, too")
        return [np.asarray(v / 2 * np.vectorize(erfc, otypes=[np.float64])(-v / np.sqrt(2))).astype(x.dtype)]

    attack.rule, attack.close = rule, _SINGLE
    return attack


# -- several inputs ---------------------------------------------------------------------------------------------------


def _several(d: Draw, op: str, types: Sequence[str], count: int, odd: float = 0.2, **attributes: Any) -> Attack:
    rank, dtype = d.int(0, 4), d.dtype(types)
    whole = [d.chance(0.6) for _ in range(count)]  # inputs of lower rank stay so from call to call
    less = [0 if w else d.int(0, rank) for w in whole]

    def feed() -> Arrays:
        shape = d.shape(rank)
        dims = [d.broadcast(shape) if not w else shape for w in whole]
        dims = [(*shape[: rank - n - len(s[n:])], *s[n:]) if len(s) == rank else shape[n:] for s, n in zip(dims, less)]
        return [d.array(dtype, s, odd) for s in dims]

    def rule(*arrays: np.ndarray) -> Answer:
        broadcast_shapes(*(a.shape for a in arrays))
        return None

    return Attack(op, feed, rule, attributes=attributes)


@attacks("Add", "Sub", "Mul", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
def arithmetic(d: Draw, op: str) -> Attack:
    return _several(d, op, ("float32", "float64", "float16", *INTEGERS), 2)


@attacks("And", "Or", "Xor")
def logic(d: Draw, op: str) -> Attack:
    return _several(d, op, ("bool",), 2)


@attacks("BitwiseAnd", "BitwiseOr", "BitwiseXor")
def bits(d: Draw, op: str) -> Attack:
    return _several(d, op, INTEGERS, 2)


@attacks("BitShift")
def shift(d: Draw, op: str) -> Attack:
    attack = _several(d, op, UNSIGNED, 2, direction=d.pick(("LEFT", "RIGHT", "LEFT", "RIGHT", "UP")))

    def rule(x: np.ndarray, y: np.ndarray) -> Answer:
        require(attack.attributes["direction"] in ("LEFT", "RIGHT"), "direction")
        broadcast_shapes(x.shape, y.shape)
        if (y >= x.itemsize * 8).any():
            raise Unspecified("a shift by all bits")
        return None

    attack.rule = rule
    return attack


@attacks("Div", "Mod")
def division(d: Draw, op: str) -> Attack:
    types: Sequence[str] = ("float32", *INTEGERS)
    attributes = {}
    if op == "Mod":
        floats = d.chance(0.3)
        types, attributes = (_FLOATS if floats else INTEGERS), d.choose(fmod=d.int(0, 1))
        attributes |= {"fmod": 1} if floats else {}
    attack = _several(d, op, types, 2, **attributes)

    def rule(x: np.ndarray, y: np.ndarray) -> Answer:
        shape = broadcast_shapes(x.shape, y.shape)
        if x.dtype.kind in "iu" and int(np.prod(shape)):
            if (y == 0).any():
                raise Unspecified("an integer divided by 0")
            if x.dtype.kind == "i" and (y == -1).any() and (x == np.iinfo(x.dtype).min).any():
                raise Unspecified("a quotient out of range")
            if op == "Div":  # toward zero, in exact numbers; the reference goes through floats
                a, b = (np.broadcast_to(v, shape).astype(object) for v in (x, y))
                return [np.asarray(np.sign(a) * np.sign(b) * (abs(a) // abs(b)), object).astype(x.dtype)]
        return None

    attack.rule = rule
    return attack


@attacks("Pow")
def power(d: Draw, op: str) -> Attack:
    attack = _several(d, op, ("float32", "float64", "float16", "int32", "int64"), 2)

    def rule(x: np.ndarray, y: np.ndarray) -> Answer:
        broadcast_shapes(x.shape, y.shape)
        if x.dtype.kind == "i" and ((y < 0).any() or (abs(x) > 9).any() or (abs(y) > 9).any()):
            raise Unspecified("an integer power out of range")
        return None

    attack.rule, attack.close = rule, 1e-4
    return attack


@attacks("PRelu")
def prelu(d: Draw, op: str) -> Attack:
    attack = _several(d, op, ("float32", "float64", "int32"), 2)

    def rule(x: np.ndarray, slope: np.ndarray) -> Answer:
        require(broadcast_shapes(x.shape, slope.shape) == x.shape, "the slope is larger")
        return [np.where(x < 0, x * slope, x)]  # the reference multiplies what is not below 0 by the slope, too

    attack.rule = rule
    return attack


@attacks("Max", "Min", "Sum", "Mean")
def variadic(d: Draw, op: str) -> Attack:
    types = ("float32", "float64", "float16") + (INTEGERS if op in ("Max", "Min") else ())
    attack = _several(d, op, types, d.int(1, 4), 0.2 if op in ("Max", "Min") else 0.0)

    def rule(*arrays: np.ndarray) -> Answer:
        shape = broadcast_shapes(*(a.shape for a in arrays))
        if op == "Mean":  # the reference adds to its first input, whatever its shape
            wide = sum(np.broadcast_to(a, shape).astype(np.float64) for a in arrays) / len(arrays)
            return [np.asarray(wide, arrays[0].dtype)]
        return None

    attack.rule = rule
    return attack


@attacks("Where")
def where(d: Draw, op: str) -> Attack:
    attack = _several(d, op, ANY, 3)
    drawn = attack.feed

    def feed() -> Arrays:
        first, *rest = drawn()
        assert first is not None
        return [d.array("bool", first.shape), *rest]

    attack.feed = feed
    return attack


@attacks("Clip")
def clip(d: Draw, op: str) -> Attack:
    rank, dtype = d.int(0, 4), d.dtype(("float32", "float64", "float16", *INTEGERS))
    holes = [d.chance(0.3), d.chance(0.3)]
    bad = d.chance(0.1)

    def feed() -> Arrays:
        low, high = sorted((d.array(dtype, ()), d.array(dtype, ())))
        if d.chance(0.05):
            low, high = high, low
        bounds = [None if hole else np.full((2,) if bad else (), b, dtype) for hole, b in zip(holes, (low, high))]
        return [d.array(dtype, d.shape(rank), 0.2), *bounds]

    def rule(x: np.ndarray, low: np.ndarray | None = None, high: np.ndarray | None = None) -> Answer:
        require(all(b is None or b.ndim == 0 for b in (low, high)), "bounds that are not scalars")
        if low is None and high is None:
            return [x]
        ends = [None if b is None else b for b in (low, high)]
        return [np.asarray(np.clip(x, *ends))]  # the maximum first: max where min > max

    return Attack(op, feed, rule, parameters={1, 2}, opset=d.pick((12, 24)))


# -- types ------------------------------------------------------------------------------------------------------------


def _converted(x: np.ndarray, dtype: str) -> Answer:
    """Unspecified where a number does not fit into the integer."""
    kind = np.dtype(dtype)
    if kind.kind in "iu" and x.dtype.kind not in "iub" and x.size:
        wide, ends = x.astype(np.float64), np.iinfo(kind)
        if not (np.isfinite(wide) & (wide > float(ends.min) - 1) & (wide < float(ends.max))).all():
            raise Unspecified("a number that does not fit the integer")
    if dtype == "bool":
        return [x.astype(np.float64) != 0 if x.dtype.kind not in "iu" else x != 0]
    return [x.astype(kind)]


@attacks("Cast")
def cast(d: Draw, op: str) -> Attack:
    source, target = d.dtype(ANY), d.pick(ANY)
    attack = _one_input(d, op, (source,), 0.3, to=helper.np_dtype_to_tensor_dtype(np.dtype(target)))
    if d.chance(0.05):
        attack.attributes["to"] = d.pick((0, 99, -1))

    def rule(x: np.ndarray) -> Answer:
        require(attack.attributes["to"] not in (0, 99, -1), "a type that is none")
        return _converted(x, target)

    attack.rule = rule
    return attack


@attacks("CastLike")
def cast_like(d: Draw, op: str) -> Attack:
    source, target, rank = d.dtype(ANY), d.pick(ANY), d.int(0, 4)

    def feed() -> Arrays:
        return [d.array(source, d.shape(rank), 0.3), d.array(target, d.shape(1))]

    return Attack(op, feed, lambda x, like: _converted(x, like.dtype.name))


@attacks("BitCast")
def bit_cast(d: Draw, op: str) -> Attack:
    """The types have as many bits, and sometimes do not."""
    of_bits = (("int8", "uint8"), ("int16", "uint16", "float16"), ("int32", "uint32", "float32"), ("int64", "float64"))
    alike, other = d.pick(of_bits), d.pick(of_bits)
    source, to = d.pick(alike), d.pick(alike if d.chance(0.9) else other)

    def rule(x: np.ndarray) -> Answer:
        require(np.dtype(source).itemsize == np.dtype(to).itemsize, "bits")
        raise Unspecified("the values are those of the standard's cases")

    rank = d.int(0, 3)
    attributes = {"to": int(helper.np_dtype_to_tensor_dtype(np.dtype(to)))}
    return Attack(op, lambda: [d.array(source, d.shape(rank))], rule, attributes=attributes, opset=26)
