"""Attention in steps, between which scores and probabilities are tensors [B, Hq, S, T]."""

from __future__ import annotations

import math

import numpy as np
from tvm import relax, te, tirx

from ...importing.compute import Element, largest, read, reduced, relax_call, total
from ...importing.node import Node
from ...importing.values import Value
from ..matmul import emit_matmul, permuted, rounded


def scores(node: Node, q: Value, k: Value, scale: float, dtype: str) -> Value:
    """scale Q K^T in dtype, for Q [B, Hq, S, D] and K [B, Hkv, T, D]."""
    matmul = _by_head(node, q, permuted(node, k, (0, 1, 3, 2)))
    factor = node.constant(np.array(scale, matmul.dtype))
    return rounded(node, relax_call(node, relax.op.multiply, matmul, factor), dtype)


def probabilities(node: Node, scores: Value) -> Value:
    """Their softmax along the keys; 0 in rows whose scores are all -inf."""
    return node.emit_te(_softmax, node.tensor(scores), primfunc_name_hint="softmax")


def weighted(node: Node, probabilities: Value, v: Value, dtype: str) -> Value:
    """P V in dtype, for V [B, Hkv, T, Dv]."""
    return rounded(node, _by_head(node, probabilities, rounded(node, v, probabilities.dtype)), dtype)


def _by_head(node: Node, a: Value, b: Value) -> Value:
    """A [B, Hq, S, n] B [B, Hkv, n, m]: the rows of all query heads that share a key/value head are one matrix."""
    batch, heads, rows, width = a.shape
    shared = b.shape[1]
    together = node.reshaped(a, (batch, shared, node.simplify(rows * (heads // shared)), width))
    return node.reshaped(emit_matmul(node, together, b), (batch, heads, rows, b.shape[3]))


def _softmax(x: te.Tensor) -> te.Tensor:
    """p / sum p with p = e^(x - m), m the maximum, or 0 where that is -inf."""

    def shift(*i: Element) -> Element:
        m = peak(*i[:3], 0)
        return tirx.Select(m == tirx.const(-math.inf, m.ty.dtype), tirx.const(0.0, m.ty.dtype), m)

    def quotient(*i: Element) -> Element:
        l = sums(*i[:3], 0)
        zero = tirx.const(0.0, l.ty.dtype)
        return tirx.Select(l == zero, zero, p(*i) / l).astype(x.dtype)

    peak = reduced(x.shape, {3}, largest, lambda *i: read(x, i), "m")
    p = te.compute(x.shape, lambda *i: tirx.exp(read(x, i) - shift(*i)), name="p")
    sums = reduced(x.shape, {3}, total, lambda *i: p(*i), "l")
    return te.compute(x.shape, quotient, name="softmax")
