"""A library of masks. Functions of a pair are mask_mods themselves; those of a number, or of a mask_mod, make one.

Arrays that a mask reads are captures; `tables.py` makes them of lengths, page tables and trees.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import deprecated
from ..errors import InputError
from .mod import Composed, Mod
from .tables import ancestors_of as ancestors_of
from .tables import documents as documents
from .tables import pages as pages
from .vocabulary import clip

# -- by position ------------------------------------------------------------------------------------------------------


def full(b: Any, h: Any, i: Any, j: Any) -> Any:
    """All keys."""
    return (i >= 0) & (j >= 0)


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Keys up to the row's own position."""
    return i >= j


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


def dilated(window: int, step: int) -> Mod:
    """Every `step`-th position before and behind the row's own, up to `window` positions away."""

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j <= window) & (j - i <= window) & ((i - j) % step == 0)

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


# -- of other masks ---------------------------------------------------------------------------------------------------


def and_masks(*mask_mods: Mod) -> Mod:
    """Where all of them hold; of none everywhere."""
    return Composed("and_masks", "mask_mod", _all, mask_mods)


def _all(mods: Sequence[Mod], *pair: Any) -> Any:
    return functools.reduce(operator.and_, (mod(*pair) for mod in mods)) if mods else True


def or_masks(*mask_mods: Mod) -> Mod:
    """Where one of them holds; of none nowhere."""
    return Composed("or_masks", "mask_mod", _any, mask_mods)


def _any(mods: Sequence[Mod], *pair: Any) -> Any:
    return functools.reduce(operator.or_, (mod(*pair) for mod in mods)) if mods else False


def shifted(mask_mod: Mod, offset: int) -> Mod:
    """mask_mod for rows that begin at position `offset`."""

    def mod(mods: Sequence[Mod], b: Any, h: Any, i: Any, j: Any) -> Any:
        return mods[0](b, h, i + offset, j)

    return Composed("shifted", "mask_mod", mod, (mask_mod,))


def shifted_by_batch(mask_mod: Mod) -> Mod:
    """mask_mod for rows that begin at a position of each batch, as those of a decoder do behind the keys of its cache:
    captures={"offset": int [B]}."""
    return Composed("shifted_by_batch", "mask_mod", _from_offset, (mask_mod,))


def _from_offset(mods: Sequence[Mod], b: Any, h: Any, i: Any, j: Any, *, offset: Any) -> Any:
    return mods[0](b, h, i + offset[b], j)


