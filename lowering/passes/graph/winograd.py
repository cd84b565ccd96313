"""Weights of 3 x 3 convolutions for Winograd's algorithm (schedules/reading/winograd.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import te, tirx

from schedules.reading.winograd import POINTS, TILE, WINDOW, read_weight

from .convolutions import Convolution

_G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
# From 16 channels on, of inputs and outputs, transforms are less than what they save. 16 tiles (7 x 7 outputs) of 512
# channels took longer, since U is larger than the weights, and 49 tiles of 256 channels less.
_LEAST_CHANNELS = 16
_LEAST_TILES = 36


def is_transformed(convolution: Convolution, weights: np.ndarray, shape: Sequence[tvm.ir.Expr]) -> bool:
    """Return whether a convolution [N, H, W, M] by weights [3, 3, C, M] takes less time by Winograd's algorithm.

    Transforms cost as much as some channels do, and few tiles do not outweigh that U is larger than the weights. A
    symbolic size counts as a large one.
    """
    fits = convolution.kernel == (WINDOW, WINDOW) and {*convolution.strides, *convolution.dilations} == {1}
    if not fits or convolution.dtype != "float32" or weights.dtype != np.float32:
        return False
    if min(weights.shape[2:]) < _LEAST_CHANNELS:
        return False
    sizes = [size.value if isinstance(size, tirx.IntImm) else None for size in shape[1:3]]
    rows, columns = (None if size is None else -(-size // TILE) for size in sizes)
    if rows is None or columns is None:
        return 1 not in sizes  # half of each tile would be unused
    return rows * columns >= _LEAST_TILES


def transform_weights(weights: np.ndarray, nr: int) -> np.ndarray:
    """Return U of weights [3, 3, C, M] in panels [ceil(M / nr), 16, C, nr], with zeros after column M."""
    _, _, channels, columns = weights.shape
    panels = -(-columns // nr)
    u = np.zeros((POINTS, channels, panels * nr), np.float32)
    u[..., :columns] = np.einsum("ra,sb,abcm->rscm", _G, _G, weights, optimize=True).reshape(POINTS, channels, columns)
    return np.ascontiguousarray(u.reshape(POINTS, channels, panels, nr).transpose(2, 0, 1, 3))


def read_transformed_element(components: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return a weight, of row k and column j, from U in panels."""
    (u,) = components
    return read_weight(u, int(u.shape[2]), int(u.shape[3]), k, j)
