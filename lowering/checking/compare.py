"""Comparison of an output with its reference, and the tolerance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from ..choices import INT8_ROWS
from ..manifest import Manifest

RTOL, ATOL = 1e-3, 1e-5
"""The tolerance per element, where everything is computed in float32 or wider."""

# The largest relative rms error of an output where values are rounded to narrower types: several times the error that
# correct models show.
_ROUNDED = {
    "float32": 0.1, "float16": 2e-2, "bfloat16": 0.1, "fast": 0.1, "tf32": 2e-2,
    "weights f16": 1e-2, "weights int8": 0.1, "weights int4": 0.3, "cache int8": 0.1,
    "rows int8": 0.1,
}  # fmt: skip

MAX_ERROR_RATIO = 2
"""The largest ratio of an output's error to the reference's error, both against the float64 result."""

_WORTHLESS = 0.1  # relative rms error from which on a reference, or the float64 result, is not evidence


@dataclass(frozen=True)
class Tolerance:
    """The difference that an output may have.

    Each element may differ by atol + rtol * |reference|. Where values are rounded to `rounding`, the relative rms error
    of the whole output may be at most `share` instead. `strict` says that the user specified this tolerance.
    """

    rtol: float
    atol: float
    share: float | None = None
    rounding: str = ""
    strict: bool = False

    @staticmethod
    def for_model(roundings: Iterable[str], manifest: Manifest, rtol: float | None, atol: float | None) -> Tolerance:
        """Return the tolerance for a model compiled as the manifest says.

        roundings are the types of the model's inputs, outputs and weights, and "rows int8" if it permits that. An rtol
        or atol of the user replaces everything else.
        """
        cache = "" if manifest.served is None or not manifest.served.pools else f"cache {manifest.served.dtype}"
        rows = "rows int8" if manifest.accuracy_level == INT8_ROWS else ""
        comparison = {f"weights {manifest.scheme}", str(manifest.precision), cache, rows, *roundings}
        rounding = max(comparison & _ROUNDED.keys(), key=_ROUNDED.__getitem__, default=None)
        strict = rtol is not None or atol is not None
        if rounding is not None and not strict:
            return Tolerance(0.0, 0.0, _ROUNDED[rounding], rounding)
        return Tolerance(RTOL if rtol is None else rtol, ATOL if atol is None else atol, strict=strict)

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.share:g} of an output's rms, for {self.rounding}"
        return f"of each element {self.atol:g} and {self.rtol:g} of itself"


@dataclass(frozen=True)
class Float64Errors:
    """Errors of the compiled model's output (`ours`) and of the reference's, against a float64 result.

    Each has the largest absolute error and the relative rms error as in `Comparison`.
    """

    ours: float
    ours_rms: float
    reference: float
    reference_rms: float


@dataclass(frozen=True)
class Comparison:
    """An output compared with the reference's: the largest absolute and relative differences, and whether it is close.

    `worst` is the index of the element that differs most. NaN and infinities must be at the same indices to be close.
    `rms` is the root mean square of the differences over that of the reference. `float64` is set where the output was
    not close to the reference and could be computed in float64 (checking/float64_reference.py). Such an output is close
    if it is close to the float64 result. Unless the user specified a tolerance, it is close as well if its error is at
    most MAX_ERROR_RATIO times the reference's error.
    """

    name: str
    max_abs: float
    max_rel: float
    worst: tuple[int, ...]
    close: bool
    rms: float
    float64: Float64Errors | None = None

    def __str__(self) -> str:
        summary = (
            f"{self.name}: max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g}, rms {self.rms:.3g} of its rms, "
        )
        if self.float64 is None:
            return summary + ("ok" if self.close else "DIFFERS")
        errors = f"beside float64 ours is {self.float64.ours:.3g} off and the reference {self.float64.reference:.3g}"
        return f"{summary}{'ok: the output is ill-conditioned; ' if self.close else 'DIFFERS: '}{errors}"


def compare_output(name: str, actual: Any, expected: Any, allowed: Tolerance) -> Comparison:
    """Compare an output element by element; another shape or dtype is an infinite difference."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Comparison(name, np.inf, np.inf, (), False, np.inf)
    if actual.size == 0:
        return Comparison(name, 0.0, 0.0, (), True, 0.0)
    if actual.dtype.kind in "OUS":
        differ = actual != expected
        share = float(np.sqrt(differ.mean()))
        return Comparison(
            name, float(differ.any()), float(differ.any()), _locate_worst(differ), not differ.any(), share
        )
    wide = np.complex128 if actual.dtype.kind == "c" else np.float64
    a, e = actual.astype(wide), expected.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == e) | (np.isnan(a) & np.isnan(e))
        difference = np.where(same, 0.0, np.abs(a - e))
        difference = np.where(np.isnan(difference), np.inf, difference)
        relative = np.where(same, 0.0, difference / np.maximum(np.abs(e), np.finfo(np.float64).tiny))
        near = same | (difference <= allowed.atol + allowed.rtol * np.abs(e))
        size = max(np.linalg.norm(e[np.isfinite(e)]), np.finfo(np.float64).tiny)
        rms = float(np.linalg.norm(difference) / size)
    close = bool(near.all()) if allowed.share is None else rms <= allowed.share
    return Comparison(name, float(difference.max()), float(relative.max()), _locate_worst(difference), close, rms)


def add_float64_errors(
    comparison: Comparison, actual: Any, expected: Any, float64: Any, allowed: Tolerance
) -> Comparison:
    """Return a comparison with the errors of output and reference against the float64 result.

    The reference itself may be far from the float64 result, for instance because the model masks elements with a number
    that is infinite in float32 only. Then the output must be close to the float64 result.
    """
    actual, expected, float64 = np.asarray(actual), np.asarray(expected), np.asarray(float64)
    if not actual.shape == expected.shape == float64.shape or actual.dtype != expected.dtype:
        return comparison
    ours = compare_output(comparison.name, actual.astype(float64.dtype), float64, allowed)
    reference = compare_output(comparison.name, expected.astype(float64.dtype), float64, allowed)
    as_good = (
        not allowed.strict
        and float64.dtype == np.float64
        and reference.rms < _WORTHLESS
        and ours.max_abs <= MAX_ERROR_RATIO * reference.max_abs
        and ours.rms <= MAX_ERROR_RATIO * reference.rms
    )
    errors = Float64Errors(ours.max_abs, ours.rms, reference.max_abs, reference.rms)
    return replace(comparison, close=ours.close or as_good, float64=errors)


def _locate_worst(difference: np.ndarray) -> tuple[int, ...]:
    return tuple(int(k) for k in np.unravel_index(int(np.argmax(difference)), difference.shape))
