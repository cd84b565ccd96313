"""Decoders with growing caches become decoders over a paged cache, for packed tokens of many requests.

An exported decoder takes token ids [B, S], past keys and values of each layer, and what tells positions; it computes
its masks and angles itself. Served, it takes the tokens of all requests side by side as one row of ids [1, N], tables
that say which request has which of them, and one pool of blocks of keys and values. What depends on positions alone is
computed now, for all positions up to the context, and looked up by token (positions.py); masks become what they say
(mask_patterns.py); attention becomes ServedAttention, which appends to the pool and reads it. Everything else must
compute each token by itself (row_wise.py). The first output is that of each request's last token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ..errors import InputError, ModelError
from ..fusion.matching import Rewrite, Size, attribute, dims, is_op, numbers, operand
from ..fusion.sizes import InferSizesPass
from ..manifest import BLOCK_TABLE, CACHE, PAST_LENGTHS, ROW_STARTS, SCALE, ServedCache
from .legality import OWN_DOMAIN
from .mask_patterns import Pattern, patterns_of
from .positions import Positions, rows_by_position
from .row_wise import check_row_wise, row_axis
from .serve import Serve
from .static_cache import grows

_K, _V, _MASK = 1, 2, 3  # inputs of Attention


@dataclass(frozen=True)
class Served:
    """What the model has become: the pool, and by consumed input the output that takes its memory."""

    cache: ServedCache
    donated: dict[str, str]


def batch_of(model: ir.Model, serve: Serve) -> str | None:
    """The name of the batch dimension, None if it is 1. Raises InputError where there are no such token ids, ModelError
    for a decoder of another form."""
    ids = next((value for value in model.graph.inputs if value.name == serve.ids), None)
    if ids is None or len(dims(ids)) != 2:
        names = ", ".join(str(value.name) for value in model.graph.inputs)
        raise InputError(
            f"serve: there is no input '{serve.ids}' [batch, tokens] for token ids. The inputs are {names}."
        )
    batch, tokens = dims(ids)
    if isinstance(tokens, int) or (isinstance(batch, int) and batch != 1):
        raise ModelError(
            f"serve: '{serve.ids}' is {[str(batch), str(tokens)]}: export the model with any number of tokens, and "
            "with any number of sequences or with one."
        )
    return None if isinstance(batch, int) else batch.value


def serve_decoder(model: ir.Model, serve: Serve) -> Served:
    """Rewrites a model of batch 1 that `fuse` has been through. Raises ModelError where it cannot be served."""
    InferSizesPass()(model)
    decoder = _decoder_of(model, serve)
    positions, readers = decoder.positions, [n for n in model.graph if decoder.positions.of_data(n)]
    others = [node for node in readers if node not in decoder.attentions and node not in decoder.grown]
    check_row_wise(others, decoder.tokens)
    masks = list(dict.fromkeys(operand(node, _MASK) for node in decoder.attentions))
    patterns = patterns_of(positions, masks, serve.context)
    read = dict.fromkeys(v for node in others for v in node.inputs if v is not None and v in positions)
    rows = rows_by_position(positions, list(read), serve.context)
    return _Rewriting(model, decoder, serve.context).run(patterns, rows)


@dataclass(frozen=True)
class _Decoder:
    """The parts of a decoder: `grown` are the nodes that make the caches longer, `dropped` the inputs that a served one
    does without, `tokens` is the size of the axis over tokens."""

    ids: ir.Value
    tokens: Size
    position_ids: ir.Value | None
    dropped: list[ir.Value]
    grown: list[ir.Node]
    attentions: list[ir.Node]
    positions: Positions
    cache: ServedCache
    cache_type: ir.DataType


def _decoder_of(model: ir.Model, serve: Serve) -> _Decoder:
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    ids, mask, position_ids = inputs[serve.ids], inputs.get(serve.mask), inputs.get(serve.positions)
    grown = [node for node in graph if grows(node)]
    if not grown:
        raise ModelError(
            "serve: no output of the model is the Concat of a past input [batch, heads, length, size] and new rows "
            "along axis 2. Export the model with past_key_values as inputs and outputs."
        )
    pasts = [operand(node, 0) for node in grown]
    dropped = [value for value in (*pasts, mask, position_ids) if value is not None]
    others = [value.name for value in graph.inputs if value is not ids and value not in dropped]
    if others:
        raise ModelError(f"serve: the model has an input '{others[0]}' beside tokens, mask, positions and caches.")
    shapes = {(dims(past)[1], dims(past)[3]) for past in pasts}
    shape = numbers(shapes.pop()) if len(shapes) == 1 else None
    element = pasts[0].dtype
    if shape is None or element is None:
        raise ModelError("serve: the caches of the layers differ in their heads or their size, or do not tell it.")
    positions = Positions(model, ids, mask, position_ids, pasts)
    attentions = [node for node in graph if is_op(node, "Attention") and positions.of_data(node)]
    for node in attentions:
        _check_attention(node, grown, positions)
    read = {operand(node, k).producer() for node in attentions for k in (_K, _V)}
    if len(grown) != 2 * len(attentions) or read != {*grown}:
        raise ModelError("serve: the model's caches are not each read by one attention, as its keys or its values.")
    codes = serve.cache == "int8"
    cache_type = ir.DataType.INT8 if codes else element
    cache = ServedCache(
        context=serve.context,
        tokens_per_block=serve.tokens_per_block,
        layers=len(attentions),
        kv_heads=shape[0],
        head_dim=shape[1],
        dtype=cache_type.numpy().name,
        scales=1 if codes else 0,
        ids=serve.ids,
    )
    return _Decoder(ids, dims(ids)[1], position_ids, dropped, grown, attentions, positions, cache, cache_type)


def _check_attention(node: ir.Node, grown: list[ir.Node], positions: Positions) -> None:
    ours = all(operand(node, k).producer() in grown for k in (_K, _V))
    more = any(value is not None for value in node.inputs[_MASK + 1 :])
    extra = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    sided = any(attribute(node, f"{side}_window_size", -1) != -1 for side in ("left", "right"))
    if not ours or more or extra or sided or attribute(node, "is_causal", 0):
        raise ModelError(
            f"serve: node '{node.name}' (Attention) is not over one growing cache of keys and one of values, with all "
            "that it may see said by its mask."
        )
    mask = node.inputs[_MASK] if len(node.inputs) > _MASK else None
    if mask is None or mask not in positions:
        raise ModelError(
            f"serve: node '{node.name}' (Attention) has {'no mask' if mask is None else 'a mask made of data'}: its "
            "tokens would see later ones of their request."
        )


class _Rewriting:
    """New inputs, and what becomes of the nodes that read the old ones."""

    def __init__(self, model: ir.Model, decoder: _Decoder, context: int) -> None:
        self.model, self.graph, self.decoder, self.context = model, model.graph, decoder, context
        cache, int64 = decoder.cache, ir.DataType.INT64
        requests, columns, blocks = (ir.SymbolicDim(name) for name in ("requests", "columns", "blocks"))
        front: list[Size] = [blocks, cache.layers, 2, cache.kv_heads, cache.tokens_per_block]
        tables = {ROW_STARTS: [ir.SymbolicDim("row_starts_0")], PAST_LENGTHS: [requests]}
        tables |= {BLOCK_TABLE: [requests, columns]}
        given = [self.input(name, int64, shape) for name, shape in tables.items()]
        self.kv = self.input(CACHE, decoder.cache_type, [*front, cache.head_dim])
        self.scale = self.input(SCALE, ir.DataType.FLOAT, [*front, cache.scales]) if cache.scales else None
        packed = ir.node(
            "PackedRequests", [decoder.ids, *given, self.kv], {"context": context}, domain=OWN_DOMAIN, num_outputs=9,
            name="packed_requests",
        )  # fmt: skip
        for output in packed.outputs:
            output.type = ir.TensorType(int64)
        self.graph.insert_before(next(iter(self.graph)), packed)
        self.token_positions, self.last_rows, *self.tables = packed.outputs
        self.token_positions.shape = ir.Shape([decoder.tokens])

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[Size]) -> ir.Value:
        if any(value.name == name for value in self.graph.inputs):
            raise ModelError(f"serve: the model has an input '{name}' already.")
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def run(self, patterns: dict[ir.Value, Pattern], rows: dict[ir.Value, tuple[np.ndarray, int]]) -> Served:
        kv, scale = self.kv, self.scale
        for layer, node in enumerate(self.decoder.attentions):
            kv, scale = self.serve_attention(node, layer, patterns[operand(node, _MASK)], kv, scale)
        for value, (table, axis) in rows.items():
            self.look_up(value, table, axis)
        self.fix_sizes()
        updated = {CACHE: kv} | ({SCALE: scale} if scale is not None else {})
        donated = {name: f"{name}_updated" for name in updated}
        for name, value in updated.items():
            value.name = donated[name]
        outputs = [self.of_last_tokens(self.graph.outputs[0]), *updated.values()]
        self.graph.outputs.clear()
        self.graph.outputs.extend(outputs)
        common.CommonSubexpressionEliminationPass()(self.model)
        common.RemoveUnusedNodesPass()(self.model)
        self.drop_inputs()
        self.model.opset_imports[OWN_DOMAIN] = 1
        return Served(self.decoder.cache, donated)

    def serve_attention(
        self, node: ir.Node, layer: int, pattern: Pattern, kv: ir.Value, scale: ir.Value | None
    ) -> tuple[ir.Value, ir.Value | None]:
        """ServedAttention in place of the node; answers with the cache and its scales behind it."""
        attributes: dict[str, float | int | str] = {
            "scale": attribute(node, "scale", 1 / math.sqrt(self.decoder.cache.head_dim)),
            "softcap": attribute(node, "softcap", 0.0), "layer": layer, "context": self.context,
            "left_window_size": -1 if pattern.left is None else pattern.left,
        }  # fmt: skip
        new, bias = Rewrite(node), None
        if pattern.bias is not None:
            bias, attributes["bias_by"] = new.constant(pattern.bias, ir.DataType.FLOAT), pattern.by
        inputs = [operand(node, 0), _new_rows(node, _K), _new_rows(node, _V), *self.tables, kv, scale, bias]
        served = ir.node("ServedAttention", inputs, attributes, domain=OWN_DOMAIN, num_outputs=3, name=node.name)
        new.nodes.append(served)
        y, after, scales = served.outputs
        for output, source in ((y, node.outputs[0]), (after, kv), (scales, scale)):
            if source is not None:
                output.type, output.shape = source.type, source.shape
        new.replace([node], node.outputs[0], y)
        return after, None if scale is None else scales

    def look_up(self, value: ir.Value, table: np.ndarray, axis: int) -> None:
        """Rows of a table for all positions in place of those computed for consecutive positions of one sequence."""
        readers = [use for use in value.uses() if self.decoder.positions.of_data(use.node)]
        order = {node: k for k, node in enumerate(self.graph)}
        new = Rewrite(min((use.node for use in readers), key=order.__getitem__))
        assert value.dtype is not None
        rows = new.emit("Gather", [new.constant(table, value.dtype), self.token_positions], {"axis": axis})
        rows.shape = ir.Shape([self.decoder.tokens if k == axis else size for k, size in enumerate(table.shape)])
        new.insert()
        for reader, index in readers:
            reader.replace_input_with(index, rows)

    def fix_sizes(self) -> None:
        """The sizes of what is no input any more, where they are known: the others nobody may ask for."""
        for node in [n for n in self.graph if is_op(n, "Shape") and operand(n, 0) in self.decoder.dropped]:
            value = operand(node, 0)
            sizes = numbers(dims(value)[attribute(node, "start", 0) : attribute(node, "end", None)])
            if sizes is not None:
                new = Rewrite(node)
                new.replace([node], node.outputs[0], new.integers(*sizes))
            elif value is self.decoder.position_ids:
                node.replace_input_with(0, self.decoder.ids)

    def of_last_tokens(self, result: ir.Value) -> ir.Value:
        """A result [1, N, ...] of the last token of each request alone: [R, ...], under its name. So is what only that
        needs."""
        name, result.name = result.name, f"{result.name}_of_last_tokens"
        front = ir.node("Constant", [], {"value": ir.tensor(np.array([0], np.int64))}, name="last_rows/front")
        squeeze = ir.node("Squeeze", [result, front.outputs[0]], name="last_rows")
        front.outputs[0].type, squeeze.outputs[0].type = self.last_rows.type, result.type
        squeeze.outputs[0].name = name
        self.graph.extend([front, squeeze])
        reader, rows = squeeze, result
        while (before := self.only_rows_of(rows)) is not None:
            reader, rows = before
        axis = row_axis(rows, self.decoder.tokens)
        if axis is None:
            raise ModelError(f"serve: the first output, '{name}', has no row for each token.")
        new = Rewrite(reader)
        last = new.emit("Gather", [rows, self.last_rows], {"axis": axis})
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
