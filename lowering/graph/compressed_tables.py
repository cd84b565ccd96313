"""Tables of embeddings in fewer bits, on request: rows of codes, which are widened where they are read.

Gather(table, ids) becomes Cast(Gather(codes, ids)) * Gather(scales, ids), of standard operators: codes int8 [V, H],
scales float32 [V, 1], both for the scheme int8 and for int4. A row that is looked up has no other rows to make up for
its error, so that its elements keep 8 bits, as quantizers of language models have it. The scheme f16 stores float16. A
table that a matmul reads too, transposed, is packed for that beside it (passes/pack_weights.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..fusion.matching import Rewrite, operand

_LEAST = 1 << 14  # elements; smaller tables are worth no operators
_PART = 1 << 12  # rows that are widened at a time
_MOVE = {"Cast", "Concat", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class _Table:
    """What a table becomes: codes and scales of rows, or float16 elements without scales."""

    codes: ir.Value
    scales: ir.Value | None
    squares: tuple[float, float]
    """Of its errors, and of its elements."""


def compress_tables(model: ir.Model, scheme: str) -> str | None:
    """Rewrites a model that `fuse` has been through, by int8, int4 or f16; says what was done, for the reader."""
    graph = model.graph
    found: dict[ir.Value, _Table | None] = {}
    before = after = 0
    for node, table in list(_lookups(graph)):
        if table not in found:
            found[table] = _compressed(graph, table, scheme)
        made = found[table]
        if made is not None:
            _replace(node, table, made)
    done = {table: made for table, made in found.items() if made is not None}
    for table, made in done.items():
        assert table.const_value is not None and made.codes.const_value is not None and table.name is not None
        before += table.const_value.nbytes
        after += made.codes.const_value.nbytes
        after += made.scales.const_value.nbytes if made.scales is not None and made.scales.const_value else 0
        if not table.uses() and not table.is_graph_output():
            graph.initializers.pop(table.name)
    if not done:
        return None
    error, size = (sum(made.squares[k] for made in done.values()) for k in range(2))
    how = "float16" if scheme == "f16" else "int8 with a scale for each row"
    rms = (error / max(size, np.finfo(np.float64).tiny)) ** 0.5
    count = f"{len(done)} tables of embeddings are" if len(done) > 1 else "1 table of embeddings is"
    return (
        f"{count} {how}: {after / 2**20:.1f} MiB instead of {before / 2**20:.1f}, "
        f"root mean square error {rms:.2g} of theirs"
    )


def _lookups(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Nodes that look up rows of constant tables."""
    for node in graph:
        if node.op_type != "Gather" or node.domain not in ("", "ai.onnx") or node.attributes.get_int("axis", 0) != 0:
            continue
        table = node.inputs[0]
        if table is None or not table.is_initializer() or table.is_graph_input() or table.const_value is None:
            continue
        shape = table.const_value.shape.numpy()
        large = table.const_value.dtype in _FLOATS and len(shape) == 2 and shape[0] * shape[1] >= _LEAST
        if large and not _are_angles(node.outputs[0]):
            yield node, table


def _are_angles(value: ir.Value) -> bool:
    """Whether they are the cosines or sines of a RotaryEmbedding, whose every error turns a whole head."""
    found, seen = [value], {value}
    while found:
        for reader, place in found.pop().uses():
            if reader.op_type == "RotaryEmbedding" and place > 0:
                return True
            if reader.op_type in _MOVE:
                found += set(reader.outputs) - seen
                seen |= set(reader.outputs)
    return False


def _compressed(graph: ir.Graph, table: ir.Value, scheme: str) -> _Table | None:
    """The table in new initializers; None where that is no smaller, or cannot hold it."""
    assert table.const_value is not None
    array, bits = table.const_value.numpy(), 16 if scheme == "f16" else 8
    if array.dtype.itemsize * 8 <= bits:
        return None
    codes = np.empty(array.shape, np.float16 if bits == 16 else np.int8)
    scales = np.ones((len(array), 1), np.float32)
    error = size = 0.0
    for start in range(0, len(array), _PART):
        part = slice(start, start + _PART)
        rows = array[part].astype(np.float32)
        if not np.isfinite(rows).all():
            return None
        with np.errstate(over="ignore"):
            if bits == 8:
                largest = np.abs(rows).max(axis=1, keepdims=True)
                scales[part] = largest / np.float32(127)
                scales[part][scales[part] == 0] = 1  # of nothing, or of less than a scale can be
                codes[part] = np.rint(rows / scales[part]).clip(-127, 127)
            else:
                codes[part] = rows
        stored = codes[part].astype(np.float32) * scales[part]
        if not np.isfinite(stored).all():
            return None
        error += float(np.square(stored - rows, dtype=np.float64).sum())
        size += float(np.square(rows, dtype=np.float64).sum())
    kept = _initializer(graph, f"{table.name}_codes", codes)
    return _Table(kept, _initializer(graph, f"{table.name}_scales", scales) if bits == 8 else None, (error, size))


def _initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    while name in graph.initializers:
        name += "_"
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _replace(node: ir.Node, table: ir.Value, made: _Table) -> None:
    """Has the node's readers read what is made of rows of codes."""
    assert table.const_value is not None
    ids, wide, dtype = operand(node, 1), ir.DataType.FLOAT, table.const_value.dtype
    new = Rewrite(node)
    rows = new.emit("Gather", [made.codes, ids])
    if made.scales is None:
        result = new.emit("Cast", [rows], {"to": int(dtype)}, dtype)
    else:
        numbers = new.emit("Cast", [rows], {"to": int(wide)}, wide)
        result = new.emit("Mul", [numbers, new.emit("Gather", [made.scales, ids])])
        if dtype != wide:
            result = new.emit("Cast", [result], {"to": int(dtype)}, dtype)
    new.replace([node], node.outputs[0], result)
