"""Percentiles of what was measured."""

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
    def of(seconds: Sequence[float]) -> Percentiles:
        """Return the percentiles of one length of time at least; between two they are interpolated linearly."""
        return Percentiles(*(float(quantile) for quantile in np.quantile(seconds, (0.5, 0.9, 0.99))))
