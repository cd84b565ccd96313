"""Attention with a score_mod and a mask_mod in NumPy: a float64 reference, and a plain computation in a precision.

The mods are the functions that kernels are compiled from, called with grids of indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from lowering.flex.mod import ModSignature

Mod = Callable[..., Any]
Arrays = Mapping[str, Any]

FACTOR = {"float32": 10.0, "float16": 1.1, "bfloat16": 1.1, "float64": 10.0}
"""How many times the error of the plain computation a kernel may have, as PyTorch's own tests allow."""


def compute_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    captures: Arrays | None = None,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return y and lse in float64; for float64 arrays, in NumPy's longest type."""
    dtype = np.longdouble if q.dtype == np.float64 else np.float64
    p, lse = _probabilities(q.astype(dtype), k.astype(dtype), score_mod, mask_mod, captures, scale)
    return p @ _repeat_heads(_zero_unread(v.astype(dtype), p), p), lse


def compute_naive(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    captures: Arrays | None = None,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return y and lse with scores and softmax in float32 (float64), and probabilities in the type of v.

    PyTorch's eager reference computes in the same types.
    """
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    p, lse = _probabilities(q.astype(dtype), k.astype(dtype), score_mod, mask_mod, captures, scale)
    p = p.astype(v.dtype).astype(dtype)
    return (p @ _repeat_heads(_zero_unread(v.astype(dtype), p), p)).astype(q.dtype), lse


def compute_visible(
    mask_mod: Mod | None, shape: tuple[int, int, int, int], captures: Arrays | None = None
) -> np.ndarray:
    """Return which keys each row sees: bool [B, H, S, T]."""
    if mask_mod is None:
        return np.ones(shape, bool)
    return np.broadcast_to(call_mod(mask_mod, make_grid(shape), captures or {}), shape)


def compute_block_states(dense: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the block states of a mask bool [B, H, S, T]: int8 [B, H, row blocks, key blocks].

    A state is 2 where a whole block is visible, 1 where something is, else 0.
    """
    padding = [(0, -length % block_size) for length, block_size in zip(dense.shape[2:], size)]
    padded = np.pad(dense, [(0, 0), (0, 0), *padding])
    counts = [length // block_size for length, block_size in zip(padded.shape[2:], size)]
    tiles = padded.reshape(*dense.shape[:2], counts[0], size[0], counts[1], size[1])
    return np.where(tiles.all((3, 5)), 2, np.where(tiles.any((3, 5)), 1, 0)).astype(np.int8)


def make_grid(shape: tuple[int, ...]) -> list[np.ndarray]:
    return [np.asarray(x, np.int32) for x in np.ogrid[tuple(map(slice, shape))]]


def call_mod(mod: Mod, args: list[np.ndarray], captures: Arrays) -> Any:
    """Call the mod with the captured arrays that it takes."""
    with np.errstate(all="ignore"):
        return mod(*args, **{name: Table.wrap(array) for name, array in ModSignature(mod).bindings(captures).items()})


class Table:
    """A captured array as mods see it: captured[i][j] is captured[i, j].

    A negative index counts from the end. An index that is still outside is moved to the nearest element.
    """

    def __init__(self, array: np.ndarray, bindings: tuple[Any, ...] = ()) -> None:
        self.array, self.bindings = array, bindings
        self.shape, self.ndim = array.shape[len(bindings) :], array.ndim - len(bindings)

    @staticmethod
    def wrap(array: np.ndarray) -> Any:
        """Return a table, or the number of an array without dimensions."""
        return Table(array) if np.ndim(array) else _widen(np.asarray(array))[()]

    def __getitem__(self, index: Any) -> Any:
        bindings = (*self.bindings, *(index if isinstance(index, tuple) else (index,)))
        if len(bindings) < self.array.ndim:
            return Table(self.array, bindings)
        indices = []
        for index_along, size in zip(bindings, self.array.shape, strict=True):
            index_along = np.asarray(index_along)
            indices.append(np.clip(np.where(index_along < 0, index_along + size, index_along), 0, size - 1))
        return _widen(self.array[tuple(indices)])


_WIDER = dict.fromkeys(("int8", "int16", "uint8", "uint16"), "int32") | {"uint32": "int64"}
_WIDER |= dict.fromkeys(("float16", "bfloat16"), "float32")


def _widen(elements: np.ndarray) -> np.ndarray:
    """Convert elements to the type in which mods read them."""
    return elements.astype(_WIDER.get(elements.dtype.name, elements.dtype))


def assert_close(
    actual: np.ndarray,
    expected: np.ndarray,
    plain: np.ndarray,
    name: str = "y",
    factor: float | None = None,
    single: bool = False,
) -> None:
    """Check that the mean error is at most `factor` times that of the plain computation.

    The floor is for small arrays, whose few errors of rounding do not average out: the error of a mean of n roundings
    of numbers of this size. single says that the mod itself computes in float32, whatever the type of the scores.
    """
    dtype = actual.dtype
    factor = FACTOR[dtype.name] if factor is None else factor
    assert actual.shape == expected.shape and plain.shape == expected.shape
    if not actual.size:
        return
    same = np.isneginf(expected)
    assert (np.isneginf(actual) == same).all(), f"{name}: -inf elsewhere"
    result, baseline, reference = (np.where(same, 0, x.astype(np.longdouble)) for x in (actual, plain, expected))
    assert np.isfinite(result).all(), f"{name}: not finite"
    unit = float(ml_dtypes.finfo(dtype).eps)
    size = float(np.sqrt((reference**2).mean()))
    floor = unit * size / math.sqrt(reference.size) + float(ml_dtypes.finfo(dtype).smallest_normal)
    floor += size * 2**-23 if single else 0
    error, baseline_error = float(np.abs(result - reference).mean()), float(np.abs(baseline - reference).mean())
    assert error <= factor * baseline_error + floor, (
        f"{name}: error {error:.3g}, of the plain computation {baseline_error:.3g}"
    )


def _probabilities(
    q: np.ndarray, k: np.ndarray, score_mod: Mod | None, mask_mod: Mod | None, captures: Arrays | None, scale: Any
) -> tuple[np.ndarray, np.ndarray]:
    captures = captures or {}
    scale = q.dtype.type(1 / math.sqrt(q.shape[3]) if scale is None else scale)
    with np.errstate(all="ignore"):
        scores = (q @ np.repeat(k, q.shape[1] // k.shape[1], 1).swapaxes(2, 3)) * scale
    args = make_grid(scores.shape)
    if score_mod is not None:
        scores = np.broadcast_to(call_mod(score_mod, [scores, *args], captures), scores.shape).astype(q.dtype)
    if mask_mod is not None:
        scores = np.where(call_mod(mask_mod, args, captures), scores, q.dtype.type(-np.inf))
    if not scores.shape[3]:
        return np.zeros_like(scores), np.full(scores.shape[:3], -np.inf, q.dtype)
    row_max = scores.max(-1, keepdims=True)
    with np.errstate(all="ignore"):
        e = np.where(np.isneginf(row_max), 0, np.exp(scores - row_max))
        total = e.sum(-1, keepdims=True)
        lse = np.where(np.isneginf(row_max), -np.inf, np.log(total) + row_max)
        return np.where(np.isneginf(row_max), 0, e / total), lse[..., 0]


def _zero_unread(v: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Return v with 0 where no row of any head gives a key weight: 0 * NaN would be NaN."""
    group = p.shape[1] // v.shape[1]
    used = (p != 0).any(2).reshape(len(p), v.shape[1], group, p.shape[3]).any(2)
    return np.where(used[..., None], np.broadcast_to(v, (len(p), *v.shape[1:])), 0)


def _repeat_heads(v: np.ndarray, p: np.ndarray) -> np.ndarray:
    return np.repeat(v, p.shape[1] // v.shape[1], 1)
