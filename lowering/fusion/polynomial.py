"""Arithmetic with one variable as a polynomial, so that patterns need not list every order of its terms."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from .matching import dims, is_op, number, operand

# Coefficients by power.
Polynomial = dict[int, float]

_DEPTH = 12  # more nested operators than any activation has


def polynomial(value: ir.Value, x: ir.Value, depth: int = _DEPTH) -> Polynomial | None:
    """What the value is in terms of x, if only Add, Sub, Mul, Neg, Div by and Pow to a number compute it."""
    if value is x:
        return {1: 1.0}
    constant = number(value)
    if constant is not None:
        return {0: constant} if len(dims(value)) <= len(dims(x)) else None
    node = value.producer()
    if depth == 0 or not is_op(node, "Add", "Sub", "Mul", "Div", "Pow", "Neg"):
        return None
    assert node is not None
    terms = [polynomial(operand(node, k), x, depth - 1) for k in range(len(node.inputs))]
    if any(t is None for t in terms):
        return None
    a, b = terms[0] or {}, (terms[1] or {}) if len(terms) > 1 else {}
    if is_op(node, "Neg"):
        return _scaled(a, -1.0)
    if is_op(node, "Add"):
        return _sum(a, b)
    if is_op(node, "Sub"):
        return _sum(a, _scaled(b, -1.0))
    if is_op(node, "Mul"):
        return prod(a, b)
    c = b.get(0, 0.0) if set(b) <= {0} else None
    if is_op(node, "Div"):
        return None if not c else _scaled(a, 1.0 / c)
    if c not in (1, 2, 3, 4):
        return None
    power = a
    for _ in range(int(c) - 1):
        power = prod(power, a)
    return power


def alike(found: Polynomial | None, wanted: Mapping[int, float], dtype: ir.DataType | None) -> bool:
    """Equal but for the rounding of constants in that type."""
    tolerance = {ir.DataType.FLOAT16: 2e-3, ir.DataType.BFLOAT16: 1e-2}.get(dtype or ir.DataType.FLOAT, 2e-5)
    return found is not None and all(
        math.isclose(found.get(k, 0.0), wanted.get(k, 0.0), rel_tol=tolerance) for k in {*found, *wanted}
    )


def _scaled(a: Polynomial, factor: float) -> Polynomial:
    return {k: c * factor for k, c in a.items()}


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in {*a, *b}}


def prod(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for j, c in a.items():
        for k, d in b.items():
            result[j + k] = result.get(j + k, 0.0) + c * d
    return result
