"""Cost models that select the next candidates. For tiles: an analytic estimate, later gradient-boosted trees on top of
it. For loops: MetaSchedule's own model.

MetaSchedule's features are those of the scheduled function, which does not exist for tiles until a candidate is built.
The features of such a candidate are its tiles.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from ...tuning_records.candidate_choices import read_choice
from ...tuning_records.database import TuningDatabase
from .context import create_candidate
from .loop_space import LoopSpace
from .tile_space import TileSpace

_MIN_MEASUREMENTS = 8  # from so many measurements on, trees predict better than the estimate
_BOOSTING_ROUNDS = 60


@derived_object
class TileCostModel(ms.cost_model.PyCostModel):
    """Scores of candidates, higher for faster ones. Without xgboost only the estimate is used."""

    def __init__(self, space: TileSpace, seed: int) -> None:
        super().__init__()
        self.space, self.seed = space, seed
        self.features: list[list[float]] = []
        self.log_seconds: list[float] = []
        self.trees: Any = None

    def update(self, context: ms.TuneContext, candidates: list, results: list) -> None:
        for measured, result in zip(candidates, results):
            text = read_choice(measured.sch.mod)
            if text is not None and result.run_secs:
                self.add_measurement(text, float(np.median([float(s) for s in result.run_secs])))
        self.fit()

    def predict(self, context: ms.TuneContext, candidates: list) -> np.ndarray:
        texts = [read_choice(c.sch.mod) for c in candidates]
        return np.array([-s for s in self.predict_log_seconds([t for t in texts if t is not None])])

    def add_measurement(self, choice: str, seconds: float) -> None:
        """Add a measurement, which the next `fit` uses."""
        self.features.append(self._compute_features(choice))
        self.log_seconds.append(math.log(seconds))

    def fit(self) -> None:
        xgboost = _import_xgboost()
        if xgboost is None or len(self.log_seconds) < _MIN_MEASUREMENTS:
            return
        data = xgboost.DMatrix(np.array(self.features), np.array(self.log_seconds))
        parameters = {"max_depth": 4, "eta": 0.2, "nthread": 1, "seed": self.seed, "min_child_weight": 1}
        self.trees = xgboost.train(parameters, data, _BOOSTING_ROUNDS)

    def predict_log_seconds(self, choices: list[str]) -> list[float]:
        """Return the logarithm of the predicted time of each choice, up to a constant."""
        features = np.array([self._compute_features(choice) for choice in choices])
        if self.trees is None:
            return [float(f[0]) for f in features]
        return [float(s) for s in self.trees.predict(_import_xgboost().DMatrix(features))]

    def _compute_features(self, text: str) -> list[float]:
        """Return the estimate, the variant, and all fields of all its kernels, with -1 for missing ones."""
        choice = self.space.read(text)
        numbers = [self.space.estimate(choice)]
        for variant in self.space.variants:
            is_chosen = variant.name == choice.variant
            numbers.append(float(is_chosen))
            for kernel, field, _ in self.space.list_fields(variant.name):
                value = getattr(choice.tiles[kernel], field) if is_chosen else None
                numbers.append(-1.0 if value is None else math.log2(1 + int(value)))
        return numbers


@derived_object
class LoopCostModel(ms.cost_model.PyCostModel):
    """Scores of candidates, higher for faster ones. They are random at first, and always without xgboost."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = np.random.default_rng(seed)
        self.measured = 0
        self.trees: Any = None
        if _import_xgboost() is not None:
            self.trees = ms.cost_model.XGBModel(num_warmup_samples=_MIN_MEASUREMENTS, num_tuning_cores=1)

    def update(self, context: ms.TuneContext, candidates: list, results: list) -> None:
        self.measured += len(candidates)
        if self.trees is not None and candidates:
            self.trees.update(context, candidates, results)

    def predict(self, context: ms.TuneContext, candidates: list) -> np.ndarray:
        if self.trees is None or self.measured < _MIN_MEASUREMENTS:
            return self.random.uniform(size=len(candidates))
        return np.asarray(self.trees.predict(context, candidates))


def create_cost_model(space: TileSpace | LoopSpace, seed: int) -> TileCostModel | LoopCostModel:
    return TileCostModel(space, seed) if isinstance(space, TileSpace) else LoopCostModel(seed)


def train_on_database(
    model: TileCostModel | LoopCostModel, context: ms.TuneContext, task: tvm.IRModule, database: TuningDatabase
) -> None:
    """Update a model with the measurements of a task."""
    seconds_by_choice, traces = database.measured_seconds(task), database.traces(task)
    results = [ms.runner.RunnerResult([seconds_by_choice[text]], None) for text in traces]
    model.update(context, [create_candidate(task, trace) for trace in traces.values()], results)


def predicted(model: TileCostModel | LoopCostModel, context: ms.TuneContext, candidate: ms.MeasureCandidate) -> float:
    """Return the logarithm of the predicted time of a candidate, up to a constant."""
    (score,) = model.predict(context, [candidate])
    return -float(score)


def _import_xgboost() -> Any:
    """Return the library, or None if it is not installed."""
    try:
        import xgboost
    except ImportError:
        return None
    return xgboost
