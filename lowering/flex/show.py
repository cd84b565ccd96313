"""`show`: the picture of a mask_mod or of a BlockMask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from .block_mask import BlockMask
from .create import create_block_mask
from .mask_picture import MaskPicture
from .mod import Mod


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
    """Show which blocks of rows and keys are full, partial or skipped, and the work that this saves.

    Args:
        mask: a mask_mod, for which the other arguments are those of `create_block_mask`, or a BlockMask, which has
            them.
        B, H, Q_LEN, KV_LEN, BLOCK_SIZE, captures: as of `create_block_mask`.
        batch, head: which of the mask's batches and heads is drawn.

    Returns:
        A picture that can be printed, shown in a notebook, or written to a file by its `save`.

    Raises:
        InputError: lengths are missing, or given twice, or the mask does not have the batch or head.
    """
    if isinstance(mask, BlockMask):
        if any(x is not None for x in (B, H, Q_LEN, KV_LEN, captures)):
            raise InputError(
                "flex.conflicting_arguments",
                "a BlockMask has its own B, H, Q_LEN, KV_LEN and captures. Leave these arguments out.",
            )
    elif Q_LEN is None or KV_LEN is None:
        raise InputError(
            "flex.length_missing",
            "a mask_mod has no size. Give Q_LEN and KV_LEN, the numbers of rows and keys to show.",
        )
    else:
        mask = create_block_mask(mask, B, H, Q_LEN, KV_LEN, BLOCK_SIZE, captures)
    for axis, index, count in zip(("batch", "head"), (batch, head), mask.shape):
        if not 0 <= index < count:
            raise InputError(
                "flex.index_out_of_range",
                f"{axis} {index} cannot be shown: the mask has {count}. Give B and H where mask_mod reads b and h.",
            )
    return MaskPicture(mask, batch, head)
