"""KV caches: their four layouts, two ways to find a token's slot, and 8-bit quantization."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx

from ...attention.codegen.parameters import int64
from ...attention.kv_write import KvWrite
from ...attention.record.cache_layout import CacheLayout, KvQuantization, Offset, Pages
from ...importing.node import Node
from ...importing.values import MAX_DIMENSION, Size, Value, static
from ..attention.kv_write import kv_write
from ..helpers.assertions import assert_shape
from ..helpers.compute import number
from ..helpers.requirements import require_choice, require_dtype, require_range
from .ppl_requests import PplRequests, check_integers

LAYOUTS = ("tlchd", "ltchd", "lcthd", "lchtd")
"""The axes of a cache by attribute cache_layout, as in lowering/attention/record/cache_layout.py."""

_BITS = {8: "int8"}


@dataclass(frozen=True)
class PplCache:
    """A cache and its scales, with tensors by kernel parameter name; capacity is the largest number of keys of a
    request.
    """

    layout: CacheLayout
    tensors: dict[str, Value]
    capacity: Size


def read_cache(
    node: Node, heads: int, key: Value, seqstarts: Value, cachestarts: Value, cache: Value, scale: Value | None
) -> PplCache:
    """Return the cache of this many key/value heads, for rows [N, heads, size] of keys."""
    check_integers(node, "seqstarts", seqstarts, 1)
    batch, size, dtype = node.simplify(seqstarts.shape[0] - 1), key.shape[2], key.dtype
    mode, layout_index, layer = node.attr("cache_mode", 0), node.attr("cache_layout", 0), node.attr("layer_idx", 0)
    bits, group, layers = node.attr("quant_bit", 0), node.attr("quant_group", 8), node.attr("num_layer", 1)
    _check_attributes(node, mode, layout_index, layer, layers, bits)
    check_integers(node, "cachestarts", cachestarts, 1 + mode)
    cachestarts = assert_shape(node, cachestarts, (batch, *cachestarts.shape[1:]))
    axes = LAYOUTS[layout_index]
    layout = CacheLayout(axes, _read_pages(node) if mode else Offset(), layer=layer)
    cache = _assert_shape(node, "cache", cache, axes, layers, heads, size)
    if cache.dtype != (_BITS[bits] if bits else dtype):
        source = f"quant_bit is {bits}" if bits else f"query is {dtype}"
        raise node.error(
            "node.cache_dtype_mismatch",
            f"cache is {cache.dtype}, and {source}.",
            f"Make it {_BITS[bits] if bits else dtype}.",
        )
    tensors = {"kv": cache, "pages" if mode else "slot_starts": cachestarts}
    slots = cache.shape[axes.index("t")]
    # A request has at most as many keys as its pages store and as the cache has slots, whatever its lengths say.
    max_keys = tirx.min(int64(cachestarts.shape[1] * node.attr("page_size", 128)), int64(slots)) if mode else slots
    capacity = node.simplify(max_keys)
    if not bits:
        return PplCache(layout, tensors, capacity)
    scale = _check_scale(node, cache, scale, group, size)
    scale = _assert_shape(node, "scale", scale, axes, layers, heads, size // group)
    scale = assert_shape(node, scale, (*cache.shape[:-1], size // group))
    layout = replace(layout, quantization=KvQuantization("int8", group, scale.dtype))
    return PplCache(layout, {**tensors, "kv_scale": scale}, capacity)


def _check_attributes(node: Node, mode: int, layout_index: int, layer: int, layers: int, bits: int) -> None:
    require_choice(node, "cache_mode", mode, (0, 1))
    require_choice(node, "cache_layout", layout_index, range(len(LAYOUTS)))
    if not 1 <= layers <= MAX_DIMENSION or layer not in range(layers):
        raise node.error(
            "node.layer_out_of_range",
            f"attribute layer_idx is {layer}, and num_layer is {layers}.",
            "Use 0 to num_layer - 1.",
        )
    require_choice(node, "quant_bit", bits, (0, *_BITS))


def _check_scale(node: Node, cache: Value, scale: Value | None, group: int, size: int) -> Value:
    """Return the scale of a quantized cache, which must have the rank of the cache."""
    if group < 1 or size % group:
        raise node.error(
            "node.quant_group_not_divisor",
            f"attribute quant_group is {group}, for heads of {size}.",
            "Choose a divisor of head_dim.",
        )
    if scale is None or scale.rank != cache.rank:
        raise node.error(
            "node.scale_mismatch",
            "scale is missing or not of the cache's rank, and quant_bit is 8.",
            "Give the scales of the cache, with its rank.",
        )
    require_dtype(node, "scale", scale, ("float32", "float16"))
    return scale


def append_to_cache(
    node: Node, cache: PplCache, requests: PplRequests, start_pos: Value, key: Value, value: Value
) -> PplCache:
    """Return the cache with new rows [N, heads, size]."""
    check_integers(node, "start_pos", start_pos, 1)
    start_pos = assert_shape(node, start_pos, (requests.batch,))
    _, heads, size = key.shape
    record = KvWrite(static(requests.batch), heads, size, size, key.dtype, cache.layout)
    arguments = {"new_k": key, "new_v": value, "starts": start_pos}
    arguments |= {"row_starts": requests.firsts, "row_counts": requests.counts, **cache.tensors}
    return replace(cache, tensors={**cache.tensors, **kv_write(node, record, arguments)})


def _read_pages(node: Node) -> Pages:
    page = require_range(node, "page_size", node.attr("page_size", 128), 1, MAX_DIMENSION)
    return Pages(page, "slot")


def _assert_shape(node: Node, name: str, value: Value, axes: str, layers: int, heads: int, size: int) -> Value:
    """Return the cache, or its scales, checked to have this many elements in a row of a head."""
    if value.rank != len(axes):
        raise node.error(
            "node.rank_unsupported",
            f"{name} has rank {value.rank}.",
            f"Make it {len(axes)}, as attribute cache_layout requires.",
        )
    static_sizes = {"l": layers, "c": 2, "h": heads, "d": size}
    for axis, extent in zip(axes, value.shape):
        if axis in static_sizes and isinstance(extent, int) and extent != static_sizes[axis]:
            raise node.error(
                "node.shape_mismatch",
                f"{name} has shape {[number(node, name, d) if isinstance(d, int) else '?' for d in value.shape]}, and "
                f"dimension {axes.index(axis)} must be {static_sizes[axis]}.",
                "Correct its shape, or attributes cache_layout, num_layer, head_dim and quant_group.",
            )
    return assert_shape(node, value, tuple(static_sizes.get(axis, extent) for axis, extent in zip(axes, value.shape)))
