"""Random operators: ONNX RandomNormal, RandomUniform, their Like forms, Bernoulli and Multinomial.

Words (random_words.py) are the same on every target, and so are draws from [0, 1), which are words as fractions. Normal
numbers come of them by Box and Muller's transform, whose logarithms and cosines each target rounds in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..importing import symbolic
from ..importing.compute import Element, is_float, pointwise, require_numbers, widened
from ..importing.node import Node
from ..importing.values import Shape, Value, prod
from ..tensorir.independent import independent
from . import op
from .asserted import required
from .cast import cast_to
from .kernels import compute, let, loops, serial
from .random_words import random_words
from .reshape import reshape_to

Words = Callable[[int], Element]
"""Reads the k-th random word of an element."""


@op("RandomUniform", since=1)
def random_uniform(node: Node) -> Value:
    return _uniform(node, _shape(node), _dtype(node, "float32"))


@op("RandomUniformLike", since=1)
def random_uniform_like(node: Node, like: Value) -> Value:
    return _uniform(node, like.shape, _dtype(node, like.dtype))


@op("RandomNormal", since=1)
def random_normal(node: Node) -> Value:
    return _normal(node, _shape(node), _dtype(node, "float32"))


@op("RandomNormalLike", since=1)
def random_normal_like(node: Node, like: Value) -> Value:
    return _normal(node, like.shape, _dtype(node, like.dtype))


@op("Bernoulli", since=15)
def bernoulli(node: Node, probability: Value) -> Value:
    """1 with the probability that each element gives, else 0."""
    require_numbers(node, probability)
    dtype = _dtype(node, probability.dtype, floats=False)
    numbers = uniform_numbers(node, probability.shape, widened(probability.dtype))
    drawn = pointwise(node, lambda p, u: u < p, probability, numbers, dtype="bool", name="bernoulli")
    return cast_to(node, drawn, dtype)


@op("Multinomial", since=7)
def multinomial(node: Node, logits: Value) -> Value:
    """Draw classes [batch, sample_size] with the probabilities softmax(logits) [batch, classes], with replacement.

    A draw is the first class at which the running sum of e^(logit - largest) exceeds a uniform share of all of it.
    """
    if logits.rank != 2 or not is_float(logits.dtype):
        raise node.error(f"the input is {logits.dtype} of rank {logits.rank}.", "Make it floats [batch, classes].")
    samples, dtype = node.attr("sample_size", 1), ir.DataType(node.attr("dtype", ir.DataType.INT32)).numpy().name
    if samples < 0 or dtype not in ("int32", "int64"):
        raise node.error(
            f"attribute sample_size is {samples}, and dtype {dtype}.", "Use at least 0, and int32 or int64."
        )
    batch, classes = logits.shape
    logits = required(node, logits, symbolic.less(0, classes), "the input has no classes.")
    shares = uniform_numbers(node, (batch, samples), "float64")

    def search(sums: Any, shares: Any, out: Any) -> None:
        with independent(batch, samples) as (row, sample):
            T.buffer_store(out, tirx.const(0, dtype), [row, sample])
            bound = let(shares[row, sample] * sums[row, classes - 1])
            with serial(classes - 1) as k, T.If(sums[row, k] <= bound), T.Then():
                T.buffer_store(out, (k + 1).astype(dtype), [row, sample])

    (drawn,) = loops(node, "draw", search, [_running_weights(node, logits), shares], [((batch, samples), dtype)])
    return drawn


def _running_weights(node: Node, logits: Value) -> Value:
    """Running sums of e^(logit - the largest of the row): float64 [batch, classes]. A NaN weighs nothing."""
    batch, classes = logits.shape
    lowest = tirx.min_value("float64")

    def statements(x: Any, out: Any) -> None:
        def read(row: Any, k: Any) -> Any:
            value = x[row, k].astype("float64")
            return tirx.Select(value > lowest, value, lowest)

        with independent(batch) as (row,):
            largest, total = (T.alloc_buffer((1,), "float64") for _ in range(2))
            T.buffer_store(largest, lowest, [0])
            T.buffer_store(total, tirx.const(0.0, "float64"), [0])
            with serial(classes) as k:
                T.buffer_store(largest, tirx.max(largest[0], read(row, k)), [0])
            with serial(classes) as k:
                T.buffer_store(total, total[0] + tirx.exp(read(row, k) - largest[0]), [0])
                T.buffer_store(out, total[0], [row, k])

    (sums,) = loops(node, "running_weights", statements, [logits], [((batch, classes), "float64")])
    return sums


def uniform_numbers(node: Node, shape: Shape, dtype: str) -> Value:
    """Emit numbers from [0, 1), multiples of 2^-24 in float32 and of 2^-53 in float64."""

    def element(word: Words) -> Element:
        return _fraction(word, 0, dtype)

    return _drawn(node, shape, dtype, 2 if dtype == "float64" else 1, element)


def _uniform(node: Node, shape: Shape, dtype: str) -> Value:
    low, high = node.attr("low", 0.0), node.attr("high", 1.0)
    accurate = widened(dtype)

    def element(word: Words) -> Element:
        low_, width = tirx.const(low, accurate), tirx.const(high - low, accurate)
        return low_ + _fraction(word, 0, accurate) * width

    return _drawn(node, shape, dtype, 2 if dtype == "float64" else 1, element)


def _normal(node: Node, shape: Shape, dtype: str) -> Value:
    """mean + scale sqrt(-2 log u) cos(2 pi v) for uniform u of (0, 1] and v of [0, 1)."""
    mean, scale = node.attr("mean", 0.0), node.attr("scale", 1.0)
    accurate = widened(dtype)
    words = 2 if accurate == "float64" else 1

    def element(word: Words) -> Element:
        u = tirx.const(1.0, accurate) - _fraction(word, 0, accurate)
        radius = tirx.sqrt(tirx.const(-2.0, accurate) * tirx.log(u))
        angle = _fraction(word, words, accurate) * tirx.const(2 * math.pi, accurate)
        return tirx.const(mean, accurate) + tirx.const(scale, accurate) * (radius * tirx.cos(angle))

    return _drawn(node, shape, dtype, 2 * words, element)


def _fraction(word: Words, first: int, dtype: str) -> Element:
    """A number from [0, 1) of one word, or for float64 of two: as many bits as the type holds."""
    if dtype != "float64":
        return _upper_bits(word(first), 24, dtype) * tirx.const(2.0**-24, dtype)
    upper, lower = _upper_bits(word(first), 27, dtype), _upper_bits(word(first + 1), 26, dtype)
    return (upper * tirx.const(2.0**26, dtype) + lower) * tirx.const(2.0**-53, dtype)


def _upper_bits(word: Element, count: int, dtype: str) -> Element:
    return tirx.shift_right(word, tirx.const(32 - count, "uint32")).astype(dtype)


def _drawn(node: Node, shape: Shape, dtype: str, words: int, element: Callable[[Words], Element]) -> Value:
    """A tensor whose every element is made of so many words of its own."""
    shape = tuple(map(node.simplify, shape))
    count = node.simplify(prod(shape))

    def body(index: Any, read: Any) -> Element:
        (k,) = index
        return element(lambda number: read(k * words + number)).astype(dtype)

    numbers = compute(node, "random", body, [random_words(node, count * words)], (count,), dtype=dtype)
    return reshape_to(node, numbers, shape)


def _shape(node: Node) -> Shape:
    shape = tuple(node.attr("shape"))
    if any(size < 0 for size in shape):
        raise node.error(f"attribute shape is {list(shape)}.", "Give it no negative size.")
    return shape


def _dtype(node: Node, default: str, floats: bool = True) -> str:
    """The element type of the result: attribute dtype, or else the default."""
    given = node.attr("dtype", None)
    dtype = default if given is None else ir.DataType(given).numpy().name
    if floats and (not is_float(dtype) or widened(dtype) not in ("float32", "float64")):
        raise node.error(f"its result would be {dtype}.", "Set attribute dtype to a float type of 16 bits or more.")
    return dtype
