"""com.microsoft MatMulNBits: a matmul with a weight of 2, 4 or 8 bits per element, which is stored in 4 or 8.

Block n of row r of the weight has elements (q - z) * scale. q is packed in B, lowest bits first. z is 2^(bits - 1)
without zero points.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ...choices import INT8_ROWS
from ...importing.node import Node
from ...importing.quantized_matrix import QuantizedMatrix, unpack_bits
from ...importing.values import Value
from .. import op
from ..helpers.compute import relax_call
from ..helpers.requirements import read_choice, reject_attribute, reject_input
from ..math.matmul import emit_matmul, round_to
from . import DOMAIN


@op("MatMulNBits", since=1, domain=DOMAIN)
def matmul_n_bits(
    node: Node,
    a: Value,
    packed: Value,
    scales: Value,
    zero_points: Value | None = None,
    g_idx: Value | None = None,
    bias: Value | None = None,
) -> Value:
    """Return A [..., K] times the weight [K, N], plus bias [N]; rounded once."""
    reject_input(node, "g_idx", g_idx, "Quantize without act_order, which reorders the groups of the weight.")
    reject_attribute(node, "weight_prepacked", 0, "Export the weight in the operator's own layout.")
    weight = read_weight(node, packed, scales, zero_points, node.attr("N"), np.dtype(a.dtype))
    y = emit_matmul(node, a, node.quantized(weight.transpose((1, 0))))
    if bias is not None:
        y = relax_call(node, relax.op.add, y, round_to(node, bias, y.dtype))
    return round_to(node, y, a.dtype)


def read_weight(
    node: Node, packed: Value, scales: Value, zero_points: Value | None, columns: int, dtype: np.dtype
) -> QuantizedMatrix:
    """Return the weight [columns, K], packed as attributes K, bits and block_size specify."""
    rows, size = (node.attr(name) for name in ("K", "block_size"))
    bits = read_choice(node, "bits", 4, (2, 4, 8))
    blocks = -(-rows // size)
    q, scale, zeros = (None if v is None else v.constant for v in (packed, scales, zero_points))
    if q is None or scale is None or (zero_points is not None and zeros is None):
        raise node.error(
            "node.constant_required", "B, scales or zero_points are computed at run time.", "Make them initializers."
        )
    for name, array, count in (
        ("B", q, columns * blocks * size * bits // 8),
        ("scales", scale, columns * blocks),
    ):
        if array.size != count:
            raise node.error(
                "node.shape_mismatch",
                f"input {name} has {array.size} elements, not {count}.",
                "Correct N, K, block_size or bits.",
            )
    offset = 2 ** (bits - 1)
    if zeros is None:
        z = None
    elif zeros.dtype == np.uint8:
        z = (unpack_bits(zeros.reshape(columns, -1), bits)[:, :blocks].astype(np.int16) - offset).astype(np.int8)
    else:
        z = zeros.reshape(columns, blocks).astype(np.float32) - offset
    q = unpack_bits(q.reshape(columns * blocks, -1), bits).reshape(columns, -1)[:, :rows]
    quantized = (q.astype(np.int16) - offset).astype(np.int8)
    has_int8_rows = node.attr("accuracy_level", 0) == INT8_ROWS
    return QuantizedMatrix(quantized, scale.reshape(columns, blocks), z, (1, size), max(bits, 4), dtype, has_int8_rows)
