"""The paged caches of com.microsoft PagedAttention: blocks by sequence, and the tables that locate rows and keys.

Tables have an element for each of B sequences or of N packed rows. A sequence whose lengths are negative, or greater
than its blocks can store, has no rows and no keys. The table of blocks has -1 for none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....attention.codegen.parameters import int64
from ....attention.kv_write import KvWrite
from ....attention.record.cache_layout import CacheLayout, Pages
from ....importing.node import Node
from ....importing.values import Size, Value, static
from ...attention.kv_write import kv_write
from ...helpers import symbolic
from ...helpers.assertions import assert_shape, require
from ...helpers.compute import Element, number, unify_sizes
from ...helpers.kernels import ElementReader, compute, emit_loops, serial
from ...helpers.run_time import bind_sizes
from .projections import check_ints
from .quantized_caches import CacheQuantization


@dataclass(frozen=True)
class PagedShape:
    """Hq, Hkv, and for a latent cache the number of elements of a value; None means all."""

    heads: int
    kv_heads: int
    is_latent: bool
    v_size: int | None


@dataclass(frozen=True)
class PagedSequences:
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


def locate_sequences(node: Node, tokens: Size, cumulative: Value, past: Value, caches: PagedCaches) -> PagedSequences:
    """Emit the tables of all sequences, whose rows and lengths are limited to what exists."""
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
    return PagedSequences(batch, *tables, *bind_sizes(node, numbers, source=past))


class PagedCaches:
    """The caches, with the blocks of each sequence."""

    def __init__(
        self,
        node: Node,
        shape: PagedShape,
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

    def append(self, new: dict[str, Value], sequences: PagedSequences, slot_mapping: Value | None) -> dict[str, Value]:
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

    def _copy_first_rows(self, sequences: PagedSequences) -> Value:
        return compute(self.node, "firsts", lambda i, starts: starts(*i), [sequences.row_starts], (sequences.batch,))

    def _locate_slots(self, slots: Value, sequences: PagedSequences) -> dict[str, Value]:
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
