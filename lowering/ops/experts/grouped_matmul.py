"""GroupedMatMul: each row times the matrix of its own expert, a grouped GEMM over rows sorted by expert.

The matrices of all experts are concatenated to one matrix [K, experts * N], until weights are packed
(passes/graph/grouped_weights.py).
"""

from __future__ import annotations

import numpy as np
from tvm import te

from ...graph.loading.legality import OWN_DOMAIN
from ...importing.node import Node
from ...importing.values import Value
from ...tensorir.grouped_matmul import GROUPS, grouped_matmul
from .. import op
from ..helpers.compute import number, require_numbers, unify_sizes, widen_dtype
from ..math.matmul import round_to
from ..microsoft.matmul_n_bits import read_weight

_FUSABLE = 4  # TVM's pattern kind of a matmul: element-wise operations after it fuse with it


@op("GroupedMatMul", since=1, domain=OWN_DOMAIN)
def lower_grouped_matmul(
    node: Node,
    x: Value,
    experts: Value,
    weights: Value,
    scales: Value | None = None,
    zero_points: Value | None = None,
) -> Value:
    """Return [R, N] for x [R, K]: row r times matrix experts[r] of the weights.

    experts is int64 [R]. weights is [E, K, N], or [E, N, K] if attribute transB is 1. With scales, a matrix is stored
    in the format of MatMulNBits, and attributes K, N, bits and block_size have the meaning they have there.
    """
    require_numbers(node, x)
    if widen_dtype(x.dtype) != "float32":
        raise node.error("node.dtype_unsupported", f"rows are {x.dtype}.", "Use float32, float16 or bfloat16.")
    count = number(node, "dimension 0 of the weights", weights.shape[0])
    matrices, depth, columns = _concatenate_experts(node, weights, scales, zero_points, np.dtype(x.dtype))
    rows = unify_sizes(node, "the number of rows", x.shape[0], experts.shape[0])
    x, experts = node.cast_shape(x, (rows, depth)), node.cast_shape(experts, (rows,))

    def kernel(x: te.Tensor, experts: te.Tensor, matrices: te.Tensor) -> te.Tensor:
        def element(k: te.Var, j: te.Var) -> te.Tensor:
            return matrices(k, j).astype("float32")

        return grouped_matmul(x, experts, count, columns, columns, element)

    y = node.emit_te(
        kernel,
        *(node.tensor(value) for value in (x, experts, matrices)),
        primfunc_name_hint="grouped_matmul",
        primfunc_attrs={"op_pattern": _FUSABLE, GROUPS: count},
    )
    return round_to(node, y, x.dtype)


def _concatenate_experts(
    node: Node, weights: Value, scales: Value | None, zero_points: Value | None, dtype: np.dtype
) -> tuple[Value, int, int]:
    """Return the matrices as one [K, E * N], and K and N."""
    if scales is not None:
        depth, columns = node.attr("K"), node.attr("N")
        count = number(node, "dimension 0 of the weights", weights.shape[0])
        matrix = read_weight(node, weights, scales, zero_points, count * columns, dtype)
        return node.quantized(matrix.transpose((1, 0))), depth, columns
    array = weights.constant
    if array is None:
        raise node.error("node.constant_required", "the weights are computed at run time.", "Make them initializers.")
    if node.attr("transB", 0):
        array = array.transpose(0, 2, 1)
    count, depth, columns = array.shape
    return node.constant(np.ascontiguousarray(array.transpose(1, 0, 2).reshape(depth, -1))), depth, columns
