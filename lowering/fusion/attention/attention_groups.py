"""Query heads grouped by key head: Q [B, Hkv, G, S, D], and K and V with an axis of size 1 instead of G."""

from __future__ import annotations

import onnx_ir as ir

from ...graph.rewriting.matching import Rewrite, Size, attribute, can_broadcast, dims, operand, producer

_GROUP = 2  # the axis


def read_groups(q: ir.Value, kt: ir.Value, v: ir.Value) -> tuple[int, int] | None:
    """Return Hkv and G of Q [B, Hkv, G, S, D], Kt [B, Hkv, 1, D, T] and V [B, Hkv, 1, T, Dv].

    None for other sizes.
    """
    shapes = queries, keys, values = dims(q), dims(kt), dims(v)
    if any(len(shape) != 5 for shape in shapes) or (keys[_GROUP], values[_GROUP]) != (1, 1):
        return None
    if not keys[1] == values[1] == queries[1]:
        return None
    if not all(can_broadcast(first[0], second[0]) for first in shapes for second in shapes):
        return None
    heads, group = queries[1], queries[_GROUP]
    return (heads, group) if isinstance(heads, int) and isinstance(group, int) else None


def flatten_queries(new: Rewrite, q: ir.Value) -> ir.Value:
    """Return Q as [B, Hkv * G, S, D]."""
    batch, heads, group, rows, size = dims(q)
    assert isinstance(heads, int) and isinstance(group, int) and isinstance(size, int)
    return new.emit(
        "Reshape", [q, new.emit_integers(0, heads * group, -1, size)], shape=[batch, heads * group, rows, size]
    )


def split_queries(new: Rewrite, y: ir.Value, groups: tuple[int, int]) -> ir.Value:
    """Return Y [B, Hkv * G, S, Dv] as [B, Hkv, G, S, Dv]."""
    batch, _, rows, size = dims(y)
    assert isinstance(size, int)
    return new.emit("Reshape", [y, new.emit_integers(0, *groups, -1, size)], shape=[batch, *groups, rows, size])


def drop_group_axis(new: Rewrite, value: ir.Value) -> ir.Value:
    """Return keys, their transpose or values [B, Hkv, 1, ...] as [B, Hkv, ...].

    The result is the source of an earlier Unsqueeze or Reshape if there is one.
    """
    shape: tuple[Size, ...] = (*dims(value)[:_GROUP], *dims(value)[_GROUP + 1 :])
    transpose = producer(value, "Transpose")
    if transpose is not None and list(attribute(transpose, "perm", ())) == [0, 1, 2, 4, 3]:
        return new.emit_transpose(drop_group_axis(new, operand(transpose, 0)), [0, 1, 3, 2])
    expand = producer(value, "Unsqueeze", "Reshape")
    if expand is not None and dims(operand(expand, 0)) == shape:
        return operand(expand, 0)
    return new.emit("Squeeze", [value, new.emit_integers(_GROUP)], shape=shape)
