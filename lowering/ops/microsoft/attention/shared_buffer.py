"""Caches with room: new rows are written after past_sequence_length cached tokens, and later slots are not read.

Under beam search, batch b is beam b % beams of a request. Its token t < past_sequence_length is that of beam
cache_indirection[request, beam, t]; new rows belong to the beam itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax, tirx

from ....attention.codegen.parameters import int64
from ....attention.record.cache_layout import Beams
from ....importing.node import Node
from ....importing.values import Size, Value, static
from ....tensorir.scatter import CacheUpdate, make_copying_update
from ...attention.attend import move_heads_first
from ...helpers import symbolic
from ...helpers.assertions import assert_shape, require
from ...helpers.compute import Element, number, unify_sizes
from ...helpers.contents import read_sizes
from ...helpers.kernels import ElementReader, compute
from ...helpers.requirements import require_tensor
from ...helpers.run_time import bind_sizes
from .masks import PaddingMask


@dataclass(frozen=True)
class SharedBuffer:
    """The caches [B, H, M, D] after the call, with the numbers of past tokens and of all tokens.

    tables has further arguments of the attention: lengths [B], all tokens, and those of beams.
    """

    k: Value
    v: Value
    past: Size
    total: Size
    beams: Beams | None
    tables: dict[str, Value]


def append_to_shared_buffer(
    node: Node,
    heads: int,
    new: tuple[Value, Value],
    caches: tuple[Value, Value],
    past_sequence_length: Value,
    cache_indirection: Value | None,
) -> SharedBuffer:
    """Return copies of the caches [B, H, M, D] with the new K and V [B, L, H * D] written to them."""
    (batch, rows, _), capacity = new[0].shape, caches[0].shape[2]
    unify_sizes(node, "the length of past_key and past_value", capacity, caches[1].shape[2])
    past = _read_past(node, past_sequence_length)
    total = node.simplify(past + rows)
    text = "past_sequence_length and the new tokens are {} tokens, and past_key has room for {}."
    first = require(
        node, caches[0], symbolic.less_or_equal(total, capacity), "node.cache_too_small", text, total, capacity
    )
    starts = compute(node, "starts", lambda _, past: int64(past), [], (batch,), [past], dtype="int64")
    updated: list[Value] = []
    for cache, x in zip((first, caches[1]), new):
        size = x.shape[2] // heads
        cache = assert_shape(node, cache, (batch, heads, capacity, size))
        update = make_copying_update(CacheUpdate(cache.dtype, tuple(map(static, cache.shape)), static(rows), axis=2))
        arguments = [node.tensor(t) for t in (cache, move_heads_first(node, x, heads), starts)]
        updated += node.call_tir(update, arguments, [(cache.shape, cache.dtype)], "update_cache")
    lengths = compute(node, "lengths", lambda _, total: int64(total), [], (batch,), [total], dtype="int64")
    beams, tables = None, {"lengths": lengths}
    if cache_indirection is not None:
        beams, beam_tables = _read_beams(node, batch, past, total, cache_indirection)
        tables |= beam_tables
    return SharedBuffer(updated[0], updated[1], past, total, beams, tables)


def combine_lengths(node: Node, shared: SharedBuffer | None, mask: PaddingMask) -> dict[str, Value | None]:
    """Return the arguments of the attention that give the number of visible keys, and their beams."""
    if shared is None or mask.lengths is None:
        return {"lengths": mask.lengths} if shared is None else dict(shared.tables)
    mask_lengths, cache_lengths = mask.lengths, shared.tables["lengths"]
    lengths = compute(
        node,
        "lengths",
        lambda i, a, b: tirx.min(a(*i), b(*i)),
        [mask_lengths, cache_lengths],
        cache_lengths.shape,
        dtype="int64",
    )
    return {**shared.tables, "lengths": lengths}


def trim_scores(node: Node, qk: Value, total: Size) -> Value:
    """Return scores [B, H, S, M] without the slots after the keys."""
    return compute(node, "qk", lambda i, x: x(*i), [qk], (*qk.shape[:3], total))


def _read_past(node: Node, value: Value) -> Size:
    require_tensor(node, "past_sequence_length", value, ("int32", "int64"), "[] or [1]")
    if value.rank == 1:
        value = assert_shape(node, value, (1,))
    static_sizes = read_sizes(value)
    if static_sizes is not None:
        if isinstance(static_sizes[0], int) and static_sizes[0] < 0:
            raise node.error(
                "node.value_out_of_range",
                f"past_sequence_length is {static_sizes[0]}.",
                "Make it 0 or more: it counts tokens.",
            )
        return static_sizes[0]
    flat = node.emit(relax.op.reshape(node.tensor(value), (1,)))
    return bind_sizes(node, flat, source=value)[0]


def _read_beams(node: Node, batch: Size, past: Size, total: Size, indirection: Value) -> tuple[Beams, dict[str, Value]]:
    require_tensor(node, "cache_indirection", indirection, ("int32", "int64"), "[requests, beams, tokens]")
    count = number(node, "the number of beams, dimension 1 of cache_indirection,", indirection.shape[1])
    if count < 1:
        raise node.error(
            "node.beam_count_zero", "cache_indirection has 0 beams.", "Make it int32 [requests, beams, tokens]."
        )
    requests, length = indirection.shape[0], indirection.shape[2]
    text = "cache_indirection is for {} requests of {} beams, and the batch size is {}."
    fits = symbolic.equal(node.simplify(requests * count), batch)
    indirection = require(node, indirection, fits, "node.beam_count_mismatch", text, requests, count, batch)
    text = "cache_indirection has {} tokens for each beam, and the cache has {}."
    indirection = require(
        node, indirection, symbolic.less_or_equal(past, length), "node.beam_table_too_short", text, length, past
    )

    def source(index: tuple[Element, ...], table: ElementReader, past: Element) -> Element:
        """Return the beam whose token is read: for new tokens, the beam itself."""
        return tirx.if_then_else(index[2] < int64(past), table(*index).astype("int64"), index[1])

    beam_of = compute(node, "beam_of", source, [indirection], (requests, count, total), [past], dtype="int64")
    prompts = compute(node, "prompts", lambda _: int64(0), [], (requests,), dtype="int64")
    return Beams(count), {"prompts": prompts, "beam_of": beam_of}
