"""ServedCausalConv: a causal convolution of packed requests, each of which goes on from places of its own.

A state is a ring: place t % (k - 1) of a slot holds what token t had. So new tokens only write, each its place, by the
kernel that appends to rings of keys (lowering/attention/kv_write.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ...attention.cache_layout import CacheLayout, Pages, Ring
from ...attention.kv_write import KvWrite
from ...attention.parameters import int64
from ...graph.legality import OWN_DOMAIN
from ...importing.channels import channels_last, channels_second
from ...importing.compute import number, widened
from ...importing.node import Node
from ...importing.values import Value, static
from .. import op
from ..asserted import asserted
from ..causal_conv import finished, window_of
from ..conv import transposed
from ..kernels import compute
from ..kv_write import kv_write
from ..linear_attention import FLOATS
from ..microsoft.causal_conv import read_attributes
from ..window import Window
from .layer_states import layer_states

_ROW = 256  # elements that a thread of a CPU copies at once


@dataclass(frozen=True)
class _Requests:
    """Tables of PackedRequests, and which state of the pool [states, k - 1, C] each request has."""

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
    """output like x, [1, C, N], and the pool with the places of layer `layer` behind the new tokens.

    x, weight [C, 1, k], bias and the attributes are com.microsoft CausalConvWithState's; the tables [N] and [R] are
    those of PackedRequests. states [slots, layers, k - 1, C]: request r has slot state_slots[r]. Tokens before its
    first one count as zeros, whatever the slot holds.
    """
    dilation, has_channels_last = read_attributes(node)
    window = window_of(node, x, weight, dilation)
    kept, channels = window.reach(0) - 1, number(node, "the number of channels", weight.shape[0])
    if states.rank != 4 or states.dtype != x.dtype or x.dtype not in FLOATS or kept < 1:
        raise node.error(
            f"input states is {states.dtype} of rank {states.rank}, for {kept} places of {x.dtype}.",
            f"Make it [slots, layers, k - 1, C] in the input's type, one of {', '.join(FLOATS)}, for k of 2 or more.",
        )
    x = x if has_channels_last else channels_last(node, x)
    x = asserted(node, x, (1, x.shape[1], channels))
    states = asserted(node, states, (*states.shape[:2], kept, channels))
    pool, pages = layer_states(node, state_slots, states, past)
    of_rows = asserted(node, row_requests, (x.shape[1],))
    first_rows, row_counts = (asserted(node, table, past.shape) for table in (first_rows, row_counts))
    requests = _Requests(of_rows, first_rows, row_counts, past, pages, pool)
    y = finished(node, _sums(node, x, asserted(node, weight, (channels, 1, *window.kernel)), window, requests), bias, x)
    after = node.reshaped(_appended(node, x, requests), states.shape)
    return (y if has_channels_last else channels_second(node, y)), after


def _sums(node: Node, x: Value, weight: Value, window: Window, requests: _Requests) -> Value:
    """The sums [1, N, C] over the last k places of each token, in the type of sums."""
    (taps,), (dilation,), (count, kept) = window.kernel, window.dilations, requests.pool.shape[:2]
    dtype = widened(x.dtype)
    by_tap = transposed(node, weight)

    def element(index: tuple[Any, ...], x: Any, w: Any, *read: Any) -> Any:
        of_row, first_rows, past, pages, pool, states = read
        n, c = index[1], index[2]
        r = tirx.max(of_row(n), int64(0))
        i, before, page = n - first_rows(r), past(r), pages(r, int64(0))
        is_there = tirx.all(page >= 0, page < states)
        total = tirx.const(0.0, dtype)
        for tap in range(taps):
            back = (taps - 1 - tap) * dilation
            place = tirx.floormod(before + i - back, int64(kept))
            is_kept = tirx.all(is_there, i < back, before + i >= back)
            kept_place = tirx.if_then_else(is_kept, pool(page, place, c).astype(dtype), tirx.const(0.0, dtype))
            new = x(int64(0), tirx.max(n - back, int64(0)), c).astype(dtype)
            total += tirx.if_then_else(i >= back, new, kept_place) * w(int64(tap), int64(0), c).astype(dtype)
        return total

    given = [x, by_tap, requests.row_requests, requests.first_rows, requests.past, requests.pages, requests.pool]
    return compute(node, "conv", element, given, x.shape, [count], dtype)


def _appended(node: Node, x: Value, requests: _Requests) -> Value:
    """The pool with the last places of each request."""
    _, rows, channels = x.shape
    kept = requests.pool.shape[1]
    assert isinstance(channels, int) and isinstance(kept, int)
    size = math.gcd(channels, _ROW)
    layout = CacheLayout("pte", Pages(None, "page"), Ring(0, 0, kept))
    record = KvWrite(static(requests.past.shape[0]), channels // size, size, 0, x.dtype, layout)
    new = node.reshaped(x, (rows, channels // size, size))
    where = {"row_starts": requests.first_rows, "row_counts": requests.row_counts, "starts": requests.past}
    return kv_write(node, record, {"new_k": new, **where, "k": requests.pool, "pages": requests.pages})["k"]
