"""com.microsoft PagedAttention: packed requests append to caches in blocks, and attend to all that is there.

Sequence b has the rows cumulative_sequence_length[b] to [b + 1] of N packed ones, and had past_seqlens[b] tokens in the
cache before. Its token t lies in block block_table[b, t / block_size]; an entry that names no block hides the keys
that would be there. A sequence whose lengths are negative, or more than its blocks hold, writes nothing and gives 0.

With kv_cache_layout LATENT there is one cache of one head, whose first v_head_size elements are the values: the
attention reads it twice, and leaves out what its values have too many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...attention.cache_layout import CacheLayout, Pages
from ...attention.kv_write import KvWrite
from ...attention.parameters import int64
from ...attention.problem import Window
from ...importing import symbolic
from ...importing.compute import Element, agreed, number
from ...importing.node import Node
from ...importing.values import Size, Value, static
from .. import op
from ..asserted import asserted, required
from ..attend import formula_of, packed, solved
from ..kernels import Read, compute, loops, serial
from ..kv_write import kv_write
from ..rotary_embedding import Head, rotate
from ..run_time import bind
from . import DOMAIN
from .codes import Codes, cache_codes
from .projections import check_floats, head_sink_of, head_size, normalized, part

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
    """Y [N, Hq * Dv], and key_cache and value_cache [blocks, block_size, Hkv, D] with the new rows.

    query is [N, Hq * D] with key and value [N, Hkv * D], or packed [N, (Hq + 2 Hkv) * D] without them; tables are
    int32. attention_metadata is a hint, and is not read.
    """
    shape = _shape(node)
    check_floats(node, query=query, key=key, value=value)
    if query.dtype not in _FLOATS:
        raise node.error(f"input query is {query.dtype}.", f"Use one of {', '.join(_FLOATS)}.")
    q, k, v = _projections(node, shape, query, key, value)
    size, tokens = q.shape[2] // shape.heads, q.shape[1]
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise node.error("one of q_norm_weight and k_norm_weight is given.", "Give both or none.")
    q, k = normalized(node, q, shape.heads, q_norm_weight), normalized(node, k, shape.kv_heads, k_norm_weight)
    _check_cache_types(node, {"k": key_cache, "v": value_cache})
    codes = cache_codes(node, (shape.kv_heads, size), q.dtype, (("k", key_cache, k_scale), ("v", value_cache, v_scale)))
    caches = _Caches(node, shape, size, codes, key_cache, value_cache, block_table)
    sequences = _sequences(node, tokens, cumulative_sequence_length, past_seqlens, caches)
    if node.attr("do_rotary", 0):
        q, k = (_turned(node, x, size, cos_cache, sin_cache, sequences) for x in (q, k))
    new = {"new_k": node.reshaped(k, (tokens, shape.kv_heads, size))}
    if v is not None:
        new["new_v"] = node.reshaped(v, (tokens, shape.kv_heads, size))
    tensors = caches.updated(new, sequences, slot_mapping)
    y = _attended(node, shape, node.reshaped(q, (tokens, shape.heads, size)), caches, tensors, sequences, head_sink)
    return y, tensors["k"], tensors.get("v")


@dataclass(frozen=True)
class _Shape:
    """Hq, Hkv, and with a latent cache the elements of a value, None for all."""

    heads: int
    kv_heads: int
    latent: bool
    v_size: int | None


def _shape(node: Node) -> _Shape:
    heads, kv_heads = node.attr("num_heads"), node.attr("kv_num_heads")
    layout, v_size = node.attr("kv_cache_layout", "SEPARATE"), node.attr("v_head_size", 0)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise node.error(f"{heads} query heads do not divide into {kv_heads} key/value heads.", "Use a multiple.")
    if layout not in ("SEPARATE", "LATENT"):
        raise node.error(f"attribute kv_cache_layout is '{layout}'.", "Use 'SEPARATE' or 'LATENT'.")
    latent = layout == "LATENT"
    if latent and kv_heads != 1:
        raise node.error(f"attribute kv_num_heads is {kv_heads}, and kv_cache_layout 'LATENT'.", "Make it 1.")
    if v_size < 0 or (v_size and not latent):
        raise node.error(
            f"attribute v_head_size is {v_size}, and kv_cache_layout '{layout}'.", "It is for 'LATENT', and positive."
        )
    return _Shape(heads, kv_heads, latent, v_size or None)


def _projections(
    node: Node, shape: _Shape, query: Value, key: Value | None, value: Value | None
) -> tuple[Value, Value, Value | None]:
    """Q [1, N, Hq * D] and K and V [1, N, Hkv * D]; a latent cache has no V."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is not None and x.rank != 2:
            raise node.error(f"input {name} has rank {x.rank}.", "Make it [tokens, hidden].")
    tokens, heads, kv_heads = query.shape[0], shape.heads, shape.kv_heads
    if shape.latent and (key is None or value is not None):
        raise node.error("kv_cache_layout is 'LATENT'.", "Give key [tokens, head size], and no value.")
    if key is None and value is None:
        size = head_size(node, "packed query", query.shape[1], heads + 2 * kv_heads)
        rows = node.reshaped(query, (1, tokens, query.shape[1]))
        widths = [count * size for count in (heads, kv_heads, kv_heads)]
        q, k, v = (part(node, rows, sum(widths[:n]), widths[n]) for n in range(3))
        return q, k, v
    if key is None or (value is None and not shape.latent):
        raise node.error("one of key and value is given.", "Give both, or none and pack them in query.")
    width = heads * head_size(node, "query", query.shape[1], heads)
    kv_width = width // heads * kv_heads
    given = [x for x in (key, value) if x is not None]
    tokens = agreed(node, "the number of tokens", tokens, *(x.shape[0] for x in given))
    for x in given:
        agreed(node, f"the last dimension of {node.name_of(x, False)}", x.shape[1], kv_width)
    rows = node.reshaped(asserted(node, query, (tokens, width)), (1, tokens, width))
    new = [node.reshaped(asserted(node, x, (tokens, kv_width)), (1, tokens, kv_width)) for x in given]
    return rows, new[0], new[1] if value is not None else None


