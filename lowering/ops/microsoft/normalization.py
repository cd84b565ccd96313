"""Normalisation as onnxruntime's optimisers fuse it: with the residual sum, with the embedding, and in older opsets."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx

from ...importing import symbolic
from ...importing.compute import Element, pointwise, require_numbers, widened
from ...importing.node import Node
from ...importing.values import Shape, Value
from .. import op
from ..asserted import asserted, broadcast_to, inside, required
from ..kernels import Read, compute
from ..matmul import rounded
from ..normalization import layer_normalization, over_last_axes
from . import DOMAIN

_SKIP_EPSILON = 1e-12  # the default of the fused operators

# onnxruntime's optimisers put LayerNormalization into models of opsets that did not have it yet.
op("LayerNormalization", since=1)(layer_normalization)


@op("SimplifiedLayerNormalization", since=1)
@op("SimplifiedLayerNormalization", since=1, domain=DOMAIN)
def simplified_layer_normalization(node: Node, x: Value, scale: Value) -> Value:
    """RMSNormalization. onnxruntime has it in ai.onnx too, where the standard does not."""
    _no_statistics(node, 1)
    return over_last_axes(node, x, [scale], centred=False)


@op("SkipLayerNormalization", since=1, domain=DOMAIN)
def skip_layer_normalization(
    node: Node, x: Value, skip: Value, gamma: Value, beta: Value | None = None, bias: Value | None = None
) -> tuple[Value, None, None, Value]:
    """LayerNormalization of x + skip + bias, and that sum."""
    return _skip_normalization(node, [x, skip, bias], [gamma, beta], centred=True)


@op("SkipSimplifiedLayerNormalization", since=1, domain=DOMAIN)
def skip_simplified_layer_normalization(
    node: Node, x: Value, skip: Value, gamma: Value, bias: Value | None = None
) -> tuple[Value, None, None, Value]:
    """RMSNormalization of x + skip + bias, and that sum."""
    return _skip_normalization(node, [x, skip, bias], [gamma], centred=False)


def _skip_normalization(
    node: Node, terms: Sequence[Value | None], parameters: Sequence[Value | None], centred: bool
) -> tuple[Value, None, None, Value]:
    """The sum is normalised before it is rounded to half precision."""
    _no_statistics(node, 1, 2)
    x, skip, bias = terms
    assert x is not None and skip is not None
    width = x.shape[-1:]
    if skip.rank > 1:  # batches may share one, rows may not
        skip = asserted(node, skip, (*skip.shape[:-2], *x.shape[-2:]))
    bias, *vectors = (None if v is None else _vector(node, v, width) for v in (bias, *parameters))
    given = list(broadcast_to(node, *(term for term in (x, skip, bias) if term is not None)))
    dtype = given[0].dtype
    total = pointwise(node, lambda *x: sum(x[1:], x[0]), *given, dtype=widened(dtype), name="residual")
    y = over_last_axes(node, total, [v for v in vectors if v is not None], centred, _SKIP_EPSILON)
    return y, None, None, rounded(node, total, dtype)


def _vector(node: Node, vector: Value, width: Shape) -> Value:
    """gamma, beta or a bias, with an element for each of the last axis."""
    if vector.rank != 1:
        raise node.error(f"{node.name_of(vector, False)} has rank {vector.rank}.", "Make it a vector.")
    return asserted(node, vector, width)


def _no_statistics(node: Node, *outputs: int) -> None:
    for k in outputs:
        if node.wants(k):
            raise node.error(f"output {k} is a statistic that training keeps.", "Remove it: inference needs none.")


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
    if (segment_ids is None) != (segments is None):
        raise node.error("one of segment_ids and segment_embedding is given.", "Give both or none.")
    for name, value in (("input_ids", ids), ("segment_ids", segment_ids), ("position_ids", position_ids)):
        if value is not None and value.rank != 2:
            raise node.error(f"input {name} has rank {value.rank}.", "Make it [batch, sequence].")
    tables = [table for table in (words, positions, segments) if table is not None]
    tables = [asserted(node, table, (table.shape[0], words.shape[1])) for table in tables]
    if segment_ids is not None:
        segment_ids = asserted(node, segment_ids, ids.shape)
    if position_ids is not None:
        batch = position_ids.shape[0]
        one = isinstance(batch, int) and batch == 1
        position_ids = asserted(node, position_ids, (1 if one else ids.shape[0], ids.shape[1]))
    given = [v for v in (segment_ids, position_ids) if v is not None]
    ids = inside(node, ids, words.shape[0], of="the number of words", from_the_back=False)
    tables_of_given = [t for v, t in ((segment_ids, segments), (position_ids, positions)) if v is not None]
    given = [
        inside(node, v, t.shape[0], of="the number of rows of its table", from_the_back=False)
        for v, t in zip(given, tables_of_given)
        if t is not None
    ]
    if position_ids is None:
        text = "position_embedding has {} rows, and there are {} tokens."
        fits = symbolic.less_or_equal(ids.shape[1], positions.shape[0])
        ids = required(node, ids, fits, text, positions.shape[0], ids.shape[1])
    dtype, batch_of_positions = words.dtype, None if position_ids is None else given[-1].shape[0]

    def row(table: Read, size: Element, place: Element, d: Element) -> Element:
        last = size - tirx.const(1, "int64")
        inside = tirx.max(tirx.min(place.astype("int64"), last), tirx.const(0, "int64"))
        return table(inside, d).astype(widened(dtype))

    def element(index: tuple[Element, ...], *operands: Element) -> Element:
        b, s, d = index
        reads, sizes = list(operands[: -len(tables)]), operands[-len(tables) :]
        ids_at, others, lookups = reads[0], reads[1 : 1 + len(given)], reads[1 + len(given) :]
        place = s
        if position_ids is not None:
            one = isinstance(batch_of_positions, int) and batch_of_positions == 1
            place = others[-1](tirx.const(0, "int64") if one else b, s)
        total = row(lookups[0], sizes[0], ids_at(b, s), d) + row(lookups[1], sizes[1], place, d)
        return total + row(lookups[2], sizes[2], others[0](b, s), d) if segments is not None else total

    shape = (*ids.shape, words.shape[1])
    rows = [table.shape[0] for table in tables]
    total = compute(node, "embedding", element, [ids, *given, *tables], shape, rows, dtype=widened(dtype))
    y = over_last_axes(node, total, [gamma, beta], centred=True, epsilon=_SKIP_EPSILON)
    return y, _mask_index(node, ids, mask) if node.wants(1) else None, rounded(node, total, dtype)


def _mask_index(node: Node, ids: Value, mask: Value | None) -> Value:
    batch = ids.shape[:1]
    if mask is None:
        return node.emit(relax.op.zeros(node.shape_expr(batch), "int32"))
    ones = relax.op.equal(node.tensor(mask), relax.const(1, mask.dtype))
    return node.emit(relax.op.sum(relax.op.astype(ones, "int32"), axis=[1]))
