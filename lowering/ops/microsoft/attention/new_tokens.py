"""New tokens of com.microsoft GroupQueryAttention: their positions in each sequence, and caches with them written.

Batch b has seqlens_k[b] + 1 valid tokens, and its S new ones start at position max(seqlens_k[b] + 1 - S, 0).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax, tirx

from ....attention.kv_write import KvWrite
from ....attention.record.cache_layout import CacheLayout, KvQuantization
from ....importing.node import Node
from ....importing.values import Shape, Size, Value, is_one, static, storage_dtype
from ....tensorir.scatter import CacheUpdate, make_copying_update
from ...attention.attend import move_heads_first
from ...attention.kv_write import kv_write
from ...helpers.assertions import assert_shape
from ...helpers.compute import Element
from ...helpers.contents import read_sizes
from ...helpers.kernels import ElementReader, compute
from ...helpers.requirements import require_rank
from ...helpers.run_time import bind_sizes
from .quantized_caches import CacheQuantization


class NewTokens:
    """The positions of the new tokens of each batch in its sequence."""

    def __init__(self, node: Node, seqlens_k: Value, total: Value, q: Value) -> None:
        self.node, self.total = node, total
        self.batch, self.rows = q.shape[:2]
        if seqlens_k.rank not in (1, 2) or (seqlens_k.rank == 2 and not is_one(seqlens_k.shape[1])):
            raise node.error("node.shape_mismatch", f"seqlens_k has shape {list(seqlens_k.shape)}.", "Make it [batch].")
        unit_axes = (1,) * (seqlens_k.rank - 1)
        self.seqlens_k = assert_shape(node, seqlens_k, (self.batch, *unit_axes))
        self._zeros = (tirx.const(0, "int64"),) * len(unit_axes)

    def compute_lengths(self, at_least_rows: bool) -> Value:
        """Return the number of visible keys of each batch.

        In a causal first prompt these are all keys, since no row sees the padding after it.
        """

        def length(index: tuple[Element, ...], seqlens_k: ElementReader, rows: Element) -> Element:
            valid_count = self._count_valid(index[0], seqlens_k)
            return tirx.max(valid_count, rows) if at_least_rows else valid_count

        return self._compute_per_batch("lengths", length)

    def _compute_start(self) -> Value:
        """Return the position of the first new token of each batch."""

        def start(index: tuple[Element, ...], seqlens_k: ElementReader, rows: Element) -> Element:
            return tirx.max(self._count_valid(index[0], seqlens_k) - rows, tirx.const(0, "int64"))

        return self._compute_per_batch("first_position", start)

    def _count_valid(self, b: Element, seqlens_k: ElementReader) -> Element:
        return seqlens_k(b, *self._zeros).astype("int64") + tirx.const(1, "int64")

    def _compute_per_batch(self, name: str, element: Callable[..., Element]) -> Value:
        return compute(self.node, name, element, [self.seqlens_k], (self.batch,), [self.rows], dtype="int64")

    def compute_positions(self, position_ids: Value | None) -> Value:
        """Return the positions [B, S] of the new tokens.

        In a first prompt only the very first element of position_ids is used.
        """
        shape = (self.batch, self.rows)
        if position_ids is None:
            return compute(self.node, "positions", lambda i, start: start(i[0]) + i[1], [self._compute_start()], shape)
        require_rank(self.node, "position_ids", position_ids, "[batch, sequence]")
        position_ids = assert_shape(self.node, position_ids, shape)
        zeros = (tirx.const(0, "int64"),)

        def position(
            index: tuple[Element, ...], position_ids: ElementReader, total: ElementReader, rows: Element
        ) -> Element:
            is_first_prompt = total(*zeros * self.total.rank).astype("int64") == rows
            return tirx.Select(is_first_prompt, position_ids(*zeros * 2) + index[1], position_ids(*index))

        return compute(self.node, "positions", position, [position_ids, self.total], shape, [self.rows], dtype="int64")

    def append(self, past: Value, new: Value, past_input: int, present_output: int) -> Value:
        """Return the cache [B, H, T, D] with the new rows [B, S, H * D] written to it."""
        node, (batch, heads, length, size) = self.node, past.shape
        grown = node.simplify(tirx.max(_int64(length), _int64(self._read_total())))
        if node.symbols.equal(grown, length):
            return self._update(past, move_heads_first(node, new, heads))
        if node.has_output(present_output) and node.declares_same_shape(past_input, present_output):
            checked = assert_shape(node, past, (batch, heads, grown, size))  # there is room, by the model's shapes
            return self._update(assert_shape(node, checked, past.shape), move_heads_first(node, new, heads))
        return self._grow(past, new, grown)

    def append_quantized(
        self,
        pasts: tuple[Value, Value],
        new: tuple[Value, Value],
        quantization: CacheQuantization,
        cache_format: KvQuantization,
    ) -> tuple[Value, Value]:
        """Return the quantized caches [B, H, T, D] with the new rows [B, S, H * D], quantized, written to them."""
        node, (batch, heads, length, width) = self.node, pasts[0].shape
        size = width * cache_format.packing
        grown = node.simplify(tirx.max(_int64(length), _int64(self._read_total())))
        if not node.symbols.equal(grown, length):
            has_room = all(node.has_output(n) and node.declares_same_shape(n + 2, n) for n in (1, 2))
            shape = (batch, heads, grown, width)
            if has_room:  # there is room, by the model's shapes
                k, v = (assert_shape(node, assert_shape(node, past, shape), past.shape) for past in pasts)
            else:
                k, v = (self._lengthen(past, shape) for past in pasts)
            pasts = k, v
        record = KvWrite(static(batch), heads, size, size, new[0].dtype, CacheLayout(quantization=cache_format))
        rows = node.simplify(batch * self.rows)
        arguments = {f"new_{name}": node.reshape_to(x, (rows, heads, size)) for name, x in zip("kv", new)}
        arguments |= {"row_starts": self._compute_per_batch("row_starts", lambda i, _, rows: i[0] * _int64(rows))}
        arguments |= {"row_counts": self._compute_per_batch("row_counts", lambda i, _, rows: _int64(rows))}
        arguments |= {"starts": self._compute_start(), "k": pasts[0], "v": pasts[1], **quantization.factors}
        caches = kv_write(node, record, arguments)
        return caches["k"], caches["v"]

    def _lengthen(self, past: Value, shape: Shape) -> Value:
        """Return the cache, extended by zeros."""

        def element(index: tuple[Element, ...], past: ElementReader, past_length: Element) -> Element:
            return tirx.if_then_else(index[2] < past_length, past(*index), tirx.const(0, storage_dtype(dtype)))

        dtype = past.dtype
        return compute(self.node, "longer_cache", element, [past], shape, [past.shape[2]])

    def _update(self, past: Value, new: Value) -> Value:
        """Update the cache by the kernel that can also work in place."""
        dims = tuple(map(static, past.shape))
        rows = static(self.rows)
        update = make_copying_update(CacheUpdate(past.dtype, dims, rows, axis=2))
        arguments = [self.node.tensor(x) for x in (past, new, self._compute_start())]
        return self.node.call_tir(update, arguments, [(past.shape, past.dtype)], "update_cache")[0]

    def _grow(self, past: Value, new: Value, length: Size) -> Value:
        heads, size = past.shape[1], past.shape[3]
        width = tirx.const(size, "int64")

        def element(
            index: tuple[Element, ...],
            past: ElementReader,
            new: ElementReader,
            start: ElementReader,
            past_length: Element,
            rows: Element,
        ) -> Element:
            b, h, t, d = index
            row = t - start(b)
            cached = tirx.if_then_else(t < past_length, past(*index), tirx.const(0, new_dtype))
            is_new = tirx.all(row >= tirx.const(0, "int64"), row < rows)
            return tirx.if_then_else(is_new, new(b, row, h * width + d), cached)

        new_dtype = new.dtype
        return compute(
            self.node,
            "grown_cache",
            element,
            [past, new, self._compute_start()],
            (self.batch, heads, length, size),
            [past.shape[2], self.rows],
        )

    def _read_total(self) -> Size:
        """Return total_sequence_length as a size: static at import, or read at run time."""
        static_sizes = read_sizes(self.total)
        if static_sizes is not None:
            return static_sizes[0]
        flat = relax.op.reshape(self.node.tensor(self.total), (1,))
        return bind_sizes(self.node, self.node.emit(flat))[0]


def _int64(size: Size) -> Element:
    return tirx.const(size, "int64") if isinstance(size, int) else size
