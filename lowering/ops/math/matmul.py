"""Matmuls: ONNX MatMul and Gemm.

They become relax.op.matmul (with permute_dims and add), where the weight packing pass and the matmul kernels find them.
Half precision is accumulated in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax, tirx

from ...importing.node import Node
from ...importing.values import Value, is_one
from .. import op
from ..helpers.assertions import assert_broadcastable
from ..helpers.compute import is_float, relax_call, require_numbers, unify_sizes, widen_dtype
from ..helpers.kernels import compute
from ..helpers.requirements import require_rank


def emit_matmul(node: Node, a: Value, b: Value, acc_dtype: str | None = None) -> Value:
    """Emit A B as in numpy.matmul, in the accumulator type.

    It is `acc_dtype`, or else float32 for half precision.
    """
    require_numbers(node, a, b)
    if a.rank == 0 or b.rank == 0:
        raise node.error(
            "node.matmul_of_scalar",
            f"operands {list(a.shape)} and {list(b.shape)}: a scalar is not a matrix.",
            "Use Mul.",
        )
    row, column = max(b.rank - 2, 0), a.rank - 1
    a_shape, b_shape = list(a.shape), list(b.shape)
    a_shape[column] = b_shape[row] = unify_sizes(node, "the inner dimension", a.shape[column], b.shape[row])
    for k in range(3, min(a.rank, b.rank) + 1):
        if not is_one(a.shape[-k]) and not is_one(b.shape[-k]):
            a_shape[-k] = b_shape[-k] = unify_sizes(node, "a batch dimension", a.shape[-k], b.shape[-k])
    a, b = node.cast_shape(a, tuple(a_shape)), node.cast_shape(b, tuple(b_shape))
    out_type = acc_dtype or widen_dtype(a.dtype)
    out_dtype = out_type if out_type != a.dtype else None
    y = node.emit(relax.op.matmul(node.tensor(a), node.tensor(b), out_dtype=out_dtype))
    if a_shape[column] == 0:  # an empty inner dimension, which no kernel initializes
        return compute(node, "no_matmul", lambda *_: tirx.const(0, out_type), [a, b], y.shape, dtype=out_type)
    return y


def round_to(node: Node, value: Value, dtype: str) -> Value:
    """Return the value as elements of dtype."""
    return value if value.dtype == dtype else node.emit(relax.op.astype(node.tensor(value), dtype))


def permute_axes(node: Node, value: Value, axes: Sequence[int]) -> Value:
    """Return the value with its axes in another order."""
    if list(axes) == list(range(value.rank)):
        return value
    return node.emit(relax.op.permute_dims(node.tensor(value), list(axes)), value.dtype)


@op("MatMul", since=1)
def matmul(node: Node, a: Value, b: Value) -> Value:
    return round_to(node, emit_matmul(node, a, b), a.dtype)


@op("Gemm", since=7)
def gemm(node: Node, a: Value, b: Value, c: Value | None = None) -> Value:
    """Emit alpha A' B' + beta C, rounded once."""
    return round_to(node, emit_gemm_accumulator(node, a, b, c), a.dtype)


def emit_gemm_accumulator(node: Node, a: Value, b: Value, c: Value | None) -> Value:
    """Emit alpha A' B' + beta C in the accumulator type."""
    for name, matrix in (("A", a), ("B", b)):
        require_rank(node, name, matrix, "[rows, columns]", code="gemm.rank_unsupported")
    a = permute_axes(node, a, [1, 0]) if node.attr("transA", 0) else a
    b = permute_axes(node, b, [1, 0]) if node.attr("transB", 0) else b
    y = _scale(node, emit_matmul(node, a, b), "alpha")
    if c is not None and node.attr("beta", 1.0) != 0.0:
        y, c = assert_broadcastable(node, y, c)
        y = relax_call(node, relax.op.add, y, _scale(node, round_to(node, c, y.dtype), "beta"))
    return y


def _scale(node: Node, value: Value, attribute: str) -> Value:
    factor = node.attr(attribute, 1.0)
    if factor == 1.0:
        return value
    if not is_float(value.dtype) and factor != int(factor):
        raise node.error(
            "gemm.factor_not_integer",
            f"attribute {attribute} is {factor}, and elements are {value.dtype}.",
            "Use a whole number.",
        )
    return relax_call(node, relax.op.multiply, value, node.constant(np.array(factor).astype(value.dtype)))
