"""One output beside what it should be, and by how much it may differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 by it)
import numpy as np

from ..manifest import Manifest

RTOL, ATOL = 1e-3, 1e-5
"""By how much elements may differ, where everything is computed in float32 or wider."""

# By how much an output may differ, of its root mean square, where numbers are rounded to less: what sound models show,
# several times over.
_ROUNDED = {
    "float32": 0.1, "float16": 2e-2, "bfloat16": 0.1, "fast": 0.1, "tf32": 2e-2,
    "weights f16": 1e-2, "weights int8": 0.1, "weights int4": 0.3, "cache int8": 0.1,
}  # fmt: skip

FACTOR = 2
"""How many times as far from the float64 result as the reference an output may be."""

_WORTHLESS = 0.1  # rms from which on a reference says nothing of an output, or the float64 result does not


@dataclass(frozen=True)
class Allowed:
    """By how much an output may differ: each element by atol + rtol of the reference's, or, where `rounding` says what
    rounds numbers, all of it by `share` of its root mean square. strict says that this is what the user demands."""

    rtol: float
    atol: float
    share: float | None = None
    rounding: str = ""
    strict: bool = False

    @staticmethod
    def of(types: Iterable[str], manifest: Manifest, rtol: float | None, atol: float | None) -> Allowed:
        """types are those of a model's inputs, outputs and weights; the manifest says how it was compiled, and a
        tolerance that is given takes the place of everything else."""
        cache = "" if manifest.served is None or not manifest.served.pools else f"cache {manifest.served.dtype}"
        found = {f"weights {manifest.scheme}", str(manifest.precision), cache, *types}
        rounding = max(found & _ROUNDED.keys(), key=_ROUNDED.__getitem__, default=None)
        strict = rtol is not None or atol is not None
        if rounding is not None and not strict:
            return Allowed(0.0, 0.0, _ROUNDED[rounding], rounding)
        return Allowed(RTOL if rtol is None else rtol, ATOL if atol is None else atol, strict=strict)

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.share:g} of an output's rms, for {self.rounding}"
        return f"of each element {self.atol:g} and {self.rtol:g} of itself"


@dataclass(frozen=True)
class Float64Errors:
    """The largest absolute error, and that of the root mean square as in `Comparison`, of our output and of the
    reference's beside one that was computed in float64."""

    ours: float
    ours_rms: float
    reference: float
    reference_rms: float


@dataclass(frozen=True)
class Comparison:
    """One output beside the reference's: the largest absolute and relative differences, and whether it is close.

    worst is the index of the element that differs most; NaN and infinities must be in the same places to be close. rms
    is the root mean square of the differences over that of the reference. float64 is there where the output was not
    close to the reference and could be computed in float64 (checking/float64_reference.py): then it is close if it is
    so to the float64 result, or at most FACTOR times as far from it as the reference, unless a tolerance was demanded.
    """

    name: str
    max_abs: float
    max_rel: float
    worst: tuple[int, ...]
    close: bool
    rms: float
    float64: Float64Errors | None = None

    def __str__(self) -> str:
        said = f"{self.name}: max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g}, rms {self.rms:.3g} of its rms, "
        if self.float64 is None:
            return said + ("ok" if self.close else "DIFFERS")
        errors = f"beside float64 ours is {self.float64.ours:.3g} off and the reference {self.float64.reference:.3g}"
        return f"{said}{'ok: the output is ill-conditioned; ' if self.close else 'DIFFERS: '}{errors}"


def compare(name: str, actual: Any, expected: Any, allowed: Allowed) -> Comparison:
    """Compares one output element by element; a difference in shape or dtype is an infinite one."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Comparison(name, np.inf, np.inf, (), False, np.inf)
    if actual.size == 0:
        return Comparison(name, 0.0, 0.0, (), True, 0.0)
    if actual.dtype.kind in "OUS":
        differ = actual != expected
        share = float(np.sqrt(differ.mean()))
        return Comparison(name, float(differ.any()), float(differ.any()), _where(differ), not differ.any(), share)
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
    return Comparison(name, float(difference.max()), float(relative.max()), _where(difference), close, rms)


def with_float64_errors(found: Comparison, actual: Any, expected: Any, float64: Any, allowed: Allowed) -> Comparison:
    """What was found beside the reference, once more with the errors of both from the float64 result.

    Where the reference itself is far from it, for instance because the model hides elements by a number that only
    float32 takes for infinite, the float64 result excuses nothing but what is close to it.
    """
    actual, expected, float64 = np.asarray(actual), np.asarray(expected), np.asarray(float64)
    if not actual.shape == expected.shape == float64.shape or actual.dtype != expected.dtype:
        return found
    ours = compare(found.name, actual.astype(float64.dtype), float64, allowed)
    reference = compare(found.name, expected.astype(float64.dtype), float64, allowed)
    as_good = (
        not allowed.strict
        and float64.dtype == np.float64
        and reference.rms < _WORTHLESS
        and ours.max_abs <= FACTOR * reference.max_abs
        and ours.rms <= FACTOR * reference.rms
    )
    errors = Float64Errors(ours.max_abs, ours.rms, reference.max_abs, reference.rms)
    return replace(found, close=ours.close or as_good, float64=errors)


def _where(difference: np.ndarray) -> tuple[int, ...]:
    return tuple(int(k) for k in np.unravel_index(int(np.argmax(difference)), difference.shape))
