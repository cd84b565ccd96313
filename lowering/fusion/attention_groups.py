"""Query heads by the group of their key head: Q [B, Hkv, G, S, D] beside K and V with an axis of one in place of G."""

from __future__ import annotations

import onnx_ir as ir

from .matching import Rewrite, Size, attribute, dims, may_broadcast, operand, producer

_GROUP = 2  # the axis


def read_groups(q: ir.Value, kt: ir.Value, v: ir.Value) -> tuple[int, int] | None:
    """Return Hkv and G of Q [B, Hkv, G, S, D], Kt [B, Hkv, 1, D, T] and V [B, Hkv, 1, T, Dv]; None of other sizes."""
    shapes = queries, keys, values = dims(q), dims(kt), dims(v)
    if any(len(shape) != 5 for shape in shapes) or (keys[_GROUP], values[_GROUP]) != (1, 1):
        return None
    if not keys[1] == values[1] == queries[1]:
        return None
    if not all(may_broadcast(one[0], other[0]) for one in shapes for other in shapes):
        return None
    heads, group = queries[1], queries[_GROUP]
    return (heads, group) if isinstance(heads, int) and isinstance(group, int) else None


def flatten_queries(new: Rewrite, q: ir.Value) -> ir.Value:
    """Return Q as [B, Hkv * G, S, D]."""
    batch, heads, group, rows, size = dims(q)
    assert isinstance(heads, int) and isinstance(group, int) and isinstance(size, int)
    return new.emit("Reshape", [q, new.integers(0, heads * group, -1, size)], shape=[batch, heads * group, rows, size])


def split_queries(new: Rewrite, y: ir.Value, groups: tuple[int, int]) -> ir.Value:
    """Return Y [B, Hkv * G, S, Dv] as [B, Hkv, G, S, Dv]."""
    batch, _, rows, size = dims(y)
    assert isinstance(size, int)
    return new.emit("Reshape", [y, new.integers(0, *groups, -1, size)], shape=[batch, *groups, rows, size])


def without_group(new: Rewrite, value: ir.Value) -> ir.Value:
    """Return keys, their transpose or values [B, Hkv, 1, ...] as [B, Hkv, ...]: as they were before, if known."""
    shape: tuple[Size, ...] = (*dims(value)[:_GROUP], *dims(value)[_GROUP + 1 :])
    transpose = producer(value, "Transpose")
    if transpose is not None and list(attribute(transpose, "perm", ())) == [0, 1, 2, 4, 3]:
        return new.transpose(without_group(new, operand(transpose, 0)), [0, 1, 3, 2])
    before = producer(value, "Unsqueeze", "Reshape")
    if before is not None and dims(operand(before, 0)) == shape:
        return operand(before, 0)
    return new.emit("Squeeze", [value, new.integers(_GROUP)], shape=shape)