@dataclass(frozen=True)
class _Sequences:
    """int64 tensors: row_starts [B + 1], and by sequence counts (of rows that are written), past and lengths (of keys,
    those of this call among them); by row the position [1, N] and whether it is written, writes [N]. most_rows and
    most_keys: the most that a sequence has, at least 1."""

    batch: Size
    row_starts: Value
    counts: Value
    past: Value
    lengths: Value
    positions: Value
    writes: Value
    most_rows: Size
    most_keys: Size


def _sequences(node: Node, tokens: Size, cumulative: Value, past: Value, caches: _Caches) -> _Sequences:
    check_ints(node, "cumulative_sequence_length", cumulative, 1)
    check_ints(node, "past_seqlens", past, 1)
    batch = caches.batch
    cumulative = asserted(node, cumulative, (node.simplify(batch + 1),))
    past = asserted(node, past, (batch,))
    blocks, columns, block = caches.blocks, caches.pages.shape[1], caches.block

    def body(cumulative: Any, past: Any, *made: Any) -> None:
        row_starts, counts, befores, lengths, positions, writes, numbers = made
        zero, one = int64(0), int64(1)
        capacity = tirx.Select(int64(blocks) > 0, int64(columns) * block, zero)

        def row(at: Element) -> Element:
            return tirx.max(tirx.min(cumulative[at].astype("int64"), int64(tokens)), zero)

        T.buffer_store(row_starts, row(zero), [zero])
        for k in range(2):
            T.buffer_store(numbers, one, [k])
        with serial(tokens) as n:
            T.buffer_store(positions, zero, [zero, n])
            T.buffer_store(writes, zero, [n])
        with serial(batch) as b:
            first = T.bind(row_starts[b])
            count = T.bind(tirx.max(row(b + 1) - first, zero))
            before = T.bind(past[b].astype("int64"))
            legal = T.bind(tirx.all(before >= 0, before <= capacity - count))  # the sum may overflow
            T.buffer_store(row_starts, first + count, [b + 1])
            T.buffer_store(counts, tirx.Select(legal, count, zero), [b])
            T.buffer_store(befores, tirx.Select(legal, before, zero), [b])
            T.buffer_store(lengths, tirx.Select(legal, before + count, zero), [b])
            T.buffer_store(numbers, tirx.max(numbers[0], count), [0])
            T.buffer_store(numbers, tirx.max(numbers[1], lengths[b]), [1])
            with T.serial(counts[b]) as i:
                T.buffer_store(positions, before + i, [zero, first + i])
                T.buffer_store(writes, one, [first + i])

    shapes = ((node.simplify(batch + 1),), (batch,), (batch,), (batch,), (1, tokens), (tokens,), (2,))
    outputs = [(shape, "int64") for shape in shapes]
    *tables, numbers = loops(node, "sequences", body, [cumulative, past], outputs, [batch, tokens, blocks, columns])
    return _Sequences(batch, *tables, *bind(node, numbers, of=past))


