"""Movement of quantized values without dequantizing and requantizing them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.rewriting.matching import Rewrite, attribute, dims, is_closed, operand, producer, read_array
from ..node_pass import NodePass

_TYPES = {
    ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.INT4, ir.DataType.UINT4,
}  # fmt: skip
_EXACT_SCALES = (1e-30, 1e30)
"""Scales for which (q * scale) / scale, in float32, is nearer to the quantized value q than to any other."""
_MOVES = ("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Slice", "Identity")


class MoveQuantizedValuesPass(NodePass):
    """Pass that moves quantized values if floats are moved between DequantizeLinear and QuantizeLinear.

    The static tool of onnxruntime writes models in this form.

    1. QuantizeLinear(Transpose(DequantizeLinear(x))) with one scale and one zero point of the tensor is Transpose(x),
       and so it is with any number of moves. The projection of a language model stays a weight, even if it is a
       transposed table of embeddings; heads are repeated as bytes.
    2. QuantizeLinear(Concat(a, b)), if nothing else reads the Concat, is Concat(QuantizeLinear(a), QuantizeLinear(b)):
       a growing cache is concatenated as bytes.

    In case 1 both scales, and both zero points, are constants of the same contents. The match is rejected for others,
    and for scales of an axis or of blocks.
    """

    since = 10
    operators = ("QuantizeLinear",)

    def rewrite(self, node: ir.Node) -> bool:
        result, value, new = node.outputs[0], operand(node, 0), Rewrite(node)
        if result.dtype not in _TYPES or attribute(node, "block_size", 0):
            return False
        matched = [node]
        quantized = _emit_moved(value, node, new, matched)
        concat = producer(value, "Concat")
        if quantized is None and concat is not None and _has_scalar_scale(node) and is_closed({concat, node}, result):
            matched.append(concat)
            inputs = [
                _emit_moved(source, node, new, matched) or _emit_quantized(source, node, new)
                for source in concat.inputs
                if source
            ]
            quantized = new.emit("Concat", inputs, concat.attributes, shape=dims(value))
        if quantized is None:
            return False
        new.replace(matched, result, quantized)
        return True


def _emit_moved(value: ir.Value, like: ir.Node, new: Rewrite, matched: list[ir.Node]) -> ir.Value | None:
    """Emit a value as quantized values, if moves of a DequantizeLinear with the quantization of `like` compute it.

    The nodes of the chain are appended to `matched`.
    """
    moves: list[ir.Node] = []
    while (move := producer(value, *_MOVES)) is not None and value.shape is not None:
        moves.append(move)
        value = operand(move, 0)
    dequantize = producer(value, "DequantizeLinear")
    if dequantize is None or attribute(dequantize, "block_size", 0):
        return None
    quantized = operand(dequantize, 0)
    if quantized.dtype != like.outputs[0].dtype or quantized.shape is None:
        return None
    if (
        not _has_same_scalar(like, dequantize, 1)
        or not _has_same_scalar(like, dequantize, 2)
        or not _is_exact(read_array(operand(dequantize, 1)))
    ):
        return None
    matched += [*moves, dequantize]
    for move in reversed(moves):
        quantized = new.emit(move.op_type, [quantized, *move.inputs[1:]], move.attributes, shape=dims(move.outputs[0]))
    return quantized if moves else new.emit("Identity", [quantized], shape=dims(quantized))


def _emit_quantized(value: ir.Value, like: ir.Node, new: Rewrite) -> ir.Value:
    return new.emit(
        "QuantizeLinear", [value, *like.inputs[1:]], like.attributes, dtype=like.outputs[0].dtype, shape=dims(value)
    )


def _has_scalar_scale(node: ir.Node) -> bool:
    """Return whether the node has one scale for the whole tensor."""
    scale = operand(node, 1)
    return scale.shape is not None and dims(scale) == ()


def _has_same_scalar(a: ir.Node, b: ir.Node, position: int) -> bool:
    """Return whether an input of both nodes is the same number of the tensor, or absent."""
    inputs = [node.inputs[position] if len(node.inputs) > position else None for node in (a, b)]
    if None in inputs:
        return inputs == [None, None]
    numbers = [read_array(value) for value in inputs]
    return all(n is not None and n.size == 1 for n in numbers) and numbers[0] == numbers[1]


def _is_exact(scale: np.ndarray | None) -> bool:
    return (
        scale is not None
        and scale.dtype == np.float32
        and bool(_EXACT_SCALES[0] < scale.reshape(()) < _EXACT_SCALES[1])
    )
