"""matmuls: ONNX MatMul and Gemm.

They become relax.op.matmul (with permute_dims and add), where the weight packing pass and the matrix kernels find them.
Half precision is accumulated in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax, tirx

from ..importing.compute import agreed, is_float, relax_call, require_numbers, widened, with_shape
from ..importing.node import Node
from ..importing.values import Value, is_one
from . import op
from .asserted import broadcast_to
from .kernels import compute


def emit_matmul(node: Node, a: Value, b: Value, sums: str | None = None) -> Value:
    """A B as numpy.matmul has it, in the type of the sums: `sums`, or else float32 for half precision."""
    require_numbers(node, a, b)
    if a.rank == 0 or b.rank == 0:
        raise node.error(f"operands {list(a.shape)} and {list(b.shape)}: a scalar is no matrix.", "Use Mul.")
    row, column = max(b.rank - 2, 0), a.rank - 1
    a_shape, b_shape = list(a.shape), list(b.shape)
    a_shape[column] = b_shape[row] = agreed(node, "the inner dimension", a.shape[column], b.shape[row])
    for k in range(3, min(a.rank, b.rank) + 1):
        if not is_one(a.shape[-k]) and not is_one(b.shape[-k]):
            a_shape[-k] = b_shape[-k] = agreed(node, "a batch dimension", a.shape[-k], b.shape[-k])
    a, b = with_shape(node, a, a_shape), with_shape(node, b, b_shape)
    inside = sums or widened(a.dtype)
    out_dtype = inside if inside != a.dtype else None
    y = node.emit(relax.op.matmul(node.tensor(a), node.tensor(b), out_dtype=out_dtype))
    if a_shape[column] == 0:  # sums of nothing, which no kernel begins
        return compute(node, "no_matmul", lambda *_: tirx.const(0, inside), [a, b], y.shape, dtype=inside)
    return y


def rounded(node: Node, value: Value, dtype: str) -> Value:
    """The value as elements of dtype."""
    return value if value.dtype == dtype else node.emit(relax.op.astype(node.tensor(value), dtype))


def permuted(node: Node, value: Value, axes: Sequence[int]) -> Value:
    """The value with its axes in another order."""
    if list(axes) == list(range(value.rank)):
        return value
    return node.emit(relax.op.permute_dims(node.tensor(value), list(axes)), value.dtype)


@op("MatMul", since=1)
def matmul(node: Node, a: Value, b: Value) -> Value:
    return rounded(node, emit_matmul(node, a, b), a.dtype)


@op("Gemm", since=7)
def gemm(node: Node, a: Value, b: Value, c: Value | None = None) -> Value:
    """alpha A' B' + beta C, rounded once."""
    return rounded(node, gemm_accumulator(node, a, b, c), a.dtype)


def gemm_accumulator(node: Node, a: Value, b: Value, c: Value | None) -> Value:
    """Emit alpha A' B' + beta C in the type of the accumulator."""
    if a.rank != 2 or b.rank != 2:
        raise node.error(f"A and B have ranks {a.rank} and {b.rank}.", "Gemm takes matrices; MatMul takes any rank.")
    a = permuted(node, a, [1, 0]) if node.attr("transA", 0) else a
    b = permuted(node, b, [1, 0]) if node.attr("transB", 0) else b
    y = _scaled(node, emit_matmul(node, a, b), "alpha")
    if c is not None and node.attr("beta", 1.0) != 0.0:
        y, c = broadcast_to(node, y, c)
        y = relax_call(node, relax.op.add, y, _scaled(node, rounded(node, c, y.dtype), "beta"))
    return y


def _scaled(node: Node, value: Value, attribute: str) -> Value:
    factor = node.attr(attribute, 1.0)
    if factor == 1.0:
        return value
    if not is_float(value.dtype) and factor != int(factor):
        raise node.error(f"attribute {attribute} is {factor}, and elements are {value.dtype}.", "Use a whole number.")
    return relax_call(node, relax.op.multiply, value, node.constant(np.array(factor).astype(value.dtype)))
