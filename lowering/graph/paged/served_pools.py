"""A pool of a served decoder during the rewrite: the nodes that write to it, and those that attend over it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from ...errors import ModelError
from ...manifest import CachePool
from ..loading.legality import OWN_DOMAIN
from ..rewriting.attention_node import SINK, attention_input
from ..rewriting.matching import Rewrite, Size, attribute, dims, operand
from .served_caches import CacheLayer

KV_WRITE_TABLES = ("first_rows", "row_counts", "past", "entries")
ATTENTION_TABLES = ("row_starts", "past", "lengths", "most", "entries")


@dataclass
class ServedPool:
    """A pool, the tables of its requests by name, and its arrays after the nodes emitted so far.

    kv and scale begin as the inputs.
    """

    spec: CachePool
    kv: ir.Value
    scale: ir.Value | None
    tables: dict[str, ir.Value] = field(default_factory=dict)

    @classmethod
    def add_to(cls, graph: ir.Graph, spec: CachePool, dtype: ir.DataType, tokens: int, blocks: str) -> ServedPool:
        """Make the arrays of a pool inputs of a graph.

        A block has `tokens` tokens, and `blocks` is the symbol for their number.
        """
        leading: list[Size] = [ir.SymbolicDim(blocks), spec.layers, 2, spec.kv_heads, tokens]
        kv = add_input(graph, spec.name, dtype, [*leading, spec.head_dim])
        scale = add_input(graph, spec.scale, ir.DataType.FLOAT, [*leading, 1]) if spec.scale else None
        return cls(spec, kv, scale)

    def updated_arrays(self) -> dict[str, ir.Value]:
        """Return the arrays after all nodes, by the names of the inputs."""
        scales = {} if self.scale is None else {self.spec.scale: self.scale}
        return {self.spec.name: self.kv, **scales}

    def emit_kv_write(self, new: Rewrite, layer: CacheLayer, k: ir.Value, v: ir.Value) -> None:
        """Emit the write of keys and values [1, H, N, D] into a layer."""
        rows = [emit_padded(new, value, self.spec.head_dim) for value in (k, v)]
        tables = [self.tables[name] for name in KV_WRITE_TABLES]
        pool, attributes = (self.kv, self.scale), {"layer": layer.index}
        name = f"{new.origin}/kv_write"
        kv, scale = new.emit_node(
            "ServedKvWrite", [*rows, *tables, *pool], attributes, pool, domain=OWN_DOMAIN, name=name
        )
        self.kv, self.scale = kv, None if self.scale is None else scale

    def replace_attention(
        self, new: Rewrite, layer: CacheLayer, attributes: Mapping[str, float | int | str], bias: ir.Value | None = None
    ) -> None:
        """Replace the attention that is the anchor of `new` by ServedAttention over a layer."""
        attention = new.anchor
        q, q_size = operand(attention, 0), dims(operand(attention, 0))[3]
        assert isinstance(q_size, int)
        node_attributes: dict[str, float | int | str] = {
            "scale": attribute(attention, "scale", 1 / math.sqrt(q_size)),
            "softcap": attribute(attention, "softcap", 0.0), "layer": layer.index, **attributes,
        }  # fmt: skip
        q = emit_padded(new, q, self.spec.head_dim)
        tables = [self.tables[name] for name in ATTENTION_TABLES]
        inputs = [q, *tables, self.kv, self.scale, bias, attention_input(attention, SINK)]
        y = new.emit("ServedAttention", inputs, node_attributes, shape=dims(q), domain=OWN_DOMAIN)
        if layer.v_size != self.spec.head_dim:
            (y,) = new.emit_slices(y, [layer.v_size])
        new.replace([attention], attention.outputs[0], y)


def add_input(graph: ir.Graph, name: str, dtype: ir.DataType | None, shape: Sequence[Size]) -> ir.Value:
    """Return a new input of a graph.

    Raises:
        ModelError: The graph has an input of that name.
    """
    assert dtype is not None
    if any(value.name == name for value in graph.inputs):
        raise ModelError("serve.input_name_taken", f"serve: the model already has an input '{name}'. Rename it.")
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    graph.inputs.append(value)
    return value


def set_graph_outputs(graph: ir.Graph, results: Sequence[ir.Value], updated: Mapping[str, ir.Value]) -> dict[str, str]:
    """Make results and the updated pools the outputs of a graph; return the names of the latter by input."""
    donated = {name: f"{name}_updated" for name in updated}
    for name, value in updated.items():
        value.name = donated[name]
    graph.outputs.clear()
    graph.outputs.extend([*results, *updated.values()])
    return donated


def emit_padded(new: Rewrite, rows: ir.Value, size: int) -> ir.Value:
    """Return rows [1, H, N, D] padded by zeros to the size."""
    row_size = dims(rows)[3]
    if row_size == size:
        return rows
    assert isinstance(row_size, int)
    ends = new.emit_integers(0, 0, 0, 0, 0, 0, 0, size - row_size)
    return new.emit("Pad", [rows, ends], shape=[*dims(rows)[:3], size])
