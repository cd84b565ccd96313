"""ServedKvWrite: write new keys and values of requests to one layer of a paged cache of all layers."""

from __future__ import annotations

from tvm import relax

from ...attention.kv_write import KvWrite
from ...graph.loading.legality import OWN_DOMAIN
from ...importing.node import Node
from ...importing.values import Value, static
from .. import op
from ..attention.kv_write import kv_write
from ..helpers.compute import number
from .layer_pages import LayerPages


@op("ServedKvWrite", since=1, domain=OWN_DOMAIN)
def served_kv_write(
    node: Node,
    k: Value,
    v: Value,
    first_rows: Value,
    row_counts: Value,
    past: Value,
    entries: Value,
    kv_cache: Value,
    kv_cache_scale: Value | None = None,
) -> tuple[Value, Value | None]:
    """Return the cache and its scales with the new keys and values of layer `layer`.

    k and v are [1, Hkv, N, D]. Request r has rows first_rows[r] to first_rows[r] + row_counts[r] - 1, which become its
    tokens from past[r] on. entries [R, 2, M] are those of PackedRequests or PackedSources. kv_cache is [blocks, layers,
    2, Hkv, tokens, D], int8 with float32 kv_cache_scale [blocks, layers, 2, Hkv, tokens, groups].
    """
    heads, size = (number(node, f"dimension {axis} of k", k.shape[axis]) for axis in (1, 3))
    pages = LayerPages(node, entries, kv_cache, kv_cache_scale)
    record = KvWrite(static(past.shape[0]), heads, size, size, k.dtype, pages.layout)
    new = {"new_k": _move_rows_first(node, k), "new_v": _move_rows_first(node, v)}
    tables = {"row_starts": first_rows, "row_counts": row_counts, "starts": past}
    updated = kv_write(node, record, {**new, **tables, **pages.tensors})
    scale = None if kv_cache_scale is None else node.reshape_to(updated["kv_scale"], kv_cache_scale.shape)
    return node.reshape_to(updated["kv"], kv_cache.shape), scale


def _move_rows_first(node: Node, x: Value) -> Value:
    """Return [1, H, N, D] as [N, H, D]."""
    transposed = node.emit(relax.op.permute_dims(node.tensor(x), [0, 2, 1, 3]))
    return node.reshape_to(transposed, (x.shape[2], x.shape[1], x.shape[3]))
