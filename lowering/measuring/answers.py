"""Whether a kernel's answers are right: compared with what the unscheduled function gave for the same arguments."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .isolated import Failed

# The largest error, as a share of the largest number that is expected. Kernels add in another order than the
# unscheduled function and round where it does not; what is wrong differs by more.
_TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "float16": 1e-2, "bfloat16": 5e-2}
_TOLERANCE = 0.3  # of float8

# A share of rounded numbers may be one off, where ties fall the other way.
_ONE_OFF = 1e-2


def check(name: str, dtype: str, got: np.ndarray, expected: np.ndarray) -> float:
    """The error of a tensor, given as bytes, as a share of the largest number expected. Raises Failed("wrong")."""
    if dtype.startswith(("float", "bfloat")):
        return _check_floats(name, dtype, got, expected)
    a, b = (x.view(dtype).astype(np.int64) for x in (got, expected))
    apart = np.abs(a - b)
    if apart.size == 0 or not apart.any():
        return 0.0
    if dtype in ("int8", "uint8") and apart.max() == 1 and np.count_nonzero(apart) <= _ONE_OFF * apart.size:
        return 1 / 255
    raise Failed("wrong", f"{name} differs in {np.count_nonzero(apart)} of {apart.size} elements")


def _check_floats(name: str, dtype: str, got: np.ndarray, expected: np.ndarray) -> float:
    kind = getattr(ml_dtypes, dtype, dtype)
    with np.errstate(invalid="ignore"):
        a, b = (x.view(kind).astype(np.float64) for x in (got, expected))
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            raise Failed("wrong", f"{name} has NaN in other places than expected")
        infinite = np.isinf(b)
        if not np.array_equal(a[infinite], b[infinite]):
            raise Failed("wrong", f"{name} has infinity in other places than expected")
        finite = np.isfinite(b)
        largest = np.abs(b[finite]).max(initial=0.0)
        error = np.abs(a[finite] - b[finite]).max(initial=0.0) / (largest or 1.0)
    if not error <= _TOLERANCES.get(dtype, _TOLERANCE):
        raise Failed("wrong", f"{name} is {error:.2g} of the largest number off")
    return float(error)
