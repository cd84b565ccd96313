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
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....attention.codegen.parameters import int64
from ....attention.kv_write import KvWrite
from ....attention.record.cache_layout import CacheLayout, Pages
from ....attention.record.problem import Window
from ....importing import symbolic
from ....importing.compute import Element, number, unify_sizes
from ....importing.node import Node
from ....importing.values import Size, Value, static
from ... import op
from ...attention.attend import call_attention_kernel, make_ragged_problem, trace_formula
from ...attention.kv_write import kv_write
from ...attention.rotary_embedding import RotatedHead, rotate_heads
from ...helpers.assertions import assert_shape, require
from ...helpers.kernels import ElementReader, compute, emit_loops, serial
from ...helpers.run_time import bind_sizes
from .. import DOMAIN
from .projections import check_floats, check_pair, divide_heads, normalize_heads, read_head_sink, slice_projection
from .quantized_caches import CacheQuantization, read_cache_quantization

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
    if query.dtype not in _FLOATS:
        raise node.error(
            "node.dtype_unsupported", f"input query is {query.dtype}.", f"Use one of {', '.join(_FLOATS)}."
        )
    q, k, v = _split_projections(node, shape, query, key, value)
    size, tokens = q.shape[2] // shape.heads, q.shape[1]
    check_pair(node, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    q, k = normalize_heads(node, q, shape.heads, q_norm_weight), normalize_heads(node, k, shape.kv_heads, k_norm_weight)
    _check_cache_types(node, {"k": key_cache, "v": value_cache})
    quantization = read_cache_quantization(
        node, (shape.kv_heads, size), q.dtype, (("k", key_cache, k_scale), ("v", value_cache, v_scale))
    )
    caches = _PagedCaches(node, shape, size, quantization, key_cache, value_cache, block_table)
    sequences = _locate_sequences(node, tokens, cumulative_sequence_length, past_seqlens, caches)
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


@dataclass(frozen=True)
class _PagedShape:
    """Hq, Hkv, and for a latent cache the number of elements of a value; None means all."""

    heads: int
    kv_heads: int
    is_latent: bool
    v_size: int | None


def _read_shape(node: Node) -> _PagedShape:
    heads, kv_heads = node.attr("num_heads"), node.attr("kv_num_heads")
    layout, v_size = node.attr("kv_cache_layout", "SEPARATE"), node.attr("v_head_size", 0)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise node.error(
            "paged_attention.heads_not_divisible",
            f"{heads} query heads do not divide into {kv_heads} key/value heads.",
            "Choose num_heads as a multiple of kv_num_heads.",
        )
    if layout not in ("SEPARATE", "LATENT"):
        raise node.error(
            "node.attribute_unsupported", f"attribute kv_cache_layout is '{layout}'.", "Use 'SEPARATE' or 'LATENT'."
        )
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
    return _PagedShape(heads, kv_heads, is_latent, v_size or None)


def _split_projections(
    node: Node, shape: _PagedShape, query: Value, key: Value | None, value: Value | None
) -> tuple[Value, Value, Value | None]:
    """Return Q [1, N, Hq * D], and K and V [1, N, Hkv * D]; a latent cache has no V."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is not None and x.rank != 2:
            raise node.error("node.rank_unsupported", f"input {name} has rank {x.rank}.", "Make it [tokens, hidden].")
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


@dataclass(frozen=True)
class _PagedSequences:
    """Tables that locate the rows and keys of each sequence, int64.

    row_starts is [B + 1]. By sequence: counts (of rows that are written), past and lengths (of keys, including those of
    this call). By row: positions [1, N], and writes [N], whether the row is written. max_rows and max_keys are the
    largest numbers of a sequence, at least 1.
    """

    batch: Size
    row_starts: Value
    counts: Value
    past: Value
    lengths: Value
    positions: Value
    writes: Value
    max_rows: Size
    max_keys: Size


def _locate_sequences(
    node: Node, tokens: Size, cumulative: Value, past: Value, caches: _PagedCaches
) -> _PagedSequences:
    check_ints(node, "cumulative_sequence_length", cumulative, 1)
    check_ints(node, "past_seqlens", past, 1)
    batch = caches.batch
    cumulative = assert_shape(node, cumulative, (node.simplify(batch + 1),))
    past = assert_shape(node, past, (batch,))
    blocks, columns, block = caches.blocks, caches.pages.shape[1], caches.block

    def body(cumulative: Any, past: Any, *buffers: Any) -> None:
        row_starts, counts, past_lengths, lengths, positions, writes, numbers = buffers
        zero, unit = int64(0), int64(1)
        capacity = tirx.Select(int64(blocks) > 0, int64(columns) * block, zero)

        def row(index: Element) -> Element:
            return tirx.max(tirx.min(cumulative[index].astype("int64"), int64(tokens)), zero)

        T.buffer_store(row_starts, row(zero), [zero])
        for k in range(2):
            T.buffer_store(numbers, unit, [k])
        with serial(tokens) as n:
            T.buffer_store(positions, zero, [zero, n])
            T.buffer_store(writes, zero, [n])
        with serial(batch) as b:
            first = T.bind(row_starts[b])
            count = T.bind(tirx.max(row(b + 1) - first, zero))
            past_length = T.bind(past[b].astype("int64"))
            is_legal = T.bind(tirx.all(past_length >= 0, past_length <= capacity - count))  # the sum could overflow
            T.buffer_store(row_starts, first + count, [b + 1])
            T.buffer_store(counts, tirx.Select(is_legal, count, zero), [b])
            T.buffer_store(past_lengths, tirx.Select(is_legal, past_length, zero), [b])
            T.buffer_store(lengths, tirx.Select(is_legal, past_length + count, zero), [b])
            T.buffer_store(numbers, tirx.max(numbers[0], count), [0])
            T.buffer_store(numbers, tirx.max(numbers[1], lengths[b]), [1])
            with T.serial(counts[b]) as i:
                T.buffer_store(positions, past_length + i, [zero, first + i])
                T.buffer_store(writes, unit, [first + i])

    shapes = ((node.simplify(batch + 1),), (batch,), (batch,), (batch,), (1, tokens), (tokens,), (2,))
    outputs = [(shape, "int64") for shape in shapes]
    *tables, numbers = emit_loops(
        node, "sequences", body, [cumulative, past], outputs, [batch, tokens, blocks, columns]
    )
    return _PagedSequences(batch, *tables, *bind_sizes(node, numbers, source=past))


class _PagedCaches:
    """The caches, with the blocks of each sequence."""

    def __init__(
        self,
        node: Node,
        shape: _PagedShape,
        size: int,
        quantization: CacheQuantization,
        key_cache: Value,
        value_cache: Value | None,
        block_table: Value,
    ) -> None:
        self.node, self.shape, self.size, self.quantization = node, shape, size, quantization
        if shape.is_latent and value_cache is not None:
            raise node.error(
                "paged_attention.value_cache_unsupported",
                "value_cache is given, and kv_cache_layout is 'LATENT'.",
                "Remove value_cache.",
            )
        if not shape.is_latent and value_cache is None:
            raise node.error(
                "node.input_missing", "value_cache is missing.", "Give it, or use kv_cache_layout 'LATENT'."
            )
        caches = {"k": key_cache} | ({"v": value_cache} if value_cache is not None else {})
        for cache in caches.values():
            if cache.rank != 4:
                name = node.describe(cache, False)
                raise node.error(
                    "node.rank_unsupported",
                    f"{name} has rank {cache.rank}.",
                    "Make it [blocks, block size, heads, head size].",
                )
        self.blocks = unify_sizes(node, "the number of blocks", *(cache.shape[0] for cache in caches.values()))
        blocks = unify_sizes(node, "the block size", *(cache.shape[1] for cache in caches.values()))
        self.block = number(node, "the block size, dimension 1 of key_cache,", blocks)
        if self.block < 1:
            raise node.error(
                "paged_attention.block_size_zero",
                "the block size, dimension 1 of key_cache, is 0.",
                "Use at least 1 token.",
            )
        dims = (self.blocks, self.block, shape.kv_heads, size)
        self.tensors = {name: assert_shape(node, cache, dims) for name, cache in caches.items()}
        self.layout = CacheLayout("pthd", Pages(self.block), quantization=quantization.format)
        check_ints(node, "block_table", block_table, 2)
        text = "dimension 1 of block_table is {}; it must be 1 or more."
        columns = block_table.shape[1]
        block_table = require(
            node, block_table, symbolic.less_or_equal(1, columns), "paged_attention.block_table_empty", text, columns
        )
        self.batch = block_table.shape[0]

        def entry(index: tuple[Element, ...], table: ElementReader, blocks: Element) -> Element:
            """Return the block, or -1 for none."""
            block = table(*index).astype("int64")
            return tirx.Select(tirx.all(block >= 0, block < int64(blocks)), block, int64(-1))

        self.pages = compute(node, "pages", entry, [block_table], block_table.shape, [self.blocks], dtype="int64")

    def append(self, new: dict[str, Value], sequences: _PagedSequences, slot_mapping: Value | None) -> dict[str, Value]:
        """Return the tensors of the caches with the new rows [N, Hkv, D]."""
        node, tokens = self.node, new["new_k"].shape[0]
        v_size = self.size if "new_v" in new else 0
        tables = {
            "row_starts": self._copy_first_rows(sequences),
            "row_counts": sequences.counts,
            "starts": sequences.past,
        }
        tables |= {"pages": self.pages}
        batch = self.batch
        if slot_mapping is not None:
            check_ints(node, "slot_mapping", slot_mapping, 1)
            tables, batch = self._locate_slots(assert_shape(node, slot_mapping, (tokens,)), sequences), tokens
        record = KvWrite(static(batch), self.shape.kv_heads, self.size, v_size, new["new_k"].dtype, self.layout)
        arguments = {**new, **tables, **self.tensors, **self.quantization.factors}
        return {**self.tensors, **kv_write(node, record, arguments)}

    def _copy_first_rows(self, sequences: _PagedSequences) -> Value:
        return compute(self.node, "firsts", lambda i, starts: starts(*i), [sequences.row_starts], (sequences.batch,))

    def _locate_slots(self, slots: Value, sequences: _PagedSequences) -> dict[str, Value]:
        """Return tables that treat each row as a sequence of its own, which starts in the block of its slot."""
        node, tokens = self.node, slots.shape[0]

        def count(index: tuple[Element, ...], slots: ElementReader, writes: ElementReader) -> Element:
            return tirx.Select(slots(*index).astype("int64") >= 0, writes(*index), int64(0))

        def start(index: tuple[Element, ...], slots: ElementReader) -> Element:
            return tirx.floormod(slots(*index).astype("int64"), int64(self.block))

        def page(index: tuple[Element, ...], slots: ElementReader) -> Element:
            return tirx.floordiv(slots(index[0]).astype("int64"), int64(self.block))

        row_shape = (tokens,)
        return {
            "row_starts": compute(node, "rows", lambda i: i[0], [], row_shape, dtype="int64"),
            "row_counts": compute(node, "counts", count, [slots, sequences.writes], row_shape, dtype="int64"),
            "starts": compute(node, "starts", start, [slots], row_shape, dtype="int64"),
            "pages": compute(node, "pages", page, [slots], (tokens, 1), dtype="int64"),
        }


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
    node: Node, x: Value, size: int, cos: Value | None, sin: Value | None, sequences: _PagedSequences
) -> Value:
    """Return x [1, N, H * D] with every head rotated."""
    if cos is None or sin is None:
        raise node.error(
            "node.input_missing", "attribute do_rotary is 1, and cos_cache or sin_cache is missing.", "Give both."
        )
    if cos.rank != 2 or sin.rank != 2:
        raise node.error(
            "node.rank_unsupported",
            f"cos_cache and sin_cache have ranks {cos.rank} and {sin.rank}.",
            "Make them matrices.",
        )
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
    shape: _PagedShape,
    query: Value,
    caches: _PagedCaches,
    tensors: dict[str, Value],
    sequences: _PagedSequences,
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


def check_ints(node: Node, name: str, value: Value, rank: int) -> None:
    if value.dtype not in ("int32", "int64") or value.rank != rank:
        raise node.error(
            "node.tensor_type_unsupported",
            f"input {name} is {value.dtype} of rank {value.rank}.",
            f"Make it int32 of rank {rank}.",
        )
