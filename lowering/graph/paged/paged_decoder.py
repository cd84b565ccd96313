"""Conversion of decoders with caches and states to decoders over pools, for packed tokens of many requests.

An exported decoder takes token ids [B, S] or embeddings [B, S, H], past keys and values of each layer, and inputs that
determine positions; it computes its masks and angles itself. Served, it takes the tokens of all requests as one packed
row [1, N] or [1, N, H], tables that assign them to requests, and one pool of blocks of keys and values.

Values that depend on positions alone are computed now, for all positions up to the context, and looked up by token
(positions.py). Masks become patterns (mask_patterns.py). Attention becomes ServedKvWrite and ServedAttention over the
pool (served_pools.py). States of a fixed size are stored in pools of slots, which operators update (served_states.py).
Keys and values of an encoder's output are stored in a pool of their own, which the setup writes (served_sources.py).
Everything else must compute each token by itself (row_wise.py). The first output is that of each request's last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ...errors import ModelError
from ...manifest import (  # fmt: skip
    BLOCK_TABLE,
    CACHE,
    PAST_LENGTHS,
    ROW_STARTS,
    SCALE,
    SOURCE_LENGTHS,
    SOURCE_TABLE,
    STATE_SLOTS,
    ServedCache,
    SourceCache,
)
from ..caches.cache_forms import K, V, is_growing_cache
from ..caches.mask_patterns import MaskPattern, find_patterns
from ..caches.positions import Positions, evaluate_rows
from ..caches.setup_split import Setup, split_setup
from ..loading.legality import OWN_DOMAIN, import_own_domain
from ..rewriting.attention_node import is_attention
from ..rewriting.matching import Rewrite, Size, attribute, dims, is_op, operand, read_static_sizes
from ..rewriting.sizes import InferSizesPass
from .row_wise import check_row_wise, row_axis
from .serve import Serve
from .served_caches import CacheLayer, assign_cache_layers, build_cache_pools, check_attention
from .served_inputs import find_dependent_nodes, find_inputs, reject_inputs
from .served_pools import ServedPool, add_input, set_graph_outputs
from .served_sources import SOURCE_BLOCKS, SourceReads, find_source_reads, pack_sources
from .served_states import StateLayer, assign_state_layers, is_state_operator, past_state, serve_state

_TABLES = (
    "positions", "row_requests", "last_rows", "row_starts", "first_rows", "row_counts", "past", "lengths", "most",
    "entries",
)  # fmt: skip
"""Outputs of PackedRequests."""


@dataclass(frozen=True)
class ServedModel:
    """The result of the rewrite: the pools, and by donated input the output that reuses its memory.

    setup computes keys and values of sources, if there are any.
    """

    cache: ServedCache
    donated: dict[str, str]
    setup: Setup | None


def serve_decoder(model: ir.Model, serve: Serve) -> ServedModel:
    """Rewrite a model of batch 1 that `fuse` has processed.

    Raises:
        ModelError: The model cannot be served.
    """
    InferSizesPass()(model)
    _keep_outputs(model)
    decoder = _read_decoder(model, serve)
    positions, readers = decoder.positions, [n for n in model.graph if decoder.positions.is_data_node(n)]
    attention_nodes = {
        *decoder.attentions,
        *decoder.reads.layers,
        *decoder.grown,
        *find_dependent_nodes(model.graph, decoder.cache.fixed),
    }
    other_nodes = [node for node in readers if node not in attention_nodes]
    check_row_wise([node for node in other_nodes if node not in decoder.states], decoder.tokens)
    patterns = find_patterns(positions, decoder.attentions, serve.context)
    looked_up = dict.fromkeys(v for node in other_nodes for v in node.inputs if v is not None and positions.varies(v))
    rows = evaluate_rows(positions, list(looked_up), serve.context)
    return _DecoderRewrite(model, decoder, serve.context).run(patterns, rows)


def _keep_outputs(model: ir.Model) -> None:
    """Keep the first output, and the outputs of caches and states."""
    state_outputs = {
        output for node in model.graph if is_growing_cache(node) or is_state_operator(node) for output in node.outputs
    }
    model.graph.outputs[1:] = [value for value in model.graph.outputs[1:] if value in state_outputs]
    common.RemoveUnusedNodesPass()(model)


@dataclass(frozen=True)
class _Decoder:
    """The elements of a decoder.

    `grown` are the nodes that extend the caches, `states` those that update states, `dropped` the inputs that a served
    decoder does not have, `tokens` is the size of the axis over tokens. `reads` are the attentions over sources, whose
    keys and values `setup` returns.
    """

    ids: ir.Value
    tokens: Size
    position_ids: ir.Value | None
    dropped: list[ir.Value]
    grown: list[ir.Node]
    attentions: list[ir.Node]
    layers: dict[ir.Node, CacheLayer]
    states: dict[ir.Node, StateLayer]
    positions: Positions
    reads: SourceReads
    setup: ir.Model | None
    cache: ServedCache
    cache_type: ir.DataType


def _read_decoder(model: ir.Model, serve: Serve) -> _Decoder:
    inputs = find_inputs(model, serve)
    ids, mask, position_ids = inputs.ids, inputs.mask, inputs.positions
    grown = [node for node in model.graph if is_growing_cache(node)]
    carriers = [node for node in model.graph if is_state_operator(node)]
    if not grown and not carriers:
        raise ModelError(
            "serve.cache_missing",
            "serve: no output of the model is a past input [batch, heads, length, size] extended by new rows (by "
            "Concat or an attention operator), or the next value of a state that LinearAttention or "
            "CausalConvWithState updates. Export the model with past_key_values as inputs and outputs.",
        )
    pasts, states = [operand(node, 0) for node in grown], [past_state(node) for node in carriers]
    dropped = [value for value in (*pasts, *states, mask, position_ids) if value is not None]
    setup = split_setup(model, {str(value.name) for value in (ids, *dropped)})
    scalars = [value for value in model.graph.inputs if value not in dropped and value.shape == ir.Shape([])]
    positions = Positions(model, ids, mask, position_ids, pasts)
    attentions = [node for node in model.graph if is_attention(node) and positions.is_data_node(node)]
    reads = find_source_reads(model, ids, attentions, pasts)
    attentions = [node for node in attentions if node not in reads.layers]
    dropped = [value for value in model.graph.inputs if value in dropped or value in reads.inputs]
    handled = [ids, *inputs.per_token, *scalars, *dropped]
    reject_inputs([value for value in model.graph.inputs if value not in handled], setup)
    for node in attentions:
        check_attention(node, grown, positions)
    caches_read = {operand(node, k).producer() for node in attentions for k in (K, V)}
    if caches_read != {*grown}:
        raise ModelError("serve.cache_unread", "serve: not every cache is read by attention as its keys or its values.")
    cache_type = _choose_cache_type([*pasts, *reads.inputs], serve)
    is_int8, sources = cache_type == ir.DataType.INT8, None
    if reads.layers:
        setup, rows = reads.finish_setup(setup, model)
        sources = SourceCache(reads.pools(is_int8), rows)
    layers, (state_layers_by_node, state_pools) = assign_cache_layers(attentions), assign_state_layers(carriers)
    cache = ServedCache(
        context=serve.context,
        tokens_per_block=serve.tokens_per_block,
        pools=build_cache_pools(layers, CACHE, SCALE if is_int8 else ""),
        dtype=cache_type.numpy().name if grown or sources else "",
        scales=1 if is_int8 else 0,
        ids=str(ids.name),
        states=state_pools,
        sources=sources,
        per_token=tuple(str(value.name) for value in inputs.per_token),
        fixed=tuple(str(value.name) for value in scalars),
        vocabularies=inputs.vocabularies(),
    )
    return _Decoder(
        ids, dims(ids)[1], position_ids, dropped, grown, attentions, layers, state_layers_by_node, positions, reads,
        setup, cache, cache_type,
    )  # fmt: skip


def _choose_cache_type(cached: list[ir.Value], serve: Serve) -> ir.DataType:
    """Return the element type of all caches, UNDEFINED if there is no cache."""
    types = {value.dtype for value in cached}
    element = types.pop() if types else ir.DataType.UNDEFINED
    if element is None or types:
        raise ModelError("serve.cache_dtype_mismatch", "serve: the caches have different or unknown element types.")
    if serve.cache == "model":
        return element
    if not cached:
        raise ModelError("serve.cache_int8_unsupported", "serve: no KV cache can be stored as int8. Leave `cache` out.")
    return ir.DataType.INT8


class _DecoderRewrite:
    """The new inputs, and the rewrite of the nodes that read the old ones."""

    def __init__(self, model: ir.Model, decoder: _Decoder, context: int) -> None:
        self.model, self.graph, self.decoder, self.context = model, model.graph, decoder, context
        cache, graph, int64 = decoder.cache, model.graph, ir.DataType.INT64
        requests, columns = ir.SymbolicDim("requests"), ir.SymbolicDim("columns")
        starts = add_input(graph, ROW_STARTS, int64, [ir.SymbolicDim("row_starts_0")])
        past = add_input(graph, PAST_LENGTHS, int64, [requests])
        self.request_inputs = [
            starts,
            past,
            add_input(graph, BLOCK_TABLE, int64, [requests, columns]) if cache.pools else None,
        ]
        self.slots = add_input(graph, STATE_SLOTS, int64, [requests]) if cache.states else None
        types = {layer.pool: past_state(node).dtype for node, layer in decoder.states.items()}
        self.states: dict[str, ir.Value] = {}
        for state in cache.states:
            shape: list[Size] = [ir.SymbolicDim("slots"), state.layers, *state.shape]
            self.states[state.name] = add_input(graph, state.name, types[state.name], shape)
        self.pools: dict[tuple[int, int], ServedPool] = {}
        for spec in cache.pools:
            pool = ServedPool.add_to(graph, spec, decoder.cache_type, cache.tokens_per_block, "blocks")
            pool.tables = self.emit_packed_requests(spec.name.removeprefix(CACHE), pool.kv)
            self.pools[spec.kv_heads, spec.head_dim] = pool
        self.tables = next(iter(self.pools.values())).tables if self.pools else self.emit_packed_requests("", None)
        self.sources = {} if cache.sources is None else self.add_source_pools(cache.sources, requests)

    def add_source_pools(self, sources: SourceCache, requests: ir.SymbolicDim) -> dict[tuple[int, int], ServedPool]:
        graph, int64, pools = self.graph, ir.DataType.INT64, {}
        lengths = add_input(graph, SOURCE_LENGTHS, int64, [requests])
        table = add_input(graph, SOURCE_TABLE, int64, [requests, ir.SymbolicDim("source_columns")])
        requests_packed = self.tables["most"].producer()
        assert requests_packed is not None
        for spec in sources.pools:
            pool = ServedPool.add_to(
                graph, spec, self.decoder.cache_type, self.decoder.cache.tokens_per_block, SOURCE_BLOCKS
            )
            pool.tables = {name: self.tables[name] for name in ("row_starts", "past")}
            graph.insert_after(requests_packed, pack_sources(lengths, table, pool, self.tables["most"]))
            pools[spec.kv_heads, spec.head_dim] = pool
        return pools

    def emit_packed_requests(self, suffix: str, kv: ir.Value | None) -> dict[str, ir.Value]:
        """Return the outputs of PackedRequests for the tables, and for a pool of keys and values if there is one."""
        states = next(iter(self.states.values()), None)
        inputs = [self.decoder.ids, *self.request_inputs, kv, self.slots, states]
        node = ir.node(
            "PackedRequests", inputs, {"context": self.context}, domain=OWN_DOMAIN, num_outputs=len(_TABLES),
            name=f"packed_requests{suffix}",
        )  # fmt: skip
        for output in node.outputs:
            output.type = ir.TensorType(ir.DataType.INT64)
        self.graph.insert_before(next(iter(self.graph)), node)
        node.outputs[0].shape = ir.Shape([self.decoder.tokens])
        return dict(zip(_TABLES, node.outputs))

    def run(self, patterns: dict[ir.Node, MaskPattern], rows: dict[ir.Value, tuple[np.ndarray, int]]) -> ServedModel:
        setup = self.write_setup()
        for node in self.decoder.attentions:
            self.replace_attention(node, patterns[node])
        for node, layer in self.decoder.reads.layers.items():
            self.sources[layer.shape].replace_attention(Rewrite(node), layer, {"is_causal": 0, "left_window_size": -1})
        for value, (table, axis) in rows.items():
            self.replace_by_table(value, table, axis)
        for node, state_layer in self.decoder.states.items():
            assert self.slots is not None
            self.states[state_layer.pool] = serve_state(
                node, state_layer, self.tables, self.slots, self.states[state_layer.pool]
            )
        self.replace_static_shapes()
        updated = dict(self.states)
        for pool in self.pools.values():
            updated |= pool.updated_arrays()
        donated = set_graph_outputs(self.graph, [self.emit_last_tokens(self.graph.outputs[0])], updated)
        common.CommonSubexpressionEliminationPass()(self.model)
        common.RemoveUnusedNodesPass()(self.model)
        self.drop_inputs()
        import_own_domain(self.model)
        return ServedModel(self.decoder.cache, donated, setup)

    def write_setup(self) -> Setup | None:
        """Return the setup that writes the pools of sources."""
        decoder, cache = self.decoder, self.decoder.cache
        if cache.sources is None:
            return None
        assert decoder.setup is not None
        return decoder.reads.write_pools(decoder.setup, cache.sources, decoder.cache_type, cache.tokens_per_block)

    def replace_attention(self, node: ir.Node, pattern: MaskPattern) -> None:
        """Replace the node by ServedAttention, after the write of its new keys and values to its pool."""
        layer, new, bias = self.decoder.layers[node], Rewrite(node), None
        attributes: dict[str, int | float | str] = {
            "is_causal": 1, "left_window_size": -1 if pattern.left is None else pattern.left, "context": self.context,
        }  # fmt: skip
        if pattern.bias is not None:
            bias, attributes["bias_by"] = new.emit_constant(pattern.bias, ir.DataType.FLOAT), pattern.by
        pool = self.pools[layer.shape]
        if layer.writes:
            pool.emit_kv_write(new, layer, _read_new_rows(node, K), _read_new_rows(node, V))
        pool.replace_attention(new, layer, attributes, bias)

    def replace_by_table(self, value: ir.Value, table: np.ndarray, axis: int) -> None:
        """Replace a value by rows of a table for all positions.

        The value was computed for consecutive positions of one sequence.
        """
        readers = [use for use in value.uses() if self.decoder.positions.is_data_node(use.node)]
        order = {node: k for k, node in enumerate(self.graph)}
        new = Rewrite(min((use.node for use in readers), key=order.__getitem__))
        assert value.dtype is not None
        rows = new.emit("Gather", [new.emit_constant(table, value.dtype), self.tables["positions"]], {"axis": axis})
        rows.shape = ir.Shape([self.decoder.tokens if k == axis else size for k, size in enumerate(table.shape)])
        new.insert()
        for reader, index in readers:
            reader.replace_input_with(index, rows)

    def replace_static_shapes(self) -> None:
        """Replace static shapes of dropped inputs; their other shapes must not be read."""
        for node in [n for n in self.graph if is_op(n, "Shape") and operand(n, 0) in self.decoder.dropped]:
            value = operand(node, 0)
            sizes = dims(value)[attribute(node, "start", 0) : attribute(node, "end", None)]
            if (static := read_static_sizes(sizes)) is not None:
                new = Rewrite(node)
                new.replace([node], node.outputs[0], new.emit_integers(*static))
            elif value is self.decoder.position_ids:
                self.replace_token_shape(node, sizes)

    def replace_token_shape(self, node: ir.Node, sizes: tuple[Size, ...]) -> None:
        """Replace symbolic sizes of position ids by the number of tokens."""
        new = Rewrite(node)
        parts = [size if isinstance(size, int) else new.emit_size(self.decoder.ids, 1) for size in sizes]
        new.replace([node], node.outputs[0], new.emit_shape(parts))

    def emit_last_tokens(self, result: ir.Value) -> ir.Value:
        """Return a result [1, N, ...] for the last token of each request only: [R, ...], under its name.

        Values that are only needed for it are computed for these tokens only.
        """
        name, result.name = result.name, f"{result.name}_of_last_tokens"
        axis_zero = ir.node("Constant", [], {"value": ir.tensor(np.array([0], np.int64))}, name="last_rows/front")
        squeeze = ir.node("Squeeze", [result, axis_zero.outputs[0]], name="last_rows")
        axis_zero.outputs[0].type, squeeze.outputs[0].type = self.tables["last_rows"].type, result.type
        squeeze.outputs[0].name = name
        self.graph.extend([axis_zero, squeeze])
        reader, rows = squeeze, result
        while (earlier := self.find_single_row_input(rows)) is not None:
            reader, rows = earlier
        axis = row_axis(rows, self.decoder.tokens)
        if axis is None:
            raise ModelError(
                "serve.output_rows_missing", f"serve: the first output, '{name}', has no row for each token."
            )
        new = Rewrite(reader)
        last_rows = new.emit("Gather", [rows, self.tables["last_rows"]], {"axis": axis})
        new.replace_input(list(reader.inputs).index(rows), last_rows)
        return squeeze.outputs[0]

    def find_single_row_input(self, value: ir.Value) -> tuple[ir.Node, ir.Value] | None:
        """Return the node that computes a value, and its single input with rows.

        None unless no other node reads that input, and its rows lie along the same axis.
        """
        node, tokens = value.producer(), self.decoder.tokens
        if node is None or node.domain == OWN_DOMAIN:
            return None
        row_inputs = [v for v in node.inputs if v is not None and row_axis(v, tokens) is not None]
        if (
            len(row_inputs) != 1
            or len(row_inputs[0].uses()) != 1
            or row_inputs[0].is_graph_input()
            or row_inputs[0].is_graph_output()
        ):
            return None
        is_same_axis = len(dims(row_inputs[0])) == len(dims(value)) and row_axis(row_inputs[0], tokens) == row_axis(
            value, tokens
        )
        return (node, row_inputs[0]) if is_same_axis else None

    def drop_inputs(self) -> None:
        for value in self.decoder.dropped:
            use = next(iter(value.uses()), None)
            if use is not None:
                raise ModelError(
                    "serve.input_use_unsupported",
                    f"serve: node '{use.node.name}' ({use.node.op_type}) reads '{value.name}', or its length, for "
                    "something that is neither a mask nor a row for each position.",
                )
            self.graph.inputs.remove(value)


def _read_new_rows(attention: ir.Node, position: int) -> ir.Value:
    """Return the new rows that the Concat before an attention's input appends to a past."""
    concat = operand(attention, position).producer()
    assert concat is not None
    return operand(concat, 1)
