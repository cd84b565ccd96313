"""Whether the slots and blocks that a call of GptAttention needs exist, and have one writer, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lowering.functions.gpt_checks.rows import QkvShape
from lowering.functions.gpt_checks.settings import CallSettings
from tests.attacks.attack import require


@dataclass(frozen=True)
class Window:
    """The newest tokens that are read, sinks included; None for all."""

    size: int | None
    sinks: int
    is_compatible: bool

    def oldest(self, past: int, is_step: bool) -> int:
        """Return the oldest token after the sinks that a request reads."""
        if self.size is None:
            return 0
        return max(past - (self.size - self.sinks - 1) - (self.is_compatible and is_step), 0)


class Lengths(Protocol):
    contexts: int
    past: np.ndarray
    total: np.ndarray
    prompt: np.ndarray


@dataclass(frozen=True)
class Cache:
    """A contiguous cache of `slots`, or blocks of `block` tokens by offsets [requests, beams, 2, columns]."""

    slots: int
    block: int = 0
    offsets: np.ndarray | None = None
    entries: int = 0


class Ring:
    """The slot of each token: sinks first, then a ring, which begins with a block of its own."""

    def __init__(self, arguments: Mapping[str, Any], settings: CallSettings, window: Window) -> None:
        block = find_cache(arguments, settings).block
        self.sinks = self.start = window.sinks
        self.length: int | None = None
        if settings.is_cross:
            self.sinks = self.start = 0
            return
        if block:
            self.start = -(-window.sinks // block) * block
        if window.size is not None:
            self.length = window.size - window.sinks + (block if settings.has_spare_block else 0)

    def slot(self, token: int) -> int:
        if token < self.sinks:
            return token
        offset = token - self.sinks
        return self.start + (offset if self.length is None else offset % self.length)


def find_cache(arguments: Mapping[str, Any], settings: CallSettings) -> Cache:
    offsets, pools = arguments["kv_cache_block_offsets"], arguments["host_kv_cache_pool_pointers"]
    cache = arguments["past_key_value"]
    if offsets is None:
        return Cache(cache.shape[3])
    pools = pools if pools is not None else cache if isinstance(cache, (list, tuple)) else [cache]
    mapping = arguments["host_kv_cache_pool_mapping"]
    layer = settings.layer if pools[0].ndim == 6 else 0
    index, layer = (0, layer) if mapping is None else map(int, mapping[settings.layer])
    pool = pools[index]
    layers = pool.shape[1] if pool.ndim == 6 else 1
    own = offsets[index] if offsets.ndim == 5 else offsets
    block = pool.shape[-2]
    return Cache(own.shape[3] * block, block, own, (len(pool) * layers - layer) * 2)


def blocks_fit(
    cache: Cache,
    ring: Ring,
    settings: CallSettings,
    rows: QkvShape,
    lengths: Lengths,
    window: Window,
    encoder: np.ndarray | None,
    table: np.ndarray | None,
) -> None:
    """Raise Illegal unless all slots exist, and no block is written for two requests or beams."""
    for b in range(rows.requests):
        tokens = _list_needed(b, lengths, window, encoder)
        require(all(ring.slot(token) < cache.slots for token in tokens), "slots")
    if cache.offsets is None:
        return
    has_steps = lengths.contexts < rows.requests
    require(not (has_steps and cache.offsets.shape[1] < rows.beams and not settings.is_cross), "blocks of beams")
    writers: Counter[int] = Counter()
    for b in range(rows.requests):
        is_step = b >= lengths.contexts
        for beam, token in _list_read(b, rows, lengths, window, encoder, table, is_step and not settings.is_cross):
            entries = cache.offsets[b, beam, :, ring.slot(token) // cache.block]
            require(((entries >= 0) & (entries < cache.entries)).all(), "a block")
        for beam, column in _list_written(b, cache, ring, rows, lengths, encoder, is_step):
            writers.update(map(int, cache.offsets[b, beam, :, column]))
    require(max(writers.values(), default=0) < 2, "writers of a block")


def _list_needed(b: int, lengths: Lengths, window: Window, encoder: np.ndarray | None) -> Iterator[int]:
    if encoder is not None:
        yield from range(int(encoder[b]))
        return
    total, past = int(lengths.total[b]), int(lengths.past[b])
    yield from range(min(total, window.sinks))
    yield from range(max(window.oldest(past, b >= lengths.contexts), window.sinks), total)


def _list_read(
    b: int,
    rows: QkvShape,
    lengths: Lengths,
    window: Window,
    encoder: np.ndarray | None,
    table: np.ndarray | None,
    by_beam: bool,
) -> Iterator[tuple[int, int]]:
    """Yield beam and token of each slot that a request reads or writes."""
    if not by_beam or rows.beams == 1 or table is None:
        yield from ((0, token) for token in _list_needed(b, lengths, window, encoder))
        return
    prompt, past = int(lengths.prompt[b]), int(lengths.past[b])
    yield from ((0, token) for token in range(prompt))
    for beam in range(rows.beams):
        yield beam, past
        yield from ((int(table[b, beam, token]), token) for token in range(prompt, past))


def _list_written(
    b: int, cache: Cache, ring: Ring, rows: QkvShape, lengths: Lengths, encoder: np.ndarray | None, is_step: bool
) -> set[tuple[int, int]]:
    """Return beam and column of each block that a request writes."""
    past, total = int(lengths.past[b]), int(lengths.total[b])
    if encoder is not None:
        tokens = range(0 if is_step or past else int(encoder[b]))
        return {(0, ring.slot(token) // cache.block) for token in tokens}
    beams = range(cache.offsets.shape[1] if is_step and cache.offsets is not None else 1)
    return {(beam, ring.slot(token) // cache.block) for beam in beams for token in range(past, total)}
