"""Layout of states of a fixed size in a served decoder: layers of pools, one pool for each shape and type.

Before: LinearAttention and CausalConvWithState, of ai.onnx or com.microsoft, that take a state from an input of the
model and return its next value as an output. After: ServedLinearAttention and ServedCausalConv, which read the state of
each request from its slot of a pool, and update it in place. A pool contains linear attention's states [Hv, D, Dv] as
they are, and for a convolution the last positions [k - 1, C], channels last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ...errors import ModelError
from ...manifest import STATES, StatePool
from ..caches.microsoft_caches import MICROSOFT_DOMAIN
from ..loading.legality import OWN_DOMAIN
from ..rewriting.matching import Rewrite, attribute, dims, operand, read_static_sizes

_PAST, _PRESENT = 3, 1  # input and output of both operators
_LINEAR, _CONVOLUTION = "LinearAttention", "CausalConvWithState"


@dataclass(frozen=True)
class StateLayer:
    """The pool of an operator's states, by name, and their index along its axis of layers."""

    pool: str
    index: int


def is_state_operator(node: ir.Node) -> bool:
    """Return whether the node takes its state from an input of the model and returns it as an output."""
    is_supported = node.op_type in (_LINEAR, _CONVOLUTION) and node.domain in ("", "ai.onnx", MICROSOFT_DOMAIN)
    if not is_supported or len(node.inputs) <= _PAST or len(node.outputs) <= _PRESENT:
        return False
    past = node.inputs[_PAST]
    return past is not None and past.is_graph_input() and node.outputs[_PRESENT].is_graph_output()


def past_state(node: ir.Node) -> ir.Value:
    """Return the input of the model that is the past state of a node."""
    return operand(node, _PAST)


def assign_state_layers(nodes: list[ir.Node]) -> tuple[dict[ir.Node, StateLayer], tuple[StatePool, ...]]:
    """Return the layer of each node's states, and the pools.

    Raises:
        ModelError: Other nodes read the states.
    """
    kinds: dict[tuple[tuple[int, ...], str], list[ir.Node]] = {}
    for node in nodes:
        kinds.setdefault(_read_kind(node), []).append(node)
    layers: dict[ir.Node, StateLayer] = {}
    pools = []
    for pool_index, ((shape, dtype), nodes_of_kind) in enumerate(kinds.items()):
        pools.append(StatePool(f"{STATES}_{pool_index}" if pool_index else STATES, len(nodes_of_kind), shape, dtype))
        layers |= {node: StateLayer(pools[-1].name, index) for index, node in enumerate(nodes_of_kind)}
    return layers, tuple(pools)


def _read_kind(node: ir.Node) -> tuple[tuple[int, ...], str]:
    """Return the shape of a state in a pool, and its type."""
    past, present = past_state(node), node.outputs[_PRESENT]
    shape = read_static_sizes(dims(past)[1:])
    if len(past.uses()) > 1 or present.uses() or shape is None or past.dtype is None:
        raise ModelError(
            "serve.state_unsupported",
            f"serve: the state '{past.name}' of node '{node.name}' ({node.op_type}) has no static size and type, or "
            "another node reads it or its next value.",
        )
    has_channels_first = node.op_type == _CONVOLUTION and not attribute(node, "channels_last", 0)
    return tuple(reversed(shape) if has_channels_first else shape), past.dtype.numpy().name


def serve_state(
    node: ir.Node, layer: StateLayer, tables: Mapping[str, ir.Value], slots: ir.Value, states: ir.Value
) -> ir.Value:
    """Replace a node by the served operator, and return the pool after it.

    Args:
        tables: The outputs of PackedRequests, by name.
        slots: The slot of each request.
        states: The pool before the node.
    """
    data, row_tables = list(node.inputs[:_PAST]), [tables[name] for name in ("first_rows", "row_counts", "past")]
    if node.op_type == _LINEAR:
        inputs = [*data, *row_tables, slots, states, *node.inputs[_PAST + 1 :]]
    else:
        inputs = [*data[:2], tables["row_requests"], *row_tables, slots, states, *data[2:]]
    attributes = {name: stored.value for name, stored in node.attributes.items()}
    operator = "ServedLinearAttention" if node.op_type == _LINEAR else "ServedCausalConv"
    attributes["layer"], likes = layer.index, (node.outputs[0], states)
    new = Rewrite(node)
    y, updated = new.emit_node(operator, inputs, attributes, likes, domain=OWN_DOMAIN, name=node.name)
    new.replace([node], node.outputs[0], y)
    return updated
