"""Split of the nodes that depend on an encoder's output alone into a setup model, which runs once per sequence.

Before: a decoder that takes the encoder's output at every step, and multiplies it by the weights of cross attention in
every layer again. After: the setup takes the encoder's output and returns keys and values [B, H, E, D]; the decoder
takes those instead, under the same names.

The boundary contains values that depend on a matmul of the encoder's output and that nodes of a call read. Nodes of a
call depend on tokens, the past or positions. It also contains all keys and values of attention. Other values that
depend on the encoder alone and need no matmul, such as a mask of its padding, stay in the decoder. Cross attention
without a mask gets the number of keys of each sequence as an input (SOURCE_LENGTHS), so that sources of different
lengths may share a batch; the setup returns the number of all keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import onnx_ir as ir
from onnx_ir.passes import common

from ...manifest import SOURCE_LENGTHS
from ..loading.legality import has_bodies
from ..options.random_seed import RANDOM
from ..rewriting.attention_node import is_attention
from ..rewriting.matching import Rewrite, Size, attribute, dims, is_op, operand, remove_unused, replace_value
from ..rewriting.sizes import InferSizesPass
from .cache_forms import LENGTH_AXIS, MASK, NONPAD, K, V, split_heads, use_opset_24

_MATMULS = (
    "Attention", "Conv", "DynamicQuantizeMatMul", "Einsum", "Gemm", "MatMul", "MatMulBnb4", "MatMulInteger",
    "MatMulNBits", "QLinearMatMul",
)  # fmt: skip
_FLAT_ATTENTION = ("q_num_heads", "kv_num_heads")


@dataclass(frozen=True)
class Setup:
    """A model that runs once per sequence, and its donated pools.

    donated: output by input, for the pools that it writes.
    """

    model: ir.Model
    donated: dict[str, str] = field(default_factory=dict)


class _Dependence(IntEnum):
    """The inputs that a value depends on, apart from weights.

    The largest value of a node's inputs is that of its outputs.
    """

    CONSTANT = 0
    SOURCE = 1
    CALL = 2  # tokens, the past or positions


def split_setup(model: ir.Model, called: Collection[str]) -> ir.Model | None:
    """Remove the setup from a decoder and return it; None if nothing can be computed once.

    Outputs other than the first that are the same in every call, such as keys and values of cross attention that are
    passed on, leave the decoder in any case: it would copy them at every step.

    Args:
        model: The decoder, rewritten in place. The setup's outputs are inputs of it, by name, or were outputs of it.
        called: Names of the inputs that change from call to call: tokens, masks, positions, caches, states.
    """
    sources = _find_sources(model.graph, called)
    if not sources:
        return None
    InferSizesPass()(model)
    _split_cross_attention(model.graph, sources)
    _redirect_shapes(model.graph, sources)
    kinds = _find_dependences(model.graph, sources)
    computed = _find_matmul_results(model.graph, kinds)
    boundary = list(_iterate_boundary(model.graph, computed))
    setup_outputs = [
        *boundary,
        *(value for value in model.graph.outputs if value in computed and value not in boundary),
    ]
    outputs = [value for value in model.graph.outputs[1:] if kinds[value] != _Dependence.SOURCE]
    if not boundary:
        model.graph.outputs[1:] = outputs
        return None
    _name_values(model.graph, boundary)
    lengths = _count_keys(model, boundary)
    setup = _extract_setup(model, [str(value.name) for value in [*setup_outputs, *lengths]])
    model.graph.outputs[1:] = outputs
    _make_inputs(model, [*boundary, *lengths])
    return setup


def _find_sources(graph: ir.Graph, called: Collection[str]) -> list[ir.Value]:
    """Return the inputs that are the same in every call.

    An input with as many rows as there are tokens is not among them.
    """
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    batches = {size for value in inputs for size in dims(value)[:1]}
    call_sizes = {
        size for value in inputs if value.name in called for size in dims(value) if isinstance(size, ir.SymbolicDim)
    }
    return [value for value in inputs if value.name not in called and not (call_sizes - batches) & set(dims(value))]


def _find_dependences(graph: ir.Graph, sources: Collection[ir.Value]) -> dict[ir.Value, _Dependence]:
    kinds = dict.fromkeys(graph.initializers.values(), _Dependence.CONSTANT)
    kinds |= dict.fromkeys([value for value in graph.inputs if value not in kinds], _Dependence.CALL)
    kinds |= dict.fromkeys(sources, _Dependence.SOURCE)
    for node in graph:
        kind = max((kinds[value] for value in node.inputs if value is not None), default=_Dependence.CONSTANT)
        kind = _Dependence.CALL if has_bodies(node) or node.op_type in RANDOM else kind
        kinds |= dict.fromkeys(node.outputs, kind)
    return kinds


def _find_matmul_results(graph: ir.Graph, kinds: dict[ir.Value, _Dependence]) -> dict[ir.Value, None]:
    """Return the values that depend on sources alone, by way of a matmul or as keys and values for tokens."""
    computed: dict[ir.Value, None] = {}
    attended = {
        operand(node, position)
        for node in graph
        for position in (K, V)
        if is_attention(node) and kinds[node.outputs[0]] == _Dependence.CALL
    }
    for node in graph:
        if kinds[node.outputs[0]] != _Dependence.SOURCE or is_op(node, "Shape", "Size"):
            continue
        is_matmul = node.op_type in _MATMULS or node.outputs[0] in attended
        if is_matmul or any(value in computed for value in node.inputs):
            computed |= dict.fromkeys(node.outputs)
    return computed


def _iterate_boundary(graph: ir.Graph, computed: Collection[ir.Value]) -> Iterator[ir.Value]:
    for value in computed:
        if any(node.outputs[0] not in computed for node, _ in value.uses()):
            yield value


def _split_cross_attention(graph: ir.Graph, sources: Collection[ir.Value]) -> None:
    """Split the heads of keys and values in attention over an encoder, and drop its outputs but Y.

    Without a past, present keys and values are the keys and values themselves.
    """
    kinds = _find_dependences(graph, sources)
    for node in [node for node in graph if is_op(node, "Attention")]:
        q, k, v = (operand(node, position) for position in range(3))
        pasts = [value for value in node.inputs[4:6] if value is not None]
        is_cross = kinds[k] == kinds[v] == _Dependence.SOURCE and not pasts
        if not is_cross or any(value.uses() or value.is_graph_output() for value in node.outputs[3:]):
            continue
        if len(dims(k)) == 3 and all(isinstance(dims(value)[-1], int) for value in (q, k, v)):
            k, v = _split_heads_of_attention(node, q, k, v)
        elif len(dims(k)) != 4:
            continue
        for present, value in zip(node.outputs[1:3], (k, v)):
            if present.is_graph_output():
                replace_value(present, value)
            else:
                present.replace_all_uses_with(value)
        node.resize_outputs(1)
        remove_unused([node])


def _split_heads_of_attention(node: ir.Node, q: ir.Value, k: ir.Value, v: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Replace Y of an attention over [B, S, H * D] by that over [B, H, S, D]; return its keys and values."""
    new = Rewrite(node)
    heads = [attribute(node, name, 1) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
    rows = [
        split_heads(new, value, count, size // count)
        for value, count in zip((q, k, v), heads)
        if isinstance(size := dims(value)[-1], int)
    ]
    attributes = {name: stored.value for name, stored in node.attributes.items() if name not in _FLAT_ATTENTION}
    y = new.emit("Attention", [*rows, *node.inputs[3:]], attributes, shape=[*dims(rows[0])[:3], dims(rows[2])[3]])
    y = new.emit_transpose(y, (0, 2, 1, 3))
    y = new.emit("Reshape", [y, new.emit_integers(0, 0, -1)], shape=dims(node.outputs[0]))
    new.replace([], node.outputs[0], y)
    return rows[1], rows[2]


def _redirect_shapes(graph: ir.Graph, providers: Sequence[ir.Value]) -> None:
    """Let each Shape read its sizes from the providers, if they have all of them."""
    axes_by_size: dict[Size, tuple[ir.Value, int]] = {}
    for provider in providers:
        for axis, size in enumerate(dims(provider)):
            if isinstance(size, ir.SymbolicDim):
                axes_by_size.setdefault(size, (provider, axis))
    for node in [node for node in graph if is_op(node, "Shape")]:
        value = operand(node, 0)
        start, end, _ = slice(attribute(node, "start", 0), attribute(node, "end", None)).indices(len(dims(value)))
        sizes = dims(value)[start:end]
        if (
            value in providers
            or not sizes
            or any(size not in axes_by_size and not isinstance(size, int) for size in sizes)
        ):
            continue
        new = Rewrite(node)
        parts = [size if isinstance(size, int) else new.emit_size(*axes_by_size[size]) for size in sizes]
        new.replace([node], node.outputs[0], new.emit_shape(parts))


def _name_values(graph: ir.Graph, boundary: Iterable[ir.Value]) -> None:
    """Name the boundary `setup.N`, except for outputs of the model, which keep their names."""
    taken = {value.name for value in graph.inputs}
    free = (name for k in range(len(taken) + 10**6) if (name := f"setup.{k}") not in taken)
    for value in boundary:
        if not value.is_graph_output():
            value.name = next(free)


def _count_keys(model: ir.Model, boundary: Collection[ir.Value]) -> list[ir.Value]:
    """Let attention over boundary keys and values without a mask read SOURCE_LENGTHS.

    Return that value, if there is any. In the setup it is the number of all keys.
    """
    graph = model.graph
    readers = [node for node in graph if is_op(node, "Attention") and _is_read_of_all_keys(node, boundary)]
    lengths = {dims(operand(node, 1))[LENGTH_AXIS] for node in readers}
    if len(lengths) != 1 or any(value.name == SOURCE_LENGTHS for value in graph.inputs):
        return []
    use_opset_24(model)
    new = Rewrite(readers[0])
    key = operand(readers[0], 1)
    count = new.emit_size(key, LENGTH_AXIS)
    value = new.emit("Expand", [count, new.emit_size(key, 0)], shape=dims(key)[:1])
    value.name = SOURCE_LENGTHS
    new.insert()
    for node in readers:
        node.resize_inputs(max(len(node.inputs), NONPAD + 1))
        node.replace_input_with(NONPAD, value)
    return [value]


def _is_read_of_all_keys(node: ir.Node, boundary: Collection[ir.Value]) -> bool:
    has_more = any(value is not None for value in node.inputs[MASK:])
    is_aligned = attribute(node, "is_causal", 0) == 1 or attribute(node, "left_window_size", -1) != -1
    are_in_boundary = operand(node, 1) in boundary and operand(node, 2) in boundary
    return are_in_boundary and not has_more and not is_aligned and len(dims(operand(node, 1))) == 4


def _extract_setup(model: ir.Model, names: Collection[str]) -> ir.Model:
    """Return a model that computes only those values."""
    setup = model.clone()
    values = {value.name: value for node in setup.graph for value in node.outputs}
    setup.graph.outputs[:] = [values[name] for name in names]
    _remove_unused(setup)
    return setup


def _make_inputs(model: ir.Model, values: Sequence[ir.Value]) -> None:
    """Make values inputs of the model."""
    graph = model.graph
    inputs = []
    for value in values:
        replacement = ir.Value(name=value.name, type=value.type, shape=value.shape)
        value.name = None
        value.replace_all_uses_with(replacement)
        inputs.append(replacement)
    graph.inputs.extend(inputs)
    common.RemoveUnusedNodesPass()(model)
    read = [value for value in graph.inputs if any(not is_op(node, "Shape") for node, _ in value.uses())]
    _redirect_shapes(graph, read)
    _remove_unused(model)


def _remove_unused(model: ir.Model) -> None:
    common.RemoveUnusedNodesPass()(model)
    outputs = set(model.graph.outputs)
    for value in list(model.graph.inputs):
        if not value.uses() and value not in outputs:
            model.graph.inputs.remove(value)
