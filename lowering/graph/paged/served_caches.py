"""Layout of keys and values in a served decoder: layers of pools, one pool for each number of heads and size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from ...errors import ModelError
from ...manifest import CACHE, CachePool
from ..caches.cache_forms import K, V, can_read_slots
from ..caches.positions import Positions
from ..rewriting.attention_node import MASK, SINK, attention_input
from ..rewriting.matching import attribute, dims, operand, read_static_sizes


@dataclass(frozen=True)
class CacheLayer:
    """The location of the keys and values of an attention: the pool of that shape (heads, size), and the layer.

    Values are `v_size` long, and padded to the size of keys. The first of several attentions that share a layer writes
    it.
    """

    shape: tuple[int, int]
    index: int
    v_size: int
    writes: bool


def assign_cache_layers(attentions: list[ir.Node]) -> dict[ir.Node, CacheLayer]:
    """Return the layer of each attention's keys and values. Attentions with the same ones share a layer."""
    layers: dict[tuple[ir.Value, ir.Value], CacheLayer] = {}
    counts: dict[tuple[int, int], int] = {}
    layers_by_node: dict[ir.Node, CacheLayer] = {}
    for node in attentions:
        k, v = operand(node, K), operand(node, V)
        sizes = read_static_sizes((dims(k)[1], dims(v)[1], dims(k)[3], dims(v)[3]))
        if sizes is None or sizes[0] != sizes[1]:
            raise ModelError(
                "serve.cache_size_unknown",
                f"serve: node '{node.name}' (Attention) has caches of unknown or different numbers of heads, or of "
                "unknown sizes.",
            )
        shape = sizes[0], max(sizes[2:])
        is_new = (k, v) not in layers
        if is_new:
            index = counts.get(shape, 0)
            counts[shape] = index + 1
            layers[k, v] = CacheLayer(shape, index, sizes[3], True)
        layers_by_node[node] = layers[k, v] if is_new else replace(layers[k, v], writes=False)
    return layers_by_node


def build_cache_pools(layers: dict[ir.Node, CacheLayer], name: str = CACHE, scale: str = "") -> tuple[CachePool, ...]:
    """Return the pools of the layers.

    name is that of the first pool, and scale that of its scales, "" for pools without scales.
    """
    pools = []
    for pool_index, shape in enumerate(dict.fromkeys(layer.shape for layer in layers.values())):
        suffix = f"_{pool_index}" if pool_index else ""
        count = 1 + max(layer.index for layer in layers.values() if layer.shape == shape)
        pools.append(CachePool(f"{name}{suffix}", f"{scale}{suffix}" if scale else "", count, *shape))
    return tuple(pools)


def check_attention(node: ir.Node, grown: list[ir.Node], positions: Positions) -> None:
    if not can_read_slots(node, grown):
        raise ModelError(
            "serve.attention_unsupported",
            f"serve: node '{node.name}' (Attention) is not attention over one growing cache of keys and one of "
            "values, whose visible keys are determined by its mask, or by is_causal and windows that end with the "
            "newest token.",
        )
    mask, sink = (attention_input(node, position) for position in (MASK, SINK))
    if positions.is_data(sink) or positions.varies(sink):
        raise ModelError(
            "serve.sinks_not_constant", f"serve: node '{node.name}' (Attention) has sinks that are not constants."
        )
    if mask is not None and mask not in positions:
        raise ModelError(
            "serve.mask_depends_on_data",
            f"serve: node '{node.name}' (Attention) has a mask computed from data, not from positions.",
        )
    if mask is None and not attribute(node, "is_causal", 0):
        raise ModelError(
            "serve.mask_missing",
            f"serve: node '{node.name}' (Attention) has no mask: its tokens would see later tokens of their request.",
        )
