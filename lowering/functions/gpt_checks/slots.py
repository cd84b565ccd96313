"""Checks of the cache slots that a call of gpt_attention reads and writes: they exist, and each has only one writer.

Entries of kv_cache_block_offsets that no request needs are never rejected, whatever they contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from .beams import find_read_tokens
from .caches import CacheLocation
from .rows import QkvShape, RequestLengths
from .settings import CallSettings
from .values import find_first, find_outside, refuse

Span = tuple[np.ndarray, np.ndarray]  # for each request: start, and end (exclusive); empty if end is not greater

_ENDLESS = 2**62  # slots of a ring that never wraps


@dataclass(frozen=True)
class SlotRing:
    """The slot of each token: sinks first, then from `start` on a ring of `length` slots."""

    sinks: int
    start: int
    length: int

    @staticmethod
    def from_settings(settings: CallSettings, block: int | None) -> SlotRing:
        if settings.is_cross:
            return SlotRing(0, 0, _ENDLESS)
        start = settings.sinks if block is None else -(-settings.sinks // block) * block
        if settings.window is None:
            return SlotRing(settings.sinks, start, _ENDLESS)
        spare = block if block is not None and settings.has_spare_block else 0
        return SlotRing(settings.sinks, start, settings.window - settings.sinks + spare)

    def find_slots(self, token: np.ndarray) -> np.ndarray:
        return np.where(token < self.sinks, token, self.start + (token - self.sinks) % self.length)

    def find_spans(self, start: np.ndarray, stop: np.ndarray) -> list[Span]:
        """Return the slots of tokens start..stop-1 of each request."""
        spans = []
        if self.sinks:
            spans.append((start, np.minimum(stop, self.sinks)))
        ring_token = np.maximum(start, self.sinks) - self.sinks
        count = np.minimum(stop - self.sinks - ring_token, self.length)
        begin = ring_token % self.length
        end = begin + count
        spans.append((self.start + begin, self.start + np.minimum(end, self.length)))
        if self.length < _ENDLESS:
            spans.append((np.full_like(end, self.start), self.start + np.where(count > 0, end - self.length, 0)))
        return spans


@dataclass(frozen=True)
class NeededTokens:
    """Ranges of tokens of each request that a call needs.

    They are the sinks, the other tokens that it reads or writes, and the tokens that a context phase writes. In the
    generation phase one token is written, after all others.
    """

    sinks: Span
    rest: Span
    written: Span


def find_needed_tokens(settings: CallSettings, requests: RequestLengths, encoder: np.ndarray | None) -> NeededTokens:
    zeros = np.zeros_like(requests.past)
    if encoder is not None:  # the first chunk of a request provides the keys of its encoder, later ones read them
        return NeededTokens((zeros, zeros), (zeros, encoder), (zeros, np.where(requests.past == 0, encoder, 0)))
    total, past = requests.total, requests.past
    oldest = zeros
    if settings.window is not None:
        oldest = past - (settings.window - settings.sinks - 1)
        if settings.is_trt_compatible:
            oldest[requests.contexts :] -= 1
        oldest = np.maximum(oldest, 0)
    return NeededTokens((zeros, np.minimum(total, settings.sinks)), (oldest, total), (past, total))


def check_slots(
    cache: CacheLocation,
    settings: CallSettings,
    rows: QkvShape,
    requests: RequestLengths,
    encoder: np.ndarray | None,
    indirection: np.ndarray | None,
) -> None:
    """Check the slots of the cache; encoder has encoder_input_lengths in cross attention."""
    ring, needs = SlotRing.from_settings(settings, cache.block), find_needed_tokens(settings, requests, encoder)
    spans = ring.find_spans(*needs.rest)
    if settings.sinks:
        spans[0] = needs.sinks
    end = np.zeros_like(requests.total)
    for start, stop in spans:
        end = np.maximum(end, np.where(stop > start, stop, 0))
    if (wrong := end > cache.slots).any():
        b = find_first(wrong)
        if cache.block is None:
            refuse(
                "gpt_attention.cache_too_small",
                f"past_key_value has {cache.slots} slots for tokens, and request {b} needs slot {end[b] - 1}",
                f"give a cache of at least {end.max()} slots",
            )
        columns = cache.slots // cache.block
        refuse(
            "gpt_attention.block_table_too_small",
            f"kv_cache_block_offsets has {columns} columns of {cache.block} tokens, and request {b} needs column "
            f"{(end[b] - 1) // cache.block}",
            f"give at least {-(-int(end.max()) // cache.block)} columns",
        )
    if cache.block is not None:
        _BlockChecker(cache, ring, settings, rows, requests, needs).check(spans, indirection)


class _BlockChecker:
    """A check of the entries of kv_cache_block_offsets that a call needs."""

    def __init__(
        self,
        cache: CacheLocation,
        ring: SlotRing,
        settings: CallSettings,
        rows: QkvShape,
        requests: RequestLengths,
        needs: NeededTokens,
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
                "gpt_attention.beam_blocks_missing",
                f"kv_cache_block_offsets is for one beam, and request {contexts}, in the generation phase, has "
                f"{self.rows.beams}",
                "give the blocks of each beam",
            )
        wrong = find_outside(self.offsets, self.cache.entries)
        if wrong.any():
            wrong &= self.find_columns(spans)[:, None, None]
            if self.beams > 1:
                # contexts and cross attention need the blocks of only one beam
                wrong[: None if self.settings.is_cross else contexts, 1:] = False
                if wrong.any() and contexts < self.rows.requests and not self.settings.is_cross:
                    wrong[contexts:] &= self.find_needed_columns(indirection)[:, :, None]
            if wrong.any():
                self.refuse_entry(wrong)
        self.check_written()

    def find_columns(self, spans: list[Span]) -> np.ndarray:
        """Return bool (requests, columns): the columns that contain some of these slots."""
        columns = np.arange(self.columns)
        columns_found = np.zeros((len(spans[0][0]), self.columns), bool)
        for start, stop in spans:
            last = np.where(stop > start, (stop - 1) // self.block, -1)
            columns_found |= (columns >= (start // self.block)[:, None]) & (columns <= last[:, None])
        return columns_found

    def find_needed_columns(self, indirection: np.ndarray | None) -> np.ndarray:
        """Return bool (requests in the generation phase, beams, columns): the columns that each beam needs.

        With several beams there is no window shorter than the sequences, so that every earlier token is read.
        """
        assert indirection is not None
        ring, contexts = self.ring, self.requests.contexts
        past, prompt = self.requests.past[contexts:], self.requests.prompt[contexts:]
        tokens = find_read_tokens(indirection[contexts:], prompt, past)
        shift = ring.start - ring.sinks
        slots = np.zeros((*tokens.shape[:2], self.columns * self.block), bool)
        count = min(tokens.shape[2], slots.shape[2] - shift)
        sinks = min(ring.sinks, count)
        slots[:, :, :sinks] = tokens[:, :, :sinks]
        slots[:, :, shift + sinks : shift + count] = tokens[:, :, sinks:count]
        needed = np.any(slots.reshape(*slots.shape[:2], self.columns, self.block), axis=-1)
        needed[:, 0] |= self.find_columns(ring.find_spans(np.zeros_like(prompt), prompt))
        needed[np.arange(len(past)), :, ring.find_slots(past) // self.block] = True
        return needed

    def refuse_entry(self, wrong: np.ndarray) -> NoReturn:
        b, beam, kind, column = (int(index) for index in np.argwhere(wrong)[0])
        refuse(
            "gpt_attention.block_out_of_range",
            f"the entry of kv_cache_block_offsets for {self.name_owner(b, beam)}, {'KV'[kind]}, column {column} is "
            f"{self.offsets[b, beam, kind, column]}, and entries of this layer in its pool are 0 to "
            f"{self.cache.entries - 1}",
            "give a block that is in the pool",
        )

    def name_owner(self, request: int, beam: int) -> str:
        return f"request {request}" + (f", beam {beam}" if self.beams > 1 else "")

    def locate_written_blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return request, beam and column of each block that is written, as arrays of one length."""
        contexts, (start, stop) = self.requests.contexts, self.needs.written
        request = column = np.zeros(0, np.int64)
        if contexts:
            request, column = np.nonzero(self.find_columns(self.ring.find_spans(start[:contexts], stop[:contexts])))
        beam = np.zeros_like(request)
        if self.settings.is_cross or contexts == self.rows.requests:
            return request, beam, column
        steps = np.arange(contexts, self.rows.requests)
        own = self.ring.find_slots(self.requests.past[contexts:]) // self.block
        return (
            np.concatenate([request, np.repeat(steps, self.beams)]),
            np.concatenate([beam, np.tile(np.arange(self.beams), len(steps))]),
            np.concatenate([column, np.repeat(own, self.beams)]),
        )

    def check_written(self) -> None:
        """Check that K or V of a block is written by only one request and beam."""
        request, beam, column = self.locate_written_blocks()
        entries = self.offsets[request, beam, :, column].reshape(-1)
        ordered = np.sort(entries)
        is_duplicate = ordered[1:] == ordered[:-1]
        if not is_duplicate.any():
            return
        entry = ordered[1:][is_duplicate][0]
        first_writer, second_writer = np.flatnonzero(entries == entry)[:2] // 2
        owners = [self.name_owner(int(request[n]), int(beam[n])) for n in (first_writer, second_writer)]
        if owners[0] == owners[1]:
            refuse(
                "gpt_attention.block_written_twice",
                f"kv_cache_block_offsets has {owners[0]} write twice to the block of entry {entry}",
                "give a block of its own to K and to V of each column",
            )
        refuse(
            "gpt_attention.block_written_twice",
            f"kv_cache_block_offsets has both {owners[0]} and {owners[1]} write to the block of entry {entry}",
            "give each a block of its own; blocks that are only read may be shared",
        )
