"""com.microsoft DynamicQuantizeLSTM: an LSTM with 8-bit weights.

Constant weights stay int8, and inputs and the states of each step are quantized, as in ONNX Runtime. Weights that are
inputs of the model are dequantized to float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from ...importing.node import Node
from ...importing.values import Value
from ...tensorir.quantized_states import PACKED_VALUES
from ...tensorir.recurrence import BLOCK, Recurrence
from .. import op
from ..helpers.compute import relax_call
from ..math.integer_matmul import integer_matmul
from ..math.matmul import permute_axes
from ..math.quantization import quantize_dynamically
from ..nn.recurrent import emit_recurrent
from ..nn.recurrent_weights import IndexMap
from ..tensor.cast import cast_to
from ..tensor.reshape import reshape_to
from . import DOMAIN
from .quantized import rescale


@op("DynamicQuantizeLSTM", since=1, domain=DOMAIN)
def dynamic_quantize_lstm(
    node: Node,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None,
    lengths: Value | None,
    initial_h: Value | None,
    initial_c: Value | None,
    peepholes: Value | None,
    w_scale: Value,
    w_zero: Value,
    r_scale: Value,
    r_zero: Value,
) -> tuple[Value, ...]:
    """Compute the LSTM for w [directions, I, 4 H] and r [directions, H, 4 H].

    Scales and zero points are [directions] or [directions, 4 H].
    """
    matrices = (w, w_scale, w_zero), (r, r_scale, r_zero)
    w, r = (_dequantize_weights(node, *matrix) for matrix in matrices)
    w_values, r_values = (_Int8Matrices.from_constant(*matrix) for matrix in matrices)
    quantized = None
    if x.dtype == "float32" and w_values is not None and r_values is not None:
        quantized = _Int8Weights(w_values, r_values)
    return emit_recurrent(node, "LSTM", x, w, r, bias, lengths, initial_h, initial_c, peepholes, quantized)


@dataclass(frozen=True)
class _Int8Matrices:
    """Constant weights [directions, 4 H, inputs] as int8; scales and zero points [directions, 4 H]."""

    values: np.ndarray
    scale: np.ndarray
    zero: np.ndarray

    @staticmethod
    def from_constant(values: Value, scale: Value, zero: Value) -> _Int8Matrices | None:
        if values.constant is None or scale.constant is None or zero.constant is None:
            return None
        offset = 128 if values.dtype == "uint8" else 0
        shape = values.constant.shape[0], values.constant.shape[2]
        spread = [
            np.broadcast_to(array.reshape(array.shape[0], -1), shape)
            for array in (scale.constant.astype(np.float32), zero.constant.astype(np.int32) - offset)
        ]
        wide = values.constant.astype(np.int32) - offset
        return _Int8Matrices(wide.astype(np.int8).transpose(0, 2, 1), *spread)


@dataclass(frozen=True)
class _Int8Weights:
    w: _Int8Matrices
    r: _Int8Matrices

    @property
    def holds_lowest(self) -> bool:
        return bool((self.r.values == -128).any())

    def multiply_inputs(self, node: Node, x: Value, columns: int, place: IndexMap) -> Value:
        """Return x [L, B, I], quantized, times W."""
        is_inside, index = place(*np.indices((self.w.values.shape[2], columns)))
        index = tuple(np.where(is_inside, i, 0) for i in index)
        values = np.where(is_inside, self.w.values[index], 0).astype(np.int8)
        scale, zero = (
            np.where(is_inside[0], table[index[0][0], index[1][0]], 0) for table in (self.w.scale, self.w.zero)
        )
        quantized, x_scale, x_zero = quantize_dynamically(node, x)
        b = node.constant(values)
        accumulators = integer_matmul(node, quantized, b, x_zero, node.constant(zero.astype(np.int8)))
        return rescale(node, accumulators, x, b, (x_scale, node.constant(scale)), None)

    def pack_recurrent(self, node: Node, record: Recurrence, place: IndexMap) -> dict[str, Value]:
        """Return r, r_scale, r_zero and r_sum of the record."""
        shape = record.blocks, record.packed_units * PACKED_VALUES, record.gates, BLOCK
        is_inside, index = place(*np.indices(shape))
        is_inside &= np.arange(shape[1])[:, None, None] < record.units
        index = tuple(np.where(is_inside, i, 0) for i in index)
        values = np.where(is_inside, self.r.values[index], 0).astype(np.int8)
        scale, zero = (
            np.where(is_inside[:, 0], table[index[0][:, 0], index[1][:, 0]], 0) for table in (self.r.scale, self.r.zero)
        )
        packed = values.reshape(shape[0], record.packed_units, PACKED_VALUES, *shape[2:]).transpose(0, 1, 3, 4, 2)
        return {
            "r": node.constant(np.ascontiguousarray(packed).view("<i4")[..., 0]),
            "r_scale": node.constant(scale.reshape(-1).astype(np.float32)),
            "r_zero": node.constant(zero.reshape(-1).astype(np.int32)),
            "r_sum": node.constant((values.sum(1, dtype=np.int32) - record.units * zero).reshape(-1).astype(np.int32)),
        }


def _dequantize_weights(node: Node, values: Value, scale: Value, zero: Value) -> Value:
    """Return (values - zero) scale as [directions, 4 H, inputs]."""
    if values.rank != 3 or scale.rank not in (1, 2) or zero.rank != scale.rank:
        raise node.error(
            "node.rank_mismatch",
            f"weights of rank {values.rank} have scales and zero points of rank {scale.rank} and {zero.rank}.",
            "Make weights [directions, inputs, 4 H], and scales [directions] or [directions, 4 H].",
        )
    if values.constant is not None and scale.constant is not None and zero.constant is not None:
        axes = (slice(None), None, slice(None)) if scale.rank == 2 else (slice(None), None, None)
        wide = values.constant.astype("float32") - zero.constant.astype("float32")[axes]
        return node.constant((wide * scale.constant[axes]).transpose(0, 2, 1))
    shape = (scale.shape[0], 1, scale.shape[1] if scale.rank == 2 else 1)
    number = relax_call(
        node, relax.op.subtract, cast_to(node, values, "float32"),
        cast_to(node, reshape_to(node, zero, shape), "float32"),
    )  # fmt: skip
    number = relax_call(node, relax.op.multiply, number, reshape_to(node, scale, shape))
    return permute_axes(node, number, [0, 2, 1])