def paged(mask_mod: Mod, page_size: int) -> Mod:
    """mask_mod over positions in a sequence, of keys that lie in pages shared by all batches.

    captures={"logical": int [B, pages], "lengths": int [B]}: which page of batch b's sequence a physical page is, or
    -1, and how many keys the sequence has; `pages` makes both of a page table.

    Source: PyTorch's torch.nn.attention.experimental._paged_attention.
    """

    def mod(mods: Sequence[Mod], b: Any, h: Any, i: Any, j: Any, *, logical: Any, lengths: Any) -> Any:
        page = logical[b, j // page_size]
        position = page * page_size + j % page_size
        return (page >= 0) & (position < lengths[b]) & mods[0](b, h, i, position)

    return Composed("paged", "mask_mod", mod, (mask_mod,))


# -- of packed sequences ----------------------------------------------------------------------------------------------


def document(mask_mod: Mod | None = None) -> Mod:
    """Rows and keys of the same document, among which mask_mod decides by their positions in it; without one all of
    them. Documents lie one behind the other.

    captures={"start": int [N]}: where the document of a position begins, by `documents`.

    Source: generate_doc_mask_mod of attention-gym.
    """
    return Composed("document", "mask_mod", _inside, () if mask_mod is None else (mask_mod,))


def _inside(mods: Sequence[Mod], b: Any, h: Any, i: Any, j: Any, *, start: Any) -> Any:
    same = start[i] == start[j]
    return same & mods[0](b, h, i - start[i], j - start[j]) if mods else same


def document_by_batch(b: Any, h: Any, i: Any, j: Any, *, document: Any) -> Any:
    """Rows and keys of the same document in each batch: captures={"document": int [B, N]}, any number for each."""
    return document[b, i] == document[b, j]


def shared_prefix(b: Any, h: Any, i: Any, j: Any, *, start: Any, prefix: Any) -> Any:
    """Causal documents, some of which continue another one and see all of that: many answers to one prompt, whose keys
    are there once.

    captures={"start": int [N], "prefix": int [N]}: where the document of a position begins, and where the one that it
    continues, -1 for none; by `documents`.

    Source: generate_shared_prefix_mask_mod of attention-gym.
    """
    return ((start[i] == start[j]) & (i >= j)) | (prefix[i] == start[j])


def tree(b: Any, h: Any, i: Any, j: Any, *, ancestors: Any, context: Any) -> Any:
    """Speculative decoding: row i is node i of a tree of tokens behind the keys of a context. It sees those, itself and
    its ancestors.

    captures={"ancestors": int32 [rows, words], or with batches in front, "context": int [B]}: bit n % 32 of word
    n // 32 says whether a row sees node n, by `ancestors_of`; and how many keys the context has.
    """
    node, count = j - context[b], 32 * ancestors.shape[-1]
    at = clip(node, 0, count - 1)
    word = ancestors[(b, i, at // 32)[3 - ancestors.ndim :]]
    return (node < 0) | ((node < count) & ((word >> (at % 32)) & 1 == 1))


# -- of images, and of blocks -----------------------------------------------------------------------------------------


def neighborhood(shape: Sequence[int], kernel: int | Sequence[int]) -> Mod:
    """Neighborhood attention: positions are those of an image or a video, row by row, and each sees a window around
    its own, which at an edge is moved inside.

    shape is (height, width), or that of any other number of axes; kernel is the size of the window, for all axes or for
    each. Of an even number there is one more before than behind. A window larger than the image shows all of it.

    Source: NATTEN (arXiv:2204.07143).
    """
    extents = tuple(shape)
    sizes = _per_axis("kernel", kernel, extents)

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return _near(i, j, sizes, extents)

    return mod


def sliding_tile(shape: Sequence[int], tile: int | Sequence[int], window: int | Sequence[int]) -> Mod:
    """Sliding tile attention: an image or a video is cut into tiles, whose positions lie one behind the other
    (`tile_order`), and each sees the tiles of a window around its own, which at an edge is moved inside. Blocks of a
    tile are hidden or full, and none is partial.

    shape is as for `neighborhood`; tile is the size of a tile, and window that of the window, in tiles.

    Raises InputError for an image that is not cut without rest.

    Source: arXiv:2502.04507; generate_sta_mask_mod_2d of attention-gym, whose kernel is tile * window.
    """
    each = _per_axis("tile", tile, shape)
    if any(extent % size for extent, size in zip(shape, each)):
        raise InputError(f"tiles of {list(each)} do not cut {list(shape)} without rest. Pad the image.")
    extents = tuple(extent // size for extent, size in zip(shape, each))
    sizes = _per_axis("window", window, extents)
    count = math.prod(each)

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return _near(i // count, j // count, sizes, extents)

    return mod


def tile_order(shape: Sequence[int], tile: int | Sequence[int]) -> np.ndarray:
    """int64 [N]: for `sliding_tile` the positions of an image, row by row, in the order in which its tiles lie one
    behind the other. x[:, :, order] is an array in that order, and y[:, :, np.argsort(order)] one in the image's."""
    each = _per_axis("tile", tile, shape)
    cut = [part for extent, size in zip(shape, each) for part in (extent // size, size)]
    axes = range(len(cut))
    return np.arange(math.prod(shape)).reshape(cut).transpose(*axes[::2], *axes[1::2]).ravel()


def _near(row: Any, key: Any, sizes: Sequence[int], extents: Sequence[int]) -> Any:
    """Whether a key lies in the window of a row; both count places row by row."""
    shown = None
    for axis in reversed(range(len(extents))):
        size, extent = sizes[axis], extents[axis]
        at, other = (row % extent, key % extent) if axis else (row, key)
        row, key = row // extent, key // extent
        center = clip(at, size // 2, extent - 1 - (size - 1) // 2)
        near = (other >= center - size // 2) & (other <= center + (size - 1) // 2)
        shown = near if shown is None else near & shown
    return shown


def block_sparse(size: int | tuple[int, int]) -> Mod:
    """Blocks of rows and keys that an array shows: captures={"shown": bool [row blocks, key blocks]}, or with heads, or
    batches and heads, in front. size is that of a block, in rows and keys."""
    rows, keys = _per_axis("size", size, (0, 0))

    def mod(b: Any, h: Any, i: Any, j: Any, *, shown: Any) -> Any:
        return shown[(b, h, i // rows, j // keys)[4 - shown.ndim :]]

    return mod


def _per_axis(name: str, given: int | Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """A size for each axis: one for all, or as many. Raises InputError for others, and for less than 1."""
    sizes = (given,) * len(axes) if isinstance(given, (int, np.integer)) else tuple(given)
    if len(sizes) != len(axes) or any(size < 1 for size in sizes):
        raise InputError(f"{name} is {given!r}: give one number, or {len(axes)}, of 1 or more.")
    return sizes


_RENAMED = {"neighbourhood": "neighborhood"}


def __getattr__(name: str) -> Any:
    return deprecated.renamed_attribute(__name__, name, _RENAMED, globals())
