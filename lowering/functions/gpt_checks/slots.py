"""The slots of a cache that a call of gpt_attention reads and writes: whether they are there, and written by one alone.

Entries of kv_cache_block_offsets that no request needs are never refused, whatever they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from .beams import read_by_beams
from .caches import Cache
from .rows import Requests, Rows
from .settings import Settings
from .values import first, outside, refuse

Span = tuple[np.ndarray, np.ndarray]  # of each request: from, to (not included); none where to is not greater

_ENDLESS = 2**62  # slots of a ring that never turns


@dataclass(frozen=True)
class Ring:
    """Slots by token: sinks first, then, from `start` on, `length` slots that are used over and over."""

    sinks: int
    start: int
    length: int

    @staticmethod
    def of(settings: Settings, block: int | None) -> Ring:
        if settings.cross:
            return Ring(0, 0, _ENDLESS)
        start = settings.sinks if block is None else -(-settings.sinks // block) * block
        if settings.window is None:
            return Ring(settings.sinks, start, _ENDLESS)
        spare = block if block is not None and settings.one_more_block else 0
        return Ring(settings.sinks, start, settings.window - settings.sinks + spare)

    def slot(self, token: np.ndarray) -> np.ndarray:
        return np.where(token < self.sinks, token, self.start + (token - self.sinks) % self.length)

    def spans(self, start: np.ndarray, stop: np.ndarray) -> list[Span]:
        """The slots of tokens start..stop-1 of each request."""
        found = []
        if self.sinks:
            found.append((start, np.minimum(stop, self.sinks)))
        behind = np.maximum(start, self.sinks) - self.sinks
        count = np.minimum(stop - self.sinks - behind, self.length)
        begin = behind % self.length
        end = begin + count
        found.append((self.start + begin, self.start + np.minimum(end, self.length)))
        if self.length < _ENDLESS:
            found.append((np.full_like(end, self.start), self.start + np.where(count > 0, end - self.length, 0)))
        return found


@dataclass(frozen=True)
class Needs:
    """Ranges of tokens of each request: sinks, the rest of what a call reads or writes, what a context phase writes.

    In the generation phase one token is written, behind all others.
    """

    sinks: Span
    rest: Span
    written: Span


def needs_of(settings: Settings, requests: Requests, encoder: np.ndarray | None) -> Needs:
    none = np.zeros_like(requests.past)
    if encoder is not None:  # the first chunk of a request brings the keys of its encoder, later ones read them
        return Needs((none, none), (none, encoder), (none, np.where(requests.past == 0, encoder, 0)))
    total, past = requests.total, requests.past
    oldest = none
    if settings.window is not None:
        oldest = past - (settings.window - settings.sinks - 1)
        if settings.compatible:
            oldest[requests.contexts :] -= 1
        oldest = np.maximum(oldest, 0)
    return Needs((none, np.minimum(total, settings.sinks)), (oldest, total), (past, total))


def check_slots(
    cache: Cache,
    settings: Settings,
    rows: Rows,
    requests: Requests,
    encoder: np.ndarray | None,
    indirection: np.ndarray | None,
) -> None:
    """encoder holds encoder_input_lengths in cross attention."""
    ring, needs = Ring.of(settings, cache.block), needs_of(settings, requests, encoder)
    spans = ring.spans(*needs.rest)
    if settings.sinks:
        spans[0] = needs.sinks
    end = np.zeros_like(requests.total)
    for start, stop in spans:
        end = np.maximum(end, np.where(stop > start, stop, 0))
    if (wrong := end > cache.slots).any():
        b = first(wrong)
        if cache.block is None:
            refuse(
                f"past_key_value has {cache.slots} slots for tokens, and request {b} needs slot {end[b] - 1}",
                f"give a cache of at least {end.max()} slots",
            )
        columns = cache.slots // cache.block
        refuse(
            f"kv_cache_block_offsets has {columns} columns of {cache.block} tokens, and request {b} needs column "
            f"{(end[b] - 1) // cache.block}",
            f"give at least {-(-int(end.max()) // cache.block)} columns",
        )
    if cache.block is not None:
        _Blocks(cache, ring, settings, rows, requests, needs).check(spans, indirection)


class _Blocks:
    """The entries of kv_cache_block_offsets that a call needs."""

    def __init__(
        self, cache: Cache, ring: Ring, settings: Settings, rows: Rows, requests: Requests, needs: Needs
    ) -> None:
        assert cache.offsets is not None and cache.block is not None
        self.cache, self.ring, self.settings, self.rows = cache, ring, settings, rows
        self.requests, self.needs = requests, needs
        self.offsets, self.block = cache.offsets, cache.block
        self.beams, self.columns = self.offsets.shape[1], self.offsets.shape[3]

    def check(self, spans: list[Span], indirection: np.ndarray | None) -> None:
        contexts = self.requests.contexts
        if self.beams < self.rows.beams and contexts < self.rows.requests:
            refuse(
                f"kv_cache_block_offsets is for one beam, and request {contexts}, in the generation phase, has "
                f"{self.rows.beams}",
                "give the blocks of each beam",
            )
        wrong = outside(self.offsets, self.cache.entries)
        if wrong.any():
            wrong &= self.within(spans)[:, None, None]
            if self.beams > 1:
                # one beam's blocks are all that contexts and cross attention need
                wrong[: None if self.settings.cross else contexts, 1:] = False
                if wrong.any() and contexts < self.rows.requests and not self.settings.cross:
                    wrong[contexts:] &= self.read_or_written(indirection)[:, :, None]
            if wrong.any():
                self.refuse_entry(wrong)
        self.check_written()

    def within(self, spans: list[Span]) -> np.ndarray:
        """bool (requests, columns): the columns that have some of these slots."""
        columns = np.arange(self.columns)
        found = np.zeros((len(spans[0][0]), self.columns), bool)
        for start, stop in spans:
            last = np.where(stop > start, (stop - 1) // self.block, -1)
            found |= (columns >= (start // self.block)[:, None]) & (columns <= last[:, None])
        return found

    def read_or_written(self, indirection: np.ndarray | None) -> np.ndarray:
        """bool (requests in the generation phase, beams, columns): what several beams need, each of its own.

        They have no window that is shorter than their sequences, so that every earlier token is read.
        """
        assert indirection is not None
        ring, contexts = self.ring, self.requests.contexts
        past, prompt = self.requests.past[contexts:], self.requests.prompt[contexts:]
        tokens = read_by_beams(indirection[contexts:], prompt, past)
        gap = ring.start - ring.sinks
        slots = np.zeros((*tokens.shape[:2], self.columns * self.block), bool)
        count = min(tokens.shape[2], slots.shape[2] - gap)
        sinks = min(ring.sinks, count)
        slots[:, :, :sinks] = tokens[:, :, :sinks]
        slots[:, :, gap + sinks : gap + count] = tokens[:, :, sinks:count]
        found = np.any(slots.reshape(*slots.shape[:2], self.columns, self.block), axis=-1)
        found[:, 0] |= self.within(ring.spans(np.zeros_like(prompt), prompt))
        found[np.arange(len(past)), :, ring.slot(past) // self.block] = True
        return found

    def refuse_entry(self, wrong: np.ndarray) -> NoReturn:
        b, beam, part, column = (int(at) for at in np.argwhere(wrong)[0])
        refuse(
            f"the entry of kv_cache_block_offsets for {self.owner(b, beam)}, {'KV'[part]}, column {column} is "
            f"{self.offsets[b, beam, part, column]}, and entries of this layer in its pool are 0 to "
            f"{self.cache.entries - 1}",
            "give a block that is in the pool",
        )

    def owner(self, request: int, beam: int) -> str:
        return f"request {request}" + (f", beam {beam}" if self.beams > 1 else "")

    def written(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Request, beam and column of each block that is written, arrays of one length."""
        contexts, (start, stop) = self.requests.contexts, self.needs.written
        request = column = np.zeros(0, np.int64)
        if contexts:
            request, column = np.nonzero(self.within(self.ring.spans(start[:contexts], stop[:contexts])))
        beam = np.zeros_like(request)
        if self.settings.cross or contexts == self.rows.requests:
            return request, beam, column
        steps = np.arange(contexts, self.rows.requests)
        own = self.ring.slot(self.requests.past[contexts:]) // self.block
        return (
            np.concatenate([request, np.repeat(steps, self.beams)]),
            np.concatenate([beam, np.tile(np.arange(self.beams), len(steps))]),
            np.concatenate([column, np.repeat(own, self.beams)]),
        )

    def check_written(self) -> None:
        """K or V of one block belongs to one request and beam."""
        request, beam, column = self.written()
        entries = self.offsets[request, beam, :, column].reshape(-1)
        ordered = np.sort(entries)
        twice = ordered[1:] == ordered[:-1]
        if not twice.any():
            return
        entry = ordered[1:][twice][0]
        one, two = np.flatnonzero(entries == entry)[:2] // 2
        owners = [self.owner(int(request[n]), int(beam[n])) for n in (one, two)]
        if owners[0] == owners[1]:
            refuse(
                f"kv_cache_block_offsets has {owners[0]} write twice to the block of entry {entry}",
                "give a block of its own to K and to V of each column",
            )
        refuse(
            f"kv_cache_block_offsets has both {owners[0]} and {owners[1]} write to the block of entry {entry}",
            "give each a block of its own; blocks that are only read may be shared",
        )
