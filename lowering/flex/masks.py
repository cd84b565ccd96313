"""A library of masks: functions of a pair are mask_mods, and functions of a number or a mask_mod return a mask_mod.

Arrays that a mask reads are captures; `tables.py` computes them from lengths, page tables and trees.
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
from .mod import ComposedMod, Mod
from .tables import ancestors_of as ancestors_of
from .tables import documents as documents
from .tables import pages as pages
from .vocabulary import clip

# -- by position ------------------------------------------------------------------------------------------------------


def full(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Show all keys."""
    return (i >= 0) & (j >= 0)


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Show keys up to the row's own position."""
    return i >= j


def sliding_window(window: int) -> Mod:
    """Show the row's own position and `window` keys before it: window + 1 in all."""

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j <= window)

    return mod


def local(left: int, right: int) -> Mod:
    """Show the row's own position, `left` keys before it and `right` keys after it."""

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j <= left) & (j - i <= right)

    return mod


def dilated(window: int, step: int) -> Mod:
    """Show every `step`-th position before and after the row's own, up to `window` positions away."""

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j <= window) & (j - i <= window) & ((i - j) % step == 0)

    return mod


def prefix_lm(prefix: int) -> Mod:
    """Show the first `prefix` keys to all rows; causal after them."""

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j < prefix) | (i >= j)

    return mod


def prefix_lm_by_batch(b: Any, h: Any, i: Any, j: Any, *, prefix: Any) -> Any:
    """Show a prefix for each batch to all rows; causal after it: captures={"prefix": int [B]}."""
    return (j < prefix[b]) | (i >= j)


def padding(b: Any, h: Any, i: Any, j: Any, *, lengths: Any) -> Any:
    """Show keys below each batch's length: captures={"lengths": int [B]}."""
    return j < lengths[b]


# -- combinations -----------------------------------------------------------------------------------------------------


def and_masks(*mask_mods: Mod) -> Mod:
    """Show pairs that all of the masks show.

    Args:
        mask_mods: the masks.

    Returns:
        A mask_mod with the captures of all masks; without masks it shows all pairs.
    """
    return ComposedMod("and_masks", "mask_mod", _apply_and, mask_mods)


def _apply_and(mods: Sequence[Mod], *pair: Any) -> Any:
    return functools.reduce(operator.and_, (mod(*pair) for mod in mods)) if mods else True


def or_masks(*mask_mods: Mod) -> Mod:
    """Show pairs that at least one of the masks shows.

    Args:
        mask_mods: the masks.

    Returns:
        A mask_mod with the captures of all masks; without masks it shows no pair.
    """
    return ComposedMod("or_masks", "mask_mod", _apply_or, mask_mods)


def _apply_or(mods: Sequence[Mod], *pair: Any) -> Any:
    return functools.reduce(operator.or_, (mod(*pair) for mod in mods)) if mods else False


def shifted(mask_mod: Mod, offset: int) -> Mod:
    """Apply mask_mod to rows that begin at position `offset`."""

    def mod(mods: Sequence[Mod], b: Any, h: Any, i: Any, j: Any) -> Any:
        return mods[0](b, h, i + offset, j)

    return ComposedMod("shifted", "mask_mod", mod, (mask_mod,))


def shifted_by_batch(mask_mod: Mod) -> Mod:
    """Apply mask_mod to rows that begin at a position of each batch: captures={"offset": int [B]}.

    The rows of a decoder begin after the keys of its cache.
    """
    return ComposedMod("shifted_by_batch", "mask_mod", _apply_offset, (mask_mod,))


def _apply_offset(mods: Sequence[Mod], b: Any, h: Any, i: Any, j: Any, *, offset: Any) -> Any:
    return mods[0](b, h, i + offset[b], j)


