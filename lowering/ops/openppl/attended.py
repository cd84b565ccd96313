"""What MultiHeadCacheAttention and MultiHeadAttention have in common: attention of packed requests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...attention.alibi import alibi_slopes
from ...attention.cache_layout import CacheLayout
from ...attention.problem import Mask, Window
from ...importing import symbolic
from ...importing.compute import agreed
from ...importing.node import Node
from ...importing.values import Size, Value, empty
from ..asserted import asserted, required
from ..attend import formula_of, packed, solved
from ..kernels import compute
from .requests import Requests

FLOATS = ("float32", "float16", "bfloat16")


def rows(
    node: Node, heads: tuple[int, int], size: int, query: Value, key: Value, value: Value, own: bool
) -> tuple[Value, ...]:
    """Query, key and value, of these heads and rows that agree: within keys and values, with queries if they are of
    the rows' own tokens."""
    if size < 1 or heads[0] < 1 or heads[1] < 1 or heads[0] % heads[1]:
        raise node.error(
            f"{heads[0]} heads of {size} do not divide into {heads[1]} key/value heads.", "Use a multiple."
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.rank != 3 or x.dtype not in FLOATS or x.dtype != query.dtype:
            raise node.error(
                f"{name} is {x.dtype} of rank {x.rank}, and query is {query.dtype}.",
                f"Make them [tokens, heads, head_dim] of one type of {', '.join(FLOATS)}.",
            )
    tokens = agreed(node, "the number of rows", key=key.shape[0], value=value.shape[0])
    query_rows = query.shape[0]
    if own:
        tokens = query_rows = agreed(node, "the number of rows", query=query.shape[0], key=tokens)
    query = asserted(node, query, (query_rows, heads[0], size))
    return query, *(asserted(node, x, (tokens, heads[1], size)) for x in (key, value))


def attended(
    node: Node,
    heads: tuple[int, int],
    query: Value,
    requests: Requests,
    layout: CacheLayout,
    tensors: dict[str, Value],
    attn_mask: Value | None,
) -> Value:
    """Y [N, Hq, D], of keys and values that lie in a cache of these tensors."""
    alibi, causal = bool(node.attr("is_alibi", 0)), bool(node.attr("is_causal", 1))
    mask = None
    if attn_mask is not None and attn_mask.rank == 1:
        query = _without_mask(node, query, attn_mask)
    elif attn_mask is not None:
        mask = _mask(node, attn_mask, heads[0], query.shape[0])
    window = Window(right=0, offset="lengths", free=not alibi) if alibi or causal else None
    size = query.shape[2]
    problem = packed(
        requests.batch,
        heads,
        size,
        query.dtype,
        layout,
        scale=1 / math.sqrt(size),
        window=window,
        mask=None if mask is None else Mask(mask.dtype, (1, mask.shape[1], None, None), pad=True, starts=True),
    )
    given: dict[str, Value | Size | None] = {"q": query, "mask": mask, **tensors, "key_starts": requests.key_starts}
    given |= {"row_starts": requests.row_starts, "lengths": requests.lengths, "free_batches": requests.free}
    given |= {"most_rows": requests.most_rows, "most_keys": requests.most_keys}
    if alibi:
        change, read = _alibi(node, heads[0], requests)
        problem, given = replace(problem, score=change), {**given, **read}
    return solved(node, problem, given, requests.most_keys)["y"]


def _alibi(node: Node, heads: int, requests: Requests) -> tuple[Any, dict[str, Value]]:
    """s + slope[h] * (j - p)."""
    past = compute(
        node, "past", lambda i, keys, rows: keys(*i) - rows(*i), [requests.lengths, requests.counts], (requests.batch,)
    )
    slopes = node.constant(alibi_slopes(heads))

    def element(b: Any, h: Any, i: Any, j: Any, s: Any, slope: Any, past: Any) -> Any:
        return s + slope(h) * (j - i - past(b)).astype("float32")

    return formula_of(element, [slopes, past], "float32")


def _without_mask(node: Node, query: Value, mask: Value) -> Value:
    """The query, where a mask of rank 1 is empty."""
    text = "attn_mask has {} elements in one dimension; only an empty one may have one."
    return required(node, query, symbolic.equal(mask.shape[0], 0), text, mask.shape[0])


def _mask(node: Node, mask: Value, heads: int, tokens: Size) -> Value | None:
    """[1, 1 or Hq, N, columns], or None for an empty tensor."""
    if empty(mask.shape):
        return None
    if mask.rank not in (2, 3):
        raise node.error(f"attn_mask has rank {mask.rank}.", "Make it [tokens, keys] or [heads, tokens, keys].")
    if mask.dtype not in FLOATS:
        raise node.error(f"attn_mask is {mask.dtype}.", f"Use one of {', '.join(FLOATS)}.")
    front = (heads,) if mask.rank == 3 else ()
    mask = asserted(node, mask, (*front, tokens, mask.shape[-1]))
    return node.reshaped(mask, (1, *(front or (1,)), tokens, mask.shape[-1]))
