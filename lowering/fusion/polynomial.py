"""Arithmetic on one variable as a polynomial, so that patterns need not list every order of its terms."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from ..graph.rewriting.matching import dims, is_op, operand, read_number

# Coefficients by power.
Polynomial = dict[int, float]

_MAX_DEPTH = 12  # more nested operators than any activation has


def read_polynomial(value: ir.Value, x: ir.Value, depth: int = _MAX_DEPTH) -> Polynomial | None:
    """Return the value as a polynomial of x.

    None unless only Add, Sub, Mul, Neg, Div by a number and Pow to a number compute it.
    """
    if value is x:
        return {1: 1.0}
    constant = read_number(value)
    if constant is not None:
        return {0: constant} if len(dims(value)) <= len(dims(x)) else None
    node = value.producer()
    if depth == 0 or not is_op(node, "Add", "Sub", "Mul", "Div", "Pow", "Neg"):
        return None
    assert node is not None
    terms = [read_polynomial(operand(node, k), x, depth - 1) for k in range(len(node.inputs))]
    if any(t is None for t in terms):
        return None
    a, b = terms[0] or {}, (terms[1] or {}) if len(terms) > 1 else {}
    if is_op(node, "Neg"):
        return _scale_polynomial(a, -1.0)
    if is_op(node, "Add"):
        return _add_polynomials(a, b)
    if is_op(node, "Sub"):
        return _add_polynomials(a, _scale_polynomial(b, -1.0))
    if is_op(node, "Mul"):
        return multiply_polynomials(a, b)
    c = b.get(0, 0.0) if set(b) <= {0} else None
    if is_op(node, "Div"):
        return None if not c else _scale_polynomial(a, 1.0 / c)
    if c not in (1, 2, 3, 4):
        return None
    power = a
    for _ in range(int(c) - 1):
        power = multiply_polynomials(power, a)
    return power


def has_equal_coefficients(actual: Polynomial | None, expected: Mapping[int, float], dtype: ir.DataType | None) -> bool:
    """Return whether two polynomials are equal up to the rounding of constants in that type."""
    tolerance = {ir.DataType.FLOAT16: 2e-3, ir.DataType.BFLOAT16: 1e-2}.get(dtype or ir.DataType.FLOAT, 2e-5)
    return actual is not None and all(
        math.isclose(actual.get(k, 0.0), expected.get(k, 0.0), rel_tol=tolerance) for k in {*actual, *expected}
    )


def _scale_polynomial(a: Polynomial, factor: float) -> Polynomial:
    return {k: c * factor for k, c in a.items()}


def _add_polynomials(a: Polynomial, b: Polynomial) -> Polynomial:
    return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in {*a, *b}}


def multiply_polynomials(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for j, c in a.items():
        for k, d in b.items():
            result[j + k] = result.get(j + k, 0.0) + c * d
    return result
