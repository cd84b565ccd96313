"""com.microsoft MatMulNBits: a matmul with a weight of 2, 4 or 8 bits per element, which is stored in 4 or 8.

Block n of row r of the weight has elements (q - z) * scale. q is packed in B, lowest bits first. z is 2^(bits - 1)
without zero points.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tvm import relax

from ... import scratch
from ...choices import INT8_ROWS
from ...chunks import map_columns
from ...importing.node import Node
from ...importing.quantized_matrix import QuantizedMatrix, unpack_bits
from ...importing.values import Value
from .. import op
from ..helpers.compute import relax_call
from ..helpers.requirements import read_choice, reject_attribute
from ..math.matmul import emit_matmul, round_to
from ..tensor.gather import gather_along
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
    """Return A [..., K] times the weight [K, N], plus bias [N]; rounded once.

    g_idx [K] is the block of each k, whose scale and zero point apply to it; without it blocks are successive.
    """
    reject_attribute(node, "weight_prepacked", 0, "Export the weight in the operator's own layout.")
    weight = read_weight(node, packed, scales, zero_points, node.attr("N"), np.dtype(a.dtype))
    if g_idx is None:
        matrix = node.quantized(weight.transpose((1, 0)))
    else:
        a, matrix = _order_by_block(node, a, weight, g_idx)
    y = emit_matmul(node, a, matrix)
    if bias is not None:
        y = relax_call(node, relax.op.add, y, round_to(node, bias, y.dtype))
    return round_to(node, y, a.dtype)


def _order_by_block(node: Node, a: Value, weight: QuantizedMatrix, g_idx: Value) -> tuple[Value, Value]:
    """Return A and the weight [K, N] with the values of each block side by side, as quantizers with act_order need it.

    Where blocks differ in size, the weight becomes floats and keeps its order.
    """
    if g_idx.constant is None:
        raise node.error("node.constant_required", "g_idx is computed at run time.", "Make it an initializer.")
    (depth, size), blocks = (weight.shape[1], weight.block[1]), weight.scales.shape[1]
    numbers = g_idx.constant.reshape(-1)[:depth].astype(np.int64)
    if len(numbers) != depth or not ((numbers >= 0) & (numbers < blocks)).all():
        raise node.error(
            "matmul_n_bits.blocks_invalid",
            f"input g_idx must have {depth} numbers of blocks, from 0 to {blocks - 1}.",
            "Correct it, or quantize without act_order.",
        )
    order, successive = np.argsort(numbers, kind="stable"), np.arange(depth) // size
    if not np.array_equal(numbers[order], successive):
        zeros = 0 if weight.zero_points is None else weight.zero_points.astype(np.float32)[:, numbers]
        floats = (weight.values - zeros) * weight.scales.astype(np.float32)[:, numbers]
        return a, node.constant(np.ascontiguousarray(floats.T.astype(weight.dtype)))
    if not np.array_equal(numbers, successive):
        a = gather_along(node, a, node.constant(order), a.rank - 1)
        weight = replace(weight, values=weight.values[:, order])
    return a, node.quantized(weight.transpose((1, 0)))


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
    quantized, octets = scratch.empty((columns, rows), np.dtype(np.int8)), q.reshape(columns, -1)

    def unpack(chunk: slice) -> None:
        values = unpack_bits(octets[chunk], bits)[:, :rows]
        quantized[chunk] = (values - np.uint8(offset)).view(np.int8)

    map_columns(unpack, rows, columns)
    permits_int8_rows = node.attr("accuracy_level", 0) == INT8_ROWS
    return QuantizedMatrix(
        quantized, scale.reshape(columns, blocks), z, (1, size), max(bits, 4), dtype, permits_int8_rows
    )
