"""Keys and values of sources in a served decoder: a page pool of their own, which the setup writes.

Before: a decoder whose cross attention reads keys and values [1, H, E, D] that are inputs, and the setup that computes
them from an encoder's output (setup_split.py), if there is one. After: the setup writes them to one layer each of
source_cache, in the blocks of source_table, and ServedAttention reads those of each request. A request's source has
source_lengths rows; later rows of its blocks are not visible. A mask of padding therefore has nothing left to hide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ...errors import ModelError
from ...manifest import SOURCE_CACHE, SOURCE_LENGTHS, SOURCE_SCALE, SOURCE_TABLE, CachePool, SourceCache
from ..caches.cache_forms import LENGTH_AXIS, K, V, drop_unused_inputs
from ..caches.mask_patterns import convert_to_bias
from ..caches.positions import Positions
from ..caches.setup_split import Setup
from ..loading.legality import OWN_DOMAIN, import_own_domain
from ..rewriting.attention_node import MASK, NONPAD, PAST_KEY, PAST_VALUE, attention_input
from ..rewriting.matching import Rewrite, attribute, dims, is_op, operand
from ..rewriting.opset import opset
from .served_caches import CacheLayer, assign_cache_layers, build_cache_pools
from .served_pools import ServedPool, add_input, set_graph_outputs

SOURCE_BLOCKS = "source_blocks"  # symbol for the size of the pools' first axis

# Keys of a source, tokens of a call, and masked keys, for which a mask is compared.
_TESTED_SIZES = ((7, 3, 0), (7, 3, 2), (7, 1, 6), (5, 2, 4), (8, 8, 3))


@dataclass(frozen=True)
class SourceReads:
    """The attentions that read keys and values of sources, and the cache layers of these."""

    layers: dict[ir.Node, CacheLayer]

    @property
    def inputs(self) -> list[ir.Value]:
        """Return the distinct keys and values."""
        return list(dict.fromkeys(operand(node, position) for node in self.layers for position in (K, V)))

    def pools(self, is_int8: bool) -> tuple[CachePool, ...]:
        return build_cache_pools(self.layers, SOURCE_CACHE, SOURCE_SCALE if is_int8 else "")

    def finish_setup(self, setup: ir.Model | None, like: ir.Model) -> tuple[ir.Model, tuple[str, int]]:
        """Return a setup that outputs all keys and values, and its input and axis over rows of the source.

        like is the model that reads them.

        Raises:
            ModelError: No input of the setup has these rows.
        """
        if setup is None:
            graph = ir.Graph([], [], nodes=[], opset_imports={"": opset(like)}, name="setup")
            setup = ir.Model(graph, ir_version=like.ir_version)
        graph = setup.graph
        outputs = {value.name: value for value in graph.outputs}
        graph.outputs.clear()
        for value in self.inputs:
            graph.outputs.append(outputs.get(value.name) or add_input(graph, str(value.name), value.dtype, dims(value)))
        lengths = {dims(value)[LENGTH_AXIS] for value in graph.outputs}
        axes = [(str(v.name), axis) for v in graph.inputs for axis, size in enumerate(dims(v)) if size in lengths]
        if len(lengths) != 1 or not axes:
            raise ModelError(
                "serve.source_lengths_differ",
                f"serve: keys and values of sources have {', '.join(map(str, lengths))} rows, but must have the one "
                "number of rows of an input. Export the encoder as a model of its own.",
            )
        return setup, axes[0]

    def write_pools(self, setup: ir.Model, sources: SourceCache, dtype: ir.DataType, tokens: int) -> Setup:
        """Rewrite a setup that outputs keys and values to write them to the pools instead."""
        graph, int64 = setup.graph, ir.DataType.INT64
        outputs = {value.name: value for value in graph.outputs}
        table = add_input(graph, SOURCE_TABLE, int64, [1, ir.SymbolicDim("source_columns")])
        pools = {}
        for spec in sources.pools:
            pool = ServedPool.add_to(graph, spec, dtype, tokens, SOURCE_BLOCKS)
            key = next(iter(outputs.values()))
            bounds = {"start": LENGTH_AXIS, "end": LENGTH_AXIS + 1}
            count, zero = ir.node("Shape", [key], bounds), ir.node("Constant", [], {"value_ints": [0]})
            packed = pack_sources(count.outputs[0], table, pool)
            graph.extend([count, zero, packed])
            for value in (*count.outputs, *zero.outputs):
                value.type, value.shape = ir.TensorType(int64), ir.Shape([1])
            pool.tables |= dict.fromkeys(("first_rows", "past"), zero.outputs[0])
            pool.tables["row_counts"] = pool.tables["lengths"]
            pools[spec.kv_heads, spec.head_dim] = pool, packed
        for node, layer in self.layers.items():
            if layer.writes:
                pool, packed = pools[layer.shape]
                new = Rewrite(packed)
                pool.emit_kv_write(new, layer, *(outputs[operand(node, position).name] for position in (K, V)))
                new.insert()
        updated = {name: value for pool, _ in pools.values() for name, value in pool.updated_arrays().items()}
        donated = set_graph_outputs(graph, [], updated)
        graph.sort()
        common.RemoveUnusedNodesPass()(setup)
        import_own_domain(setup)
        return Setup(setup, donated)


def find_source_reads(
    model: ir.Model, ids: ir.Value, attentions: Collection[ir.Node], pasts: Collection[ir.Value]
) -> SourceReads:
    """Return the attentions that read keys and values of sources, and let them read all rows.

    Lengths and masks of the sources are no longer inputs of the model.

    Raises:
        ModelError: An attention sees other rows than the valid ones.
    """
    readers = [node for node in attentions if _is_source_read(node, pasts)]
    hides_padding = functools.cache(functools.partial(_is_padding_mask, model, ids))
    for node in readers:
        _check_visibility(node, hides_padding)
        for position in (MASK, NONPAD):
            if attention_input(node, position) is not None:
                node.replace_input_with(position, None)
    common.RemoveUnusedNodesPass()(model)
    drop_unused_inputs(model)
    return SourceReads(assign_cache_layers(readers))


def pack_sources(lengths: ir.Value, table: ir.Value, pool: ServedPool, max_lengths: ir.Value | None = None) -> ir.Node:
    """Return the node that converts the tables of sources for the kernels; set its outputs as tables of the pool.

    max_lengths are the maximum numbers of rows and keys of the requests of a call, None if the node is for writing the
    blocks.
    """
    suffix = pool.spec.name.removeprefix(SOURCE_CACHE)
    node = ir.node(
        "PackedSources", [lengths, table, pool.kv, max_lengths], domain=OWN_DOMAIN, num_outputs=3,
        name=f"packed_sources{suffix}",
    )  # fmt: skip
    for output, name in zip(node.outputs, ("lengths", "most", "entries")):
        output.type = ir.TensorType(ir.DataType.INT64)
        pool.tables[name] = output
    node.outputs[0].shape = lengths.shape
    return node


def _is_source_read(node: ir.Node, pasts: Collection[ir.Value]) -> bool:
    operands = [operand(node, position) for position in (K, V)]
    return all(value.is_graph_input() and value not in pasts and len(dims(value)) == 4 for value in operands)


def _check_visibility(node: ir.Node, hides_padding: Callable[[ir.Value], bool]) -> None:
    mask, lengths = attention_input(node, MASK), attention_input(node, NONPAD)
    has_past = any(attention_input(node, position) is not None for position in (PAST_KEY, PAST_VALUE))
    sides = [attribute(node, name, -1) for name in ("left_window_size", "right_window_size")]
    is_aligned = attribute(node, "is_causal", 0) == 1 or sides != [-1, -1]
    has_lengths = lengths is not None and lengths.name != SOURCE_LENGTHS
    if has_past or is_aligned or has_lengths or not (mask is None or hides_padding(mask)):
        raise ModelError(
            "serve.source_attention_unsupported",
            f"serve: node '{node.name}' (Attention) reads keys '{operand(node, K).name}' of a source, but does not "
            "attend to all of its rows: it has a past, a window or lengths of its own, or a mask other than that of "
            "an input [batch, rows]. Export it without these; each request gives the number of rows of its source.",
        )


def _is_padding_mask(model: ir.Model, ids: ir.Value, mask: ir.Value) -> bool:
    """Return whether a mask only hides the keys for which an input [1, E] is 0.

    The mask is [1, heads or 1, S or 1, E].
    """
    inputs = _find_inputs_of(mask)
    if len(inputs) != 1 or len(dims(inputs[0])) != 2:
        return False
    positions = Positions(model, ids, inputs[0], None, [])
    try:
        arrays = [positions.at([mask], keys - rows, rows, hidden)[0] for keys, rows, hidden in _TESTED_SIZES]
    except ModelError:  # it depends on other values
        return False
    expected = [np.where(np.arange(keys) >= hidden, np.float32(0), -np.inf) for keys, _, hidden in _TESTED_SIZES]
    return all(
        array.shape[-1:] == bias.shape and bool((convert_to_bias(array) == bias).all())
        for array, bias in zip(arrays, expected)
    )


def _find_inputs_of(value: ir.Value) -> list[ir.Value]:
    """Return the inputs of the model whose contents a value depends on."""
    pending, seen = [value], {value: None}
    while pending:
        node = pending.pop().producer()
        if node is None or is_op(node, "Shape", "Size"):
            continue
        new = [read for read in node.inputs if read is not None and read not in seen]
        seen |= dict.fromkeys(new)
        pending += new
    return [read for read in seen if read.is_graph_input()]
