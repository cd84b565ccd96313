"""What depends on an encoder's output alone becomes a model of its own, the setup, which runs once per sequence.

Before: a decoder that takes the encoder's output at every step, and multiplies it by the weights of cross attention in
every layer again. After: the setup takes the encoder's output and gives keys and values [B, H, E, D]; the decoder takes
those in its place, under the same names.

The cut goes through the values that matmuls of the encoder's output lead to, and that nodes read which depend on
tokens, the past or positions; and through keys and values of attention, however they are made. What else depends on
the encoder alone and needs no matmul, such as a mask of its padding, stays in the decoder. Cross attention that has no
mask gets the number of keys of each sequence as an input (SOURCE_LENGTHS), so that sources of different lengths may
share a batch; the setup gives the number of all keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import onnx_ir as ir
from onnx_ir.passes import common

from ..fusion.attention_node import is_attention
from ..fusion.matching import Rewrite, Size, attribute, dims, is_op, operand, remove_unused
from ..fusion.sizes import InferSizesPass
from ..manifest import SOURCE_LENGTHS
from .cache_forms import LENGTH_AXIS, MASK, NONPAD, K, V, split_heads, use_opset_24
from .random_seed import RANDOM

_MATMULS = (
    "Attention", "Conv", "DynamicQuantizeMatMul", "Einsum", "Gemm", "MatMul", "MatMulBnb4", "MatMulInteger",
    "MatMulNBits", "QLinearMatMul",
)  # fmt: skip
_FLAT_ATTENTION = ("q_num_heads", "kv_num_heads")


@dataclass(frozen=True)
class Setup:
    """A model that runs once per sequence. donated: output by input, of pools that it writes."""

    model: ir.Model
    donated: dict[str, str] = field(default_factory=dict)


class _Kind(IntEnum):
    """What a value depends on, besides weights; the largest kind of a node's inputs is that of its outputs."""

    CONSTANT = 0
    SOURCE = 1
    CALL = 2  # tokens, the past or positions


def split_setup(model: ir.Model, called: Collection[str]) -> ir.Model | None:
    """Take the setup out of a decoder and return it; None where there is nothing to compute once.

    Outputs other than the first that are the same in every call, such as keys and values of cross attention that are
    passed on, leave the decoder in any case: it would copy them at every step.

    Args:
        model: The decoder, rewritten in place. The setup's outputs are inputs of it, by name, or were outputs of it.
        called: Names of the inputs that change from call to call: tokens, masks, positions, caches, states.
    """
    sources = _sources(model.graph, called)
    if not sources:
        return None
    InferSizesPass()(model)
    _split_cross_attention(model.graph, sources)
    _read_sizes_of(model.graph, sources)
    kinds = _kinds(model.graph, sources)
    made = _made_by_products(model.graph, kinds)
    kept = list(_kept(model.graph, made))
    given = [*kept, *(value for value in model.graph.outputs if value in made and value not in kept)]
    outputs = [value for value in model.graph.outputs[1:] if kinds[value] != _Kind.SOURCE]
    if not kept:
        model.graph.outputs[1:] = outputs
        return None
    _name(model.graph, kept)
    lengths = _count_keys(model, kept)
    setup = _setup_of(model, [str(value.name) for value in [*given, *lengths]])
    model.graph.outputs[1:] = outputs
    _give_as_inputs(model, [*kept, *lengths])
    return setup


def _sources(graph: ir.Graph, called: Collection[str]) -> list[ir.Value]:
    """Return the inputs that are the same in every call; one that has as many rows as there are tokens is not."""
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    batches = {size for value in inputs for size in dims(value)[:1]}
    own = {size for value in inputs if value.name in called for size in dims(value) if isinstance(size, ir.SymbolicDim)}
    return [value for value in inputs if value.name not in called and not (own - batches) & set(dims(value))]


