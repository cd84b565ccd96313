"""Which candidates of our kernels to measure next: an analytic estimate at first, gradient-boosted trees over it later.

MetaSchedule's own features are those of the scheduled function, which for our tasks is not made until a candidate is
built. Here a candidate is its tiles.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from .space import TileSpace, annotated

_ENOUGH = 8  # measurements from which on trees know more than the estimate
_ROUNDS = 60


@derived_object
class TileModel(ms.cost_model.PyCostModel):
    """Scores of candidates, the higher the faster. Without xgboost the estimate is all there is."""

    def __init__(self, space: TileSpace, seed: int) -> None:
        super().__init__()
        self.space, self.seed = space, seed
        self.features: list[list[float]] = []
        self.slowness: list[float] = []
        self.trees: Any = None

    def update(self, context: ms.TuneContext, candidates: list, results: list) -> None:
        for candidate, result in zip(candidates, results):
            text = annotated(candidate.sch.mod)
            if text is not None and result.run_secs:
                self.learn(text, float(np.median([float(s) for s in result.run_secs])))
        self.fit()

    def predict(self, context: ms.TuneContext, candidates: list) -> np.ndarray:
        texts = [annotated(candidate.sch.mod) for candidate in candidates]
        return np.array([-s for s in self.slowness_of([t for t in texts if t is not None])])

    def learn(self, choice: str, seconds: float) -> None:
        """A measurement; `fit` makes use of it."""
        self.features.append(self._features(choice))
        self.slowness.append(math.log(seconds))

    def fit(self) -> None:
        xgboost = _xgboost()
        if xgboost is None or len(self.slowness) < _ENOUGH:
            return
        data = xgboost.DMatrix(np.array(self.features), np.array(self.slowness))
        parameters = {"max_depth": 4, "eta": 0.2, "nthread": 1, "seed": self.seed, "min_child_weight": 1}
        self.trees = xgboost.train(parameters, data, _ROUNDS)

    def slowness_of(self, choices: list[str]) -> list[float]:
        """The logarithm of the time that each should take, up to a constant."""
        features = np.array([self._features(choice) for choice in choices])
        if self.trees is None:
            return [float(f[0]) for f in features]
        return [float(s) for s in self.trees.predict(_xgboost().DMatrix(features))]

    def _features(self, text: str) -> list[float]:
        """The estimate, the variant, and all fields of all its kernels, missing ones as -1."""
        choice = self.space.read(text)
        numbers = [self.space.estimate(choice)]
        for variant in self.space.variants:
            mine = variant.name == choice.variant
            numbers.append(float(mine))
            for kernel, field, _ in self.space.fields(variant.name):
                value = getattr(choice.tiles[kernel], field) if mine else None
                numbers.append(-1.0 if value is None else math.log2(1 + int(value)))
        return numbers


def _xgboost() -> Any:
    """The library, None where it is not installed."""
    try:
        import xgboost
    except ImportError:
        return None
    return xgboost
