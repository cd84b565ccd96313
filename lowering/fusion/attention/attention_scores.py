"""Operators on the scores between the matmul of Q and K and the softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from ...graph.rewriting.matching import dims, is_op, is_widening_cast, operand, operand_orders, producer, read_number
from .attention_masks import ScoreMask, ScoreMasks

_NO_MASKS = ScoreMasks()


@dataclass(frozen=True)
class AttentionScores:
    """The input of the softmax, softcap(scale * matmul) + masks; `nodes` lie between.

    While the chain is read backwards, `scale` multiplies the part that is still to be read, and `matmul` is any node of
    it.
    """

    matmul: ir.Node
    scale: float = 1.0
    softcap: float = 0.0
    masks: ScoreMasks = field(default_factory=ScoreMasks)
    nodes: tuple[ir.Node, ...] = ()


def find_scores(value: ir.Value, scale: float = 1.0, masks: ScoreMasks = _NO_MASKS) -> AttentionScores | None:
    """Read backwards from the softmax, or from a value that is later scaled and masked.

    None if the chain contains any other operator.
    """
    node = value.producer()
    return None if node is None else _read(value, AttentionScores(node, scale, masks=masks))


def _read(value: ir.Value, chain: AttentionScores) -> AttentionScores | None:
    node = value.producer()
    if node is None:
        return None
    chain = replace(chain, nodes=(*chain.nodes, node))
    if is_op(node, "MatMul"):
        return replace(chain, matmul=node)
    if is_op(node, "Reshape") or (is_op(node, "Cast") and is_widening_cast(node)):
        return _read(operand(node, 0), chain)
    if is_op(node, "Mul", "Div"):
        return _read_scale(node, chain)
    if is_op(node, "Tanh"):
        capped = chain.scale > 0 and not chain.softcap and math.isfinite(chain.scale)
        return _read(operand(node, 0), replace(chain, softcap=chain.scale)) if capped else None
    if chain.softcap or not chain.scale > 0:
        return None  # a mask before the soft cap
    if is_op(node, "Add", "Sub"):
        rank = len(dims(value))
        for scores, mask in operand_orders(node) if is_op(node, "Add") else [(operand(node, 0), operand(node, 1))]:
            scale = chain.scale if is_op(node, "Add") else -chain.scale
            result = _read(scores, replace(chain, masks=chain.masks.add(ScoreMask(mask, rank, scale))))
            if result is not None and len(dims(scores)) == rank:
                return result
    if is_op(node, "Where"):
        return _read_where(node, chain)
    if is_op(node, "Max") and len(node.inputs) == 2:
        return _read_clamp(node, chain)
    return None


def _read_scale(node: ir.Node, chain: AttentionScores) -> AttentionScores | None:
    for scores, other in operand_orders(node):
        factor = read_number(other)
        if factor is None or len(dims(scores)) != len(dims(node.outputs[0])):
            continue
        if is_op(node, "Mul"):
            return _read(scores, replace(chain, scale=chain.scale * factor))
        if factor != 0 and other is node.inputs[1]:
            return _read(scores, replace(chain, scale=chain.scale / factor))
    return None


def _read_where(node: ir.Node, chain: AttentionScores) -> AttentionScores | None:
    """Match case 6: the scores where the condition is true, or where it is false."""
    condition, a, b = (operand(node, k) for k in range(3))
    for scores, filling, visible_when in ((a, b, True), (b, a, False)):
        fill = read_number(filling)
        if fill is None or len(dims(scores)) != len(dims(node.outputs[0])) or scores.dtype is None:
            continue
        fill *= chain.scale
        if fill != -math.inf and not _is_dominating(fill, scores.dtype):
            continue
        mask = ScoreMask(condition, len(dims(scores)), fill=fill, visible_when=visible_when, dtype=scores.dtype)
        return _read(scores, replace(chain, masks=chain.masks.add(mask)))
    return None


def _is_dominating(fill: float, dtype: ir.DataType) -> bool:
    """Return whether x + fill rounds to fill for every score x.

    This is true of at least half of the lowest number, or a number compared with which a score of 16 is less than
    rounding.
    """
    rounding = {ir.DataType.FLOAT16: 2**-11, ir.DataType.BFLOAT16: 2**-8, ir.DataType.DOUBLE: 2**-53}.get(dtype, 2**-24)
    return bool(fill <= dtype.min / 2 or -fill * rounding > 32)


def _read_clamp(node: ir.Node, chain: AttentionScores) -> AttentionScores | None:
    """Match case 7: masks that were added before are not lower than the lowest number."""
    for scores, other in operand_orders(node):
        bound, dtype = read_number(other), scores.dtype
        if bound is None or dtype is None or bound > dtype.min or chain.scale != 1 or not producer(scores, "Add"):
            continue
        return _read(scores, replace(chain, masks=chain.masks.clamp(other)))
    return None
