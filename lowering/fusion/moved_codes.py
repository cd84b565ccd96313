"""Codes that would be dequantized, moved, and quantized again: the codes themselves are moved."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .matching import Rewrite, array, attribute, closed, dims, operand, producer
from .node_pass import NodePass

_TYPES = {
    ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.INT4, ir.DataType.UINT4,
}  # fmt: skip
_EXACT = (1e-30, 1e30)
"""Scales of which (code * scale) / scale, in float32, is nearer to the code than to any other."""
_MOVES = ("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Slice", "Identity")


class MoveCodesPass(NodePass):
    """Moves codes where onnxruntime's static tool has floats moved, between a DequantizeLinear and a QuantizeLinear.

    1. QuantizeLinear(Transpose(DequantizeLinear(x))) with one scale and one zero point of the tensor is Transpose(x),
       and so it is with any number of moves. The projection of a language model stays a weight, though it is a table
       of embeddings that is turned; heads are repeated as bytes.
    2. QuantizeLinear(Concat(a, b)), where nobody else reads the Concat, is Concat(QuantizeLinear(a),
       QuantizeLinear(b)): a cache that grows is joined as bytes.

    In case 1 both scales, and both zero points, are constants of the same contents. Others refuse the match, and so do
    scales of an axis or of blocks.
    """

    since = 10
    operators = ("QuantizeLinear",)

    def rewrite(self, node: ir.Node) -> bool:
        result, value, new = node.outputs[0], operand(node, 0), Rewrite(node)
        if result.dtype not in _TYPES or attribute(node, "block_size", 0):
            return False
        taken = [node]
        codes = _moved(value, node, new, taken)
        joined = producer(value, "Concat")
        if codes is None and joined is not None and _is_one(node) and closed({joined, node}, result):
            taken.append(joined)
            parts = [_moved(part, node, new, taken) or _quantized(part, node, new) for part in joined.inputs if part]
            codes = new.emit("Concat", parts, joined.attributes, shape=dims(value))
        if codes is None:
            return False
        new.replace(taken, result, codes)
        return True


def _moved(value: ir.Value, like: ir.Node, new: Rewrite, taken: list[ir.Node]) -> ir.Value | None:
    """The codes of a value, if it is a chain of moves behind a DequantizeLinear of what `like` quantizes to; the nodes
    of the chain are added to `taken`."""
    moves: list[ir.Node] = []
    while (move := producer(value, *_MOVES)) is not None and value.shape is not None:
        moves.append(move)
        value = operand(move, 0)
    made = producer(value, "DequantizeLinear")
    if made is None or attribute(made, "block_size", 0):
        return None
    codes = operand(made, 0)
    if codes.dtype != like.outputs[0].dtype or codes.shape is None:
        return None
    if not _same(like, made, 1) or not _same(like, made, 2) or not _is_exact(array(operand(made, 1))):
        return None
    taken += [*moves, made]
    for move in reversed(moves):
        codes = new.emit(move.op_type, [codes, *move.inputs[1:]], move.attributes, shape=dims(move.outputs[0]))
    return codes if moves else new.emit("Identity", [codes], shape=dims(codes))


def _quantized(value: ir.Value, like: ir.Node, new: Rewrite) -> ir.Value:
    return new.emit(
        "QuantizeLinear", [value, *like.inputs[1:]], like.attributes, dtype=like.outputs[0].dtype, shape=dims(value)
    )


def _is_one(node: ir.Node) -> bool:
    """Whether the scale is one of the tensor."""
    scale = operand(node, 1)
    return scale.shape is not None and dims(scale) == ()


def _same(a: ir.Node, b: ir.Node, place: int) -> bool:
    """Whether an input of both is the same number of the tensor, or left out."""
    found = [node.inputs[place] if len(node.inputs) > place else None for node in (a, b)]
    if None in found:
        return found == [None, None]
    numbers = [array(value) for value in found]
    return all(n is not None and n.size == 1 for n in numbers) and numbers[0] == numbers[1]


def _is_exact(scale: np.ndarray | None) -> bool:
    return scale is not None and scale.dtype == np.float32 and bool(_EXACT[0] < scale.reshape(()) < _EXACT[1])
