"""Percentiles of measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Percentiles:
    """Seconds that half of all runs, 90 % and 99 % of them did not exceed."""

    p50: float
    p90: float
    p99: float

    @staticmethod
    def from_seconds(seconds: Sequence[float]) -> Percentiles:
        """Return the percentiles of at least one time, linearly interpolated between two times."""
        return Percentiles(*(float(quantile) for quantile in np.quantile(seconds, (0.5, 0.9, 0.99))))
