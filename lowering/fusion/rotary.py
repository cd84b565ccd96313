"""Rotary position embeddings, written out: one RotaryEmbedding node (https://arxiv.org/abs/2104.09864).

Symbols as in ops/rotary_embedding.py: B batch, S sequence, H heads, D head size, R rotated dimensions of a head. x1 and
x2 are the first and the second of each pair: halves of R, or its even and odd elements where interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .matching import Rewrite, dims, is_op, may_broadcast, only_reader, operand, pairs, producer
from .node_pass import NodePass
from .opset import FIRST
from .rotary_angles import each_once, holds_each_twice
from .rotary_pairs import Part, part, rotated_pairs, stacked


class FuseRotaryPass(NodePass):
    """Makes one RotaryEmbedding of pairs of dimensions that are turned by angles.

    1. x cos + turned(x) sin, where turned(x) is Concat(-x2, x1), its parts by Slice or Split, the minus as Neg or a
       matmul with -1. cos and sin hold every angle twice: proven by how they were computed (Concat(f, f) before or
       after Cos and Sin, Tile), or by the numbers of a table.
    2. The same interleaved: turned(x) is -x2 and x1 stacked behind a new last axis and flattened; cos and sin hold
       every angle twice in a row.
    3. Concat(x1 cos - x2 sin, x2 cos + x1 sin), with every angle once; interleaved where these are stacked.
    4. Partial: Concat of the rotated first R dimensions and the others, as they are.
    5. x is [B, H, S, D], or [B, S, H, D], which is a matter of where cos and sin are broadcast.

    cos and sin that hold different numbers for the two of a pair, the minus on the other part, or cos and sin that are
    broadcast over the sequence refuse the match.
    """

    since = FIRST

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


@dataclass(frozen=True)
class _Rotation:
    """x [.., R] turned; cos and sin have one number per angle, or two where `doubled`."""

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    interleaved: bool
    doubled: bool
    nodes: tuple[ir.Node, ...]


def _try_fuse(node: ir.Node) -> bool:
    found = _whole(node) or _by_halves(node)
    if found is None or len(dims(found.x)) != 4:
        return False
    rotated = dims(found.x)[-1]
    axis = _sequence_axis(found.cos, found.x)
    if not isinstance(rotated, int) or rotated % 2 or axis is None or axis != _sequence_axis(found.sin, found.x):
        return False
    caches = [found.cos, found.sin]
    wanted = rotated if found.doubled else rotated // 2
    if any(dims(cache)[-1] != wanted or cache.dtype != found.x.dtype for cache in caches):
        return False
    if found.doubled and not all(holds_each_twice(cache, found.interleaved) for cache in caches):
        return False
    x, result, nodes = _with_the_rest(found, node)
    heads, size = dims(x)[2], dims(x)[3]
    if not isinstance(size, int) or (axis == 1 and not isinstance(heads, int)):
        return False
    new = Rewrite(nodes[0])
    caches = [_three_dims(new, cache, axis) for cache in caches]
    if found.doubled:
        caches = [each_once(new, cache, found.interleaved) for cache in caches]
    attributes = {"interleaved": int(found.interleaved)}
    if rotated != size:
        attributes["rotary_embedding_dim"] = rotated
    if axis == 2:
        y = new.emit("RotaryEmbedding", [x, *caches], attributes, shape=dims(x))
    else:  # [B, S, H, D] is [B, S, H * D] to the operator
        assert isinstance(heads, int)
        flat = new.emit("Reshape", [x, new.integers(0, 0, heads * size)], shape=(*dims(x)[:2], heads * size))
        y = new.emit("RotaryEmbedding", [flat, *caches], {**attributes, "num_heads": heads}, shape=dims(flat))
        y = new.emit("Reshape", [y, new.integers(0, 0, heads, size)], shape=dims(x))
    new.replace(nodes, result, y)
    return True


def _with_the_rest(found: _Rotation, node: ir.Node) -> tuple[ir.Value, ir.Value, tuple[ir.Node, ...]]:
    """Case 4: x, the result and the nodes, with the dimensions that are not rotated where there are such."""
    result = node.outputs[0]
    concat, turned = only_reader(result, "Concat"), part(found.x)
    whole = stacked(concat) if concat is not None else None
    if concat is None or whole is None or turned is None or whole.parts[0] is not result:
        return found.x, result, found.nodes
    rest, size = part(whole.parts[1]), dims(turned.source)[-1]
    split = dims(found.x)[-1]
    if rest is None or rest.source is not turned.source or split != turned.stop:
        return found.x, result, found.nodes
    if (turned.start, turned.step, rest.start, rest.stop, rest.step) != (0, 1, split, size, 1):
        return found.x, result, found.nodes
    return turned.source, concat.outputs[0], (concat, *found.nodes)


def _whole(node: ir.Node) -> _Rotation | None:
    """Cases 1 and 2."""
    if not is_op(node, "Add"):
        return None
    for straight, turned in pairs(node):
        a, b = producer(straight, "Mul"), producer(turned, "Mul")
        if a is None or b is None:
            continue
        for other, sin in pairs(b):
            found = rotated_pairs(other)
            if found is None:
                continue
            for x, cos in pairs(a):
                if x is found.x and dims(x) == dims(node.outputs[0]):
                    return _Rotation(x, cos, sin, found.interleaved, True, (node, a, b, *found.nodes))
    return None


def _by_halves(node: ir.Node) -> _Rotation | None:
    """Case 3: both parts of the result have their sum of products."""
    halves = stacked(node)
    if halves is None:
        return None
    first, second = (half.producer() for half in halves.parts)
    if not is_op(first, "Sub") or not is_op(second, "Add"):
        return None
    assert first is not None and second is not None
    for x1, cos in _factors(operand(first, 0)):
        for x2, sin in _factors(operand(first, 1)):
            a, b = part(x1), part(x2)
            if a is None or b is None or not _are_pair(a, b, halves.interleaved):
                continue
            for left, right in pairs(second):
                if (x2, cos) in _factors(left) and (x1, sin) in _factors(right):
                    matmuls = [operand(first, 0), operand(first, 1), left, right]
                    nodes = [node, *halves.nodes, first, second, *(n for v in matmuls if (n := v.producer()))]
                    return _Rotation(a.source, cos, sin, halves.interleaved, False, tuple(nodes))
    return None


def _factors(value: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    node = producer(value, "Mul")
    return list(pairs(node)) if node is not None else []


def _are_pair(a: Part, b: Part, interleaved: bool) -> bool:
    return a.source is b.source and (a.is_first(interleaved), b.is_second(interleaved)) == (True, True)


def _sequence_axis(cache: ir.Value, x: ir.Value) -> int | None:
    """Case 5: the axis of x [B, H, S, D] or [B, S, H, D] along which the angles of a cache change."""
    full = (1,) * (4 - len(dims(cache))) + dims(cache)
    if len(dims(cache)) not in (2, 3, 4) or not may_broadcast(full[0], dims(x)[0]):
        return None
    for axis, heads in ((2, 1), (1, 2)):
        length = dims(x)[axis]
        if full[heads] == 1 and may_broadcast(full[axis], length) and (full[axis] != 1 or length == 1):
            return axis
    return None


def _three_dims(new: Rewrite, cache: ir.Value, axis: int) -> ir.Value:
    """[B or 1, S, R / 2] from a cache that broadcasts to four dimensions."""
    shape = dims(cache)
    if len(shape) == 2:
        return new.emit("Unsqueeze", [cache, new.integers(0)], shape=(1, *shape))
    if len(shape) == 3 and axis == 2:
        return cache
    heads = (1 if axis == 2 else 2) - (4 - len(shape))
    before = producer(cache, "Unsqueeze")
    shorter = (*shape[:heads], *shape[heads + 1 :])
    if len(shorter) == 2:  # [S, 1, R / 2]
        squeezed = new.emit("Squeeze", [cache, new.integers(heads)], shape=shorter)
        return new.emit("Unsqueeze", [squeezed, new.integers(0)], shape=(1, *shorter))
    if before is not None and dims(operand(before, 0)) == shorter:
        return operand(before, 0)
    return new.emit("Squeeze", [cache, new.integers(heads)], shape=shorter)
