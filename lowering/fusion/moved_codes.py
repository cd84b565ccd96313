"""Codes that are dequantised, moved, and quantised again as they were: the codes themselves are moved."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .matching import Rewrite, array, attribute, dims, operand, producer
from .node_pass import NodePass

_TYPES = {
    ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.INT4, ir.DataType.UINT4,
}  # fmt: skip
_EXACT = (1e-30, 1e30)
"""Scales of which (code * scale) / scale, in float32, is nearer to the code than to any other."""


class MoveCodesPass(NodePass):
    """QuantizeLinear(Transpose(DequantizeLinear(x))) with one scale and one zero point of the tensor is Transpose(x).

    onnxruntime's static tool writes that of a table of embeddings that the projection of a language model reads too:
    so the projection's codes are a weight, as they were. Both scales, and both zero points, are constants of the same
    contents. Others refuse the match.
    """

    since = 10
    operators = ("QuantizeLinear",)

    def rewrite(self, node: ir.Node) -> bool:
        moved = producer(operand(node, 0), "Transpose")
        made = None if moved is None else producer(operand(moved, 0), "DequantizeLinear")
        if moved is None or made is None or attribute(node, "block_size", 0) or attribute(made, "block_size", 0):
            return False
        codes = operand(made, 0)
        if codes.dtype not in _TYPES or codes.dtype != node.outputs[0].dtype or codes.shape is None:
            return False
        if not _same(node, made, 1) or not _same(node, made, 2) or not _is_exact(array(operand(made, 1))):
            return False
        new = Rewrite(node)
        perm = moved.attributes.get_ints("perm", range(len(dims(codes)))[::-1])
        new.replace([node, moved, made], node.outputs[0], new.transpose(codes, list(perm)))
        return True


def _same(a: ir.Node, b: ir.Node, place: int) -> bool:
    """Whether an input of both is the same number of the tensor, or left out."""
    found = [node.inputs[place] if len(node.inputs) > place else None for node in (a, b)]
    if None in found:
        return found == [None, None]
    numbers = [array(value) for value in found]
    return all(n is not None and n.size == 1 for n in numbers) and numbers[0] == numbers[1]


def _is_exact(scale: np.ndarray | None) -> bool:
    return scale is not None and scale.dtype == np.float32 and bool(_EXACT[0] < scale.reshape(()) < _EXACT[1])
