"""Which task gets the next batch of candidates, and the loop around: MetaSchedule's task scheduler with a clock.

MetaSchedule's own loop ends after so many trials and hands results on in batches. Here time ends it, and every trial is
committed when it is measured, so that whatever ends it, nothing that was measured is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.s_tir.meta_schedule.logging import get_logger, get_logging_func

from ..measuring.isolated import Failed
from .cost_model import TileModel
from .database import Database, Trial
from .local import Workshop, failed
from .space import TileSpace, annotated

_BATCH = 8  # candidates between two looks at which task is worth the most
_POPULATION = 48
_MOST_TRIALS = 1 << 20  # time ends a search first
_STALE = 3  # batches in which nothing new comes up end a task


class Context(ms.TuneContext):
    """MetaSchedule's context without the intrinsics of all targets, which take half a minute to import."""

    def __init__(  # not that of the base class
        self, module: tvm.IRModule, target: tvm.target.Target, generator: Any, strategy: Any, name: str, seed: int
    ) -> None:
        log = get_logging_func(get_logger(__name__))
        self.__init_handle_by_constructor__(
            _ffi_api.TuneContext, module, target, generator, strategy, name, 1, seed, log
        )
        _ffi_api.TuneContextInitialize(self)


@dataclass
class Search:
    """A task under way.

    weight is how often a run of the model spends what the task's kernel takes; default is its choice and trace; best
    the seconds of the fastest candidate so far, by the reference of the default (database.py).
    """

    name: str
    module: tvm.IRModule
    weight: float
    folder: Path
    space: TileSpace
    model: TileModel
    context: Context
    reference: float
    known: dict[str, float]
    failed: dict[str, Trial]
    trials: int = 0
    stale: int = 0
    won: str = ""  # the choice that is settled, and its seconds
    won_seconds: float = 0.0
    history: list[float] = field(default_factory=list)  # the best after each batch

    @property
    def best(self) -> float:
        return min([self.reference, *self.known.values()])

    @property
    def gain(self) -> float:
        """By how much the best candidate so far is faster than the default."""
        return self.reference / self.best

    def causes(self) -> Counter[str]:
        """Why candidates failed, and how many did."""
        return Counter(trial.cause or "" for trial in self.failed.values())

    def promise(self) -> float:
        """Seconds of a run that another batch may be worth: what the last ones gained, never less than some hope."""
        recent = self.history[-3:]
        gained = (recent[0] - recent[-1]) / recent[0] if len(recent) > 1 else 1.0
        hope = 1 / (1 + len(self.history)) ** 2
        return self.weight * self.best * max(gained, hope)


def strategy() -> ms.search_strategy.EvolutionarySearch:
    return ms.search_strategy.EvolutionarySearch(
        population_size=_POPULATION,
        init_measured_ratio=0.2,
        init_min_unmeasured=_POPULATION // 2,
        max_fail_count=8,
        genetic_num_iters=3,
        genetic_mutate_prob=0.85,
        genetic_max_fail_count=10,
        eps_greedy=0.1,
    )


@derived_object
class Scheduler(ms.task_scheduler.PyTaskScheduler):
    """Batch by batch until `over` says so. `progress` is called when a task is begun and after each trial."""

    def __init__(
        self,
        searches: list[Search],
        workshop: Workshop,
        database: Database,
        over: Callable[[], bool],
        progress: Callable[[Search], None],
    ) -> None:
        super().__init__()
        self.searches, self.workshop, self.database = searches, workshop, database
        self.over, self.progress = over, progress

    def run(self, builder: Any, runner: Any, target: tvm.target.Target) -> None:
        for search in self.searches:
            search.context.pre_tuning(_MOST_TRIALS, _BATCH, database=self.database.trials, cost_model=search.model)
        while not self.over() and (number := self.next_task_id()) >= 0:
            self._batch(self.searches[number], builder, runner, target)
        for search in self.searches:
            search.context.post_tuning()

    def next_task_id(self) -> int:
        """The most promising task, -1 when none has anything left to try."""
        left = [k for k, search in enumerate(self.searches) if search.stale < _STALE]
        return max(left, key=lambda k: self.searches[k].promise(), default=-1)

    def _batch(self, search: Search, builder: Any, runner: Any, target: tvm.target.Target) -> None:
        self.workshop.folder, self.workshop.reference = search.folder, search.reference
        self.progress(search)
        candidates = list(search.context.generate_measure_candidates() or ())
        results: list[ms.runner.RunnerResult] = []
        new: list[int] = []
        for candidate in candidates:
            if self.over():
                break
            text = annotated(candidate.sch.mod) or ""
            known = search.known.get(text)
            if known is None and text not in search.failed:
                new.append(len(results))
                known = self._trial(search, candidate, text, builder, runner, target)
                self.progress(search)
            results.append(ms.runner.RunnerResult([known], None) if known else ms.runner.RunnerResult(None, "failed"))
        search.stale = 0 if new else search.stale + 1
        search.history.append(search.best)
        search.context.notify_runner_results(candidates[: len(results)], results)
        search.model.update(search.context, [candidates[k] for k in new], [results[k] for k in new])

    def _trial(
        self, search: Search, candidate: Any, text: str, builder: Any, runner: Any, target: tvm.target.Target
    ) -> float | None:
        """Its seconds, None where it fails; either is written down at once."""
        search.trials += 1
        (predicted,) = search.model.slowness_of([text])
        try:
            (built,) = builder.build([ms.builder.BuilderInput(candidate.sch.mod, target)])
            if built.error_msg is not None:
                raise failed(str(built.error_msg))
            given = ms.runner.RunnerInput(built.artifact_path, target.kind.name, candidate.args_info)
            (future,) = runner.run([given])
            result = future.result()
            if result.error_msg is not None:
                raise failed(str(result.error_msg))
        except Failed as error:
            search.failed[text] = self.database.fail(search.module, text, error, predicted)
            return None
        seconds = float(result.run_secs[0])
        search.known[text] = seconds
        self.database.commit(search.module, candidate.sch.trace, seconds, target, predicted)
        return seconds
