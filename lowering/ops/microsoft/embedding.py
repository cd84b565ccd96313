"""com.microsoft EmbedLayerNormalization and QEmbedLayerNormalization: normalized sums of embedding rows.

Quantized tables stay quantized: rows are dequantized where they are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx

from ...importing.node import Node
from ...importing.values import Value, is_one
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_in_bounds, assert_shape, require
from ..helpers.compute import Element, require_numbers, widen_dtype
from ..helpers.kernels import compute
from ..helpers.requirements import require_dtype, require_rank
from ..math.integer_matmul import BYTES, broadcast_scale
from ..math.matmul import round_to
from ..nn.normalization import normalize_last_axes
from . import DOMAIN
from .normalization import FUSED_EPSILON
from .quantized import dequantize


@dataclass(frozen=True)
class _Lookup:
    """A table [N, D], and the row of it that each token reads.

    indices is [B, S], or [1, S] if sequences may share it; None means row s. scale and zero point, of rank 0, belong to
    a quantized table.
    """

    name: str
    table: Value
    indices: Value | None
    scale: Value | None = None
    zero: Value | None = None
    shared: bool = False


@op("EmbedLayerNormalization", since=1, domain=DOMAIN)
def embed_layer_normalization(
    node: Node,
    ids: Value,
    segment_ids: Value | None,
    word_table: Value,
    positions: Value,
    segments: Value | None,
    gamma: Value,
    beta: Value,
    mask: Value | None = None,
    position_ids: Value | None = None,
) -> tuple[Value, Value | None, Value | None]:
    """Normalize word_table[ids] + positions[position_ids, or 0 1 2 ...] + segments[segment_ids].

    Also return the number of ones in each row of mask [B, S], 0 without a mask, and the sum of the embeddings.
    """
    require_numbers(node, word_table, positions, gamma, beta)
    lookups = [_Lookup("word_embedding", word_table, ids)]
    lookups.append(_Lookup("position_embedding", positions, position_ids, shared=True))
    if _has_segments(node, segment_ids, segment_embedding=segments):
        assert segments is not None
        lookups.append(_Lookup("segment_embedding", segments, segment_ids))
    total = _emit_row_sum(node, lookups, widen_dtype(word_table.dtype))
    y = normalize_last_axes(node, total, [gamma, beta], centered=True, epsilon=FUSED_EPSILON)
    return y, _count_mask_ones(node, ids, mask), round_to(node, total, word_table.dtype)


@op("QEmbedLayerNormalization", since=1, domain=DOMAIN)
def q_embed_layer_normalization(
    node: Node,
    ids: Value,
    segment_ids: Value | None,
    word_table: Value,
    positions: Value,
    segments: Value | None,
    gamma: Value,
    beta: Value,
    mask: Value | None,
    word_scale: Value,
    positions_scale: Value,
    segments_scale: Value | None,
    gamma_scale: Value,
    beta_scale: Value,
    word_zero: Value,
    positions_zero: Value,
    segments_zero: Value | None,
    gamma_zero: Value,
    beta_zero: Value,
) -> tuple[Value, Value | None]:
    """Apply EmbedLayerNormalization to quantized tables and vectors, each with one scale and zero point.

    Y is float32.
    """
    lookups = [
        _read_quantized_lookup(node, "word_embedding", word_table, ids, word_scale, word_zero),
        _read_quantized_lookup(node, "position_embedding", positions, None, positions_scale, positions_zero),
    ]
    if _has_segments(
        node,
        segment_ids,
        segment_embedding=segments,
        segment_embedding_scale=segments_scale,
        segment_embedding_zero_point=segments_zero,
    ):
        assert segments is not None and segments_scale is not None and segments_zero is not None
        lookups.append(
            _read_quantized_lookup(node, "segment_embedding", segments, segment_ids, segments_scale, segments_zero)
        )
    total = _emit_row_sum(node, lookups, "float32")
    vectors = [dequantize(node, gamma, gamma_scale, gamma_zero), dequantize(node, beta, beta_scale, beta_zero)]
    y = normalize_last_axes(node, total, vectors, centered=True, epsilon=FUSED_EPSILON)
    return y, _count_mask_ones(node, ids, mask)


def _read_quantized_lookup(
    node: Node, name: str, table: Value, indices: Value | None, scale: Value, zero: Value
) -> _Lookup:
    require_dtype(node, name, table, BYTES)
    return _Lookup(name, table, indices, broadcast_scale(node, scale), broadcast_scale(node, zero))


def _has_segments(node: Node, segment_ids: Value | None, **other_inputs: Value | None) -> bool:
    """Return whether there are segments: all of these inputs, or none."""
    missing = [name for name, value in {"segment_ids": segment_ids, **other_inputs}.items() if value is None]
    if 0 < len(missing) <= len(other_inputs):
        raise node.error(
            "node.inputs_incomplete",
            f"input {missing[0]} is missing, and not all of segment_ids and {', '.join(other_inputs)} are.",
            "Give all of them or none.",
        )
    return not missing


def _emit_row_sum(node: Node, lookups: Sequence[_Lookup], dtype: str) -> Value:
    """Return the sum of the rows of all lookups, [B, S, D] of this type.

    B and S are those of the first lookup's indices.
    """
    lookups = _check_lookups(node, lookups)
    ids, width = lookups[0].indices, lookups[0].table.shape[1]
    assert ids is not None
    tensors = [v for x in lookups for v in (x.indices, x.table, x.zero, x.scale) if v is not None]

    def element(index: tuple[Element, ...], *operands: Element) -> Element:
        b, s, d = index
        reads, sizes = iter(operands[: len(tensors)]), operands[len(tensors) :]
        rows = []
        for lookup, size in zip(lookups, sizes):
            row_index, zero = s, tirx.const(0, "int64")
            if lookup.indices is not None:
                row_index = next(reads)(zero if is_one(lookup.indices.shape[0]) else b, s).astype("int64")
            last = size - tirx.const(1, "int64")
            row = next(reads)(tirx.max(tirx.min(row_index, last), zero), d).astype(dtype)
            if lookup.scale is not None:
                row = (row - next(reads)().astype(dtype)) * next(reads)().astype(dtype)
            rows.append(row)
        return sum(rows[1:], rows[0])

    sizes = [lookup.table.shape[0] for lookup in lookups]
    return compute(node, "embedding", element, tensors, (*ids.shape, width), sizes, dtype=dtype)


def _check_lookups(node: Node, lookups: Sequence[_Lookup]) -> list[_Lookup]:
    """Return the lookups, checked against the first one.

    Ranks, widths and indices fit statically, or are asserted at run time.
    """
    ids, width = lookups[0].indices, lookups[0].table.shape[-1:]
    assert ids is not None
    checked = []
    for lookup in lookups:
        table, indices = lookup.table, lookup.indices
        require_rank(node, lookup.name, table, "[rows, width]")
        table = assert_shape(node, table, (table.shape[0], *width))
        if indices is not None:
            require_rank(node, f"indices of {lookup.name}", indices, "[batch, sequence]")
            is_shared = lookup.shared and is_one(indices.shape[0])
            indices = assert_shape(node, indices, (1 if is_shared else ids.shape[0], ids.shape[1]))
            indices = assert_in_bounds(node, indices, table.shape[0], bound_name=f"the number of rows of {lookup.name}",
                            from_the_back=False)  # fmt: skip
        else:
            text = f"{lookup.name} has {{}} rows, and there are {{}} tokens."
            is_long_enough = symbolic.less_or_equal(ids.shape[1], table.shape[0])
            table = require(
                node,
                table,
                is_long_enough,
                "embed_layer_normalization.table_too_small",
                text,
                table.shape[0],
                ids.shape[1],
            )
        checked.append(replace(lookup, table=table, indices=indices))
    return checked


def _count_mask_ones(node: Node, ids: Value, mask: Value | None) -> Value | None:
    """Return the number of ones in each row of the mask, int32 [B]."""
    if not node.has_output(1):
        return None
    if mask is None:
        return node.emit(relax.op.zeros(node.shape_expr(ids.shape[:1]), "int32"))
    mask = assert_shape(node, mask, ids.shape)
    ones = relax.op.equal(node.tensor(mask), relax.const(1, mask.dtype))
    return node.emit(relax.op.sum(relax.op.astype(ones, "int32"), axis=[1]))
