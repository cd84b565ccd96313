"""Conversion of the layouts of Q, K and V to [B, H, length, size]."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ...graph.rewriting.matching import Rewrite, Size, attribute, dims, operand, producer

Heads = tuple[Size, int] | None


def restore_heads(new: Rewrite, value: ir.Value, heads: Heads) -> ir.Value:
    """Return [B * H, M, N] as [B, H, M, N]; a value of four dimensions is returned as it is.

    The result is the source of an earlier Reshape if it has that shape, else a new Reshape.
    """
    if heads is None:
        return value
    shape = (*heads, *dims(value)[1:])
    reshape = producer(value, "Reshape")
    source = value if reshape is None else operand(reshape, 0)
    if dims(source) == shape:
        return source
    sizes = new.emit("Shape", [value], {"start": 1}, ir.DataType.INT64, [2])
    target = new.emit("Concat", [new.emit_integers(-1, heads[1]), sizes], {"axis": 0}, ir.DataType.INT64, [4])
    return new.emit("Reshape", [source, target], shape=shape)


def emit_keys(new: Rewrite, kt: ir.Value, heads: Heads) -> ir.Value:
    """Return K [B, H, T, D] from its transpose, of four dimensions or three."""
    if heads is not None:
        node = producer(kt, "Transpose")
        if node is not None and list(attribute(node, "perm", ())) == [0, 2, 1]:
            return restore_heads(new, operand(node, 0), heads)
        kt = restore_heads(new, kt, heads)
    shape = dims(kt)
    source = _find_source_of_reshapes(new, kt, (shape[0], shape[1], shape[3], shape[2]))
    if source is not None:
        return source
    node = producer(kt, "Transpose")
    if node is None:
        return new.emit_transpose(kt, [0, 1, 3, 2])
    perm: Sequence[int] = attribute(node, "perm", (3, 2, 1, 0))
    return new.emit_transpose(operand(node, 0), [perm[0], perm[1], perm[3], perm[2]])


def _find_source_of_reshapes(new: Rewrite, kt: ir.Value, shape: tuple[Size, ...]) -> ir.Value | None:
    """Return X [B, H, T, D] if Kt is the transpose of X written through three dimensions.

    X becomes [B * H, T, D], its last two axes are exchanged, and the result is reshaped to [B, H, D, T]. The
    source of the first reshape may be a repetition of heads instead of X; it is then reshaped to four dimensions.
    """
    reshape = producer(kt, "Reshape")
    transpose = producer(reshape.inputs[0], "Transpose") if reshape is not None else None
    if transpose is None or list(attribute(transpose, "perm", ())) != [0, 2, 1]:
        return None
    flat = operand(transpose, 0)
    batch, heads = shape[:2]
    if producer(flat, "Reshape") is None or dims(flat)[1:] != shape[2:] or not isinstance(heads, int):
        return None
    return restore_heads(new, flat, (batch, heads))
