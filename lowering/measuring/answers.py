"""The check of a kernel's answers against those of the unscheduled function for the same arguments."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .isolated import CandidateFailure

# The largest error, relative to the largest expected number. Kernels add in another order than the unscheduled
# function, and round where it does not; wrong answers differ by more.
_TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "float16": 1e-2, "bfloat16": 5e-2}
_TOLERANCE = 0.3  # of float8

# This share of rounded numbers may be off by one, where ties round the other way.
_OFF_BY_ONE = 1e-2


def check(name: str, dtype: str, actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the error of a tensor, given as bytes, relative to the largest expected number.

    Raises CandidateFailure("wrong").
    """
    if dtype.startswith(("float", "bfloat")):
        return _check_floats(name, dtype, actual, expected)
    a, b = (x.view(dtype).astype(np.int64) for x in (actual, expected))
    difference = np.abs(a - b)
    if difference.size == 0 or not difference.any():
        return 0.0
    if (
        dtype in ("int8", "uint8")
        and difference.max() == 1
        and np.count_nonzero(difference) <= _OFF_BY_ONE * difference.size
    ):
        return 1 / 255
    raise CandidateFailure("wrong", f"{name} differs in {np.count_nonzero(difference)} of {difference.size} elements")


def _check_floats(name: str, dtype: str, actual: np.ndarray, expected: np.ndarray) -> float:
    kind = getattr(ml_dtypes, dtype, dtype)
    with np.errstate(invalid="ignore"):
        a, b = (x.view(kind).astype(np.float64) for x in (actual, expected))
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            raise CandidateFailure("wrong", f"{name} has NaN in other places than expected")
        infinite = np.isinf(b)
        if not np.array_equal(a[infinite], b[infinite]):
            raise CandidateFailure("wrong", f"{name} has infinity in other places than expected")
        finite = np.isfinite(b)
        largest = np.abs(b[finite]).max(initial=0.0)
        error = np.abs(a[finite] - b[finite]).max(initial=0.0) / (largest or 1.0)
    if not error <= _TOLERANCES.get(dtype, _TOLERANCE):
        raise CandidateFailure("wrong", f"{name} is {error:.2g} of the largest number off")
    return float(error)
