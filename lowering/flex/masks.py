"""A library of masks. Functions of a pair are mask_mods themselves; those of a number make one.

The rows of a decoder with a cache are its last positions: `offset` shifts rows, as in `causal` of i + offset.
"""

from __future__ import annotations

from typing import Any

from .captured import Captured
from .mod import Combined, Mod, Signature
from .vocabulary import abs, clip, maximum


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Keys up to the row's own position."""
    return i >= j


def full(b: Any, h: Any, i: Any, j: Any) -> Any:
    """All keys."""
    return (i >= 0) & (j >= 0)


def and_masks(*mask_mods: Mod) -> Mod:
    """Where all of them hold; of none everywhere."""
    return Combined(lambda a, b: a & b, None, mask_mods, "mask_mod", "and_masks")


def or_masks(*mask_mods: Mod) -> Mod:
    """Where one of them holds; of none nowhere."""
    start = None if mask_mods else False
    return Combined(lambda a, b: a | b, start, mask_mods, "mask_mod", "or_masks")


def shifted(mask_mod: Mod, offset: int = 0) -> Mod:
    """mask_mod for rows that begin at position `offset`, as those of a decoder behind so many cached keys."""

    def mod(b: Any, h: Any, i: Any, j: Any, **captures: Any) -> Any:
        return mask_mod(b, h, i + offset, j, **captures)

    return _with_captures_of(mod, mask_mod)


def sliding_window(window: int) -> Mod:
    """The row's own position and `window` keys before it: window + 1 in all."""

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j <= window)

    return mod


def local(left: int, right: int) -> Mod:
    """`left` keys before the row's own position, and `right` behind it."""

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j <= left) & (j - i <= right)

    return mod


def prefix_lm(prefix: int) -> Mod:
    """The first `prefix` keys for all rows; causal behind them."""

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j < prefix) | (i >= j)

    return mod


def prefix_lm_by_batch(b: Any, h: Any, i: Any, j: Any, *, prefix: Any) -> Any:
    """The same with a prefix for each batch: captures={"prefix": int [B]}."""
    return (j < prefix[b]) | (i >= j)


def padding(b: Any, h: Any, i: Any, j: Any, *, lengths: Any) -> Any:
    """Keys below each batch's length: captures={"lengths": int [B]}."""
    return j < lengths[b]


def document(mask_mod: Mod | None = None) -> Mod:
    """Rows and keys of the same document, among which mask_mod decides, by positions in the document.

    captures={"document": int [N], "start": int [N]}: which document a position belongs to, and where that begins. Packed
    sequences lie one behind the other; `documents` makes both of their lengths. Without a mask_mod all keys of the
    document are visible, and `start` is not read.
    """
    if mask_mod is None:

        def mod(b: Any, h: Any, i: Any, j: Any, *, document: Any) -> Any:
            return document[i] == document[j]

        return mod

    def inside(b: Any, h: Any, i: Any, j: Any, *, document: Any, start: Any, **captures: Any) -> Any:
        return (document[i] == document[j]) & mask_mod(b, h, i - start[i], j - start[j], **captures)

    return _with_captures_of(inside, mask_mod, "document", "start")


def document_by_batch(b: Any, h: Any, i: Any, j: Any, *, document: Any) -> Any:
    """Rows and keys of the same document in each batch: captures={"document": int [B, N]}."""
    return document[b, i] == document[b, j]


def dilated(window: int, step: int) -> Mod:
    """Every `step`-th of the keys before the row, `window` of them and its own."""

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & ((i - j) % step == 0) & (i - j <= window * step)

    return mod


