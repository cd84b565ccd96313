"""Caches with room: new rows go behind the past_sequence_length tokens that the cache holds, and the rest is not read.

Under beam search batch b is beam b % beams of a request, and token t < past_sequence_length of it is that of beam
cache_indirection[request, beam, t]; new rows are each beam's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax, tirx

from ...attention.cache_layout import Beams
from ...attention.parameters import int64
from ...importing import symbolic
from ...importing.compute import Element, agreed, number
from ...importing.node import Node
from ...importing.values import Size, Value, static
from ...tensorir.scatter import CacheUpdate, copy_and_update
from ..asserted import asserted, required
from ..attend import heads_first
from ..contents import sizes
from ..kernels import Read, compute
from ..run_time import bind
from .masks import Padding


@dataclass(frozen=True)
class SharedBuffer:
    """The caches [B, H, M, D] behind the call, past tokens and total ones, which lengths [B] say too; tables holds
    further parameters of the attention."""

    k: Value
    v: Value
    past: Size
    total: Size
    beams: Beams | None
    tables: dict[str, Value]


def shared_buffer(
    node: Node,
    heads: int,
    new: tuple[Value, Value],
    caches: tuple[Value, Value],
    past_sequence_length: Value,
    cache_indirection: Value | None,
) -> SharedBuffer:
    """new is K and V [B, L, H * D], of which the caches [B, H, M, D] get copies."""
    (batch, rows, _), most = new[0].shape, caches[0].shape[2]
    agreed(node, "the length of past_key and past_value", most, caches[1].shape[2])
    past = _past(node, past_sequence_length)
    total = node.simplify(past + rows)
    text = "past_sequence_length and the new tokens are {} tokens, and past_key has room for {}."
    first = required(node, caches[0], symbolic.less_or_equal(total, most), text, total, most)
    starts = compute(node, "starts", lambda _, past: int64(past), [], (batch,), [past], dtype="int64")
    updated: list[Value] = []
    for cache, x in zip((first, caches[1]), new):
        size = x.shape[2] // heads
        cache = asserted(node, cache, (batch, heads, most, size))
        update = copy_and_update(CacheUpdate(cache.dtype, tuple(map(static, cache.shape)), static(rows), axis=2))
        arguments = [node.tensor(t) for t in (cache, heads_first(node, x, heads), starts)]
        updated += node.call_tir(update, arguments, [(cache.shape, cache.dtype)], "update_cache")
    lengths = compute(node, "lengths", lambda _, total: int64(total), [], (batch,), [total], dtype="int64")
    beams, tables = None, {"lengths": lengths}
    if cache_indirection is not None:
        beams, found = _beams(node, batch, past, total, cache_indirection)
        tables |= found
    return SharedBuffer(updated[0], updated[1], past, total, beams, tables)


def lengths_of(node: Node, shared: SharedBuffer | None, mask: Padding) -> dict[str, Value | None]:
    """The parameters of the attention that say how many keys count, and whose they are."""
    if shared is None or mask.lengths is None:
        return {"lengths": mask.lengths} if shared is None else dict(shared.tables)
    given, own = mask.lengths, shared.tables["lengths"]
    both = compute(node, "lengths", lambda i, a, b: tirx.min(a(*i), b(*i)), [given, own], own.shape, dtype="int64")
    return {**shared.tables, "lengths": both}


def seen(node: Node, qk: Value, total: Size) -> Value:
    """Scores [B, H, S, M] without the room behind the keys."""
    return compute(node, "qk", lambda i, x: x(*i), [qk], (*qk.shape[:3], total))


def _past(node: Node, value: Value) -> Size:
    if value.dtype not in ("int32", "int64") or value.rank > 1:
        raise node.error(f"past_sequence_length is {value.dtype} of rank {value.rank}.", "Make it int32 [1].")
    if value.rank == 1:
        value = asserted(node, value, (1,))
    known = sizes(value)
    if known is not None:
        if isinstance(known[0], int) and known[0] < 0:
            raise node.error(f"past_sequence_length is {known[0]}.", "It counts tokens.")
        return known[0]
    flat = node.emit(relax.op.reshape(node.tensor(value), (1,)))
    return bind(node, flat, of=value)[0]


def _beams(node: Node, batch: Size, past: Size, total: Size, indirection: Value) -> tuple[Beams, dict[str, Value]]:
    if indirection.rank != 3 or indirection.dtype not in ("int32", "int64"):
        raise node.error(
            f"cache_indirection is {indirection.dtype} of rank {indirection.rank}.",
            "Make it int32 [requests, beams, tokens].",
        )
    count = number(node, "the number of beams, dimension 1 of cache_indirection,", indirection.shape[1])
    if count < 1:
        raise node.error("cache_indirection has no beam.", "Make it int32 [requests, beams, tokens].")
    requests, length = indirection.shape[0], indirection.shape[2]
    text = "cache_indirection is for {} requests of {} beams, and the batch size is {}."
    fits = symbolic.equal(node.simplify(requests * count), batch)
    indirection = required(node, indirection, fits, text, requests, count, batch)
    text = "cache_indirection has {} tokens for each beam, and the cache {}."
    indirection = required(node, indirection, symbolic.less_or_equal(past, length), text, length, past)

    def source(index: tuple[Element, ...], table: Read, past: Element) -> Element:
        """The beam whose token it is: of new tokens the own one."""
        return tirx.if_then_else(index[2] < int64(past), table(*index).astype("int64"), index[1])

    beam_of = compute(node, "beam_of", source, [indirection], (requests, count, total), [past], dtype="int64")
    prompts = compute(node, "prompts", lambda _: int64(0), [], (requests,), dtype="int64")
    return Beams(count), {"prompts": prompts, "beam_of": beam_of}
