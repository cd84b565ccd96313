"""Quantization of embedding tables, on request: quantized rows that are dequantized when they are read.

Gather(table, ids) becomes Cast(Gather(quantized, ids)) * Gather(scales, ids), of standard operators: quantized int8 [V,
H], scales float32 [V, 1], both for the scheme int8 and for int4. A looked-up row has no other rows to compensate for
its error, so its elements keep 8 bits, as quantizers of language models do. The scheme f16 stores float16. A table that
is also read by a matmul, transposed, is packed separately for that (passes/graph/pack_weights.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ... import scratch
from ...choices import Schemes
from ...chunks import map_columns, measure_error
from ..rewriting.matching import Rewrite, add_initializer, operand
from .weight_schemes import choose_schemes

_MIN_ELEMENTS = 1 << 14  # elements; smaller tables are not worth the operators
_MOVES = {"Cast", "Concat", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class _QuantizedTable:
    """The quantized values and scales of the rows of a table, or float16 elements without scales."""

    quantized: ir.Value
    scales: ir.Value | None
    squares: tuple[float, float]
    """Sums of squares of its errors, and of its elements."""


def compress_tables(model: ir.Model, schemes: Schemes) -> list[str]:
    """Rewrite a model that `fuse` has processed, by int8, int4 or f16; return descriptions for the user."""
    graph = model.graph
    quantized_tables: dict[tuple[ir.Value, int], _QuantizedTable | None] = {}
    by_node = choose_schemes(model, schemes).by_node
    for node, table in list(_iterate_lookups(graph)):
        scheme = by_node.get(node)
        if scheme is None:
            continue
        key = table, 16 if scheme == "f16" else 8
        if key not in quantized_tables:
            quantized_tables[key] = _quantize_table(graph, *key)
        quantized_table = quantized_tables[key]
        if quantized_table is not None:
            _replace_lookup(node, table, quantized_table)
    replaced = {key: quantized for key, quantized in quantized_tables.items() if quantized is not None}
    notes = [
        _describe({table: quantized for (table, b), quantized in replaced.items() if b == bits}, bits)
        for bits in dict.fromkeys(bits for _, bits in replaced)
    ]
    for table in dict.fromkeys(table for table, _ in replaced):
        if not table.uses() and not table.is_graph_output():
            graph.initializers.pop(str(table.name))
    return notes


def _describe(tables: Mapping[ir.Value, _QuantizedTable], bits: int) -> str:
    before = sum(map(_count_bytes, tables))
    after = sum(_count_bytes(value) for table in tables.values() for value in (table.quantized, table.scales))
    error, size = (sum(quantized_table.squares[k] for quantized_table in tables.values()) for k in range(2))
    description = "float16" if bits == 16 else "int8 with a scale for each row"
    rms = (error / max(size, np.finfo(np.float64).tiny)) ** 0.5
    count = f"{len(tables)} tables of embeddings are" if len(tables) > 1 else "1 table of embeddings is"
    return (
        f"{count} {description}: {after / 2**20:.1f} MiB instead of {before / 2**20:.1f}, "
        f"root mean square error {rms:.2g} of theirs"
    )


def _count_bytes(value: ir.Value | None) -> int:
    return 0 if value is None or value.const_value is None else value.const_value.nbytes


def _iterate_lookups(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield nodes that look up rows of constant tables, with the table."""
    for node in graph:
        if node.op_type != "Gather" or node.domain not in ("", "ai.onnx") or node.attributes.get_int("axis", 0) != 0:
            continue
        table = node.inputs[0]
        if table is None or not table.is_initializer() or table.is_graph_input() or table.const_value is None:
            continue
        shape = table.const_value.shape.numpy()
        is_large = table.const_value.dtype in _FLOATS and len(shape) == 2 and shape[0] * shape[1] >= _MIN_ELEMENTS
        if is_large and not _are_angles(node.outputs[0]):
            yield node, table


def _are_angles(value: ir.Value) -> bool:
    """Return whether a value is a cosine or sine table of a RotaryEmbedding: its errors affect whole heads."""
    pending, seen = [value], {value}
    while pending:
        for reader, position in pending.pop().uses():
            if reader.op_type == "RotaryEmbedding" and position > 0:
                return True
            if reader.op_type in _MOVES:
                pending += set(reader.outputs) - seen
                seen |= set(reader.outputs)
    return False


def _quantize_table(graph: ir.Graph, table: ir.Value, bits: int) -> _QuantizedTable | None:
    """Return the table in new initializers; None if that is no smaller, or cannot represent it."""
    assert table.const_value is not None
    array = table.const_value.numpy()
    if array.dtype.itemsize * 8 <= bits:
        return None
    quantized = scratch.empty(array.shape, np.dtype(np.float16 if bits == 16 else np.int8))
    scales = np.ones((len(array), 1), np.float32)

    def quantize(chunk: slice) -> tuple[float, float]:
        """Quantize rows, and return the sums of squares of their errors and elements."""
        rows = array[chunk].astype(np.float32)
        if bits == 8:
            largest = np.abs(rows).max(axis=1, keepdims=True)
            scales[chunk] = largest / np.float32(127)
            scales[chunk][scales[chunk] == 0] = 1  # for rows of zeros, or below the smallest scale
            quantized[chunk] = np.rint(rows / scales[chunk]).clip(-127, 127)
        else:
            quantized[chunk] = rows
        return measure_error(rows, quantized[chunk].astype(np.float32) * scales[chunk])

    with np.errstate(over="ignore", invalid="ignore"):
        squares = map_columns(quantize, array.shape[1], len(array))
    error, size = (sum(terms) for terms in zip(*squares, strict=True))
    if not np.isfinite(error):
        return None
    initializer = add_initializer(graph, f"{table.name}_quantized", quantized)
    return _QuantizedTable(
        initializer, add_initializer(graph, f"{table.name}_scales", scales) if bits == 8 else None, (error, size)
    )


def _replace_lookup(node: ir.Node, table: ir.Value, quantized_table: _QuantizedTable) -> None:
    """Let the node's readers read dequantized rows."""
    assert table.const_value is not None
    ids, float32, dtype = operand(node, 1), ir.DataType.FLOAT, table.const_value.dtype
    new = Rewrite(node)
    rows = new.emit("Gather", [quantized_table.quantized, ids])
    if quantized_table.scales is None:
        result = new.emit("Cast", [rows], {"to": int(dtype)}, dtype)
    else:
        converted = new.emit("Cast", [rows], {"to": int(float32)}, float32)
        result = new.emit("Mul", [converted, new.emit("Gather", [quantized_table.scales, ids])])
        if dtype != float32:
            result = new.emit("Cast", [result], {"to": int(dtype)}, dtype)
    new.replace([node], node.outputs[0], result)
