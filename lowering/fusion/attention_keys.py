"""The layouts in which Q, K and V come, brought to [B, H, length, size]."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from .matching import Rewrite, Size, attribute, dims, operand, producer

Heads = tuple[Size, int] | None


def split_heads(new: Rewrite, value: ir.Value, heads: Heads) -> ir.Value:
    """[B * H, M, N] as [B, H, M, N]: what it was reshaped from, or that reshaped. Four dimensions stay."""
    if heads is None:
        return value
    shape = (*heads, *dims(value)[1:])
    before = producer(value, "Reshape")
    source = value if before is None else operand(before, 0)
    if dims(source) == shape:
        return source
    sizes = new.emit("Shape", [value], {"start": 1}, ir.DataType.INT64, [2])
    wanted = new.emit("Concat", [new.integers(-1, heads[1]), sizes], {"axis": 0}, ir.DataType.INT64, [4])
    return new.emit("Reshape", [source, wanted], shape=shape)


def keys(new: Rewrite, kt: ir.Value, heads: Heads) -> ir.Value:
    """K [B, H, T, D] from its transpose, of four dimensions or three."""
    if heads is not None:
        node = producer(kt, "Transpose")
        if node is not None and list(attribute(node, "perm", ())) == [0, 2, 1]:
            return split_heads(new, operand(node, 0), heads)
        kt = split_heads(new, kt, heads)
    shape = dims(kt)
    before = _before_reshapes(new, kt, (shape[0], shape[1], shape[3], shape[2]))
    if before is not None:
        return before
    node = producer(kt, "Transpose")
    if node is None:
        return new.transpose(kt, [0, 1, 3, 2])
    perm: Sequence[int] = attribute(node, "perm", (3, 2, 1, 0))
    return new.transpose(operand(node, 0), [perm[0], perm[1], perm[3], perm[2]])


def _before_reshapes(new: Rewrite, kt: ir.Value, shape: tuple[Size, ...]) -> ir.Value | None:
    """X [B, H, T, D] where Kt is X as [B * H, T, D], its last two axes exchanged, and as [B, H, D, T].

    What repeats heads may be behind the first of these reshapes: it gives X by one to four dimensions.
    """
    after = producer(kt, "Reshape")
    middle = producer(after.inputs[0], "Transpose") if after is not None else None
    if middle is None or list(attribute(middle, "perm", ())) != [0, 2, 1]:
        return None
    flat = operand(middle, 0)
    batch, heads = shape[:2]
    if producer(flat, "Reshape") is None or dims(flat)[1:] != shape[2:] or not isinstance(heads, int):
        return None
    return split_heads(new, flat, (batch, heads))
