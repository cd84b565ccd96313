"""Decoders with caches and states become decoders over pools of them, for packed tokens of many requests.

An exported decoder takes token ids [B, S] or embeddings [B, S, H], past keys and values of each layer, and what tells
positions; it computes its masks and angles itself. Served, it takes the tokens of all requests side by side as one row
[1, N] or [1, N, H], tables that say which request has which of them, and one pool of blocks of keys and values. What
depends on positions alone is computed now, for all positions up to the context, and looked up by token (positions.py);
masks become what they say (mask_patterns.py); attention becomes ServedKvWrite and ServedAttention over the pool
(served_pools.py); states of a fixed size lie in pools of slots, which operators carry on (served_states.py); keys and
values of an encoder's output lie in a pool of their own, which the setup writes (served_sources.py). Everything else
must compute each token by itself (row_wise.py). The first output is that of each request's last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ..errors import ModelError
from ..fusion.attention_node import is_attention
from ..fusion.matching import Rewrite, Size, attribute, dims, is_op, numbers, operand
from ..fusion.sizes import InferSizesPass
from ..manifest import (
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
)  # fmt: skip
from .cache_forms import K, V, grows
from .legality import OWN_DOMAIN, import_own_domain
from .mask_patterns import Pattern, patterns_of
from .positions import Positions, rows_by_position
from .row_wise import check_row_wise, row_axis
from .serve import Serve
from .served_caches import CacheLayer, cache_layers, cache_pools, check_attention
from .served_inputs import check_known, find_inputs, nodes_of
from .served_pools import ServedPool, add_input, give_updated
from .served_sources import BLOCKS, SourceReads, find_source_reads, pack_sources
from .served_states import StateLayer, carries_state, past_state, serve_state, state_layers
from .setup_part import Setup, split_setup

_TABLES = (
    "positions", "row_requests", "last_rows", "row_starts", "first_rows", "row_counts", "past", "lengths", "most",
    "entries",
)  # fmt: skip
"""What PackedRequests gives out."""


@dataclass(frozen=True)
class Served:
    """What the model has become: the pools, and by consumed input the output that takes its memory; what computes keys
    and values of sources, if there are any."""

    cache: ServedCache
    donated: dict[str, str]
    setup: Setup | None


def serve_decoder(model: ir.Model, serve: Serve) -> Served:
    """Rewrites a model of batch 1 that `fuse` has been through. Raises ModelError where it cannot be served."""
    InferSizesPass()(model)
    _keep_outputs(model)
    decoder = _decoder_of(model, serve)
    positions, readers = decoder.positions, [n for n in model.graph if decoder.positions.of_data(n)]
    known = {*decoder.attentions, *decoder.reads.layers, *decoder.grown, *nodes_of(model.graph, decoder.cache.fixed)}
    others = [node for node in readers if node not in known]
    check_row_wise([node for node in others if node not in decoder.states], decoder.tokens)
    patterns = patterns_of(positions, decoder.attentions, serve.context)
    read = dict.fromkeys(v for node in others for v in node.inputs if v is not None and positions.varies(v))
    rows = rows_by_position(positions, list(read), serve.context)
    return _Rewriting(model, decoder, serve.context).run(patterns, rows)


def _keep_outputs(model: ir.Model) -> None:
    """Leave the first output, and those that carry caches and states on."""
    carried = {output for node in model.graph if grows(node) or carries_state(node) for output in node.outputs}
    model.graph.outputs[1:] = [value for value in model.graph.outputs[1:] if value in carried]
    common.RemoveUnusedNodesPass()(model)


@dataclass(frozen=True)
class _Decoder:
    """The parts of a decoder: `grown` are the nodes that make the caches longer, `states` those that carry states on,
    `dropped` the inputs that a served one does without, `tokens` is the size of the axis over tokens. `reads` are the
    attentions over sources, whose keys and values `setup` gives."""

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


def _decoder_of(model: ir.Model, serve: Serve) -> _Decoder:
    inputs = find_inputs(model, serve)
    ids, mask, position_ids = inputs.ids, inputs.mask, inputs.positions
    grown = [node for node in model.graph if grows(node)]
    carriers = [node for node in model.graph if carries_state(node)]
    if not grown and not carriers:
        raise ModelError(
            "serve: no output of the model is a past input [batch, heads, length, size] with new rows behind it, "
            "joined by Concat or by an attention operator, or the next value of a state that LinearAttention or "
            "CausalConvWithState carries on. Export the model with past_key_values as inputs and outputs."
        )
    pasts, states = [operand(node, 0) for node in grown], [past_state(node) for node in carriers]
    dropped = [value for value in (*pasts, *states, mask, position_ids) if value is not None]
    setup = split_setup(model, {str(value.name) for value in (ids, *dropped)})
    fixed = [value for value in model.graph.inputs if value not in dropped and value.shape == ir.Shape([])]
    positions = Positions(model, ids, mask, position_ids, pasts)
    attentions = [node for node in model.graph if is_attention(node) and positions.of_data(node)]
    reads = find_source_reads(model, ids, attentions, pasts)
    attentions = [node for node in attentions if node not in reads.layers]
    dropped = [value for value in model.graph.inputs if value in dropped or value in reads.inputs]
    known = [ids, *inputs.per_token, *fixed, *dropped]
    check_known([value for value in model.graph.inputs if value not in known], setup)
    for node in attentions:
        check_attention(node, grown, positions)
    read = {operand(node, k).producer() for node in attentions for k in (K, V)}
    if read != {*grown}:
        raise ModelError("serve: the model's caches are not each read by attention, as its keys or its values.")
    cache_type = _cache_type([*pasts, *reads.inputs], serve)
    is_int8, sources = cache_type == ir.DataType.INT8, None
    if reads.layers:
        setup, rows = reads.finish_setup(setup, model)
        sources = SourceCache(reads.pools(is_int8), rows)
    layers, (places, state_pools) = cache_layers(attentions), state_layers(carriers)
    cache = ServedCache(
        context=serve.context,
        tokens_per_block=serve.tokens_per_block,
        pools=cache_pools(layers, CACHE, SCALE if is_int8 else ""),
        dtype=cache_type.numpy().name if grown or sources else "",
        scales=1 if is_int8 else 0,
        ids=str(ids.name),
        states=state_pools,
        sources=sources,
        per_token=tuple(str(value.name) for value in inputs.per_token),
        fixed=tuple(str(value.name) for value in fixed),
        vocabularies=inputs.vocabularies(),
    )
    return _Decoder(
        ids, dims(ids)[1], position_ids, dropped, grown, attentions, layers, places, positions, reads, setup, cache,
        cache_type,
    )  # fmt: skip


def _cache_type(cached: list[ir.Value], serve: Serve) -> ir.DataType:
    """The element type of all caches; that of no cache where there is none."""
    types = {value.dtype for value in cached}
    element = types.pop() if types else ir.DataType.UNDEFINED
    if element is None or types:
        raise ModelError("serve: the caches of the layers have several types, or do not tell it.")
    if serve.cache == "model":
        return element
    if not cached:
        raise ModelError("serve: the model has states and no cache, which cannot be int8: leave `cache` out.")
    return ir.DataType.INT8


class _Rewriting:
    """New inputs, and what becomes of the nodes that read the old ones."""

    def __init__(self, model: ir.Model, decoder: _Decoder, context: int) -> None:
        self.model, self.graph, self.decoder, self.context = model, model.graph, decoder, context
        cache, graph, int64 = decoder.cache, model.graph, ir.DataType.INT64
        requests, columns = ir.SymbolicDim("requests"), ir.SymbolicDim("columns")
        starts = add_input(graph, ROW_STARTS, int64, [ir.SymbolicDim("row_starts_0")])
        past = add_input(graph, PAST_LENGTHS, int64, [requests])
        self.given = [starts, past, add_input(graph, BLOCK_TABLE, int64, [requests, columns]) if cache.pools else None]
        self.slots = add_input(graph, STATE_SLOTS, int64, [requests]) if cache.states else None
        types = {layer.pool: past_state(node).dtype for node, layer in decoder.states.items()}
        self.states: dict[str, ir.Value] = {}
        for state in cache.states:
            shape: list[Size] = [ir.SymbolicDim("slots"), state.layers, *state.shape]
            self.states[state.name] = add_input(graph, state.name, types[state.name], shape)
        self.pools: dict[tuple[int, int], ServedPool] = {}
        for spec in cache.pools:
            pool = ServedPool.add_to(graph, spec, decoder.cache_type, cache.tokens_per_block, "blocks")
            pool.tables = self.packed(spec.name.removeprefix(CACHE), pool.kv)
            self.pools[spec.kv_heads, spec.head_dim] = pool
        self.tables = next(iter(self.pools.values())).tables if self.pools else self.packed("", None)
        self.sources = {} if cache.sources is None else self.source_pools(cache.sources, requests)

    def source_pools(self, sources: SourceCache, requests: ir.SymbolicDim) -> dict[tuple[int, int], ServedPool]:
        graph, int64, pools = self.graph, ir.DataType.INT64, {}
        lengths = add_input(graph, SOURCE_LENGTHS, int64, [requests])
        table = add_input(graph, SOURCE_TABLE, int64, [requests, ir.SymbolicDim("source_columns")])
        requests_packed = self.tables["most"].producer()
        assert requests_packed is not None
        for spec in sources.pools:
            pool = ServedPool.add_to(graph, spec, self.decoder.cache_type, self.decoder.cache.tokens_per_block, BLOCKS)
            pool.tables = {name: self.tables[name] for name in ("row_starts", "past")}
            graph.insert_after(requests_packed, pack_sources(lengths, table, pool, self.tables["most"]))
            pools[spec.kv_heads, spec.head_dim] = pool
        return pools

    def packed(self, suffix: str, kv: ir.Value | None) -> dict[str, ir.Value]:
        """What PackedRequests makes of the tables, for a pool of keys and values if there is one."""
        states = next(iter(self.states.values()), None)
        inputs = [self.decoder.ids, *self.given, kv, self.slots, states]
        packed = ir.node(
            "PackedRequests", inputs, {"context": self.context}, domain=OWN_DOMAIN, num_outputs=len(_TABLES),
            name=f"packed_requests{suffix}",
        )  # fmt: skip
        for output in packed.outputs:
            output.type = ir.TensorType(ir.DataType.INT64)
        self.graph.insert_before(next(iter(self.graph)), packed)
        packed.outputs[0].shape = ir.Shape([self.decoder.tokens])
        return dict(zip(_TABLES, packed.outputs))

    def run(self, patterns: dict[ir.Node, Pattern], rows: dict[ir.Value, tuple[np.ndarray, int]]) -> Served:
        setup = self.write_setup()
        for node in self.decoder.attentions:
            self.serve_attention(node, patterns[node])
        for node, layer in self.decoder.reads.layers.items():
            self.sources[layer.shape].attend(Rewrite(node), layer, {"is_causal": 0, "left_window_size": -1})
        for value, (table, axis) in rows.items():
            self.look_up(value, table, axis)
        for node, carried in self.decoder.states.items():
            assert self.slots is not None
            self.states[carried.pool] = serve_state(node, carried, self.tables, self.slots, self.states[carried.pool])
        self.fix_sizes()
        updated = dict(self.states)
        for pool in self.pools.values():
            updated |= pool.updated()
        donated = give_updated(self.graph, [self.of_last_tokens(self.graph.outputs[0])], updated)
        common.CommonSubexpressionEliminationPass()(self.model)
        common.RemoveUnusedNodesPass()(self.model)
        self.drop_inputs()
        import_own_domain(self.model)
        return Served(self.decoder.cache, donated, setup)

    def write_setup(self) -> Setup | None:
        """What writes the pools of sources."""
        decoder, cache = self.decoder, self.decoder.cache
        if cache.sources is None:
            return None
        assert decoder.setup is not None
        return decoder.reads.write_pools(decoder.setup, cache.sources, decoder.cache_type, cache.tokens_per_block)

    def serve_attention(self, node: ir.Node, pattern: Pattern) -> None:
        """Put ServedAttention in place of the node, behind what appends its new keys and values to its pool."""
        layer, new, bias = self.decoder.layers[node], Rewrite(node), None
        attributes: dict[str, int | float | str] = {
            "is_causal": 1, "left_window_size": -1 if pattern.left is None else pattern.left, "context": self.context,
        }  # fmt: skip
        if pattern.bias is not None:
            bias, attributes["bias_by"] = new.constant(pattern.bias, ir.DataType.FLOAT), pattern.by
        pool = self.pools[layer.shape]
        if layer.writes:
            pool.append(new, layer, _new_rows(node, K), _new_rows(node, V))
        pool.attend(new, layer, attributes, bias)

    def look_up(self, value: ir.Value, table: np.ndarray, axis: int) -> None:
        """Rows of a table for all positions in place of those computed for consecutive positions of one sequence."""
        readers = [use for use in value.uses() if self.decoder.positions.of_data(use.node)]
        order = {node: k for k, node in enumerate(self.graph)}
        new = Rewrite(min((use.node for use in readers), key=order.__getitem__))
        assert value.dtype is not None
        rows = new.emit("Gather", [new.constant(table, value.dtype), self.tables["positions"]], {"axis": axis})
        rows.shape = ir.Shape([self.decoder.tokens if k == axis else size for k, size in enumerate(table.shape)])
        new.insert()
        for reader, index in readers:
            reader.replace_input_with(index, rows)

    def fix_sizes(self) -> None:
        """The sizes of what is no input any more, where they are known: the others nobody may ask for."""
        for node in [n for n in self.graph if is_op(n, "Shape") and operand(n, 0) in self.decoder.dropped]:
            value = operand(node, 0)
            sizes = dims(value)[attribute(node, "start", 0) : attribute(node, "end", None)]
            if (fixed := numbers(sizes)) is not None:
                new = Rewrite(node)
                new.replace([node], node.outputs[0], new.integers(*fixed))
            elif value is self.decoder.position_ids:
                self.size_of_tokens(node, sizes)

    def size_of_tokens(self, node: ir.Node, sizes: tuple[Size, ...]) -> None:
        """What is no number of the sizes of position ids is the number of tokens."""
        new = Rewrite(node)
        count = {"start": 1, "end": 2}
        parts = [
            new.integers(size)
            if isinstance(size, int)
            else new.emit("Shape", [self.decoder.ids], count, ir.DataType.INT64, [1])
            for size in sizes
        ]
        new.replace([node], node.outputs[0], new.emit("Concat", parts, {"axis": 0}, ir.DataType.INT64, [len(parts)]))

    def of_last_tokens(self, result: ir.Value) -> ir.Value:
        """A result [1, N, ...] of the last token of each request alone: [R, ...], under its name. So is what only that
        needs."""
        name, result.name = result.name, f"{result.name}_of_last_tokens"
        front = ir.node("Constant", [], {"value": ir.tensor(np.array([0], np.int64))}, name="last_rows/front")
        squeeze = ir.node("Squeeze", [result, front.outputs[0]], name="last_rows")
        front.outputs[0].type, squeeze.outputs[0].type = self.tables["last_rows"].type, result.type
        squeeze.outputs[0].name = name
        self.graph.extend([front, squeeze])
        reader, rows = squeeze, result
        while (before := self.only_rows_of(rows)) is not None:
            reader, rows = before
        axis = row_axis(rows, self.decoder.tokens)
        if axis is None:
            raise ModelError(f"serve: the first output, '{name}', has no row for each token.")
        new = Rewrite(reader)
        last = new.emit("Gather", [rows, self.tables["last_rows"]], {"axis": axis})
        new.insert()
        reader.replace_input_with(list(reader.inputs).index(rows), last)
        return squeeze.outputs[0]

    def only_rows_of(self, value: ir.Value) -> tuple[ir.Node, ir.Value] | None:
        """The node that computes a value, and the only rows it does that of, if nothing else reads them and they lie
        along the same axis."""
        node, tokens = value.producer(), self.decoder.tokens
        if node is None or node.domain == OWN_DOMAIN:
            return None
        given = [v for v in node.inputs if v is not None and row_axis(v, tokens) is not None]
        if len(given) != 1 or len(given[0].uses()) != 1 or given[0].is_graph_input() or given[0].is_graph_output():
            return None
        same = len(dims(given[0])) == len(dims(value)) and row_axis(given[0], tokens) == row_axis(value, tokens)
        return (node, given[0]) if same else None

    def drop_inputs(self) -> None:
        for value in self.decoder.dropped:
            use = next(iter(value.uses()), None)
            if use is not None:
                raise ModelError(
                    f"serve: node '{use.node.name}' ({use.node.op_type}) reads '{value.name}', or asks how long it is, "
                    "for something that is no mask and no row of a position."
                )
            self.graph.inputs.remove(value)


def _new_rows(attention: ir.Node, position: int) -> ir.Value:
    """What the Concat in front of an attention's input puts behind a past."""
    concat = operand(attention, position).producer()
    assert concat is not None
    return operand(concat, 1)
