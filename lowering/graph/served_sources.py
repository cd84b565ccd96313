"""Keys and values of sources in a served decoder: a pool of pages of their own, which the setup writes.

Before: a decoder whose cross attention reads keys and values [1, H, E, D] that are inputs, and the setup that computes
them of an encoder's output (setup_part.py), if anything does. After: the setup appends them to one layer each of
source_cache, in the blocks that source_table says, and ServedAttention reads those of each request. A request's source
has source_lengths rows; what its blocks hold behind them is not seen. So a mask of padding has nothing left to hide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ..errors import ModelError
from ..fusion.attention_node import MASK, NONPAD, PAST_KEY, PAST_VALUE, attention_input
from ..fusion.matching import Rewrite, attribute, dims, is_op, operand
from ..fusion.opset import opset
from ..manifest import SOURCE_CACHE, SOURCE_LENGTHS, SOURCE_SCALE, SOURCE_TABLE, CachePool, SourceCache
from .cache_forms import LENGTH_AXIS, K, V, drop_unused_inputs
from .legality import OWN_DOMAIN, import_own_domain
from .mask_patterns import as_bias
from .positions import Positions
from .served_caches import CacheLayer, cache_layers, cache_pools
from .served_pools import ServedPool, add_input, give_updated
from .setup_part import Setup

BLOCKS = "source_blocks"  # the size of the pools' first axis

# Keys of a source, tokens of a call, and keys that are hidden, for which a mask is compared.
_TRIED = ((7, 3, 0), (7, 3, 2), (7, 1, 6), (5, 2, 4), (8, 8, 3))


@dataclass(frozen=True)
class SourceReads:
    """The attentions that read keys and values of sources, with the layers where they are kept."""

    layers: dict[ir.Node, CacheLayer]

    @property
    def inputs(self) -> list[ir.Value]:
        """Keys and values, each once."""
        return list(dict.fromkeys(operand(node, position) for node in self.layers for position in (K, V)))

    def pools(self, is_int8: bool) -> tuple[CachePool, ...]:
        return cache_pools(self.layers, SOURCE_CACHE, SOURCE_SCALE if is_int8 else "")

    def finish_setup(self, setup: ir.Model | None, like: ir.Model) -> tuple[ir.Model, tuple[str, int]]:
        """Return a setup that gives all keys and values, and its input and axis that are over rows of the source.

        like is the model that reads them. Raises ModelError where no input of the setup has these rows.
        """
        if setup is None:
            graph = ir.Graph([], [], nodes=[], opset_imports={"": opset(like)}, name="setup")
            setup = ir.Model(graph, ir_version=like.ir_version)
        graph = setup.graph
        given = {value.name: value for value in graph.outputs}
        graph.outputs.clear()
        for value in self.inputs:
            graph.outputs.append(given.get(value.name) or add_input(graph, str(value.name), value.dtype, dims(value)))
        lengths = {dims(value)[LENGTH_AXIS] for value in graph.outputs}
        places = [(str(v.name), axis) for v in graph.inputs for axis, size in enumerate(dims(v)) if size in lengths]
        if len(lengths) != 1 or not places:
            raise ModelError(
                f"serve: keys and values of sources have {', '.join(map(str, lengths))} rows, and a source has one "
                "number of rows, that of an input. Export the encoder as a model of its own."
            )
        return setup, places[0]

    def write_pools(self, setup: ir.Model, sources: SourceCache, dtype: ir.DataType, tokens: int) -> Setup:
        """Let a setup that gives keys and values write them into the pools in place of that."""
        graph, int64 = setup.graph, ir.DataType.INT64
        given = {value.name: value for value in graph.outputs}
        table = add_input(graph, SOURCE_TABLE, int64, [1, ir.SymbolicDim("source_columns")])
        pools = {}
        for spec in sources.pools:
            pool = ServedPool.add_to(graph, spec, dtype, tokens, BLOCKS)
            key = next(iter(given.values()))
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
                pool.append(new, layer, *(given[operand(node, position).name] for position in (K, V)))
                new.insert()
        updated = {name: value for pool, _ in pools.values() for name, value in pool.updated().items()}
        donated = give_updated(graph, [], updated)
        graph.sort()
        common.RemoveUnusedNodesPass()(setup)
        import_own_domain(setup)
        return Setup(setup, donated)


def find_source_reads(
    model: ir.Model, ids: ir.Value, attentions: Collection[ir.Node], pasts: Collection[ir.Value]
) -> SourceReads:
    """Return those of the attentions that read keys and values of sources, and let them see all of these.

    Lengths and masks of the sources are inputs of the model no longer. Raises ModelError for an attention that sees
    other rows than those that count.
    """
    readers = [node for node in attentions if _reads_source(node, pasts)]
    hides_padding = functools.cache(functools.partial(_hides_padding, model, ids))
    for node in readers:
        _check(node, hides_padding)
        for position in (MASK, NONPAD):
            if attention_input(node, position) is not None:
                node.replace_input_with(position, None)
    common.RemoveUnusedNodesPass()(model)
    drop_unused_inputs(model)
    return SourceReads(cache_layers(readers))


def pack_sources(lengths: ir.Value, table: ir.Value, pool: ServedPool, most: ir.Value | None = None) -> ir.Node:
    """Return the node that makes of the tables of sources what kernels read, and note its outputs for the pool.

    most is how many rows and keys the requests of a call have at most, None where the blocks are to be written."""
    suffix = pool.spec.name.removeprefix(SOURCE_CACHE)
    node = ir.node(
        "PackedSources", [lengths, table, pool.kv, most], domain=OWN_DOMAIN, num_outputs=3,
        name=f"packed_sources{suffix}",
    )  # fmt: skip
    for output, name in zip(node.outputs, ("lengths", "most", "entries")):
        output.type = ir.TensorType(ir.DataType.INT64)
        pool.tables[name] = output
    node.outputs[0].shape = lengths.shape
    return node


def _reads_source(node: ir.Node, pasts: Collection[ir.Value]) -> bool:
    both = [operand(node, position) for position in (K, V)]
    return all(value.is_graph_input() and value not in pasts and len(dims(value)) == 4 for value in both)


def _check(node: ir.Node, hides_padding: Callable[[ir.Value], bool]) -> None:
    mask, lengths = attention_input(node, MASK), attention_input(node, NONPAD)
    has_past = any(attention_input(node, position) is not None for position in (PAST_KEY, PAST_VALUE))
    sides = [attribute(node, name, -1) for name in ("left_window_size", "right_window_size")]
    is_aligned = attribute(node, "is_causal", 0) == 1 or sides != [-1, -1]
    has_lengths = lengths is not None and lengths.name != SOURCE_LENGTHS
    if has_past or is_aligned or has_lengths or not (mask is None or hides_padding(mask)):
        raise ModelError(
            f"serve: node '{node.name}' (Attention) reads keys '{operand(node, K).name}' of a source, and does not see "
            "all that count: it has a past, a window or lengths of its own, or a mask that is not that of an input "
            "[batch, rows]. Export it without; each request says how many rows its source has."
        )


def _hides_padding(model: ir.Model, ids: ir.Value, mask: ir.Value) -> bool:
    """Whether a mask [1, heads or 1, S or 1, E] hides the keys where an input [1, E] is 0, and does nothing else."""
    inputs = _inputs_of(mask)
    if len(inputs) != 1 or len(dims(inputs[0])) != 2:
        return False
    positions = Positions(model, ids, inputs[0], None, [])
    try:
        arrays = [positions.at([mask], keys - rows, rows, hidden)[0] for keys, rows, hidden in _TRIED]
    except ModelError:  # it depends on more
        return False
    expected = [np.where(np.arange(keys) >= hidden, np.float32(0), -np.inf) for keys, _, hidden in _TRIED]
    return all(
        array.shape[-1:] == wanted.shape and bool((as_bias(array) == wanted).all())
        for array, wanted in zip(arrays, expected)
    )


def _inputs_of(value: ir.Value) -> list[ir.Value]:
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
