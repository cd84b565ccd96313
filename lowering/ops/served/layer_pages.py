"""Where the keys and values of a layer are in a paged cache [blocks, layers, 2, Hkv, tokens, D] of all layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, tirx

from ...arithmetic import LARGEST_SIZE
from ...attention.cache_layout import CacheLayout, Codec, Pages
from ...attention.parameters import int64
from ...importing.compute import number
from ...importing.node import Node
from ...importing.values import Value, prod
from ..asserted import asserted
from ..kernels import compute


class LayerPages:
    """The cache of layer `layer` of a node, and its tensors by the names that kernels have for them: kv, pages, and
    kv_scale of int8.

    The cache is seen as blocks of one layer and kind, so that all layers have the same kernels; entries [R, 2, M] are
    the blocks of keys and values of layer 0.
    """

    def __init__(self, node: Node, entries: Value, kv_cache: Value, kv_cache_scale: Value | None) -> None:
        first = node.tensor(node.constant(np.array([2 * node.attr("layer")], np.int64)))
        pages = node.emit(relax.op.add(node.tensor(entries), first))
        codec, self.tensors = None, {"kv": _blocks(node, kv_cache), "pages": pages}
        if kv_cache_scale is not None:
            size = number(node, "dimension 5 of kv_cache", kv_cache.shape[5])
            groups = number(node, "dimension 5 of kv_cache_scale", kv_cache_scale.shape[5])
            codec = Codec("int8", size // groups)
            self.tensors["kv_scale"] = _blocks(node, asserted(node, kv_cache_scale, (*kv_cache.shape[:-1], groups)))
        tokens = number(node, "dimension 4 of kv_cache", kv_cache.shape[4])
        self.layout = CacheLayout("phtd", Pages(tokens, "page", apart=True), codec=codec)


def _blocks(node: Node, cache: Value) -> Value:
    """[blocks, layers, 2, ...] as blocks of one layer and kind."""
    count = node.simplify(prod(cache.shape[:3]))
    return node.reshaped(cache, (count, *cache.shape[3:]))


def block_entries(node: Node, table: Value, cache: Value) -> Value:
    """int64 [R, 2, M]: where layer 0 has the blocks of a table [R, M] for keys and values, among the blocks of one
    layer and kind; negative for those that are not in the cache."""
    layers = number(node, "dimension 1 of the cache", cache.shape[1])

    def entry(index: tuple[Any, ...], table: Any, blocks: Any) -> Any:
        block = table(index[0], index[2])
        inside = tirx.all(block >= 0, block < blocks)
        return tirx.Select(inside, block * (2 * layers) + index[1], int64(-LARGEST_SIZE))

    return compute(node, "entries", entry, [table], (table.shape[0], 2, table.shape[1]), [cache.shape[0]])