class _Caches:
    """The caches, and where the blocks of each sequence are."""

    def __init__(
        self,
        node: Node,
        shape: _Shape,
        size: int,
        codes: Codes,
        key_cache: Value,
        value_cache: Value | None,
        block_table: Value,
    ) -> None:
        self.node, self.shape, self.size, self.codes = node, shape, size, codes
        if shape.latent and value_cache is not None:
            raise node.error("value_cache is given, and kv_cache_layout is 'LATENT'.", "Leave it out.")
        if not shape.latent and value_cache is None:
            raise node.error("value_cache is missing.", "Give it, or use kv_cache_layout 'LATENT'.")
        given = {"k": key_cache} | ({"v": value_cache} if value_cache is not None else {})
        for cache in given.values():
            if cache.rank != 4:
                name = node.name_of(cache, False)
                raise node.error(f"{name} has rank {cache.rank}.", "Make it [blocks, block size, heads, head size].")
        self.blocks = agreed(node, "the number of blocks", *(cache.shape[0] for cache in given.values()))
        blocks = agreed(node, "the block size", *(cache.shape[1] for cache in given.values()))
        self.block = number(node, "the block size, dimension 1 of key_cache,", blocks)
        if self.block < 1:
            raise node.error("the block size, dimension 1 of key_cache, is 0.", "Use at least 1 token.")
        dims = (self.blocks, self.block, shape.kv_heads, size)
        self.tensors = {name: asserted(node, cache, dims) for name, cache in given.items()}
        self.layout = CacheLayout("pthd", Pages(self.block), codec=codes.codec)
        check_ints(node, "block_table", block_table, 2)
        text = "dimension 1 of block_table is {}; it must be 1 or more."
        columns = block_table.shape[1]
        block_table = required(node, block_table, symbolic.less_or_equal(1, columns), text, columns)
        self.batch = block_table.shape[0]

        def entry(index: tuple[Element, ...], table: Read, blocks: Element) -> Element:
            """The block, or -1 for none."""
            found = table(*index).astype("int64")
            return tirx.Select(tirx.all(found >= 0, found < int64(blocks)), found, int64(-1))

        self.pages = compute(node, "pages", entry, [block_table], block_table.shape, [self.blocks], dtype="int64")

    def updated(self, new: dict[str, Value], sequences: _Sequences, slot_mapping: Value | None) -> dict[str, Value]:
        """The tensors of the caches with the new rows [N, Hkv, D]."""
        node, tokens = self.node, new["new_k"].shape[0]
        v_size = self.size if "new_v" in new else 0
        where = {"row_starts": self._firsts(sequences), "row_counts": sequences.counts, "starts": sequences.past}
        where |= {"pages": self.pages}
        batch = self.batch
        if slot_mapping is not None:
            check_ints(node, "slot_mapping", slot_mapping, 1)
            where, batch = self._slots(asserted(node, slot_mapping, (tokens,)), sequences), tokens
        record = KvWrite(static(batch), self.shape.kv_heads, self.size, v_size, new["new_k"].dtype, self.layout)
        given = {**new, **where, **self.tensors, **self.codes.factors}
        return {**self.tensors, **kv_write(node, record, given)}

    def _firsts(self, sequences: _Sequences) -> Value:
        return compute(self.node, "firsts", lambda i, starts: starts(*i), [sequences.row_starts], (sequences.batch,))

    def _slots(self, slots: Value, sequences: _Sequences) -> dict[str, Value]:
        """Each row as a sequence of its own, which begins in the block of its slot."""
        node, tokens = self.node, slots.shape[0]

        def count(index: tuple[Element, ...], slots: Read, writes: Read) -> Element:
            return tirx.Select(slots(*index).astype("int64") >= 0, writes(*index), int64(0))

        def start(index: tuple[Element, ...], slots: Read) -> Element:
            return tirx.floormod(slots(*index).astype("int64"), int64(self.block))

        def page(index: tuple[Element, ...], slots: Read) -> Element:
            return tirx.floordiv(slots(index[0]).astype("int64"), int64(self.block))

        each = (tokens,)
        return {
            "row_starts": compute(node, "rows", lambda i: i[0], [], each, dtype="int64"),
            "row_counts": compute(node, "counts", count, [slots, sequences.writes], each, dtype="int64"),
            "starts": compute(node, "starts", start, [slots], each, dtype="int64"),
            "pages": compute(node, "pages", page, [slots], (tokens, 1), dtype="int64"),
        }


