"""Random operators whose draws are certain: of no width, of probability 0 or 1, of one class that has any weight."""

from __future__ import annotations

import numpy as np
from onnx import helper

from tests.attacks.attack import Answer, Arrays, Attack, attacks, require
from tests.attacks.draw import Draw

_FLOATS = ("float32", "float32", "float64", "float16")


def _onnx_type(dtype: str) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _certain(op: str, value: float) -> dict[str, float]:
    """Return attributes by which every draw is this number."""
    return {"mean": value, "scale": 0.0} if "Normal" in op else {"low": value, "high": value}


@attacks("RandomNormal", "RandomUniform")
def of_a_shape(d: Draw, op: str) -> Attack:
    dtype, value, shape = d.dtype(_FLOATS), d.pick((0.0, -2.5, 3.0)), [*d.shape(d.int(1, 4))]
    if d.chance(0.1):
        shape[0] = -1
    attributes = {**_certain(op, value), "shape": shape, **d.choose(seed=d.pick((0.0, -1.0, 2.5, 1e30)))}

    def rule() -> Answer:
        require(min(shape) >= 0, "a negative size")
        return [np.full(shape, value, dtype)]

    return Attack(op, list, rule, attributes={**attributes, "dtype": _onnx_type(dtype)})


@attacks("RandomNormalLike", "RandomUniformLike")
def of_a_shape_like(d: Draw, op: str) -> Attack:
    rank, like, dtype = d.int(0, 4), d.dtype((*_FLOATS, "int32", "bool")), d.dtype(_FLOATS)
    value, keeps = d.pick((0.0, -2.5, 3.0)), d.chance(0.5)
    attributes = {**_certain(op, value), **({} if keeps else {"dtype": _onnx_type(dtype)})}

    def feed() -> Arrays:
        return [d.array(like, d.shape(rank))]

    def rule(x: np.ndarray) -> Answer:
        result_type = x.dtype if keeps else np.dtype(dtype)
        require(result_type.kind == "f", "no float")
        return [np.full(x.shape, value, result_type)]

    return Attack(op, feed, rule, attributes=attributes)


@attacks("Bernoulli")
def bernoulli(d: Draw, op: str) -> Attack:
    rank, dtype, result_type = d.int(0, 4), d.dtype(_FLOATS), d.dtype((*_FLOATS, "int32", "bool", "uint8"))

    def feed() -> Arrays:
        return [(d.array("int32", d.shape(rank)) % 2).astype(dtype)]

    return Attack(op, feed, lambda x: [x.astype(result_type)], attributes={"dtype": _onnx_type(result_type)})


@attacks("Multinomial")
def multinomial(d: Draw, op: str) -> Attack:
    dtype, result_type, samples = d.dtype(_FLOATS), d.pick(("int32", "int64")), d.pick((0, 1, 3, 40, -1))
    rank = 2 if d.chance(0.9) else d.int(0, 3)

    def feed() -> Arrays:
        shape = d.shape(rank)
        x = np.full(shape, -np.inf, dtype)
        if rank == 2 and 0 not in shape:
            x[np.arange(shape[0]), d.array("int64", (shape[0],)) % shape[1]] = d.pick((0.0, 7.0, -300.0))
        return [x]

    def rule(x: np.ndarray) -> Answer:
        require(x.ndim == 2 and x.shape[1] and samples >= 0, "no classes to draw")
        return [np.repeat(np.argmax(x, axis=1)[:, None], samples, axis=1).astype(result_type)]

    attributes = {"dtype": _onnx_type(result_type), "sample_size": samples}
    return Attack(op, feed, rule, attributes=attributes, numbers={(0, 1)})
