"""What happens to the scores between the matmul of Q and K and the softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from .attention_masks import Mask, Masks
from .matching import dims, is_op, number, operand, pairs, producer, widens

_NO_MASKS = Masks()


@dataclass(frozen=True)
class Scores:
    """softmax's input is softcap(scale * matmul) + masks; `nodes` lie between.

    While the chain is read backwards, `scale` multiplies what is still to be read, and `matmul` is any node of it.
    """

    matmul: ir.Node
    scale: float = 1.0
    softcap: float = 0.0
    masks: Masks = field(default_factory=Masks)
    nodes: tuple[ir.Node, ...] = ()


def find_scores(value: ir.Value, scale: float = 1.0, masks: Masks = _NO_MASKS) -> Scores | None:
    """Reads backwards from the softmax, or from what is scaled and masked behind it; None where anything else lies on
    the way."""
    node = value.producer()
    return None if node is None else _read(value, Scores(node, scale, masks=masks))


def _read(value: ir.Value, so_far: Scores) -> Scores | None:
    node = value.producer()
    if node is None:
        return None
    so_far = replace(so_far, nodes=(*so_far.nodes, node))
    if is_op(node, "MatMul"):
        return replace(so_far, matmul=node)
    if is_op(node, "Reshape") or (is_op(node, "Cast") and widens(node)):
        return _read(operand(node, 0), so_far)
    if is_op(node, "Mul", "Div"):
        return _scale(node, so_far)
    if is_op(node, "Tanh"):
        capped = so_far.scale > 0 and not so_far.softcap and math.isfinite(so_far.scale)
        return _read(operand(node, 0), replace(so_far, softcap=so_far.scale)) if capped else None
    if so_far.softcap or not so_far.scale > 0:
        return None  # a mask inside the cap
    if is_op(node, "Add", "Sub"):
        rank = len(dims(value))
        for scores, mask in pairs(node) if is_op(node, "Add") else [(operand(node, 0), operand(node, 1))]:
            scale = so_far.scale if is_op(node, "Add") else -so_far.scale
            found = _read(scores, replace(so_far, masks=so_far.masks.added(Mask(mask, rank, scale))))
            if found is not None and len(dims(scores)) == rank:
                return found
    if is_op(node, "Where"):
        return _where(node, so_far)
    if is_op(node, "Max") and len(node.inputs) == 2:
        return _clamp(node, so_far)
    return None


def _scale(node: ir.Node, so_far: Scores) -> Scores | None:
    for scores, other in pairs(node):
        factor = number(other)
        if factor is None or len(dims(scores)) != len(dims(node.outputs[0])):
            continue
        if is_op(node, "Mul"):
            return _read(scores, replace(so_far, scale=so_far.scale * factor))
        if factor != 0 and other is node.inputs[1]:
            return _read(scores, replace(so_far, scale=so_far.scale / factor))
    return None


def _where(node: ir.Node, so_far: Scores) -> Scores | None:
    """Case 6: the scores where the condition holds, or where it does not."""
    condition, a, b = (operand(node, k) for k in range(3))
    for scores, filling, kept in ((a, b, True), (b, a, False)):
        fill = number(filling)
        if fill is None or len(dims(scores)) != len(dims(node.outputs[0])) or scores.dtype is None:
            continue
        fill *= so_far.scale
        if fill != -math.inf and not _dominates(fill, scores.dtype):
            continue
        mask = Mask(condition, len(dims(scores)), fill=fill, kept=kept, dtype=scores.dtype)
        return _read(scores, replace(so_far, masks=so_far.masks.added(mask)))
    return None


def _dominates(fill: float, dtype: ir.DataType) -> bool:
    """Whether x + fill is fill for every score x: at least half of the lowest number, or a number beside which a score
    of 16 is less than rounding."""
    rounding = {ir.DataType.FLOAT16: 2**-11, ir.DataType.BFLOAT16: 2**-8, ir.DataType.DOUBLE: 2**-53}.get(dtype, 2**-24)
    return bool(fill <= dtype.min / 2 or -fill * rounding > 32)


def _clamp(node: ir.Node, so_far: Scores) -> Scores | None:
    """Case 7: masks that were added before are not lower than the lowest number."""
    for scores, other in pairs(node):
        bound, dtype = number(other), scores.dtype
        if bound is None or dtype is None or bound > dtype.min or so_far.scale != 1 or not producer(scores, "Add"):
            continue
        return _read(scores, replace(so_far, masks=so_far.masks.clamped(other)))
    return None
