"""Progress of a decoder: the tokens in its caches, and the lengths, masks, positions and slots for a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np

from ...errors import InputError


@dataclass(frozen=True)
class SharedProgress:
    """Progress of sequences that all have the same number of slots, padding included.

    seen is [B, length] of 0 and 1. past_length, mask and positions are the inputs of the last call.
    """

    seen: np.ndarray | None = None
    new: int = 0

    def advance(self, counts: np.ndarray, capacity: int) -> SharedProgress:
        """Return the progress after a call, whose `counts`, int [B, S], mark the tokens that are not padding.

        The model itself rejects tokens beyond the capacity. Raises InputError for another batch size.
        """
        seen = np.zeros((len(counts), 0), np.int64) if self.seen is None else self.seen
        _check_batch(seen, counts)
        return SharedProgress(np.concatenate([seen, counts], axis=1), counts.shape[1])

    def check_rings(self, capacity: int) -> None:
        """Raise InputError if ring writes would exceed the capacity, or overwrite tokens inside a window.

        A window of n tokens covers n slots only if no padding lies between the tokens.
        """
        assert self.seen is not None
        if self.length > capacity:
            raise InputError(
                "static_cache.capacity_exceeded",
                f"the caches have {capacity} slots: {self.length - self.new} tokens are in them and {self.new} more do "
                "not fit. Compile with a larger static_cache.",
            )
        if (np.diff(self.seen, axis=1, prepend=0) > 0).sum(axis=1).max(initial=0) > 1:
            raise InputError(
                "decoder.padding_between_tokens",
                "the mask has padding between tokens, and some caches store only the newest slots: pad sequences "
                "on the left, in the first call.",
            )

    @property
    def length(self) -> int:
        return 0 if self.seen is None else self.seen.shape[1]

    @property
    def past_length(self) -> np.ndarray:
        return np.array(self.length - self.new, np.int64)

    @property
    def mask(self) -> np.ndarray:
        assert self.seen is not None
        return self.seen

    @property
    def positions(self) -> np.ndarray:
        return np.maximum(self.mask.cumsum(axis=1) - 1, 0)[:, self.length - self.new :]

    def reorder(self, rows: np.ndarray) -> SharedProgress:
        """Return the progress after each sequence b continues from sequence rows[b]."""
        return SharedProgress(None if self.seen is None else self.seen[rows], self.new)

    def arrange(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of tokens, [B, S, ...], in the order that the model expects."""
        return rows

    restore = arrange  # the inverse


@dataclass(frozen=True)
class SequenceProgress:
    """Progress of sequences that each have slots of their own, without padding: lengths is int64 [B].

    Padding in a call goes after its tokens. The next call overwrites the slots that it takes.
    """

    lengths: np.ndarray | None = None
    counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def check_rings(self, capacity: int) -> None:
        """Do nothing: caches that the model itself writes are never rings."""

    def advance(self, counts: np.ndarray, capacity: int) -> SequenceProgress:
        """Return the progress after a call, as SharedProgress does.

        Raises InputError if slots run out, or if padding is on the right.
        """
        lengths = np.zeros(len(counts), np.int64) if self.lengths is None else self.lengths
        _check_batch(lengths, counts)
        if (np.diff(counts, axis=1) < 0).any():
            raise InputError(
                "decoder.padding_on_right", "the mask has padding after tokens: pad sequences on the left."
            )
        used, new = int(lengths.max(initial=0)), counts.shape[1]
        if used + new > capacity:
            raise InputError(
                "decoder.capacity_exceeded",
                f"the caches have {capacity} slots: {used} tokens are in them and {new} more do not fit. Export the "
                "model with larger caches.",
            )
        return SequenceProgress(lengths + counts.sum(axis=1), counts)

    @property
    def length(self) -> int:
        return 0 if self.lengths is None else int(self.lengths.max(initial=0))

    @cached_property
    def starts(self) -> np.ndarray:
        assert self.lengths is not None
        return self.lengths - self.counts.sum(axis=1)

    @property
    def ends(self) -> np.ndarray:
        """The ends of causal rows, padding rows included: no token attends to those."""
        return self.starts + self.counts.shape[1]

    @property
    def positions(self) -> np.ndarray:
        return self.starts[:, None] + np.arange(self.counts.shape[1])

    @property
    def mask(self) -> np.ndarray:
        return (np.arange(self.ends.max(initial=0)) < self.ends[:, None]).astype(np.int64)

    def reorder(self, rows: np.ndarray) -> SequenceProgress:
        """Return the progress after each sequence b continues from sequence rows[b]."""
        return SequenceProgress(None if self.lengths is None else self.lengths[rows], self.counts[rows])

    def arrange(self, rows: np.ndarray) -> np.ndarray:
        return self._roll_padding(rows, -1)

    def restore(self, rows: np.ndarray) -> np.ndarray:
        return self._roll_padding(rows, 1)

    def _roll_padding(self, rows: np.ndarray, direction: int) -> np.ndarray:
        padding = (self.counts == 0).sum(axis=1)
        if not padding.any():
            return rows
        if rows.shape[:2] != self.counts.shape:
            raise InputError(
                "decoder.output_rows_missing",
                f"the model's output {list(rows.shape)} does not have a row for each token: "
                "call prefill with sequences of equal length.",
            )
        return np.stack([np.roll(row, direction * count, axis=0) for row, count in zip(rows, padding)])


Progress: TypeAlias = SharedProgress | SequenceProgress


def _check_batch(rows: np.ndarray, counts: np.ndarray) -> None:
    if len(rows) != len(counts):
        raise InputError(
            "decoder.batch_size_mismatch",
            f"the decoder has {len(rows)} sequences, and {len(counts)} were given. Call reset() first.",
        )
