"""com.microsoft PagedAttention: append packed requests to paged caches, and attend to all cached keys.

Sequence b has the rows cumulative_sequence_length[b] to [b + 1] of N packed ones, and had past_seqlens[b] tokens in the
cache before. Its token t is in block block_table[b, t / block_size]; an entry that does not name a block hides the keys
that would be there. A sequence whose lengths are negative, or greater than its blocks can store, writes nothing and
gives 0.

With kv_cache_layout LATENT there is one cache of one head, whose first v_head_size elements are the values. The
attention reads it both as keys and as values, and the surplus elements of the result are dropped.
"""

from __future__ import annotations

import math

from tvm import tirx

from ....attention.codegen.parameters import int64
from ....attention.record.problem import Window
from ....importing.node import Node
from ....importing.values import Value
from ... import op
from ...attention.attend import call_attention_kernel, make_ragged_problem, trace_formula
from ...attention.rotary_embedding import RotatedHead, rotate_heads
from ...helpers.assertions import assert_shape
from ...helpers.compute import Element, number, unify_sizes
from ...helpers.kernels import ElementReader, compute
from ...helpers.requirements import require_choice, require_dtype, require_head_groups, require_input, require_rank
from .. import DOMAIN
from .paged_caches import PagedCaches, PagedSequences, PagedShape, locate_sequences
from .projections import check_floats, check_pair, divide_heads, normalize_heads, read_head_sink, slice_projection
from .quantized_caches import read_cache_quantization

_FLOATS = ("float32", "float16", "bfloat16")


