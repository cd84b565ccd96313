"""The contents of every case: model, inputs, expected results, amount of work, and its bar."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx

Arrays = dict[str, np.ndarray]

TYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}

# Largest difference from float64, relative to the range of an output.
TOLERANCE = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}


@dataclass(frozen=True)
class Work:
    """The least work of one call: FLOPs of visible elements, or bytes that must be read."""

    amount: float
    unit: Literal["FLOP", "byte"]


@dataclass(frozen=True)
class Bar:
    """The speed that a case must reach; None asks for nothing.

    On one thread: share of the limit, ratio of the best peer's time to ours, seconds of a call, and `compared_to`: the
    name of another case and the ratio of its time to this one's, both ours. On two threads: scaling, the ratio of our
    time on one thread to that on two.
    """

    share: float | None = None
    ratio: float | None = None
    seconds: float | None = None
    compared_to: tuple[str, float] | None = None
    scaling: float | None = None

    def asks(self, threads: int) -> bool:
        """Whether there is anything to reach on so many threads."""
        return self.scaling is not None if threads > 1 else self != Bar(scaling=self.scaling)


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One problem. `python -m benchmarks cpu` picks cases by name or group."""

    name: str
    group: str
    bar: Bar = Bar()
    dtype: str = "f32"

    @property
    def tolerance(self) -> float:
        """The largest error of a right answer, as `error` measures it."""
        return TOLERANCE[self.dtype]

    @property
    def source(self) -> str:
        """Cases of one source and the same options differ in sizes alone: one compiled model serves them."""
        return self.name

    @property
    def in_place(self) -> Mapping[str, str]:
        """Outputs that may take over the memory of an input, with its name."""
        return {}

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of `lowering.compile` that are part of the case."""
        return {}

    @abstractmethod
    def model(self) -> onnx.ModelProto:
        """The ONNX model; sizes that callers choose are symbolic."""

    @abstractmethod
    def feeds(self) -> Arrays:
        """Inputs by name; the same in every call."""

    def own_feeds(self) -> Arrays:
        """Inputs of our model, where `options` give it others."""
        return self.feeds()

    @abstractmethod
    def expected(self) -> Arrays:
        """Outputs by name in float64; those that are left out are not compared."""

    @abstractmethod
    def work(self) -> Work:
        """The least that one call must do."""


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference relative to the range of what is expected, or to its size where that is one number;
    infinite for another shape or for NaN."""
    if actual.shape != expected.shape:
        return float("inf")
    scale = float(np.ptp(expected)) or float(np.abs(expected).max()) or 1.0 if expected.size else 1.0
    difference = float(np.abs(actual.astype(np.float64) - expected).max(initial=0.0)) / scale
    return difference if np.isfinite(difference) else float("inf")
