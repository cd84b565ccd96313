"""com.microsoft EmbedLayerNormalization and QEmbedLayerNormalization: sums of rows of tables, normalized.

Tables of bytes stay bytes: what is looked up is made a number where it is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx

from ...importing import symbolic
from ...importing.compute import Element, require_numbers, widened
from ...importing.node import Node
from ...importing.values import Value, is_one
from .. import op
from ..asserted import asserted, inside, required
from ..integer_matmul import BYTES, along
from ..kernels import compute
from ..matmul import rounded
from ..normalization import over_last_axes
from . import DOMAIN
from .normalization import FUSED_EPSILON
from .quantized import dequantized


@dataclass(frozen=True)
class _Lookup:
    """A table [N, D], and which of its rows each token has, [B, S], or [1, S] where sequences may share them; None for
    row s. scale and zero point, of no dimensions, belong to a table of bytes."""

    name: str
    table: Value
    places: Value | None
    scale: Value | None = None
    zero: Value | None = None
    shared: bool = False


@op("EmbedLayerNormalization", since=1, domain=DOMAIN)
def embed_layer_normalization(
    node: Node,
    ids: Value,
    segment_ids: Value | None,
    words: Value,
    positions: Value,
    segments: Value | None,
    gamma: Value,
    beta: Value,
    mask: Value | None = None,
    position_ids: Value | None = None,
) -> tuple[Value, Value | None, Value | None]:
    """LayerNormalization of words[ids] + positions[position_ids, or 0 1 2 ...] + segments[segment_ids]; how many ones
    each row of mask [B, S] holds, 0 without a mask; and the sum of the embeddings.
    """
    require_numbers(node, words, positions, gamma, beta)
    lookups = [_Lookup("word_embedding", words, ids)]
    lookups.append(_Lookup("position_embedding", positions, position_ids, shared=True))
    if _has_segments(node, segment_ids, segment_embedding=segments):
        assert segments is not None
        lookups.append(_Lookup("segment_embedding", segments, segment_ids))
    total = _sum_of_rows(node, lookups, widened(words.dtype))
    y = over_last_axes(node, total, [gamma, beta], centered=True, epsilon=FUSED_EPSILON)
    return y, _mask_index(node, ids, mask), rounded(node, total, words.dtype)


@op("QEmbedLayerNormalization", since=1, domain=DOMAIN)
def q_embed_layer_normalization(
    node: Node,
    ids: Value,
    segment_ids: Value | None,
    words: Value,
    positions: Value,
    segments: Value | None,
    gamma: Value,
    beta: Value,
    mask: Value | None,
    words_scale: Value,
    positions_scale: Value,
    segments_scale: Value | None,
    gamma_scale: Value,
    beta_scale: Value,
    words_zero: Value,
    positions_zero: Value,
    segments_zero: Value | None,
    gamma_zero: Value,
    beta_zero: Value,
) -> tuple[Value, Value | None]:
    """EmbedLayerNormalization of bytes, each table and vector with one scale and zero point; Y is float32."""
    lookups = [
        _of_bytes(node, "word_embedding", words, ids, words_scale, words_zero),
        _of_bytes(node, "position_embedding", positions, None, positions_scale, positions_zero),
    ]
    if _has_segments(
        node,
        segment_ids,
        segment_embedding=segments,
        segment_embedding_scale=segments_scale,
        segment_embedding_zero_point=segments_zero,
    ):
        assert segments is not None and segments_scale is not None and segments_zero is not None
        lookups.append(_of_bytes(node, "segment_embedding", segments, segment_ids, segments_scale, segments_zero))
    total = _sum_of_rows(node, lookups, "float32")
    vectors = [dequantized(node, gamma, gamma_scale, gamma_zero), dequantized(node, beta, beta_scale, beta_zero)]
    y = over_last_axes(node, total, vectors, centered=True, epsilon=FUSED_EPSILON)
    return y, _mask_index(node, ids, mask)


def _of_bytes(node: Node, name: str, table: Value, places: Value | None, scale: Value, zero: Value) -> _Lookup:
    if table.dtype not in BYTES:
        raise node.error(f"input {name} is {table.dtype}.", "Give it bytes: uint8 or int8.")
    return _Lookup(name, table, places, along(node, scale), along(node, zero))


def _has_segments(node: Node, segment_ids: Value | None, **others: Value | None) -> bool:
    """Whether there are segments: each of these inputs, or none."""
    missing = [name for name, value in {"segment_ids": segment_ids, **others}.items() if value is None]
    if 0 < len(missing) <= len(others):
        raise node.error(
            f"input {missing[0]} is missing, and not all of segment_ids and {', '.join(others)} are.",
            "Give all of them or none.",
        )
    return not missing


def _sum_of_rows(node: Node, lookups: Sequence[_Lookup], dtype: str) -> Value:
    """What the lookups give, added up: [B, S, D] of that type, B and S those of the places of the first."""
    lookups = _legal(node, lookups)
    ids, width = lookups[0].places, lookups[0].table.shape[1]
    assert ids is not None
    tensors = [v for x in lookups for v in (x.places, x.table, x.zero, x.scale) if v is not None]

    def element(index: tuple[Element, ...], *operands: Element) -> Element:
        b, s, d = index
        reads, sizes = iter(operands[: len(tensors)]), operands[len(tensors) :]
        rows = []
        for lookup, size in zip(lookups, sizes):
            place, first = s, tirx.const(0, "int64")
            if lookup.places is not None:
                place = next(reads)(first if is_one(lookup.places.shape[0]) else b, s).astype("int64")
            last = size - tirx.const(1, "int64")
            row = next(reads)(tirx.max(tirx.min(place, last), first), d).astype(dtype)
            if lookup.scale is not None:
                row = (row - next(reads)().astype(dtype)) * next(reads)().astype(dtype)
            rows.append(row)
        return sum(rows[1:], rows[0])

    sizes = [lookup.table.shape[0] for lookup in lookups]
    return compute(node, "embedding", element, tensors, (*ids.shape, width), sizes, dtype=dtype)


def _legal(node: Node, lookups: Sequence[_Lookup]) -> list[_Lookup]:
    """The lookups, of which ranks, widths and places are known or asserted at run time to fit those of the first."""
    ids, width = lookups[0].places, lookups[0].table.shape[-1:]
    assert ids is not None
    legal = []
    for lookup in lookups:
        table, places = lookup.table, lookup.places
        if table.rank != 2:
            raise node.error(f"input {lookup.name} has rank {table.rank}.", "Make it [rows, width].")
        table = asserted(node, table, (table.shape[0], *width))
        if places is not None:
            if places.rank != 2:
                raise node.error(f"{node.name_of(places, False)} has rank {places.rank}.", "Make it [batch, sequence].")
            one = lookup.shared and is_one(places.shape[0])
            places = asserted(node, places, (1 if one else ids.shape[0], ids.shape[1]))
            places = inside(node, places, table.shape[0], of=f"the number of rows of {lookup.name}",
                            from_the_back=False)  # fmt: skip
        else:
            text = f"{lookup.name} has {{}} rows, and there are {{}} tokens."
            fits = symbolic.less_or_equal(ids.shape[1], table.shape[0])
            table = required(node, table, fits, text, table.shape[0], ids.shape[1])
        legal.append(replace(lookup, table=table, places=places))
    return legal


def _mask_index(node: Node, ids: Value, mask: Value | None) -> Value | None:
    """How many ones each row of the mask holds, int32 [B]."""
    if not node.wants(1):
        return None
    if mask is None:
        return node.emit(relax.op.zeros(node.shape_expr(ids.shape[:1]), "int32"))
    mask = asserted(node, mask, ids.shape)
    ones = relax.op.equal(node.tensor(mask), relax.const(1, mask.dtype))
    return node.emit(relax.op.sum(relax.op.astype(ones, "int32"), axis=[1]))