def _kinds(graph: ir.Graph, sources: Collection[ir.Value]) -> dict[ir.Value, _Kind]:
    kinds = dict.fromkeys(graph.initializers.values(), _Kind.CONSTANT)
    kinds |= dict.fromkeys([value for value in graph.inputs if value not in kinds], _Kind.CALL)
    kinds |= dict.fromkeys(sources, _Kind.SOURCE)
    for node in graph:
        has_bodies = any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())
        kind = max((kinds[value] for value in node.inputs if value is not None), default=_Kind.CONSTANT)
        kind = _Kind.CALL if has_bodies or node.op_type in RANDOM else kind
        kinds |= dict.fromkeys(node.outputs, kind)
    return kinds


def _made_by_products(graph: ir.Graph, kinds: dict[ir.Value, _Kind]) -> dict[ir.Value, None]:
    """Return the values that depend on sources alone, by way of a matmul or as keys and values for tokens."""
    made: dict[ir.Value, None] = {}
    attended = {
        operand(node, place)
        for node in graph
        for place in (K, V)
        if is_attention(node) and kinds[node.outputs[0]] == _Kind.CALL
    }
    for node in graph:
        if kinds[node.outputs[0]] != _Kind.SOURCE or is_op(node, "Shape", "Size"):
            continue
        is_matmul = node.op_type in _MATMULS or node.outputs[0] in attended
        if is_matmul or any(value in made for value in node.inputs):
            made |= dict.fromkeys(node.outputs)
    return made


def _kept(graph: ir.Graph, made: Collection[ir.Value]) -> Iterator[ir.Value]:
    for value in made:
        if any(node.outputs[0] not in made for node, _ in value.uses()):
            yield value


def _split_cross_attention(graph: ir.Graph, sources: Collection[ir.Value]) -> None:
    """Give attention over an encoder's keys and values these with their heads apart, and no outputs but Y.

    Without a past, present keys and values are the keys and values themselves.
    """
    kinds = _kinds(graph, sources)
    for node in [node for node in graph if is_op(node, "Attention")]:
        q, k, v = (operand(node, place) for place in range(3))
        pasts = [value for value in node.inputs[4:6] if value is not None]
        is_cross = kinds[k] == kinds[v] == _Kind.SOURCE and not pasts
        if not is_cross or any(value.uses() or value.is_graph_output() for value in node.outputs[3:]):
            continue
        if len(dims(k)) == 3 and all(isinstance(dims(value)[-1], int) for value in (q, k, v)):
            k, v = _split(node, q, k, v)
        elif len(dims(k)) != 4:
            continue
        for present, value in zip(node.outputs[1:3], (k, v)):
            is_output = present.is_graph_output()
            present.replace_all_uses_with(value, replace_graph_outputs=True)
            if is_output:
                value.name, present.name = present.name, None
        node.resize_outputs(1)
        remove_unused([node])


