"""`show`: what a mask leaves to be computed, as a picture and in numbers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from ..attention.flex_node import FULL, HIDDEN, PARTIAL
from ..errors import InputError
from . import drawing
from .block_mask import BlockMask
from .create import create_block_mask
from .mod import Mod

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

_GLYPHS = "·░▒▓█"
"""Of the shades of `drawing.shades`; each takes two columns, as characters are about twice as high as wide."""
_STYLES = ("dim", "cyan", "cyan", "blue", "blue")
_LONGEST_NAME = 60


@dataclass(frozen=True)
class Work:
    """Blocks of each state, and pairs of a row and a key in them. Pairs of hidden blocks are not computed, those of
    partial ones are and mask_mod says which count, those of full ones need no mask_mod."""

    hidden_blocks: int
    partial_blocks: int
    full_blocks: int
    hidden_pairs: int
    partial_pairs: int
    full_pairs: int

    @property
    def blocks(self) -> int:
        return self.hidden_blocks + self.partial_blocks + self.full_blocks

    @property
    def pairs(self) -> int:
        return self.hidden_pairs + self.partial_pairs + self.full_pairs

    @property
    def saved(self) -> float:
        """Of all pairs those that are not computed; 0 where there are none."""
        return self.hidden_pairs / self.pairs if self.pairs else 0.0


@dataclass(frozen=True, repr=False, eq=False)
class MaskPicture:
    """The blocks of one batch and head of a mask, as text where it is printed (colored by rich), as a picture in a
    notebook or in a file.

    states int8 [row blocks, key blocks] are 0 (hidden), 1 (partial) or 2 (full). work counts them, and total those of
    all batches and heads of the mask.
    """

    mask: BlockMask
    batch: int
    head: int

    @property
    def states(self) -> np.ndarray:
        return self.mask.states[self.batch, self.head]

    @property
    def work(self) -> Work:
        return _work(self.states[None, None], self.mask)

    @property
    def total(self) -> Work:
        return _work(self.mask.states, self.mask)

    @property
    def title(self) -> str:
        """Which mask this is, of which sizes."""
        (rows, keys), (tall, wide), (batches, heads) = self.mask.seq_lengths, self.mask.BLOCK_SIZE, self.mask.shape[:2]
        which = f", batch {self.batch} of {batches}, head {self.head} of {heads}" if batches * heads > 1 else ""
        return f"{_name(self.mask.mask_mod)}: {rows} rows x {keys} keys in blocks of {tall} x {wide}{which}"

    @property
    def summary(self) -> list[str]:
        """What is computed, in sentences."""
        work, total = self.work, self.total
        lines = [
            f"{work.blocks:,} blocks: {work.full_blocks:,} full, {work.partial_blocks:,} partial, "
            f"{work.hidden_blocks:,} skipped",
            f"{work.saved:.2%} of {work.pairs:,} pairs are not computed ({work.hidden_pairs:,})",
        ]
        if self.mask.mask_mod is not None:
            decided, saved = f"{work.partial_pairs:,}", f"{work.full_pairs:,}"
            lines.append(f"mask_mod decides {decided} pairs; full blocks save {saved} evaluations")
        if total.blocks > work.blocks:
            lines.append(f"all batches and heads: {total.saved:.2%} of {total.pairs:,} pairs are not computed")
        return lines

    def save(self, path: str | Path) -> None:
        """Writes a picture: SVG by its ending, else what matplotlib makes of the ending, such as PNG.

        Raises InputError without matplotlib, and for an ending that it does not know.
        """
        path = Path(path)
        if path.suffix == ".svg":
            path.write_text(drawing.svg(self.states, self.title, self.summary), encoding="utf-8")
        else:
            drawing.figure(self.states, self.mask.BLOCK_SIZE, self.mask.seq_lengths, self.title, self.summary, path)

    def text(self, width: int) -> tuple[str, str]:
        """The blocks as characters, in at most so many columns, and what stands below them."""
        shades = drawing.shades(drawing.scaled(self.states, max(width // 2, 1))[0])
        rows = "\n".join("".join(_GLYPHS[shade] * 2 for shade in row) for row in shades)
        legend = f"{_GLYPHS[4]} full  {_GLYPHS[2]} partial  {_GLYPHS[0]} skipped"
        return rows, "\n".join([self.title, legend, *self.summary])

    def __str__(self) -> str:
        return "\n".join(self.text(shutil.get_terminal_size().columns))

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        rows, below = self.text(options.max_width)
        for text in (Text(rows, no_wrap=True), Text(below)):
            for glyph, style in zip(_GLYPHS, _STYLES):
                text.highlight_regex(f"{glyph}+", style)
            yield text

    def _repr_html_(self) -> str:
        return drawing.svg(self.states, self.title, self.summary)


def show(
    mask: Mod | BlockMask,
    *,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    captures: Mapping[str, Any] | None = None,
    batch: int = 0,
    head: int = 0,
) -> MaskPicture:
    """Which blocks of rows and keys are full, partial or skipped, and what that saves: printed, in a notebook, or as a
    file by its `save`.

    mask is a mask_mod, for which the other arguments are those of `create_block_mask`, or a BlockMask, which has them.
    batch and head say which one of the mask's own is drawn.

    Raises InputError where lengths are missing, or given twice, and for a batch or head that the mask has not.
    """
    if isinstance(mask, BlockMask):
        if any(x is not None for x in (B, H, Q_LEN, KV_LEN, captures)):
            raise InputError("a BlockMask has its own B, H, Q_LEN, KV_LEN and captures: show it without.")
    elif Q_LEN is None or KV_LEN is None:
        raise InputError("a mask_mod has no size: give Q_LEN and KV_LEN, the numbers of rows and keys to show.")
    else:
        mask = create_block_mask(mask, B, H, Q_LEN, KV_LEN, BLOCK_SIZE, captures)
    for what, given, count in zip(("batch", "head"), (batch, head), mask.shape):
        if not 0 <= given < count:
            raise InputError(
                f"{what} {given} is not shown: the mask has {count}. Give B and H where mask_mod reads b and h."
            )
    return MaskPicture(mask, batch, head)


def _work(states: np.ndarray, mask: BlockMask) -> Work:
    heights, widths = (
        np.minimum(size, length - size * np.arange(count))
        for length, size, count in zip(mask.seq_lengths, mask.BLOCK_SIZE, states.shape[2:])
    )
    found = [states == state for state in (HIDDEN, PARTIAL, FULL)]
    pairs = (int(((x * widths).sum(-1, dtype=np.int64) * heights).sum(dtype=np.int64)) for x in found)
    return Work(*(int(x.sum()) for x in found), *pairs)


def _name(mod: Mod | None) -> str:
    if mod is None:
        return "block mask"
    name = getattr(mod, "__qualname__", None) or type(mod).__name__
    name = re.sub(r"\.<locals>(\.mod)?", "", name)
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
