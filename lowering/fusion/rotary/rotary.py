"""Fusion of decomposed rotary position embeddings into RotaryEmbedding (https://arxiv.org/abs/2104.09864).

Symbols as in attention/rotary_embedding.py: B batch, S sequence, H heads, D head size, R rotated dimensions of a head.
x1 and x2 are the first and the second of each pair: halves of R, or its even and odd elements if interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ...graph.rewriting.matching import (
    Rewrite,
    can_broadcast,
    dims,
    is_op,
    only_reader,
    operand,
    operand_orders,
    producer,
)
from ...graph.rewriting.opset import ATTENTION_OPSET
from ..node_pass import NodePass
from .rotary_angles import emit_distinct_angles, has_doubled_angles
from .rotary_pairs import AxisSlice, read_concatenation, read_rotated_pairs, read_slice


class FuseRotaryPass(NodePass):
    """Fusion of pairs of dimensions that are rotated by angles into one RotaryEmbedding.

    1. x cos + rotated(x) sin, where rotated(x) is Concat(-x2, x1), its halves by Slice or Split, the minus as Neg or a
       multiplication by -1. cos and sin contain every angle twice. That is proven by the nodes that computed them
       (Concat(f, f) before or after Cos and Sin, Tile), or by the numbers of a table.
    2. The same interleaved: rotated(x) is -x2 and x1 concatenated along a new last axis and flattened; cos and sin
       contain every angle twice, in adjacent elements.
    3. Concat(x1 cos - x2 sin, x2 cos + x1 sin), with every angle once; interleaved if these are concatenated along a
       new axis.
    4. Partial: Concat of the rotated first R dimensions and the others, as they are.
    5. x is [B, H, S, D], or [B, S, H, D], depending on the axes along which cos and sin are broadcast.

    The match is rejected if cos and sin have different numbers for the two elements of a pair, if the other half has
    the minus, or if cos and sin are broadcast over the sequence.
    """

    since = ATTENTION_OPSET

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


@dataclass(frozen=True)
class _Rotation:
    """x [.., R] rotated; cos and sin have one number per angle, or two if `doubled`."""

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    is_interleaved: bool
    is_doubled: bool
    nodes: tuple[ir.Node, ...]


def _try_fuse(node: ir.Node) -> bool:
    rotation = _match_whole(node) or _match_halves(node)
    if rotation is None or len(dims(rotation.x)) != 4:
        return False
    rotated = dims(rotation.x)[-1]
    axis = _sequence_axis(rotation.cos, rotation.x)
    if not isinstance(rotated, int) or rotated % 2 or axis is None or axis != _sequence_axis(rotation.sin, rotation.x):
        return False
    caches = [rotation.cos, rotation.sin]
    angle_count = rotated if rotation.is_doubled else rotated // 2
    if any(dims(cache)[-1] != angle_count or cache.dtype != rotation.x.dtype for cache in caches):
        return False
    if rotation.is_doubled and not all(has_doubled_angles(cache, rotation.is_interleaved) for cache in caches):
        return False
    x, result, nodes = _extend_to_partial(rotation, node)
    heads, size = dims(x)[2], dims(x)[3]
    if not isinstance(size, int) or (axis == 1 and not isinstance(heads, int)):
        return False
    new = Rewrite(nodes[0])
    caches = [_emit_three_dims(new, cache, axis) for cache in caches]
    if rotation.is_doubled:
        caches = [emit_distinct_angles(new, cache, rotation.is_interleaved) for cache in caches]
    attributes = {"interleaved": int(rotation.is_interleaved)}
    if rotated != size:
        attributes["rotary_embedding_dim"] = rotated
    if axis == 2:
        y = new.emit("RotaryEmbedding", [x, *caches], attributes, shape=dims(x))
    else:  # [B, S, H, D] is [B, S, H * D] to the operator
        assert isinstance(heads, int)
        flat = new.emit("Reshape", [x, new.emit_integers(0, 0, heads * size)], shape=(*dims(x)[:2], heads * size))
        y = new.emit("RotaryEmbedding", [flat, *caches], {**attributes, "num_heads": heads}, shape=dims(flat))
        y = new.emit("Reshape", [y, new.emit_integers(0, 0, heads, size)], shape=dims(x))
    new.replace(nodes, result, y)
    return True


def _extend_to_partial(rotation: _Rotation, node: ir.Node) -> tuple[ir.Value, ir.Value, tuple[ir.Node, ...]]:
    """Match case 4: return x, the result and the nodes, with the unrotated dimensions if there are any."""
    result = node.outputs[0]
    concat, rotated = only_reader(result, "Concat"), read_slice(rotation.x)
    joint = read_concatenation(concat) if concat is not None else None
    if concat is None or joint is None or rotated is None or joint.halves[0] is not result:
        return rotation.x, result, rotation.nodes
    unrotated, size = read_slice(joint.halves[1]), dims(rotated.source)[-1]
    split = dims(rotation.x)[-1]
    if unrotated is None or unrotated.source is not rotated.source or split != rotated.stop:
        return rotation.x, result, rotation.nodes
    if (rotated.start, rotated.step, unrotated.start, unrotated.stop, unrotated.step) != (0, 1, split, size, 1):
        return rotation.x, result, rotation.nodes
    return rotated.source, concat.outputs[0], (concat, *rotation.nodes)


def _match_whole(node: ir.Node) -> _Rotation | None:
    """Match cases 1 and 2."""
    if not is_op(node, "Add"):
        return None
    for straight, rotated in operand_orders(node):
        a, b = producer(straight, "Mul"), producer(rotated, "Mul")
        if a is None or b is None:
            continue
        for other, sin in operand_orders(b):
            pairs_of_other = read_rotated_pairs(other)
            if pairs_of_other is None:
                continue
            for x, cos in operand_orders(a):
                if x is pairs_of_other.x and dims(x) == dims(node.outputs[0]):
                    return _Rotation(
                        x, cos, sin, pairs_of_other.is_interleaved, True, (node, a, b, *pairs_of_other.nodes)
                    )
    return None


def _match_halves(node: ir.Node) -> _Rotation | None:
    """Match case 3: each half of the result is a sum of two products."""
    halves = read_concatenation(node)
    if halves is None:
        return None
    first, second = (half.producer() for half in halves.halves)
    if not is_op(first, "Sub") or not is_op(second, "Add"):
        return None
    assert first is not None and second is not None
    for x1, cos in _factors(operand(first, 0)):
        for x2, sin in _factors(operand(first, 1)):
            a, b = read_slice(x1), read_slice(x2)
            if a is None or b is None or not _are_pair(a, b, halves.is_interleaved):
                continue
            for left, right in operand_orders(second):
                if (x2, cos) in _factors(left) and (x1, sin) in _factors(right):
                    factors_of_terms = [operand(first, 0), operand(first, 1), left, right]
                    nodes = [node, *halves.nodes, first, second, *(n for v in factors_of_terms if (n := v.producer()))]
                    return _Rotation(a.source, cos, sin, halves.is_interleaved, False, tuple(nodes))
    return None


def _factors(value: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    node = producer(value, "Mul")
    return list(operand_orders(node)) if node is not None else []


def _are_pair(a: AxisSlice, b: AxisSlice, interleaved: bool) -> bool:
    return a.source is b.source and (a.is_first(interleaved), b.is_second(interleaved)) == (True, True)


def _sequence_axis(cache: ir.Value, x: ir.Value) -> int | None:
    """Match case 5: return the axis of x [B, H, S, D] or [B, S, H, D] along which the angles of a cache change."""
    shape = (1,) * (4 - len(dims(cache))) + dims(cache)
    if len(dims(cache)) not in (2, 3, 4) or not can_broadcast(shape[0], dims(x)[0]):
        return None
    for axis, heads in ((2, 1), (1, 2)):
        length = dims(x)[axis]
        if shape[heads] == 1 and can_broadcast(shape[axis], length) and (shape[axis] != 1 or length == 1):
            return axis
    return None


def _emit_three_dims(new: Rewrite, cache: ir.Value, axis: int) -> ir.Value:
    """Return [B or 1, S, R / 2] from a cache that broadcasts to four dimensions."""
    shape = dims(cache)
    if len(shape) == 2:
        return new.emit("Unsqueeze", [cache, new.emit_integers(0)], shape=(1, *shape))
    if len(shape) == 3 and axis == 2:
        return cache
    heads = (1 if axis == 2 else 2) - (4 - len(shape))
    unsqueeze = producer(cache, "Unsqueeze")
    squeezed_shape = (*shape[:heads], *shape[heads + 1 :])
    if len(squeezed_shape) == 2:  # [S, 1, R / 2]
        squeezed = new.emit("Squeeze", [cache, new.emit_integers(heads)], shape=squeezed_shape)
        return new.emit("Unsqueeze", [squeezed, new.emit_integers(0)], shape=(1, *squeezed_shape))
    if unsqueeze is not None and dims(operand(unsqueeze, 0)) == squeezed_shape:
        return operand(unsqueeze, 0)
    return new.emit("Squeeze", [cache, new.emit_integers(heads)], shape=squeezed_shape)
