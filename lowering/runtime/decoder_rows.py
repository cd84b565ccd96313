"""Rows of arrays, one for each sequence of a decoder: gathered into new arrays, or in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from .inputs import plain_array
from .tensors import Tensor, copy_to, empty_like, row_of


def gathered(array: Any, rows: np.ndarray) -> Any:
    """Return a new array of those rows of a NumPy array or a tensor."""
    if not isinstance(array, Tensor):
        return plain_array(array, "an array of a source")[rows]
    result = empty_like(array, len(rows))
    for target, source in enumerate(rows.tolist()):
        copy_to(row_of(array, source), row_of(result, target))
    return result


class Reordering:
    """Rows of arrays in another order, in place: row b becomes what row `rows[b]` was.

    One tensor of a GPU beside each kind of array holds rows on their way.
    """

    def __init__(self) -> None:
        self._beside: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def apply(self, array: Any, rows: np.ndarray, length: int | None) -> None:
        """Reorder an array [B, ...], or of [B, H, N, D] only the first `length` along N where one is given."""
        (moved,) = np.nonzero(rows != np.arange(len(rows)))
        if not isinstance(array, Tensor):
            part = array if length is None else array[:, :, :length]
            part[moved] = part[rows[moved]]
            return
        key = str(array.dtype), tuple(array.shape)
        if key not in self._beside:
            self._beside[key] = empty_like(array, len(rows))
        beside = self._beside[key]
        for target in moved.tolist():
            copy_to(row_of(array, int(rows[target])), row_of(beside, target))
        for target in moved.tolist():
            copy_to(row_of(beside, target), row_of(array, target))
