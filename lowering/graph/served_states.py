"""Where a served decoder keeps states of a fixed size: layers of pools, one pool for each shape and type.

Before: LinearAttention and CausalConvWithState, of ai.onnx or com.microsoft, that take a state from an input of the
model and give its next value to an output. After: ServedLinearAttention and ServedCausalConv, which find the state of
each request in its slot of a pool, and carry it on in place. A pool holds linear attention's states [Hv, D, Dv] as they
are, and of a convolution the last places [k - 1, C], channels last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ..errors import ModelError
from ..fusion.matching import Rewrite, attribute, dims, numbers, operand
from ..manifest import STATES, StatePool
from .legality import OWN_DOMAIN
from .microsoft_caches import DOMAIN

_PAST, _PRESENT = 3, 1  # input and output of both operators
_LINEAR, _CONVOLUTION = "LinearAttention", "CausalConvWithState"


@dataclass(frozen=True)
class StateLayer:
    """The name of the pool that holds an operator's states, and their place along its axis of layers."""

    pool: str
    place: int


def carries_state(node: ir.Node) -> bool:
    """Whether the node is an operator that takes its state from an input of the model and gives it to an output."""
    is_known = node.op_type in (_LINEAR, _CONVOLUTION) and node.domain in ("", "ai.onnx", DOMAIN)
    if not is_known or len(node.inputs) <= _PAST or len(node.outputs) <= _PRESENT:
        return False
    past = node.inputs[_PAST]
    return past is not None and past.is_graph_input() and node.outputs[_PRESENT].is_graph_output()


def past_state(node: ir.Node) -> ir.Value:
    """Return the input of the model that a node carries on."""
    return operand(node, _PAST)


def state_layers(nodes: list[ir.Node]) -> tuple[dict[ir.Node, StateLayer], tuple[StatePool, ...]]:
    """Return where each node keeps its states, and the pools. Raises ModelError where they are read elsewhere too."""
    kinds: dict[tuple[tuple[int, ...], str], list[ir.Node]] = {}
    for node in nodes:
        kinds.setdefault(_kind(node), []).append(node)
    layers: dict[ir.Node, StateLayer] = {}
    pools = []
    for number, ((shape, dtype), alike) in enumerate(kinds.items()):
        pools.append(StatePool(f"{STATES}_{number}" if number else STATES, len(alike), shape, dtype))
        layers |= {node: StateLayer(pools[-1].name, place) for place, node in enumerate(alike)}
    return layers, tuple(pools)


def _kind(node: ir.Node) -> tuple[tuple[int, ...], str]:
    """The shape of a state in a pool, and its type."""
    past, present = past_state(node), node.outputs[_PRESENT]
    shape = numbers(dims(past)[1:])
    if len(past.uses()) > 1 or present.uses() or shape is None or past.dtype is None:
        raise ModelError(
            f"serve: the state '{past.name}' of node '{node.name}' ({node.op_type}) is not of a fixed size and type, "
            "or something else reads it or its next value."
        )
    has_channels_first = node.op_type == _CONVOLUTION and not attribute(node, "channels_last", 0)
    return tuple(reversed(shape) if has_channels_first else shape), past.dtype.numpy().name


def serve_state(
    node: ir.Node, layer: StateLayer, tables: Mapping[str, ir.Value], slots: ir.Value, states: ir.Value
) -> ir.Value:
    """Put the served operator in place of a node, and return the pool behind it.

    Args:
        tables: What PackedRequests gives out, by name.
        slots: The slot of each request.
        states: The pool as it is before the node.
    """
    data, where = list(node.inputs[:_PAST]), [tables[name] for name in ("first_rows", "row_counts", "past")]
    if node.op_type == _LINEAR:
        inputs = [*data, *where, slots, states, *node.inputs[_PAST + 1 :]]
    else:
        inputs = [*data[:2], tables["row_requests"], *where, slots, states, *data[2:]]
    attributes = {name: given.value for name, given in node.attributes.items()}
    operator = "ServedLinearAttention" if node.op_type == _LINEAR else "ServedCausalConv"
    served = ir.node(
        operator, inputs, attributes | {"layer": layer.place}, domain=OWN_DOMAIN, num_outputs=2, name=node.name
    )
    for output, alike in zip(served.outputs, (node.outputs[0], states)):
        output.type, output.shape = alike.type, alike.shape
    new = Rewrite(node)
    new.nodes.append(served)
    new.replace([node], node.outputs[0], served.outputs[0])
    return served.outputs[1]
