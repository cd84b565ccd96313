"""Attention of packed requests, shared by MultiHeadCacheAttention and MultiHeadAttention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...attention.record.alibi import alibi_slopes
from ...attention.record.cache_layout import CacheLayout
from ...attention.record.problem import Mask, Window
from ...importing.node import Node
from ...importing.values import Size, Value, is_empty
from ..attention.attend import call_attention_kernel, make_ragged_problem, trace_formula
from ..helpers import symbolic
from ..helpers.assertions import assert_shape, require
from ..helpers.compute import unify_sizes
from ..helpers.kernels import compute
from ..helpers.requirements import require_dtype, require_head_groups, require_range, require_rank, require_tensor
from .ppl_requests import PplRequests

FLOATS = ("float32", "float16", "bfloat16")


def check_rows(
    node: Node, heads: tuple[int, int], size: int, query: Value, key: Value, value: Value, has_own_keys: bool
) -> tuple[Value, ...]:
    """Return query, key and value with these heads, after checking their numbers of rows.

    Keys and values must have equally many rows. If has_own_keys is set, the keys are those of the rows' own tokens, and
    queries must have as many rows, too.
    """
    require_range(node, "head_dim", size, 1, code="node.heads_not_divisible")
    require_head_groups(node, *heads)
    for name, x, dtypes in (("query", query, FLOATS), ("key", key, query.dtype), ("value", value, query.dtype)):
        require_tensor(node, name, x, dtypes, "[tokens, heads, head_dim]")
    tokens = unify_sizes(node, "the number of rows", key=key.shape[0], value=value.shape[0])
    query_rows = query.shape[0]
    if has_own_keys:
        tokens = query_rows = unify_sizes(node, "the number of rows", query=query.shape[0], key=tokens)
    query = assert_shape(node, query, (query_rows, heads[0], size))
    return query, *(assert_shape(node, x, (tokens, heads[1], size)) for x in (key, value))


def emit_attention(
    node: Node,
    heads: tuple[int, int],
    query: Value,
    requests: PplRequests,
    layout: CacheLayout,
    tensors: dict[str, Value],
    attn_mask: Value | None,
) -> Value:
    """Emit attention and return Y [N, Hq, D], for keys and values in a cache of these tensors."""
    is_alibi, is_causal = bool(node.attr("is_alibi", 0)), bool(node.attr("is_causal", 1))
    mask = None
    if attn_mask is not None and attn_mask.rank == 1:
        query = _require_empty_mask(node, query, attn_mask)
    elif attn_mask is not None:
        mask = _read_mask(node, attn_mask, heads[0], query.shape[0])
    window = Window(right=0, offset="lengths", free=not is_alibi) if is_alibi or is_causal else None
    size = query.shape[2]
    problem = make_ragged_problem(
        requests.batch,
        heads,
        size,
        query.dtype,
        layout,
        scale=1 / math.sqrt(size),
        window=window,
        mask=None if mask is None else Mask(mask.dtype, (1, mask.shape[1], None, None), pad=True, starts=True),
    )
    arguments: dict[str, Value | Size | None] = {"q": query, "mask": mask, **tensors, "key_starts": requests.key_starts}
    arguments |= {"row_starts": requests.row_starts, "lengths": requests.lengths, "free_batches": requests.free_batches}
    arguments |= {"most_rows": requests.max_rows, "most_keys": requests.max_keys}
    if is_alibi:
        score, alibi_arguments = _build_alibi(node, heads[0], requests)
        problem, arguments = replace(problem, score=score), {**arguments, **alibi_arguments}
    return call_attention_kernel(node, problem, arguments, requests.max_keys)["y"]


def _build_alibi(node: Node, heads: int, requests: PplRequests) -> tuple[Any, dict[str, Value]]:
    """Return the formula s + slope[h] * (j - p), and the kernel's arguments for it."""
    past = compute(
        node, "past", lambda i, keys, rows: keys(*i) - rows(*i), [requests.lengths, requests.counts], (requests.batch,)
    )
    slopes = node.constant(alibi_slopes(heads))

    def element(b: Any, h: Any, i: Any, j: Any, s: Any, slope: Any, past: Any) -> Any:
        return s + slope(h) * (j - i - past(b)).astype("float32")

    return trace_formula(element, [slopes, past], "float32")


def _require_empty_mask(node: Node, query: Value, mask: Value) -> Value:
    """Return the query, after checking that a mask of rank 1 is empty."""
    text = "attn_mask has one dimension of {} elements; only an empty mask may have one dimension."
    return require(node, query, symbolic.equal(mask.shape[0], 0), "node.mask_not_empty", text, mask.shape[0])


def _read_mask(node: Node, mask: Value, heads: int, tokens: Size) -> Value | None:
    """Return the mask as [1, 1 or Hq, N, columns], or None for an empty tensor."""
    if is_empty(mask.shape):
        return None
    require_rank(node, "attn_mask", mask, "[tokens, keys] or [heads, tokens, keys]")
    require_dtype(node, "attn_mask", mask, FLOATS)
    head_axes = (heads,) if mask.rank == 3 else ()
    mask = assert_shape(node, mask, (*head_axes, tokens, mask.shape[-1]))
    return node.reshape_to(mask, (1, *(head_axes or (1,)), tokens, mask.shape[-1]))