def neighbourhood(height: int, width: int, kernel: int | tuple[int, int]) -> Mod:
    """2-D neighbourhood attention (NATTEN, arXiv:2204.07143): positions are those of an image, row by row; each sees the
    kernel's window around it, which is moved inside at the edges."""
    rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel

    def near(at: Any, key: Any, size: int, extent: int) -> Any:
        centre = clip(at, size // 2, extent - 1 - (size - 1) // 2)
        return (key >= centre - size // 2) & (key <= centre + (size - 1) // 2)

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return near(i // width, j // width, rows, height) & near(i % width, j % width, columns, width)

    return mod


def sliding_tile(height: int, width: int, tile: int | tuple[int, int], window: int | tuple[int, int]) -> Mod:
    """Sliding tile attention (arXiv:2502.04507): an image cut into tiles, whose elements lie one behind the other, tile
    by tile; each sees the tiles of a window of `window` tiles around its own, moved inside at the edges."""
    tall, wide = (tile, tile) if isinstance(tile, int) else tile
    down, across = (window, window) if isinstance(window, int) else window
    rows, columns, each = height // tall, width // wide, tall * wide

    def near(at: Any, key: Any, size: int, extent: int) -> Any:
        centre = clip(at, size // 2, maximum(extent - 1 - size // 2, size // 2))
        return abs(key - centre) <= size // 2

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        row, key = i // each, j // each
        return near(row // columns, key // columns, down, rows) & near(row % columns, key % columns, across, columns)

    return mod


def shared_prefix(prefix: int) -> Mod:
    """Many sequences behind one prefix: the first `prefix` keys are seen by all, the others by rows of the same
    sequence, causally. captures={"document": int [N]}, of rows and keys; keys of the prefix have any number."""

    def mod(b: Any, h: Any, i: Any, j: Any, *, document: Any) -> Any:
        return (i >= j) & ((j < prefix) | (document[i] == document[j]))

    return mod


def tree(context: int) -> Mod:
    """Speculative decoding: row i is node i of a tree of at most 32 tokens behind `context` keys, and sees those, itself
    and its ancestors. captures={"ancestors": int32 or uint32 [rows]}: bit n of a row says whether node n is seen."""

    def mod(b: Any, h: Any, i: Any, j: Any, *, ancestors: Any) -> Any:
        node = j - context
        return (node < 0) | (((ancestors[i] >> clip(node, 0, 31)) & 1) == 1)

    return mod


def block_sparse(size: int | tuple[int, int]) -> Mod:
    """Blocks of rows and keys that an array shows: captures={"shown": bool [row blocks, key blocks]}."""
    rows, keys = (size, size) if isinstance(size, int) else size

    def mod(b: Any, h: Any, i: Any, j: Any, *, shown: Any) -> Any:
        return shown[i // rows, j // keys]

    return mod


def paged(mask_mod: Mod, page_size: int) -> Mod:
    """mask_mod over the positions in a sequence, of keys that lie in pages shared by all batches.

    captures={"logical": int [B, pages], "lengths": int [B]}: which page of batch b's sequence a physical page is, or -1,
    and how many keys the sequence has.
    """

    def mod(b: Any, h: Any, i: Any, j: Any, *, logical: Any, lengths: Any, **captures: Any) -> Any:
        page = logical[b, j // page_size]
        position = page * page_size + j % page_size
        return (page >= 0) & (position < lengths[b]) & mask_mod(b, h, i, position, **captures)

    return _with_captures_of(mod, mask_mod, "logical", "lengths")


def _with_captures_of(mod: Mod, inner: Mod, *own: str) -> Mod:
    """mod, which takes the captured arrays of its own and those of the inner one."""
    import inspect

    kinds = inspect.Parameter
    names = dict.fromkeys((*own, *Signature(inner).captures))
    positions = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("b", "h", "q_idx", "kv_idx")]
    signature = inspect.Signature([*positions, *(kinds(name, kinds.KEYWORD_ONLY) for name in names)])
    mod.__signature__ = signature  # type: ignore[attr-defined]
    return mod


def documents(lengths: Any) -> dict[str, Any]:
    """The captured arrays of `document` for sequences of these lengths, one behind the other."""
    import numpy as np

    lengths = np.asarray(lengths)
    number = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    return {"document": number, "start": starts[number]}
