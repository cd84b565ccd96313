"""Which candidates to measure next. Of tiles: an analytic estimate at first, gradient-boosted trees over it later. Of
loops: MetaSchedule's own model.

MetaSchedule's features are those of the scheduled function, which is not made of tiles until a candidate is built.
There a candidate is its tiles.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from .choices import annotated
from .context import candidate
from .database import Database
from .loop_space import LoopSpace
from .tile_space import TileSpace

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
        for measured, result in zip(candidates, results):
            text = annotated(measured.sch.mod)
            if text is not None and result.run_secs:
                self.learn(text, float(np.median([float(s) for s in result.run_secs])))
        self.fit()

    def predict(self, context: ms.TuneContext, candidates: list) -> np.ndarray:
        texts = [annotated(c.sch.mod) for c in candidates]
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


@derived_object
class LoopModel(ms.cost_model.PyCostModel):
    """Scores of candidates, the higher the faster: random ones at first, and without xgboost for ever."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = np.random.default_rng(seed)
        self.measured = 0
        self.trees: Any = None
        if _xgboost() is not None:
            self.trees = ms.cost_model.XGBModel(num_warmup_samples=_ENOUGH, num_tuning_cores=1)

    def update(self, context: ms.TuneContext, candidates: list, results: list) -> None:
        self.measured += len(candidates)
        if self.trees is not None and candidates:
            self.trees.update(context, candidates, results)

    def predict(self, context: ms.TuneContext, candidates: list) -> np.ndarray:
        if self.trees is None or self.measured < _ENOUGH:
            return self.random.uniform(size=len(candidates))
        return np.asarray(self.trees.predict(context, candidates))


def model_of(space: TileSpace | LoopSpace, seed: int) -> TileModel | LoopModel:
    return TileModel(space, seed) if isinstance(space, TileSpace) else LoopModel(seed)


def learn(model: TileModel | LoopModel, context: ms.TuneContext, task: tvm.IRModule, database: Database) -> None:
    """Tells a model what was measured of a task."""
    known, traces = database.known(task), database.traces(task)
    results = [ms.runner.RunnerResult([known[text]], None) for text in traces]
    model.update(context, [candidate(task, trace) for trace in traces.values()], results)


def predicted(model: TileModel | LoopModel, context: ms.TuneContext, candidate: ms.MeasureCandidate) -> float:
    """The logarithm of the time that a candidate should take, up to a constant."""
    (score,) = model.predict(context, [candidate])
    return -float(score)


def _xgboost() -> Any:
    """The library, None where it is not installed."""
    try:
        import xgboost
    except ImportError:
        return None
    return xgboost