def paged(mask_mod: Mod, page_size: int) -> Mod:
    """Apply mask_mod to positions in a sequence, for keys in pages shared by all batches.

    Captures are {"logical": int [B, pages], "lengths": int [B]}: the page of batch b's sequence that a physical page
    is, or -1, and the number of keys of the sequence. `pages` computes both from a page table.

    Source: PyTorch's torch.nn.attention.experimental._paged_attention.
    """

    def mod(mods: Sequence[Mod], b: Any, h: Any, i: Any, j: Any, *, logical: Any, lengths: Any) -> Any:
        page = logical[b, j // page_size]
        position = page * page_size + j % page_size
        return (page >= 0) & (position < lengths[b]) & mods[0](b, h, i, position)

    return ComposedMod("paged", "mask_mod", mod, (mask_mod,))


# -- ragged sequences -------------------------------------------------------------------------------------------------


def document(mask_mod: Mod | None = None) -> Mod:
    """Show keys of the row's own document, to which mask_mod applies by positions in it; without one, all of them.

    Documents are concatenated. Captures are {"start": int [N]}: the position at which the document of a position
    begins, by `documents`.

    Source: generate_doc_mask_mod of attention-gym.
    """
    return ComposedMod("document", "mask_mod", _match_documents, () if mask_mod is None else (mask_mod,))


def _match_documents(mods: Sequence[Mod], b: Any, h: Any, i: Any, j: Any, *, start: Any) -> Any:
    same = start[i] == start[j]
    return same & mods[0](b, h, i - start[i], j - start[j]) if mods else same


def document_by_batch(b: Any, h: Any, i: Any, j: Any, *, document: Any) -> Any:
    """Show keys of the row's own document in each batch: captures={"document": int [B, N]}, any number for each."""
    return document[b, i] == document[b, j]


def shared_prefix(b: Any, h: Any, i: Any, j: Any, *, start: Any, prefix: Any) -> Any:
    """Show causal documents, some of which continue another one and see all of it.

    This is for many answers to one prompt, whose keys are stored once. Captures are {"start": int [N], "prefix": int
    [N]}: the position at which the document of a position begins, and at which the one begins that it continues, -1 for
    none; by `documents`.

    Source: generate_shared_prefix_mask_mod of attention-gym.
    """
    return ((start[i] == start[j]) & (i >= j)) | (prefix[i] == start[j])


def tree(b: Any, h: Any, i: Any, j: Any, *, ancestors: Any, context: Any) -> Any:
    """Show the context, the node itself and its ancestors: speculative decoding.

    Row i is node i of a tree of tokens after the keys of a context. Captures are {"ancestors": int32 [rows, 32-bit
    words], or with a leading batch axis, "context": int [B]}. Bit n % 32 of 32-bit word n // 32 says whether a row sees
    node n, by `ancestors_of`; context is the number of keys of the context.
    """
    node, count = j - context[b], 32 * ancestors.shape[-1]
    index = clip(node, 0, count - 1)
    word = ancestors[(b, i, index // 32)[3 - ancestors.ndim :]]
    return (node < 0) | ((node < count) & ((word >> (index % 32)) & 1 == 1))


# -- images and blocks ------------------------------------------------------------------------------------------------


def neighborhood(shape: Sequence[int], kernel: int | Sequence[int]) -> Mod:
    """Show a window around the row's own position in an image or a video, flattened in row-major order.

    At an edge the window is moved inside (neighborhood attention).

    Args:
        shape: (height, width), or that of any other number of axes.
        kernel: the size of the window, for all axes or for each. An even size has one position more before than after.
            A window larger than the image shows all of it.

    Source: NATTEN (arXiv:2204.07143).
    """
    extents = tuple(shape)
    sizes = _expand_per_axis("kernel", kernel, extents)

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return _is_near(i, j, sizes, extents)

    return mod


def sliding_tile(shape: Sequence[int], tile: int | Sequence[int], window: int | Sequence[int]) -> Mod:
    """Show the tiles of a window around the row's own tile: sliding tile attention.

    An image or a video is split into tiles, whose positions are consecutive (`tile_order`). At an edge the window is
    moved inside. Blocks of a tile are hidden or full, and none is partial.

    Args:
        shape: as for `neighborhood`.
        tile: the size of a tile.
        window: the size of the window, in tiles.

    Raises:
        InputError: the tiles do not divide the image evenly.

    Source: arXiv:2502.04507; generate_sta_mask_mod_2d of attention-gym, whose kernel is tile * window.
    """
    tile_sizes = _expand_per_axis("tile", tile, shape)
    if any(extent % size for extent, size in zip(shape, tile_sizes)):
        raise InputError(
            "flex.tile_not_divisible",
            f"tiles of {list(tile_sizes)} do not divide the image of {list(shape)}. Pad the image.",
        )
    extents = tuple(extent // size for extent, size in zip(shape, tile_sizes))
    sizes = _expand_per_axis("window", window, extents)
    count = math.prod(tile_sizes)

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return _is_near(i // count, j // count, sizes, extents)

    return mod


def tile_order(shape: Sequence[int], tile: int | Sequence[int]) -> np.ndarray:
    """Return int64 [N]: the row-major positions of an image in the order of its tiles, for `sliding_tile`.

    x[:, :, order] is an array in that order, and y[:, :, np.argsort(order)] is one in the image's order.
    """
    tile_sizes = _expand_per_axis("tile", tile, shape)
    split_shape = [size_part for extent, size in zip(shape, tile_sizes) for size_part in (extent // size, size)]
    axes = range(len(split_shape))
    return np.arange(math.prod(shape)).reshape(split_shape).transpose(*axes[::2], *axes[1::2]).ravel()


def _is_near(row: Any, key: Any, sizes: Sequence[int], extents: Sequence[int]) -> Any:
    """Return whether a key is in the window of a row; both are row-major positions."""
    shown = None
    for axis in reversed(range(len(extents))):
        size, extent = sizes[axis], extents[axis]
        position, other = (row % extent, key % extent) if axis else (row, key)
        row, key = row // extent, key // extent
        center = clip(position, size // 2, extent - 1 - (size - 1) // 2)
        near = (other >= center - size // 2) & (other <= center + (size - 1) // 2)
        shown = near if shown is None else near & shown
    return shown


def block_sparse(size: int | tuple[int, int]) -> Mod:
    """Show blocks of rows and keys by an array.

    Captures are {"shown": bool [row blocks, key blocks]}, or with leading heads, or batches and heads. size is that of
    a block, in rows and keys.
    """
    rows, keys = _expand_per_axis("size", size, (0, 0))

    def mod(b: Any, h: Any, i: Any, j: Any, *, shown: Any) -> Any:
        return shown[(b, h, i // rows, j // keys)[4 - shown.ndim :]]

    return mod


def _expand_per_axis(name: str, value: int | Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """Return a size for each axis, from one for all axes or one for each.

    Raises InputError for another number of sizes, and for sizes less than 1.
    """
    sizes = (value,) * len(axes) if isinstance(value, (int, np.integer)) else tuple(value)
    if len(sizes) != len(axes) or any(size < 1 for size in sizes):
        raise InputError(
            "flex.size_out_of_range", f"{name} is {value!r}. Give one number, or {len(axes)} numbers, of 1 or more."
        )
    return sizes


_RENAMED = {"neighbourhood": "neighborhood"}


def __getattr__(name: str) -> Any:
    return deprecated.renamed_attribute(__name__, name, _RENAMED, globals())
