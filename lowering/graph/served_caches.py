"""Where a served decoder keeps keys and values: layers of pools, one pool for each number of heads and size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from ..errors import ModelError
from ..fusion.attention_node import MASK, SINK, attention_input
from ..fusion.matching import attribute, dims, numbers, operand
from ..manifest import CACHE, CachePool
from .cache_forms import K, V, reads_slots
from .positions import Positions


@dataclass(frozen=True)
class CacheLayer:
    """Where keys and values of an attention are: in the pool of that shape (heads, size), at that place. Values are
    `v_size` long, and padded to the size of keys. Of attentions that share a layer the first one writes."""

    shape: tuple[int, int]
    place: int
    v_size: int
    writes: bool


def cache_layers(attentions: list[ir.Node]) -> dict[ir.Node, CacheLayer]:
    """Return where each attention keeps its keys and values. Those that read the same ones share a layer."""
    layers: dict[tuple[ir.Value, ir.Value], CacheLayer] = {}
    counts: dict[tuple[int, int], int] = {}
    found: dict[ir.Node, CacheLayer] = {}
    for node in attentions:
        k, v = operand(node, K), operand(node, V)
        sizes = numbers((dims(k)[1], dims(v)[1], dims(k)[3], dims(v)[3]))
        if sizes is None or sizes[0] != sizes[1]:
            raise ModelError(f"serve: node '{node.name}' (Attention) does not tell the heads or sizes of its caches.")
        shape = sizes[0], max(sizes[2:])
        owns = (k, v) not in layers
        if owns:
            place = counts.get(shape, 0)
            counts[shape] = place + 1
            layers[k, v] = CacheLayer(shape, place, sizes[3], True)
        found[node] = layers[k, v] if owns else replace(layers[k, v], writes=False)
    return found


def cache_pools(layers: dict[ir.Node, CacheLayer], name: str = CACHE, scale: str = "") -> tuple[CachePool, ...]:
    """Return the pools of the layers. name is that of the first; so is scale, "" for pools without scales."""
    pools = []
    for number, shape in enumerate(dict.fromkeys(layer.shape for layer in layers.values())):
        suffix = f"_{number}" if number else ""
        count = 1 + max(layer.place for layer in layers.values() if layer.shape == shape)
        pools.append(CachePool(f"{name}{suffix}", f"{scale}{suffix}" if scale else "", count, *shape))
    return tuple(pools)


def check_attention(node: ir.Node, grown: list[ir.Node], positions: Positions) -> None:
    if not reads_slots(node, grown):
        raise ModelError(
            f"serve: node '{node.name}' (Attention) is not over one growing cache of keys and one of values, with all "
            "that it may see said by its mask, or by is_causal and windows that end with the newest token."
        )
    mask, sink = (attention_input(node, position) for position in (MASK, SINK))
    if positions.is_data(sink) or positions.varies(sink):
        raise ModelError(f"serve: node '{node.name}' (Attention) has sinks that are not constants.")
    if mask is not None and mask not in positions:
        raise ModelError(f"serve: node '{node.name}' (Attention) has a mask made of data, not of positions.")
    if mask is None and not attribute(node, "is_causal", 0):
        raise ModelError(
            f"serve: node '{node.name}' (Attention) has no mask: its tokens would see later ones of their request."
        )
