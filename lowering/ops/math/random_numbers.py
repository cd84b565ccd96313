"""Random operators: ONNX RandomNormal, RandomUniform, their Like forms, Bernoulli and Multinomial.

The random bits (random_bits.py) are the same on every target. So are draws from [0, 1), which are these bits as
fractions. Normal numbers come from them by the Box-Muller transform. Each target rounds its logarithms and cosines
differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Value, prod
from ...tensorir.independent_loops import independent_loops
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import require
from ..helpers.compute import Element, is_float, pointwise, require_numbers, widen_dtype
from ..helpers.kernels import compute, emit_loops, let, serial
from ..tensor.cast import cast_to
from ..tensor.reshape import reshape_to
from .random_bits import emit_random_bits

BitsReader = Callable[[int], Element]
"""Reads the k-th random 32-bit value of an element."""


@op("RandomUniform", since=1)
def random_uniform(node: Node) -> Value:
    return _emit_uniform(node, _read_shape(node), _read_dtype(node, "float32"))


@op("RandomUniformLike", since=1)
def random_uniform_like(node: Node, like: Value) -> Value:
    return _emit_uniform(node, like.shape, _read_dtype(node, like.dtype))


@op("RandomNormal", since=1)
def random_normal(node: Node) -> Value:
    return _emit_normal(node, _read_shape(node), _read_dtype(node, "float32"))


@op("RandomNormalLike", since=1)
def random_normal_like(node: Node, like: Value) -> Value:
    return _emit_normal(node, like.shape, _read_dtype(node, like.dtype))


@op("Bernoulli", since=15)
def bernoulli(node: Node, probability: Value) -> Value:
    """Emit 1 with the probability that each element gives, else 0."""
    require_numbers(node, probability)
    dtype = _read_dtype(node, probability.dtype, must_be_float=False)
    numbers = emit_uniform_numbers(node, probability.shape, widen_dtype(probability.dtype))
    draws = pointwise(node, lambda p, u: u < p, probability, numbers, dtype="bool", name="bernoulli")
    return cast_to(node, draws, dtype)


@op("Multinomial", since=7)
def multinomial(node: Node, logits: Value) -> Value:
    """Draw classes [batch, sample_size] with probabilities softmax(logits) [batch, classes].

    The draws are with replacement. A draw is the first class at which the running sum of e^(logit - largest) exceeds a
    uniform share of the total.
    """
    if logits.rank != 2 or not is_float(logits.dtype):
        raise node.error(
            "multinomial.input_unsupported",
            f"the input is {logits.dtype} of rank {logits.rank}.",
            "Give it a float type and the shape [batch, classes].",
        )
    samples, dtype = node.attr("sample_size", 1), ir.DataType(node.attr("dtype", ir.DataType.INT32)).numpy().name
    if samples < 0 or dtype not in ("int32", "int64"):
        raise node.error(
            "multinomial.attribute_unsupported",
            f"attribute sample_size is {samples}, and dtype is {dtype}.",
            "Use a sample_size of 0 or more, and int32 or int64.",
        )
    batch, classes = logits.shape
    logits = require(node, logits, symbolic.less(0, classes), "multinomial.classes_empty", "the input has no classes.")
    shares = emit_uniform_numbers(node, (batch, samples), "float64")

    def search(running: Any, shares: Any, out: Any) -> None:
        with independent_loops(batch, samples) as (row, sample):
            T.buffer_store(out, tirx.const(0, dtype), [row, sample])
            bound = let(shares[row, sample] * running[row, classes - 1])
            with serial(classes - 1) as k, T.If(running[row, k] <= bound), T.Then():
                T.buffer_store(out, (k + 1).astype(dtype), [row, sample])

    (draws,) = emit_loops(
        node, "draw", search, [_emit_running_weights(node, logits), shares], [((batch, samples), dtype)]
    )
    return draws


def _emit_running_weights(node: Node, logits: Value) -> Value:
    """Emit cumulative e^(logit - row maximum) as float64 [batch, classes]. A NaN has weight 0."""
    batch, classes = logits.shape
    lowest = tirx.min_value("float64")

    def statements(x: Any, out: Any) -> None:
        def read(row: Any, k: Any) -> Any:
            value = x[row, k].astype("float64")
            return tirx.Select(value > lowest, value, lowest)

        with independent_loops(batch) as (row,):
            largest, total = (T.alloc_buffer((1,), "float64") for _ in range(2))
            T.buffer_store(largest, lowest, [0])
            T.buffer_store(total, tirx.const(0.0, "float64"), [0])
            with serial(classes) as k:
                T.buffer_store(largest, tirx.max(largest[0], read(row, k)), [0])
            with serial(classes) as k:
                T.buffer_store(total, total[0] + tirx.exp(read(row, k) - largest[0]), [0])
                T.buffer_store(out, total[0], [row, k])

    (running,) = emit_loops(node, "running_weights", statements, [logits], [((batch, classes), "float64")])
    return running


def emit_uniform_numbers(node: Node, shape: Shape, dtype: str) -> Value:
    """Emit numbers from [0, 1), multiples of 2^-24 in float32 and of 2^-53 in float64."""

    def element(bits: BitsReader) -> Element:
        return _emit_fraction(bits, 0, dtype)

    return _emit_draws(node, shape, dtype, 2 if dtype == "float64" else 1, element)


def _emit_uniform(node: Node, shape: Shape, dtype: str) -> Value:
    low, high = node.attr("low", 0.0), node.attr("high", 1.0)
    accurate = widen_dtype(dtype)

    def element(bits: BitsReader) -> Element:
        low_, width = tirx.const(low, accurate), tirx.const(high - low, accurate)
        return low_ + _emit_fraction(bits, 0, accurate) * width

    return _emit_draws(node, shape, dtype, 2 if dtype == "float64" else 1, element)


def _emit_normal(node: Node, shape: Shape, dtype: str) -> Value:
    """Emit mean + scale sqrt(-2 log u) cos(2 pi v) for uniform u in (0, 1] and v in [0, 1)."""
    mean, scale = node.attr("mean", 0.0), node.attr("scale", 1.0)
    accurate = widen_dtype(dtype)
    bits_count = 2 if accurate == "float64" else 1

    def element(bits: BitsReader) -> Element:
        u = tirx.const(1.0, accurate) - _emit_fraction(bits, 0, accurate)
        radius = tirx.sqrt(tirx.const(-2.0, accurate) * tirx.log(u))
        angle = _emit_fraction(bits, bits_count, accurate) * tirx.const(2 * math.pi, accurate)
        return tirx.const(mean, accurate) + tirx.const(scale, accurate) * (radius * tirx.cos(angle))

    return _emit_draws(node, shape, dtype, 2 * bits_count, element)


def _emit_fraction(bits: BitsReader, first: int, dtype: str) -> Element:
    """Emit a number from [0, 1) with as many random bits as the type can represent.

    It takes one 32-bit value, or two for float64.
    """
    if dtype != "float64":
        return _shift_upper_bits(bits(first), 24, dtype) * tirx.const(2.0**-24, dtype)
    upper, lower = _shift_upper_bits(bits(first), 27, dtype), _shift_upper_bits(bits(first + 1), 26, dtype)
    return (upper * tirx.const(2.0**26, dtype) + lower) * tirx.const(2.0**-53, dtype)


def _shift_upper_bits(bits: Element, count: int, dtype: str) -> Element:
    return tirx.shift_right(bits, tirx.const(32 - count, "uint32")).astype(dtype)


def _emit_draws(
    node: Node, shape: Shape, dtype: str, bits_count: int, element: Callable[[BitsReader], Element]
) -> Value:
    """Emit a tensor whose elements each consume `bits_count` 32-bit values of their own."""
    shape = tuple(map(node.simplify, shape))
    count = node.simplify(prod(shape))

    def body(index: Any, read: Any) -> Element:
        (k,) = index
        return element(lambda number: read(k * bits_count + number)).astype(dtype)

    numbers = compute(node, "random", body, [emit_random_bits(node, count * bits_count)], (count,), dtype=dtype)
    return reshape_to(node, numbers, shape)


def _read_shape(node: Node) -> Shape:
    shape = tuple(node.attr("shape"))
    if any(size < 0 for size in shape):
        raise node.error("node.negative_size", f"attribute shape is {list(shape)}.", "Use sizes of 0 or more.")
    return shape


def _read_dtype(node: Node, default: str, must_be_float: bool = True) -> str:
    """Return the element type of the result: attribute dtype, or else the default."""
    attribute = node.attr("dtype", None)
    dtype = default if attribute is None else ir.DataType(attribute).numpy().name
    if must_be_float and (not is_float(dtype) or widen_dtype(dtype) not in ("float32", "float64")):
        raise node.error(
            "node.result_dtype_unsupported",
            f"its result would have the type {dtype}.",
            "Set attribute dtype to a float type of 16 bits or more.",
        )
    return dtype
