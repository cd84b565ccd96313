"""Views of one layer's states in a pool [slots, layers, ...]: one of slots * layers states for each request."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ...arithmetic import LARGEST_SIZE
from ...attention.codegen.parameters import int64
from ...importing.node import Node
from ...importing.values import Value, prod
from ..helpers.assertions import assert_shape
from ..helpers.compute import number
from ..helpers.kernels import compute


def select_layer_states(node: Node, state_slots: Value, states: Value, requests: Value) -> tuple[Value, Value]:
    """Return the pool as [slots * layers, ...], and the state of each request as int64 [R, 1].

    All layers share their kernels on this view. The second result counts states of layer `layer` in the view; it is
    negative if a request's slot is not in the pool. `requests` is any table [R].
    """
    layers, layer = number(node, "dimension 1 of states", states.shape[1]), node.attr("layer")
    state_slots = assert_shape(node, state_slots, requests.shape)

    def page(index: tuple[Any, ...], table: Any, slots: Any) -> Any:
        slot = table(index[0])
        return tirx.Select(tirx.all(slot >= 0, slot < slots), slot * layers + layer, int64(-LARGEST_SIZE))

    pages = compute(node, "pages", page, [state_slots], (*state_slots.shape, 1), [states.shape[0]])
    return node.reshape_to(states, (node.simplify(prod(states.shape[:2])), *states.shape[2:])), pages
