"""ServedCausalConv: a causal convolution of packed requests, each of which continues from its own state.

A state is a ring buffer: entry t % (k - 1) of a slot stores token t. So each new token only writes its own entry, with
the kernel that appends to rings of keys (lowering/attention/kv_write.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ...attention.codegen.parameters import int64
from ...attention.kv_write import KvWrite
from ...attention.record.cache_layout import CacheLayout, Pages, Ring
from ...graph.loading.legality import OWN_DOMAIN
from ...importing.node import Node
from ...importing.values import Value, static
from .. import op
from ..attention.kv_write import kv_write
from ..attention.linear_attention import FLOATS
from ..helpers.assertions import assert_shape
from ..helpers.channels import channels_last, channels_second
from ..helpers.compute import number, widen_dtype
from ..helpers.kernels import compute
from ..microsoft.causal_conv import read_attributes
from ..nn.causal_conv import apply_activation, read_causal_window
from ..nn.conv import transpose_weights
from ..nn.window import SpatialWindow
from .layer_states import select_layer_states

_ROW = 256  # elements that a CPU thread copies in one step


@dataclass(frozen=True)
class _ConvRequests:
    """The tables of PackedRequests, and the state of each request in the pool [states, k - 1, C]."""

    row_requests: Value
    first_rows: Value
    row_counts: Value
    past: Value
    pages: Value
    pool: Value


@op("ServedCausalConv", since=1, domain=OWN_DOMAIN)
def served_causal_conv(
    node: Node,
    x: Value,
    weight: Value,
    row_requests: Value,
    first_rows: Value,
    row_counts: Value,
    past: Value,
    state_slots: Value,
    states: Value,
    bias: Value | None = None,
) -> tuple[Value, Value]:
    """Return output like x [1, C, N], and the pool with the states of layer `layer` after the new tokens.

    x, weight [C, 1, k], bias and the attributes are those of com.microsoft CausalConvWithState. The tables [N] and [R]
    are those of PackedRequests. states is [slots, layers, k - 1, C]; request r has slot state_slots[r]. Tokens before
    its first one count as zeros, whatever the slot contains.
    """
    dilation, has_channels_last = read_attributes(node)
    window = read_causal_window(node, x, weight, dilation)
    state_length, channels = window.reach(0) - 1, number(node, "the number of channels", weight.shape[0])
    if states.rank != 4 or states.dtype != x.dtype or x.dtype not in FLOATS or state_length < 1:
        raise node.error(
            "node.tensor_type_unsupported",
            f"input states is {states.dtype} of rank {states.rank}, for {state_length} columns of {x.dtype}.",
            f"Make it [slots, layers, k - 1, C] in the input's type, one of {', '.join(FLOATS)}, for k of 2 or more.",
        )
    x = x if has_channels_last else channels_last(node, x)
    x = assert_shape(node, x, (1, x.shape[1], channels))
    states = assert_shape(node, states, (*states.shape[:2], state_length, channels))
    pool, pages = select_layer_states(node, state_slots, states, past)
    row_requests_checked = assert_shape(node, row_requests, (x.shape[1],))
    first_rows, row_counts = (assert_shape(node, table, past.shape) for table in (first_rows, row_counts))
    requests = _ConvRequests(row_requests_checked, first_rows, row_counts, past, pages, pool)
    y = apply_activation(
        node,
        _emit_accumulators(node, x, assert_shape(node, weight, (channels, 1, *window.kernel)), window, requests),
        bias,
        x,
    )
    after = node.reshape_to(_append_to_pool(node, x, requests), states.shape)
    return (y if has_channels_last else channels_second(node, y)), after


def _emit_accumulators(node: Node, x: Value, weight: Value, window: SpatialWindow, requests: _ConvRequests) -> Value:
    """Return the accumulators [1, N, C] over the last k tokens of each token, in the accumulator type."""
    (taps,), (dilation,), (count, state_length) = window.kernel, window.dilations, requests.pool.shape[:2]
    dtype = widen_dtype(x.dtype)
    by_tap = transpose_weights(node, weight)

    def element(index: tuple[Any, ...], x: Any, w: Any, *reads: Any) -> Any:
        request_of_row, first_rows, past, pages, pool, states = reads
        n, c = index[1], index[2]
        r = tirx.max(request_of_row(n), int64(0))
        i, past_length, page = n - first_rows(r), past(r), pages(r, int64(0))
        has_state = tirx.all(page >= 0, page < states)
        total = tirx.const(0.0, dtype)
        for tap in range(taps):
            back = (taps - 1 - tap) * dilation
            slot_index = tirx.floormod(past_length + i - back, int64(state_length))
            is_cached = tirx.all(has_state, i < back, past_length + i >= back)
            cached = tirx.if_then_else(is_cached, pool(page, slot_index, c).astype(dtype), tirx.const(0.0, dtype))
            current = x(int64(0), tirx.max(n - back, int64(0)), c).astype(dtype)
            total += tirx.if_then_else(i >= back, current, cached) * w(int64(tap), int64(0), c).astype(dtype)
        return total

    inputs = [x, by_tap, requests.row_requests, requests.first_rows, requests.past, requests.pages, requests.pool]
    return compute(node, "conv", element, inputs, x.shape, [count], dtype)


def _append_to_pool(node: Node, x: Value, requests: _ConvRequests) -> Value:
    """Return the pool with the last tokens of each request."""
    _, rows, channels = x.shape
    state_length = requests.pool.shape[1]
    assert isinstance(channels, int) and isinstance(state_length, int)
    size = math.gcd(channels, _ROW)
    layout = CacheLayout("pte", Pages(None, "page"), Ring(0, 0, state_length))
    record = KvWrite(static(requests.past.shape[0]), channels // size, size, 0, x.dtype, layout)
    new = node.reshape_to(x, (rows, channels // size, size))
    tables = {"row_starts": requests.first_rows, "row_counts": requests.row_counts, "starts": requests.past}
    return kv_write(node, record, {"new_k": new, **tables, "k": requests.pool, "pages": requests.pages})["k"]
