"""BlockMask: which blocks of rows and keys hold nothing to see, and which need no mask.

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
    """Pairs are visible in a full block; in a partial one where mask_mod holds; nowhere else.

    B' is 1 or the batch size, H' 1 or the number of query heads; rows and keys are cut in blocks of BLOCK_SIZE =
    (rows, keys), the last of which may reach behind the end. Lists are int32.

    kv_num_blocks [B', H', row blocks], kv_indices [B', H', row blocks, key blocks]: how many partial blocks a block of
    rows has, and which those are; what stands behind them in the list means nothing. full_kv_num_blocks,
    full_kv_indices: likewise the full ones, or None. q_num_blocks [B', H', key blocks], q_indices, full_q_num_blocks
    and full_q_indices are the same by blocks of keys. seq_lengths: rows and keys. captures: arrays that mask_mod reads.
    """

    def __init__(
        self,
        states: np.ndarray,
        BLOCK_SIZE: tuple[int, int],
        seq_lengths: tuple[int, int],
        mask_mod: Mod | None = None,
        captures: Mapping[str, Any] | None = None,
    ) -> None:
        """states: int8 [B', H', row blocks, key blocks]: 0 hidden, 1 partial, 2 full. Use `create_block_mask` or
        `from_kv_blocks`."""
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
        """The mask with these lists. seq_lengths are by default whole blocks.

        Raises InputError for lists that contradict each other: another shape, more blocks than there are, a block that
        is none, or one that is listed twice.
        """
        size = block_size(BLOCK_SIZE)
        lists = dict(zip(_LISTS, (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)))
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise InputError("full_kv_num_blocks and full_kv_indices come together: give both, or none.")
        arrays = {name: _integers(name, given) for name, given in lists.items() if given is not None}
        states = np.zeros(_shape(arrays), np.int8)
        for prefix, state in (("", PARTIAL), ("full_", FULL)):
            if f"{prefix}kv_indices" in arrays:
                _mark(states, arrays[f"{prefix}kv_num_blocks"], arrays[f"{prefix}kv_indices"], state, prefix)
        whole = states.shape[2] * size[0], states.shape[3] * size[1]
        lengths = whole if seq_lengths is None else (int(seq_lengths[0]), int(seq_lengths[1]))
        if min(lengths) < 0:
            raise InputError(f"seq_lengths is {lengths}: give numbers of rows and keys.")
        for what, length, count, each in zip(("rows", "keys"), lengths, states.shape[2:], size):
            if -(-length // each) != count:
                raise InputError(
                    f"{length} {what} are {-(-length // each)} blocks of {each}, and the lists have {count}."
                )
        return BlockMask(states, size, lengths, mask_mod, captures)

    # -- lists --------------------------------------------------------------------------------------------------------

    @cached_property
    def kv_num_blocks(self) -> np.ndarray:
        return _count(self.states, PARTIAL)

    @cached_property
    def kv_indices(self) -> np.ndarray:
        return _list(self.states, PARTIAL)

    @cached_property
    def full_kv_num_blocks(self) -> np.ndarray:
        return _count(self.states, FULL)

    @cached_property
    def full_kv_indices(self) -> np.ndarray:
        return _list(self.states, FULL)

    @cached_property
    def q_num_blocks(self) -> np.ndarray:
        return _count(self.states.swapaxes(2, 3), PARTIAL)

    @cached_property
    def q_indices(self) -> np.ndarray:
        return _list(self.states.swapaxes(2, 3), PARTIAL)

    @cached_property
    def full_q_num_blocks(self) -> np.ndarray:
        return _count(self.states.swapaxes(2, 3), FULL)

    @cached_property
    def full_q_indices(self) -> np.ndarray:
        return _list(self.states.swapaxes(2, 3), FULL)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B', H', rows, keys)."""
        return (*self.states.shape[:2], *self.seq_lengths)  # type: ignore[return-value]

    def as_tuple(self) -> tuple[Any, ...]:
        """seq_lengths, the eight lists and BLOCK_SIZE, in the order of PyTorch's."""
        lists = (getattr(self, prefix + name) for prefix in ("kv", "full_kv", "q", "full_q") for name in _NAMES)
        return (*self.seq_lengths, *lists, *self.BLOCK_SIZE, self.mask_mod)

    def to_dense(self) -> np.ndarray:
        """bool [B', H', row blocks, key blocks]: whether anything may be visible in a block."""
        return self.states != HIDDEN

    def sparsity(self) -> float:
        """Of all blocks those in which nothing is visible, in percent."""
        return 100.0 * float((self.states == HIDDEN).mean()) if self.states.size else 100.0

    # -- other lengths, other parts -----------------------------------------------------------------------------------

    def adjust(self, q_len: int, kv_len: int) -> BlockMask:
        """The mask of the first rows and keys, no more than there are.

        A mask by positions stays what it was; one that is aligned to the last row, as that of decoding, does not:
        create that anew. A full block that the new end cuts stays full.
        """
        for what, new, old in (("rows", q_len, self.seq_lengths[0]), ("keys", kv_len, self.seq_lengths[1])):
            if not 0 <= new <= old:
                raise InputError(f"the block mask is for {old} {what}, and cannot be one for {new}: create a new one.")
        rows, keys = (-(-length // size) for length, size in zip((q_len, kv_len), self.BLOCK_SIZE))
        states = np.ascontiguousarray(self.states[:, :, :rows, :keys])
        return BlockMask(states, self.BLOCK_SIZE, (q_len, kv_len), self.mask_mod, self.captures)

    def __getitem__(self, index: Any) -> BlockMask:
        """Of batches and heads: mask[0], mask[:, 2:4]. Rows stay whole. mask_mod goes along, and sees what it is
        called with: the indices of the call."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > 2:
            raise InputError("a block mask is cut by batch and head; `adjust` cuts rows and keys.")
        whole = tuple(slice(at, at + 1 or None) if isinstance(at, (int, np.integer)) else at for at in index)
        states = np.ascontiguousarray(self.states[whole])
        return BlockMask(states, self.BLOCK_SIZE, self.seq_lengths, self.mask_mod, self.captures)

    # -- PyTorch ------------------------------------------------------------------------------------------------------

    @staticmethod
    def from_torch(mask: Any, mask_mod: Mod | None = None, captures: Mapping[str, Any] | None = None) -> BlockMask:
        """A PyTorch BlockMask. Its mask_mod is taken over unless one is given: it must read no tensors then."""
        lists = {name: None if (x := getattr(mask, name)) is None else x.cpu().numpy() for name in _LISTS}
        mod = mask.mask_mod if mask_mod is None else mask_mod
        return BlockMask.from_kv_blocks(
            **lists, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mod, seq_lengths=mask.seq_lengths, captures=captures
        )

    def to_torch(self, mask_mod: Any = None) -> Any:
        """A PyTorch BlockMask on the CPU, with mask_mod, a function of tensors, in place of this one's."""
        import torch
        from torch.nn.attention.flex_attention import BlockMask as Torch

        lists: dict[str, Any] = {name: torch.from_numpy(getattr(self, name).copy()) for name in _LISTS}
        mod = self.mask_mod if mask_mod is None else mask_mod
        return Torch.from_kv_blocks(**lists, BLOCK_SIZE=self.BLOCK_SIZE, mask_mod=mod, seq_lengths=self.seq_lengths)

    # -- use ----------------------------------------------------------------------------------------------------------

    def joined(self, mask_mod: Mod | None, captures: Mapping[str, Any]) -> tuple[Mod | None, dict[str, Any]]:
        """The mask_mod and captured arrays of a call that gives these beside the mask: the call's arrays come first."""
        if mask_mod is not None and self.mask_mod is not None and mask_mod is not self.mask_mod:
            raise InputError("mask_mod is given twice, in block_mask and beside it: join them by and_masks.")
        return self.mask_mod if mask_mod is None else mask_mod, {**self.captures, **captures}

    def check(self, q: Sequence[int], k: Sequence[int]) -> None:
        """Raises InputError for shapes of q and k that the mask is not for."""
        for what, has, size in zip(("batches", "heads"), self.states.shape, q):
            if has not in (1, size):
                raise InputError(f"block_mask is for {has} {what}, and q has {size}: give it 1 or as many.")
        rows, keys = q[2], k[2]
        if (rows, keys) != self.seq_lengths:
            shorter = rows <= self.seq_lengths[0] and keys <= self.seq_lengths[1]
            remedy = f"use block_mask.adjust({rows}, {keys})" if shorter else "create a new one"
            raise InputError(
                f"block_mask is for {self.seq_lengths[0]} rows and {self.seq_lengths[1]} keys, and there are {rows} "
                f"and {keys}: {remedy}."
            )

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"BlockMask(shape=({shape}), BLOCK_SIZE={self.BLOCK_SIZE}, sparsity={self.sparsity():.2f} %)"


_NAMES = ("_num_blocks", "_indices")


def block_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """Rows and keys of a block."""
    each = size if isinstance(size, (tuple, list)) else (size, size)
    if len(each) != 2 or any(not isinstance(n, (int, np.integer)) or not 1 <= n < 2**31 for n in each):
        raise InputError(f"BLOCK_SIZE is {size!r}: give rows and keys of a block, 1 or more.")
    return int(each[0]), int(each[1])


def _integers(name: str, given: Any) -> np.ndarray:
    array = np.asarray(given)
    rank = 3 if name.endswith("num_blocks") else 4
    if array.dtype.kind not in "iu" or array.ndim != rank:
        dims = "[B, H, row blocks]" if rank == 3 else "[B, H, row blocks, key blocks]"
        raise InputError(f"{name} is {array.dtype} of rank {array.ndim}: make it int32 {dims}.")
    return array


def _shape(arrays: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    shape = arrays["kv_indices"].shape
    for name, array in arrays.items():
        if array.shape != shape[: array.ndim]:
            raise InputError(f"{name} has the shape {list(array.shape)}, and kv_indices has {list(shape)}.")
    return shape


def _mark(states: np.ndarray, counts: np.ndarray, indices: np.ndarray, state: int, prefix: str) -> None:
    """Gives the listed blocks their state."""
    columns = states.shape[3]
    outside = np.argwhere((counts < 0) | (counts > columns))
    if len(outside):
        at = tuple(outside[0])
        raise InputError(f"{prefix}kv_num_blocks{list(map(int, at))} is {counts[at]}, of {columns} blocks.")
    listed = np.arange(columns) < counts[..., None]
    wrong = np.argwhere(listed & ((indices < 0) | (indices >= columns)))
    if len(wrong):
        at = tuple(wrong[0])
        raise InputError(f"{prefix}kv_indices{list(map(int, at))} is {indices[at]}, of {columns} blocks.")
    b, h, row, place = np.nonzero(listed)
    blocks = indices[b, h, row, place]
    times = np.zeros(states.shape, np.int32)
    np.add.at(times, (b, h, row, blocks), 1)
    twice = np.argwhere((times > 1) | ((times > 0) & (states != HIDDEN)))
    if len(twice):
        first = list(map(int, twice[0]))
        raise InputError(
            f"block {first[3]} of row block {first[2]} (batch {first[0]}, head {first[1]}) is listed twice."
        )
    states[b, h, row, blocks] = state


def _count(states: np.ndarray, state: int) -> np.ndarray:
    return (states == state).sum(-1, dtype=np.int32)


def _list(states: np.ndarray, state: int) -> np.ndarray:
    """Blocks of the state in ascending order, then all others."""
    return np.argsort(states != state, axis=-1, kind="stable").astype(np.int32)
