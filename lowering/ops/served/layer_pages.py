"""Views of one layer in a paged cache [blocks, layers, 2, Hkv, tokens, D] of all layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, tirx

from ...arithmetic import LARGEST_SIZE
from ...attention.codegen.parameters import int64
from ...attention.record.cache_layout import CacheLayout, KvQuantization, Pages
from ...importing.node import Node
from ...importing.values import Value, prod
from ..helpers.assertions import assert_shape
from ..helpers.compute import number
from ..helpers.kernels import compute


class LayerPages:
    """The cache of layer `layer` of a node, with its tensors by kernel parameter name: kv, pages, and kv_scale of int8.

    The cache is viewed as blocks of one layer and kind (K or V), so that all layers share their kernels. entries [R, 2,
    M] are the blocks of keys and values of layer 0.
    """

    def __init__(self, node: Node, entries: Value, kv_cache: Value, kv_cache_scale: Value | None) -> None:
        first = node.tensor(node.constant(np.array([2 * node.attr("layer")], np.int64)))
        pages = node.emit(relax.op.add(node.tensor(entries), first))
        quantization, self.tensors = None, {"kv": _view_as_blocks(node, kv_cache), "pages": pages}
        if kv_cache_scale is not None:
            size = number(node, "dimension 5 of kv_cache", kv_cache.shape[5])
            groups = number(node, "dimension 5 of kv_cache_scale", kv_cache_scale.shape[5])
            quantization = KvQuantization("int8", size // groups)
            self.tensors["kv_scale"] = _view_as_blocks(
                node, assert_shape(node, kv_cache_scale, (*kv_cache.shape[:-1], groups))
            )
        tokens = number(node, "dimension 4 of kv_cache", kv_cache.shape[4])
        self.layout = CacheLayout("phtd", Pages(tokens, "page", apart=True), quantization=quantization)


def _view_as_blocks(node: Node, cache: Value) -> Value:
    """Return [blocks, layers, 2, ...] as blocks of one layer and kind."""
    count = node.simplify(prod(cache.shape[:3]))
    return node.reshape_to(cache, (count, *cache.shape[3:]))


def compute_block_entries(node: Node, table: Value, cache: Value) -> Value:
    """Return int64 [R, 2, M], the blocks of layer 0 for the keys and values of a table [R, M].

    The entries count blocks of one layer and kind. They are negative for blocks that are not in the cache.
    """
    layers = number(node, "dimension 1 of the cache", cache.shape[1])

    def entry(index: tuple[Any, ...], table: Any, blocks: Any) -> Any:
        block = table(index[0], index[2])
        is_inside = tirx.all(block >= 0, block < blocks)
        return tirx.Select(is_inside, block * (2 * layers) + index[1], int64(-LARGEST_SIZE))

    return compute(node, "entries", entry, [table], (table.shape[0], 2, table.shape[1]), [cache.shape[0]])
