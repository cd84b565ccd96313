"""BlockMask: which blocks of rows and keys have no visible pair, and which need no mask.

The lists and their names are those of PyTorch's torch.nn.attention.flex_attention.BlockMask. A kernel reads them as one
number for each block (`states`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..attention.flex_node import FULL, HIDDEN, PARTIAL
from ..errors import InputError
from .mod import Mod

_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class BlockMask:
    """All pairs of a full block are visible, in a partial one those that mask_mod shows, in other blocks none.

    B' is 1 or the batch size, H' 1 or the number of query heads. Rows and keys are split into blocks of BLOCK_SIZE =
    (rows, keys), the last of which may extend past the end. Lists are int32.

    Attributes:
        kv_num_blocks: [B', H', row blocks], the number of partial blocks of a block of rows.
        kv_indices: [B', H', row blocks, key blocks], these blocks; following entries of the list are meaningless.
        full_kv_num_blocks, full_kv_indices: likewise for the full blocks, or None.
        q_num_blocks [B', H', key blocks], q_indices, full_q_num_blocks, full_q_indices: the same by blocks of keys.
        seq_lengths: rows and keys.
        captures: arrays that mask_mod reads.
    """

    def __init__(
        self,
        states: np.ndarray,
        BLOCK_SIZE: tuple[int, int],
        seq_lengths: tuple[int, int],
        mask_mod: Mod | None = None,
        captures: Mapping[str, Any] | None = None,
    ) -> None:
        """Use `create_block_mask` or `from_kv_blocks`.

        states: int8 [B', H', row blocks, key blocks]: 0 hidden, 1 partial, 2 full.
        """
        self.states = states
        self.states.flags.writeable = False
        self.BLOCK_SIZE = BLOCK_SIZE
        self.seq_lengths = seq_lengths
        self.mask_mod = mask_mod
        self.captures = dict(captures or {})
        self.differing = states.shape[0] != 1, states.shape[1] != 1

    @staticmethod
    def from_kv_blocks(
        kv_num_blocks: Any,
        kv_indices: Any,
        full_kv_num_blocks: Any = None,
        full_kv_indices: Any = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: Mod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        captures: Mapping[str, Any] | None = None,
    ) -> BlockMask:
        """Return the mask with these lists.

        Args:
            kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices: the lists, as the attributes of the class.
            BLOCK_SIZE: rows and keys of a block, or one number for both.
            mask_mod: which pairs of partial blocks are visible.
            seq_lengths: rows and keys; by default whole blocks.
            captures: arrays that mask_mod reads.

        Raises:
            InputError: lists contradict each other: another shape, more blocks than there are, a block that does not
                exist, or one that is listed twice.
        """
        size = block_size(BLOCK_SIZE)
        lists = dict(zip(_LISTS, (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)))
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise InputError(
                "flex.list_missing", "full_kv_num_blocks and full_kv_indices belong together. Give both or neither."
            )
        arrays = {name: _check_integers(name, values) for name, values in lists.items() if values is not None}
        states = np.zeros(_check_shapes(arrays), np.int8)
        for prefix, state in (("", PARTIAL), ("full_", FULL)):
            if f"{prefix}kv_indices" in arrays:
                _set_states(states, arrays[f"{prefix}kv_num_blocks"], arrays[f"{prefix}kv_indices"], state, prefix)
        total_lengths = states.shape[2] * size[0], states.shape[3] * size[1]
        lengths = total_lengths if seq_lengths is None else (int(seq_lengths[0]), int(seq_lengths[1]))
        if min(lengths) < 0:
            raise InputError(
                "flex.seq_lengths_invalid",
                f"seq_lengths is {lengths}. Give the numbers of rows and keys, each 0 or more.",
            )
        for unit, length, count, extent in zip(("rows", "keys"), lengths, states.shape[2:], size):
            if -(-length // extent) != count:
                raise InputError(
                    "flex.block_count_mismatch",
                    f"{length} {unit} are {-(-length // extent)} blocks of {extent}, and the lists have {count}.",
                )
        return BlockMask(states, size, lengths, mask_mod, captures)

    # -- lists --------------------------------------------------------------------------------------------------------

    @cached_property
    def kv_num_blocks(self) -> np.ndarray:
        return _count_blocks(self.states, PARTIAL)

    @cached_property
    def kv_indices(self) -> np.ndarray:
        return _list_blocks(self.states, PARTIAL)

    @cached_property
    def full_kv_num_blocks(self) -> np.ndarray:
        return _count_blocks(self.states, FULL)

    @cached_property
    def full_kv_indices(self) -> np.ndarray:
        return _list_blocks(self.states, FULL)

    @cached_property
    def q_num_blocks(self) -> np.ndarray:
        return _count_blocks(self.states.swapaxes(2, 3), PARTIAL)

    @cached_property
    def q_indices(self) -> np.ndarray:
        return _list_blocks(self.states.swapaxes(2, 3), PARTIAL)

    @cached_property
    def full_q_num_blocks(self) -> np.ndarray:
        return _count_blocks(self.states.swapaxes(2, 3), FULL)

    @cached_property
    def full_q_indices(self) -> np.ndarray:
        return _list_blocks(self.states.swapaxes(2, 3), FULL)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B', H', rows, keys)."""
        return (*self.states.shape[:2], *self.seq_lengths)  # type: ignore[return-value]

    def as_tuple(self) -> tuple[Any, ...]:
        """Return seq_lengths, the eight lists and BLOCK_SIZE, in PyTorch's order."""
        lists = (getattr(self, prefix + name) for prefix in ("kv", "full_kv", "q", "full_q") for name in _NAMES)
        return (*self.seq_lengths, *lists, *self.BLOCK_SIZE, self.mask_mod)

    def to_dense(self) -> np.ndarray:
        """Return bool [B', H', row blocks, key blocks]: whether any pair of a block may be visible."""
        return self.states != HIDDEN

    def sparsity(self) -> float:
        """Return the percentage of blocks in which no pair is visible."""
        return 100.0 * float((self.states == HIDDEN).mean()) if self.states.size else 100.0

    # -- slices -------------------------------------------------------------------------------------------------------

    def adjust(self, q_len: int, kv_len: int) -> BlockMask:
        """Return the mask of the first rows and keys, no more than there are.

        A mask by positions stays valid; one that is aligned to the last row, as in decoding, does not: create that
        anew. A full block that the new end cuts stays full.

        Args:
            q_len: rows.
            kv_len: keys.

        Raises:
            InputError: the mask has fewer rows or keys.
        """
        for unit, new, old in (("rows", q_len, self.seq_lengths[0]), ("keys", kv_len, self.seq_lengths[1])):
            if not 0 <= new <= old:
                raise InputError(
                    "flex.mask_too_short",
                    f"the block mask is for {old} {unit}, and cannot be adjusted to {new}. Create a new one.",
                )
        rows, keys = (-(-length // size) for length, size in zip((q_len, kv_len), self.BLOCK_SIZE))
        states = np.ascontiguousarray(self.states[:, :, :rows, :keys])
        return BlockMask(states, self.BLOCK_SIZE, (q_len, kv_len), self.mask_mod, self.captures)

    def __getitem__(self, index: Any) -> BlockMask:
        """Return the mask of some batches and heads: mask[0], mask[:, 2:4].

        All rows are kept. mask_mod stays the same, and gets the batch and head indices of the call.
        """
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > 2:
            raise InputError(
                "flex.mask_index_count",
                "a block mask is indexed by batch and head only. Use `adjust` for rows and keys.",
            )
        slices = tuple(slice(item, item + 1 or None) if isinstance(item, (int, np.integer)) else item for item in index)
        states = np.ascontiguousarray(self.states[slices])
        return BlockMask(states, self.BLOCK_SIZE, self.seq_lengths, self.mask_mod, self.captures)

    # -- PyTorch ------------------------------------------------------------------------------------------------------

    @staticmethod
    def from_torch(mask: Any, mask_mod: Mod | None = None, captures: Mapping[str, Any] | None = None) -> BlockMask:
        """Convert a PyTorch BlockMask.

        Args:
            mask: the mask.
            mask_mod: replaces that of the mask, which is used by default and must then not read any tensors.
            captures: arrays that mask_mod reads.
        """
        lists = {name: None if (x := getattr(mask, name)) is None else x.cpu().numpy() for name in _LISTS}
        mod = mask.mask_mod if mask_mod is None else mask_mod
        return BlockMask.from_kv_blocks(
            **lists, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mod, seq_lengths=mask.seq_lengths, captures=captures
        )

    def to_torch(self, mask_mod: Any = None) -> Any:
        """Convert to a PyTorch BlockMask on the CPU.

        Args:
            mask_mod: a function of tensors that replaces that of this mask.
        """
        import torch
        from torch.nn.attention.flex_attention import BlockMask as Torch

        lists: dict[str, Any] = {name: torch.from_numpy(getattr(self, name).copy()) for name in _LISTS}
        mod = self.mask_mod if mask_mod is None else mask_mod
        return Torch.from_kv_blocks(**lists, BLOCK_SIZE=self.BLOCK_SIZE, mask_mod=mod, seq_lengths=self.seq_lengths)

    # -- use ----------------------------------------------------------------------------------------------------------

    def merge_call(self, mask_mod: Mod | None, captures: Mapping[str, Any]) -> tuple[Mod | None, dict[str, Any]]:
        """Return the mask_mod and captured arrays of a call with these arguments: the call's arrays take precedence."""
        if mask_mod is not None and self.mask_mod is not None and mask_mod is not self.mask_mod:
            raise InputError(
                "flex.mask_mod_repeated",
                "mask_mod is given twice, in block_mask and as an argument. Combine them by and_masks.",
            )
        return self.mask_mod if mask_mod is None else mask_mod, {**self.captures, **captures}

    def check(self, q: Sequence[int], k: Sequence[int]) -> None:
        """Raise InputError for shapes of q and k that the mask does not fit."""
        for unit, mask_size, size in zip(("batches", "heads"), self.states.shape, q):
            if mask_size not in (1, size):
                raise InputError(
                    "flex.mask_size_mismatch",
                    f"block_mask is for {mask_size} {unit}, but q has {size}. Create it for 1 or {size} {unit}.",
                )
        rows, keys = q[2], k[2]
        if (rows, keys) != self.seq_lengths:
            shorter = rows <= self.seq_lengths[0] and keys <= self.seq_lengths[1]
            remedy = f"Use block_mask.adjust({rows}, {keys})" if shorter else "Create a new one"
            raise InputError(
                "flex.mask_length_mismatch",
                f"block_mask is for {self.seq_lengths[0]} rows and {self.seq_lengths[1]} keys, but there are {rows} "
                f"and {keys}. {remedy}.",
            )

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"BlockMask(shape=({shape}), BLOCK_SIZE={self.BLOCK_SIZE}, sparsity={self.sparsity():.2f} %)"

    def _repr_html_(self) -> str | None:
        from .mask_picture import MaskPicture

        return MaskPicture(self, 0, 0)._repr_html_() if self.states.shape[0] and self.states.shape[1] else None


_NAMES = ("_num_blocks", "_indices")


def block_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return rows and keys of a block."""
    sizes = size if isinstance(size, (tuple, list)) else (size, size)
    if len(sizes) != 2 or any(not isinstance(n, (int, np.integer)) or not 1 <= n < 2**31 for n in sizes):
        raise InputError(
            "flex.block_size_invalid", f"BLOCK_SIZE is {size!r}. Give the rows and keys of a block, each 1 or more."
        )
    return int(sizes[0]), int(sizes[1])


def _check_integers(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    rank = 3 if name.endswith("num_blocks") else 4
    if array.dtype.kind not in "iu" or array.ndim != rank:
        dims = "[B, H, row blocks]" if rank == 3 else "[B, H, row blocks, key blocks]"
        raise InputError(
            "flex.list_type_mismatch", f"{name} is {array.dtype} of rank {array.ndim}. Make it int32 {dims}."
        )
    return array


def _check_shapes(arrays: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    shape = arrays["kv_indices"].shape
    for name, array in arrays.items():
        if array.shape != shape[: array.ndim]:
            raise InputError(
                "flex.list_shape_mismatch",
                f"{name} has the shape {list(array.shape)}, and kv_indices has {list(shape)}.",
            )
    return shape


def _set_states(states: np.ndarray, counts: np.ndarray, indices: np.ndarray, state: int, prefix: str) -> None:
    """Set the state of the listed blocks."""
    columns = states.shape[3]
    outside = np.argwhere((counts < 0) | (counts > columns))
    if len(outside):
        position = tuple(outside[0])
        raise InputError(
            "flex.list_count_out_of_range",
            f"{prefix}kv_num_blocks{list(map(int, position))} is {counts[position]}, but must be 0 to {columns}.",
        )
    listed = np.arange(columns) < counts[..., None]
    wrong = np.argwhere(listed & ((indices < 0) | (indices >= columns)))
    if len(wrong):
        position = tuple(wrong[0])
        raise InputError(
            "flex.list_index_out_of_range",
            f"{prefix}kv_indices{list(map(int, position))} is {indices[position]}, but must be 0 to {columns - 1}.",
        )
    b, h, row, column = np.nonzero(listed)
    blocks = indices[b, h, row, column]
    times = np.zeros(states.shape, np.int32)
    np.add.at(times, (b, h, row, blocks), 1)
    twice = np.argwhere((times > 1) | ((times > 0) & (states != HIDDEN)))
    if len(twice):
        first = list(map(int, twice[0]))
        raise InputError(
            "flex.block_listed_twice",
            f"block {first[3]} of row block {first[2]} (batch {first[0]}, head {first[1]}) is listed twice.",
        )
    states[b, h, row, blocks] = state


def _count_blocks(states: np.ndarray, state: int) -> np.ndarray:
    return (states == state).sum(-1, dtype=np.int32)


def _list_blocks(states: np.ndarray, state: int) -> np.ndarray:
    """Return blocks of the state in ascending order, then all others."""
    return np.argsort(states != state, axis=-1, kind="stable").astype(np.int32)
