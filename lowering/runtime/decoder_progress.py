"""Which tokens a decoder's caches hold, and what a model is told of it: lengths, masks, positions, slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np

from ..errors import InputError


@dataclass(frozen=True)
class SharedProgress:
    """All sequences have the same number of slots, padding included. seen is [B, length] of 0 and 1.

    past_length, mask and positions are what the last call's inputs hold.
    """

    seen: np.ndarray | None = None
    new: int = 0

    def after(self, counts: np.ndarray, capacity: int) -> SharedProgress:
        """Return what has been read after a call of which `counts`, int [B, S], says which tokens are not padding.

        The model itself refuses tokens beyond the capacity. Raises InputError for another batch.
        """
        seen = np.zeros((len(counts), 0), np.int64) if self.seen is None else self.seen
        _check_batch(seen, counts)
        return SharedProgress(np.concatenate([seen, counts], axis=1), counts.shape[1])

    def check_rings(self, capacity: int) -> None:
        """Raise InputError where rings would be written in vain, or would lose tokens that a window has.

        A window of so many tokens is one of so many slots only where no padding lies between them.
        """
        assert self.seen is not None
        if self.length > capacity:
            raise InputError(
                f"the caches have {capacity} slots: {self.length - self.new} tokens are in them and {self.new} more do "
                "not fit. Compile with a larger static_cache."
            )
        if (np.diff(self.seen, axis=1, prepend=0) > 0).sum(axis=1).max(initial=0) > 1:
            raise InputError(
                "the mask has padding between tokens, and some caches hold the newest slots alone: pad sequences on "
                "the left, in the first call."
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

    def reordered(self, rows: np.ndarray) -> SharedProgress:
        """Return what has been read once each sequence b goes on from sequence rows[b]."""
        return SharedProgress(None if self.seen is None else self.seen[rows], self.new)

    def arrange(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of tokens, [B, S, ...], in the order in which the model takes them."""
        return rows

    restore = arrange  # the other way round


@dataclass(frozen=True)
class SequenceProgress:
    """Each sequence has slots of its own, without padding: lengths is int64 [B].

    Padding of a call goes behind its tokens. The slots that it takes are written again by the next call.
    """

    lengths: np.ndarray | None = None
    counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def check_rings(self, capacity: int) -> None:
        """Do nothing: caches that a model writes itself are not rings."""

    def after(self, counts: np.ndarray, capacity: int) -> SequenceProgress:
        """As of SharedProgress. Raises InputError where slots run out, or where padding is on the right."""
        lengths = np.zeros(len(counts), np.int64) if self.lengths is None else self.lengths
        _check_batch(lengths, counts)
        if (np.diff(counts, axis=1) < 0).any():
            raise InputError("the mask has padding behind tokens: pad sequences on the left.")
        used, new = int(lengths.max(initial=0)), counts.shape[1]
        if used + new > capacity:
            raise InputError(
                f"the caches have {capacity} slots: {used} tokens are in them and {new} more do not fit. Export the "
                "model with larger caches."
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
        """Causal rows end here, so that those of padding count too: no token sees them."""
        return self.starts + self.counts.shape[1]

    @property
    def positions(self) -> np.ndarray:
        return self.starts[:, None] + np.arange(self.counts.shape[1])

    @property
    def mask(self) -> np.ndarray:
        return (np.arange(self.ends.max(initial=0)) < self.ends[:, None]).astype(np.int64)

    def reordered(self, rows: np.ndarray) -> SequenceProgress:
        """As of SharedProgress."""
        return SequenceProgress(None if self.lengths is None else self.lengths[rows], self.counts[rows])

    def arrange(self, rows: np.ndarray) -> np.ndarray:
        return self._rolled(rows, -1)

    def restore(self, rows: np.ndarray) -> np.ndarray:
        return self._rolled(rows, 1)

    def _rolled(self, rows: np.ndarray, direction: int) -> np.ndarray:
        padding = (self.counts == 0).sum(axis=1)
        if not padding.any():
            return rows
        if rows.shape[:2] != self.counts.shape:
            raise InputError(
                f"the model answers {list(rows.shape)}, not a row for each token: give prefill sequences of one length."
            )
        return np.stack([np.roll(row, direction * count, axis=0) for row, count in zip(rows, padding)])


Progress: TypeAlias = SharedProgress | SequenceProgress


def _check_batch(before: np.ndarray, counts: np.ndarray) -> None:
    if len(before) != len(counts):
        raise InputError(f"the decoder holds {len(before)} sequences and was given {len(counts)}. Call reset().")
