"""Rows of arrays, one per sequence of a decoder: gather them into new arrays, or reorder them in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.inputs import to_numpy_array
from ..arrays.tensors import Tensor, allocate_rows, copy_to, view_row


def gather_rows(array: Any, rows: np.ndarray) -> Any:
    """Return a new array with the given rows of a NumPy array or a tensor."""
    if not isinstance(array, Tensor):
        return to_numpy_array(array, "an array of a source")[rows]
    result = allocate_rows(array, len(rows))
    for target, source in enumerate(rows.tolist()):
        copy_to(view_row(array, source), view_row(result, target))
    return result


class RowReordering:
    """Reorders rows of arrays in place: row b becomes the former row `rows[b]`.

    On a GPU, one tensor for each shape and type buffers the rows during a reordering.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def apply(self, array: Any, rows: np.ndarray, length: int | None) -> None:
        """Reorder an array [B, ...]. With a `length`, reorder only the first `length` of N in an array [B, H, N, D]."""
        (changed_rows,) = np.nonzero(rows != np.arange(len(rows)))
        if not isinstance(array, Tensor):
            prefix = array if length is None else array[:, :, :length]
            prefix[changed_rows] = prefix[rows[changed_rows]]
            return
        key = str(array.dtype), tuple(array.shape)
        if key not in self._buffers:
            self._buffers[key] = allocate_rows(array, len(rows))
        buffer = self._buffers[key]
        for target in changed_rows.tolist():
            copy_to(view_row(array, int(rows[target])), view_row(buffer, target))
        for target in changed_rows.tolist():
            copy_to(view_row(buffer, target), view_row(array, target))
