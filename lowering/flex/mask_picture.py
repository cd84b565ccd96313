"""The blocks of a mask that are computed, as a picture and in numbers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from ..attention.flex_node import FULL, HIDDEN, PARTIAL
from . import drawing
from .mod import Mod

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

    from .block_mask import BlockMask

_GLYPHS = "·░▒▓█"
"""Glyphs of the shades of `drawing.shade_states`; each takes two columns, as characters are about twice
as high as wide.
"""
_STYLES = ("dim", "cyan", "cyan", "blue", "blue")
_MAX_NAME_LENGTH = 60


@dataclass(frozen=True)
class MaskWork:
    """Blocks of each state, and pairs of a row and a key in them.

    Pairs of hidden blocks are not computed. Pairs of partial blocks are computed, and mask_mod selects the visible
    ones. Pairs of full blocks need no mask_mod.
    """

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
        """The fraction of pairs that are not computed; 0 if there are no pairs."""
        return self.hidden_pairs / self.pairs if self.pairs else 0.0


@dataclass(frozen=True, repr=False, eq=False)
class MaskPicture:
    """The blocks of one batch and head of a mask.

    It is text if printed (colored by rich), and a picture in a notebook or in a file. states int8 [row blocks, key
    blocks] are 0 (hidden), 1 (partial) or 2 (full). work counts them, and total those of all batches and heads of the
    mask.
    """

    mask: BlockMask
    batch: int
    head: int

    @property
    def states(self) -> np.ndarray:
        return self.mask.states[self.batch, self.head]

    @property
    def work(self) -> MaskWork:
        return _count_work(self.states[None, None], self.mask)

    @property
    def total(self) -> MaskWork:
        return _count_work(self.mask.states, self.mask)

    @property
    def title(self) -> str:
        """The name of the mask, and its sizes."""
        (rows, keys), (tall, wide), (batches, heads) = self.mask.seq_lengths, self.mask.BLOCK_SIZE, self.mask.shape[:2]
        position = f", batch {self.batch} of {batches}, head {self.head} of {heads}" if batches * heads > 1 else ""
        return f"{_format_name(self.mask.mask_mod)}: {rows} rows x {keys} keys in blocks of {tall} x {wide}{position}"

    @property
    def summary(self) -> list[str]:
        """The work that is computed, in sentences."""
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
        """Write a picture: SVG by its ending, else a format of matplotlib by its ending, such as PNG.

        Args:
            path: the file.

        Raises:
            InputError: matplotlib is missing, or does not know the ending.
        """
        path = Path(path)
        if path.suffix == ".svg":
            path.write_text(drawing.render_svg(self.states, self.title, self.summary), encoding="utf-8")
        else:
            drawing.save_figure(
                self.states, self.mask.BLOCK_SIZE, self.mask.seq_lengths, self.title, self.summary, path
            )

    def text(self, width: int) -> tuple[str, str]:
        """Return the blocks as characters, in at most `width` columns, and the text below them."""
        shades = drawing.shade_states(drawing.downsample_states(self.states, max(width // 2, 1))[0])
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
        return drawing.render_svg(self.states, self.title, self.summary)


def _count_work(states: np.ndarray, mask: BlockMask) -> MaskWork:
    heights, widths = (
        np.minimum(size, length - size * np.arange(count))
        for length, size, count in zip(mask.seq_lengths, mask.BLOCK_SIZE, states.shape[2:])
    )
    selected = [states == state for state in (HIDDEN, PARTIAL, FULL)]
    pairs = (int(((x * widths).sum(-1, dtype=np.int64) * heights).sum(dtype=np.int64)) for x in selected)
    return MaskWork(*(int(x.sum()) for x in selected), *pairs)


def _format_name(mod: Mod | None) -> str:
    if mod is None:
        return "block mask"
    name = getattr(mod, "__qualname__", None) or type(mod).__name__
    name = re.sub(r"\.<locals>(\.mod)?", "", name)
    return name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"