@op("PagedAttention", since=1, domain=DOMAIN)
def paged_attention(
    node: Node,
    query: Value,
    key: Value | None,
    value: Value | None,
    key_cache: Value,
    value_cache: Value | None,
    cumulative_sequence_length: Value,
    past_seqlens: Value,
    block_table: Value,
    cos_cache: Value | None = None,
    sin_cache: Value | None = None,
    slot_mapping: Value | None = None,
    head_sink: Value | None = None,
    q_norm_weight: Value | None = None,
    k_norm_weight: Value | None = None,
    k_scale: Value | None = None,
    v_scale: Value | None = None,
    attention_metadata: Value | None = None,
) -> tuple[Value, Value, Value | None]:
    """Return Y [N, Hq * Dv], and key_cache and value_cache [blocks, block_size, Hkv, D] with the new rows.

    query is [N, Hq * D] with key and value [N, Hkv * D], or packed [N, (Hq + 2 Hkv) * D] without them. Tables are
    int32. attention_metadata is a hint, and is not read.
    """
    shape = _read_shape(node)
    check_floats(node, query=query, key=key, value=value)
    require_dtype(node, "query", query, _FLOATS)
    q, k, v = _split_projections(node, shape, query, key, value)
    size, tokens = q.shape[2] // shape.heads, q.shape[1]
    check_pair(node, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    q, k = normalize_heads(node, q, shape.heads, q_norm_weight), normalize_heads(node, k, shape.kv_heads, k_norm_weight)
    _check_cache_types(node, {"k": key_cache, "v": value_cache})
    quantization = read_cache_quantization(
        node, (shape.kv_heads, size), q.dtype, (("k", key_cache, k_scale), ("v", value_cache, v_scale))
    )
    caches = PagedCaches(node, shape, size, quantization, key_cache, value_cache, block_table)
    sequences = locate_sequences(node, tokens, cumulative_sequence_length, past_seqlens, caches)
    if node.attr("do_rotary", 0):
        q, k = (_rotate_heads(node, x, size, cos_cache, sin_cache, sequences) for x in (q, k))
    new = {"new_k": node.reshape_to(k, (tokens, shape.kv_heads, size))}
    if v is not None:
        new["new_v"] = node.reshape_to(v, (tokens, shape.kv_heads, size))
    tensors = caches.append(new, sequences, slot_mapping)
    y = _emit_attention(
        node, shape, node.reshape_to(q, (tokens, shape.heads, size)), caches, tensors, sequences, head_sink
    )
    return y, tensors["k"], tensors.get("v")


def _read_shape(node: Node) -> PagedShape:
    heads, kv_heads = node.attr("num_heads"), node.attr("kv_num_heads")
    layout, v_size = node.attr("kv_cache_layout", "SEPARATE"), node.attr("v_head_size", 0)
    require_head_groups(node, heads, kv_heads, code="paged_attention.heads_not_divisible")
    require_choice(node, "kv_cache_layout", layout, ("SEPARATE", "LATENT"))
    is_latent = layout == "LATENT"
    if is_latent and kv_heads != 1:
        raise node.error(
            "paged_attention.latent_heads_unsupported",
            f"attribute kv_num_heads is {kv_heads}, and kv_cache_layout is 'LATENT'.",
            "Make kv_num_heads 1.",
        )
    if v_size < 0 or (v_size and not is_latent):
        raise node.error(
            "paged_attention.v_head_size_unsupported",
            f"attribute v_head_size is {v_size}, and kv_cache_layout is '{layout}'.",
            "Use a positive size with 'LATENT', or remove v_head_size.",
        )
    return PagedShape(heads, kv_heads, is_latent, v_size or None)


def _split_projections(
    node: Node, shape: PagedShape, query: Value, key: Value | None, value: Value | None
) -> tuple[Value, Value, Value | None]:
    """Return Q [1, N, Hq * D], and K and V [1, N, Hkv * D]; a latent cache has no V."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        require_rank(node, name, x, "[tokens, hidden]")
    tokens, heads, kv_heads = query.shape[0], shape.heads, shape.kv_heads
    if shape.is_latent and (key is None or value is not None):
        raise node.error(
            "paged_attention.latent_inputs_mismatch",
            "kv_cache_layout is 'LATENT', and key is missing or value is given.",
            "Give key [tokens, head size], and no value.",
        )
    if key is None and value is None:
        size = divide_heads(node, "packed query", query.shape[1], heads + 2 * kv_heads)
        rows = node.reshape_to(query, (1, tokens, query.shape[1]))
        widths = [count * size for count in (heads, kv_heads, kv_heads)]
        q, k, v = (slice_projection(node, rows, sum(widths[:n]), widths[n]) for n in range(3))
        return q, k, v
    if key is None or (value is None and not shape.is_latent):
        raise node.error(
            "node.inputs_incomplete",
            "only one of key and value is given.",
            "Give both, or none and pack them in query.",
        )
    width = heads * divide_heads(node, "query", query.shape[1], heads)
    kv_width = width // heads * kv_heads
    new_inputs = [x for x in (key, value) if x is not None]
    tokens = unify_sizes(node, "the number of tokens", tokens, *(x.shape[0] for x in new_inputs))
    for x in new_inputs:
        unify_sizes(node, f"the last dimension of {node.describe(x, False)}", x.shape[1], kv_width)
    rows = node.reshape_to(assert_shape(node, query, (tokens, width)), (1, tokens, width))
    new_rows = [node.reshape_to(assert_shape(node, x, (tokens, kv_width)), (1, tokens, kv_width)) for x in new_inputs]
    return rows, new_rows[0], new_rows[1] if value is not None else None


def _check_cache_types(node: Node, caches: dict[str, Value | None]) -> None:
    """Raise NodeError if attributes name other types than those of the caches, or if values have 4 bits."""
    for name, cache in caches.items():
        declared = node.attr(f"{name}_cache_dtype", "")
        dtype = None if cache is None else cache.dtype
        if dtype is not None and (dtype == "uint8" or declared not in ("", dtype.replace("_", ""))):
            raise node.error(
                "node.cache_dtype_mismatch",
                f"attribute {name}_cache_dtype is '{declared}', and the cache is {dtype}.",
                "Use a cache of floats, int8 or float8e4m3fn: the bit layout of smaller types is not documented.",
            )


def _rotate_heads(
    node: Node, x: Value, size: int, cos: Value | None, sin: Value | None, sequences: PagedSequences
) -> Value:
    """Return x [1, N, H * D] with every head rotated."""
    remedy = "Give it, as do_rotary = 1 requires."
    cos, sin = require_input(node, "cos_cache", cos, remedy), require_input(node, "sin_cache", sin, remedy)
    for name, cache in (("cos_cache", cos), ("sin_cache", sin)):
        require_rank(node, name, cache, "[positions, angles]")
    first, angles = node.attr("rotary_offset", 0), number(node, "last dimension of cos_cache", cos.shape[1])
    if first < 0 or first + 2 * angles > size:
        raise node.error(
            "paged_attention.rotary_out_of_range",
            f"cos_cache has {angles} angles, and rotary_offset is {first}, for heads of {size}.",
            "Choose rotary_offset + 2 * angles as at most the head size.",
        )
    head = RotatedHead(size, 2 * angles, bool(node.attr("rotary_interleaved", 0)), first)
    return rotate_heads(node, head, x, cos, sin, sequences.positions)


def _emit_attention(
    node: Node,
    shape: PagedShape,
    query: Value,
    caches: PagedCaches,
    tensors: dict[str, Value],
    sequences: PagedSequences,
    head_sink: Value | None,
) -> Value:
    """Emit attention and return Y [N, Hq * Dv]."""
    tokens, heads, size = query.shape
    v_size, scale = shape.v_size or size, node.attr("scale", 0.0)
    _check_value_size(node, v_size, size, scale)
    sink = read_head_sink(node, heads, head_sink, query.dtype)

    def shown(b: Element, h: Element, i: Element, j: Element, pages: ElementReader) -> Element:
        return pages(b, tirx.floordiv(j, int64(caches.block))) >= 0

    mask, mask_arguments = trace_formula(shown, [caches.pages])
    problem = make_ragged_problem(
        sequences.batch,
        (heads, shape.kv_heads),
        size,
        query.dtype,
        caches.layout,
        scale=scale or 1 / math.sqrt(size),
        softcap=node.attr("softcap", 0.0),
        window=_read_window(node),
        mask=mask,
        sink=sink is not None,
    )
    arguments = {
        "q": query,
        "k": tensors["k"],
        "v": tensors.get("v", tensors["k"]),
        "pages": caches.pages,
        "sink": sink,
    }
    arguments |= {
        **caches.quantization.scales,
        **mask_arguments,
        "row_starts": sequences.row_starts,
        "lengths": sequences.lengths,
    }
    arguments |= {"most_rows": sequences.max_rows, "most_keys": sequences.max_keys}
    y = call_attention_kernel(node, problem, arguments, sequences.max_keys)["y"]
    if v_size != size:
        y = compute(node, "values", lambda index, y: y(*index), [y], (tokens, heads, v_size))
    return node.reshape_to(y, (tokens, heads * v_size))


def _check_value_size(node: Node, v_size: int, size: int, scale: float) -> None:
    """Raise NodeError for values that are larger than keys, or smaller without a scale."""
    if v_size > size:
        raise node.error(
            "paged_attention.v_head_size_too_large",
            f"attribute v_head_size is {v_size}, for heads of {size}.",
            "Use at most the head size: a value is a part of a key.",
        )
    if v_size != size and not scale:
        raise node.error(
            "paged_attention.scale_missing",
            "attribute scale is missing, and v_head_size is not the head size.",
            "Give the scale.",
        )


def _read_window(node: Node) -> Window | None:
    """Return the window; local_window_size counts the query's own token, and rows are the last of the keys."""
    left, is_causal = node.attr("local_window_size", -1), bool(node.attr("is_causal", 1))
    if left < 1 and left != -1:
        raise node.error("node.value_out_of_range", f"attribute local_window_size is {left}.", "Use -1, or at least 1.")
    if left == -1 and not is_causal:
        return None
    return Window(None if left == -1 else left - 1, 0 if is_causal else None, "lengths")
