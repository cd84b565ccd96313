"""A seeded source of shapes, indices, sizes and arrays: mostly values that models have, sometimes unexpected ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401  (makes "bfloat16" a NumPy type name)
import numpy as np

T = TypeVar("T")

FLOATS = ("float32", "float64", "float16", "bfloat16")
SIGNED = ("int64", "int32", "int8", "int16")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = SIGNED + UNSIGNED
NUMBERS = FLOATS + INTEGERS
ANY = (*NUMBERS, "bool")

# Sizes at which loops, tiles and vectors change their ways.
_SIZES = (1, 1, 2, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33)
# Values that no size or index should be.
WILD = (-1, -2, -(2**31), -(2**31) - 1, -(2**62), -(2**63), 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**61, 2**62, 2**63 - 1)
_ODD_FLOATS = (0.0, -0.0, np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-40)
_HALF = 0.5


class Draw:
    """Random choices that depend on a name and a number alone."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = np.random.default_rng([zlib.crc32(name.encode()), seed])

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self.rng.integers(len(choices)))]

    def int(self, low: int, high: int) -> int:
        """low <= n <= high"""
        return int(self.rng.integers(low, high, endpoint=True))

    def size(self, empty: float = 0.06) -> int:
        return 0 if self.chance(empty) else self.pick(_SIZES)

    def shape(self, rank: int, empty: float = 0.06, limit: int = 3000) -> tuple[int, ...]:
        dims: list[int] = []
        for _ in range(rank):
            size = self.size(empty)
            dims.append(size if size * int(np.prod([max(d, 1) for d in dims])) <= limit else 2)
        return tuple(dims)

    def broadcast(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Draw a shape that broadcasts to that one, now and then one that does not."""
        dims = [1 if self.chance(0.25) else d for d in shape][self.int(0, len(shape)) if self.chance(0.3) else 0 :]
        return self.corrupted(dims) if self.chance(0.1) else tuple(dims)

    def corrupted(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape with one size replaced by another."""
        dims = list(shape)
        if dims:
            dims[self.int(0, len(dims) - 1)] = self.size(0.2)
        return tuple(dims)

    def wild(self, low: int, high: int, wildness: float = 0.15) -> int:
        """Draw mostly low <= n <= high, else a number just outside or far away."""
        if low <= high and not self.chance(wildness):
            return self.int(low, high)
        return self.pick((low - 1, high + 1, *WILD))

    def axis(self, rank: int, wildness: float = 0.06) -> int:
        return self.wild(-rank, rank - 1, wildness)

    def dtype(self, choices: Sequence[str] = NUMBERS) -> str:
        """Draw one of the types, the first half of the time."""
        return choices[0] if self.chance(_HALF) else self.pick(choices)

    def array(self, dtype: str, shape: Sequence[int], odd: float = 0.0, scale: float = 2.0) -> np.ndarray:
        """Draw numbers about 0, in a share `odd` of the arrays with infinities, NaN or the ends of the range."""
        kind = np.dtype(dtype)
        if dtype == "bool":
            return self.rng.random(shape) < _HALF
        if kind.kind in "iu":
            ends = np.iinfo(kind)
            low, high = (ends.min, ends.max) if self.chance(odd) else (max(ends.min, -9), 9)
            return self.rng.integers(low, high, shape, dtype=kind, endpoint=True)
        values = np.asarray(self.rng.standard_normal(shape) * scale)
        if self.chance(odd):
            values = np.where(self.rng.random(shape) < 0.3, self.rng.choice(_ODD_FLOATS, shape), values)
        with np.errstate(all="ignore"):
            return values.astype(kind)

    def indices(self, shape: Sequence[int], bound: int, wildness: float = 0.3, dtype: str | None = None) -> np.ndarray:
        """Draw indices in [-bound, bound); a share `wildness` of the arrays has some elsewhere."""
        kind = np.dtype(dtype or self.pick(("int64", "int32")))
        low, high = (-bound, bound - 1) if bound > 0 else (0, 0)
        indices = np.asarray(self.rng.integers(low, high, shape, dtype=np.int64, endpoint=True))
        if indices.size and self.chance(wildness):
            ends = np.iinfo(kind)
            for _ in range(self.int(1, 3)):
                value = self.pick((bound, -bound - 1, bound + 7, *WILD))
                indices.flat[self.int(0, indices.size - 1)] = min(max(value, ends.min), ends.max)
        return indices.astype(kind)

    def choose(self, **attributes: Any) -> dict[str, Any]:
        """Choose some of the attributes; the others keep their defaults."""
        return {name: value for name, value in attributes.items() if self.chance(0.7)}