def _split(node: ir.Node, q: ir.Value, k: ir.Value, v: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Replace Y of an attention over [B, S, H * D] by that of one over [B, H, S, D]; return its keys and values."""
    new = Rewrite(node)
    heads = [attribute(node, name, 1) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
    rows = [
        split_heads(new, value, count, size // count)
        for value, count in zip((q, k, v), heads)
        if isinstance(size := dims(value)[-1], int)
    ]
    attributes = {name: given.value for name, given in node.attributes.items() if name not in _FLAT_ATTENTION}
    y = new.emit("Attention", [*rows, *node.inputs[3:]], attributes, shape=[*dims(rows[0])[:3], dims(rows[2])[3]])
    y = new.transpose(y, (0, 2, 1, 3))
    y = new.emit("Reshape", [y, new.integers(0, 0, -1)], shape=dims(node.outputs[0]))
    new.replace([], node.outputs[0], y)
    return rows[1], rows[2]


def _read_sizes_of(graph: ir.Graph, providers: Sequence[ir.Value]) -> None:
    """Have each Shape ask the providers for its sizes, where they have all of them."""
    places: dict[Size, tuple[ir.Value, int]] = {}
    for provider in providers:
        for axis, size in enumerate(dims(provider)):
            if isinstance(size, ir.SymbolicDim):
                places.setdefault(size, (provider, axis))
    for node in [node for node in graph if is_op(node, "Shape")]:
        value = operand(node, 0)
        start, end, _ = slice(attribute(node, "start", 0), attribute(node, "end", None)).indices(len(dims(value)))
        sizes = dims(value)[start:end]
        if value in providers or not sizes or any(size not in places and not isinstance(size, int) for size in sizes):
            continue
        new = Rewrite(node)
        parts = []
        for size in sizes:
            if isinstance(size, int):
                parts.append(new.integers(size))
                continue
            provider, axis = places[size]
            parts.append(new.emit("Shape", [provider], {"start": axis, "end": axis + 1}, ir.DataType.INT64, [1]))
        new.replace([node], node.outputs[0], new.emit("Concat", parts, {"axis": 0}, shape=[len(parts)]))


def _name(graph: ir.Graph, kept: Iterable[ir.Value]) -> None:
    """Name what is kept `setup.N`, but for outputs of the model, which keep their names."""
    taken = {value.name for value in graph.inputs}
    free = (name for k in range(len(taken) + 10**6) if (name := f"setup.{k}") not in taken)
    for value in kept:
        if not value.is_graph_output():
            value.name = next(free)


def _count_keys(model: ir.Model, kept: Collection[ir.Value]) -> list[ir.Value]:
    """Let attention over kept keys and values without a mask read SOURCE_LENGTHS; return that value, if there is any.

    In the setup it is the number of all keys.
    """
    graph = model.graph
    readers = [node for node in graph if is_op(node, "Attention") and _reads_all_keys(node, kept)]
    lengths = {dims(operand(node, 1))[LENGTH_AXIS] for node in readers}
    if len(lengths) != 1 or any(value.name == SOURCE_LENGTHS for value in graph.inputs):
        return []
    use_opset_24(model)
    new = Rewrite(readers[0])
    key = operand(readers[0], 1)
    count = new.emit("Shape", [key], {"start": LENGTH_AXIS, "end": LENGTH_AXIS + 1}, ir.DataType.INT64, [1])
    batch = new.emit("Shape", [key], {"start": 0, "end": 1}, ir.DataType.INT64, [1])
    value = new.emit("Expand", [count, batch], shape=dims(key)[:1])
    value.name = SOURCE_LENGTHS
    new.insert()
    for node in readers:
        node.resize_inputs(max(len(node.inputs), NONPAD + 1))
        node.replace_input_with(NONPAD, value)
    return [value]


def _reads_all_keys(node: ir.Node, kept: Collection[ir.Value]) -> bool:
    has_more = any(value is not None for value in node.inputs[MASK:])
    is_aligned = attribute(node, "is_causal", 0) == 1 or attribute(node, "left_window_size", -1) != -1
    both = operand(node, 1) in kept and operand(node, 2) in kept
    return both and not has_more and not is_aligned and len(dims(operand(node, 1))) == 4


def _setup_of(model: ir.Model, names: Collection[str]) -> ir.Model:
    """Return a model of those values."""
    setup = model.clone()
    values = {value.name: value for node in setup.graph for value in node.outputs}
    setup.graph.outputs[:] = [values[name] for name in names]
    _remove_unused(setup)
    return setup


def _give_as_inputs(model: ir.Model, values: Sequence[ir.Value]) -> None:
    """Make values inputs of the model."""
    graph = model.graph
    inputs = []
    for value in values:
        given = ir.Value(name=value.name, type=value.type, shape=value.shape)
        value.name = None
        value.replace_all_uses_with(given)
        inputs.append(given)
    graph.inputs.extend(inputs)
    common.RemoveUnusedNodesPass()(model)
    read = [value for value in graph.inputs if any(not is_op(node, "Shape") for node, _ in value.uses())]
    _read_sizes_of(graph, read)
    _remove_unused(model)


def _remove_unused(model: ir.Model) -> None:
    common.RemoveUnusedNodesPass()(model)
    outputs = set(model.graph.outputs)
    for value in list(model.graph.inputs):
        if not value.uses() and value not in outputs:
            model.graph.inputs.remove(value)
