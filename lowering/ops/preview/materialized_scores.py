"""Attention in separate steps, with scores and probabilities materialized as tensors [B, Hq, S, T]."""

from __future__ import annotations

import math

import numpy as np
from tvm import relax, te, tirx

from ...importing.node import Node
from ...importing.values import Value
from ..helpers.compute import MAXIMUM, SUM, Element, read_element, reduce_axes, relax_call
from ..math.matmul import emit_matmul, permute_axes, round_to


def compute_scores(node: Node, q: Value, k: Value, scale: float, dtype: str) -> Value:
    """Return scale Q K^T in dtype, for Q [B, Hq, S, D] and K [B, Hkv, T, D]."""
    matmul = _matmul_by_head(node, q, permute_axes(node, k, (0, 1, 3, 2)))
    factor = node.constant(np.array(scale, matmul.dtype))
    return round_to(node, relax_call(node, relax.op.multiply, matmul, factor), dtype)


def compute_probabilities(node: Node, scores: Value) -> Value:
    """Return the softmax of the scores along the keys; 0 in rows whose scores are all -inf."""
    return node.emit_te(_compute_softmax, node.tensor(scores), primfunc_name_hint="softmax")


def weight_values(node: Node, probabilities: Value, v: Value, dtype: str) -> Value:
    """Return P V in dtype, for V [B, Hkv, T, Dv]."""
    return round_to(node, _matmul_by_head(node, probabilities, round_to(node, v, probabilities.dtype)), dtype)


def _matmul_by_head(node: Node, a: Value, b: Value) -> Value:
    """Return A [B, Hq, S, n] times B [B, Hkv, n, m].

    The rows of all query heads that share a key/value head form one matrix.
    """
    batch, heads, rows, width = a.shape
    shared = b.shape[1]
    grouped = node.reshape_to(a, (batch, shared, node.simplify(rows * (heads // shared)), width))
    return node.reshape_to(emit_matmul(node, grouped, b), (batch, heads, rows, b.shape[3]))


def _compute_softmax(x: te.Tensor) -> te.Tensor:
    """Return p / sum p with p = e^(x - m); m is the maximum, or 0 if the maximum is -inf."""

    def shift(*i: Element) -> Element:
        m = peak(*i[:3], 0)
        return tirx.Select(m == tirx.const(-math.inf, m.ty.dtype), tirx.const(0.0, m.ty.dtype), m)

    def quotient(*i: Element) -> Element:
        l = denominator(*i[:3], 0)
        zero = tirx.const(0.0, l.ty.dtype)
        return tirx.Select(l == zero, zero, p(*i) / l).astype(x.dtype)

    peak = reduce_axes(x.shape, {3}, MAXIMUM, lambda *i: read_element(x, i), "m")
    p = te.compute(x.shape, lambda *i: tirx.exp(read_element(x, i) - shift(*i)), name="p")
    denominator = reduce_axes(x.shape, {3}, SUM, lambda *i: p(*i), "l")
    return te.compute(x.shape, quotient, name="softmax")