def _check_cache_types(node: Node, caches: dict[str, Value | None]) -> None:
    """Raises NodeError where the types that attributes name are not those of the caches, or codes of 4 bits."""
    for name, cache in caches.items():
        named = node.attr(f"{name}_cache_dtype", "")
        found = None if cache is None else cache.dtype
        if found is not None and (found == "uint8" or named not in ("", found.replace("_", ""))):
            raise node.error(
                f"attribute {name}_cache_dtype is '{named}', and the cache {found}.",
                "Use a cache of numbers, int8 or float8e4m3fn: what the bits of smaller types mean is not documented.",
            )


def _turned(node: Node, x: Value, size: int, cos: Value | None, sin: Value | None, sequences: _Sequences) -> Value:
    """x [1, N, H * D] with every head rotated."""
    if cos is None or sin is None:
        raise node.error("attribute do_rotary is 1, and cos_cache or sin_cache is missing.", "Give both.")
    if cos.rank != 2 or sin.rank != 2:
        raise node.error(f"cos_cache and sin_cache have ranks {cos.rank} and {sin.rank}.", "They are matrices.")
    first, angles = node.attr("rotary_offset", 0), number(node, "last dimension of cos_cache", cos.shape[1])
    if first < 0 or first + 2 * angles > size:
        raise node.error(
            f"cos_cache has {angles} angles, and rotary_offset is {first}, for heads of {size}.",
            "Rotate elements of the head.",
        )
    head = Head(size, 2 * angles, bool(node.attr("rotary_interleaved", 0)), first)
    return rotate(node, head, x, cos, sin, sequences.positions)


def _attended(
    node: Node,
    shape: _Shape,
    query: Value,
    caches: _Caches,
    tensors: dict[str, Value],
    sequences: _Sequences,
    head_sink: Value | None,
) -> Value:
    """Y [N, Hq * Dv]."""
    tokens, heads, size = query.shape
    v_size, scale = shape.v_size or size, node.attr("scale", 0.0)
    if v_size > size:
        raise node.error(f"attribute v_head_size is {v_size}, for heads of {size}.", "A value is a part of a key.")
    if v_size != size and not scale:
        raise node.error("attribute scale is missing, and v_head_size is not the head size.", "Give the scale.")
    sink = head_sink_of(node, heads, head_sink, query.dtype)

    def shown(b: Element, h: Element, i: Element, j: Element, pages: Read) -> Element:
        return pages(b, tirx.floordiv(j, int64(caches.block))) >= 0

    mask, read = formula_of(shown, [caches.pages])
    problem = packed(
        sequences.batch,
        (heads, shape.kv_heads),
        size,
        query.dtype,
        caches.layout,
        scale=scale or 1 / math.sqrt(size),
        softcap=node.attr("softcap", 0.0),
        window=_window(node),
        mask=mask,
        sink=sink is not None,
    )
    given = {"q": query, "k": tensors["k"], "v": tensors.get("v", tensors["k"]), "pages": caches.pages, "sink": sink}
    given |= {**caches.codes.scales, **read, "row_starts": sequences.row_starts, "lengths": sequences.lengths}
    given |= {"most_rows": sequences.most_rows, "most_keys": sequences.most_keys}
    y = solved(node, problem, given, sequences.most_keys)["y"]
    if v_size != size:
        y = compute(node, "values", lambda index, y: y(*index), [y], (tokens, heads, v_size))
    return node.reshaped(y, (tokens, heads * v_size))


def _window(node: Node) -> Window | None:
    """local_window_size counts the query's own token; rows are the last of the keys."""
    left, causal = node.attr("local_window_size", -1), bool(node.attr("is_causal", 1))
    if left < 1 and left != -1:
        raise node.error(f"attribute local_window_size is {left}.", "Use -1, or at least 1.")
    if left == -1 and not causal:
        return None
    return Window(None if left == -1 else left - 1, 0 if causal else None, "lengths")


def check_ints(node: Node, name: str, value: Value, rank: int) -> None:
    if value.dtype not in ("int32", "int64") or value.rank != rank:
        raise node.error(f"input {name} is {value.dtype} of rank {value.rank}.", f"Make it int32 of rank {rank}.")
