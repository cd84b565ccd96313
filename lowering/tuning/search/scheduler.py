"""Selection of the task for the next batch of candidates: MetaSchedule's task scheduler with a time limit.

MetaSchedule's own loop ends after a number of trials and commits results in batches. Here time ends the search, and
every trial is committed when it is measured, so that no measurement is lost however the search ends.
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

from ...errors import InputError
from ...measuring.isolated import CandidateFailure
from ...measuring.measure import Measurement
from ...tuning_records.candidate_choices import read_choice
from ...tuning_records.database import TrialRecord
from ..capture import CallSignature
from ..local import CandidateBuilder, CandidateRunner, LibraryBuilder, MeasurementSite, decode_failure
from .context import TuningContext
from .cost_model import LoopCostModel, TileCostModel, predicted
from .space import SearchSpace

_BATCH_SIZE = 8  # candidates between two selections of the most promising task
_MAX_TRIALS = 1 << 20  # never reached, as time ends a search
_MAX_STALE_BATCHES = 3  # a task ends after so many batches without a new candidate


@dataclass
class TaskSearch:
    """The search of a task.

    weight is the run time of the model in this kernel as a multiple of one call. reference is the seconds of its
    default at the first measurement, to which all others relate (database.py). won is the final choice, and won_seconds
    its seconds. in_model compares it with the default in whole runs of the model.
    """

    name: str
    call: CallSignature
    task: str  # the hash of its module
    site: MeasurementSite
    module: tvm.IRModule
    weight: float
    folder: Path
    space: SearchSpace
    model: TileCostModel | LoopCostModel
    context: TuningContext
    reference: float
    timings: dict[str, float]
    failures: dict[str, TrialRecord]
    trials: int = 0
    stale: int = 0
    won: str = ""  # the final choice
    won_seconds: float = 0.0
    in_model: Measurement | None = None
    history: list[float] = field(default_factory=list)  # the best seconds after each batch

    @property
    def has_won(self) -> bool:
        """Whether a choice other than the default was selected."""
        return self.won not in ("", self.space.default)

    def reject(self) -> None:
        """Select the default."""
        self.won, self.won_seconds = self.space.default, self.reference

    @property
    def best(self) -> float:
        """The fastest seconds so far."""
        return min([self.reference, *self.timings.values()])

    @property
    def gain(self) -> float:
        """The speedup of the fastest candidate so far over the default."""
        return self.reference / self.best

    def count_causes(self) -> Counter[str]:
        """Return the number of failed candidates by cause."""
        return Counter(trial.cause or "" for trial in self.failures.values())

    def estimate_gain(self, best: float) -> float:
        """Return the seconds of a run that another batch may save.

        It is the gain of the last batches, but at least a share that decays with the number of batches. best is the
        seconds of the kernel so far, which another search of the kernel may have found.
        """
        recent = self.history[-3:]
        relative_gain = (recent[0] - recent[-1]) / recent[0] if len(recent) > 1 else 1.0
        minimum = 1 / (1 + len(self.history)) ** 2
        return self.weight * best * max(relative_gain, minimum)


@derived_object
class SearchScheduler(ms.task_scheduler.PyTaskScheduler):
    """Runs rounds until `is_over`: in each, a batch for each site, of its most promising task.

    `progress` is called at the start of a batch and after each trial. pairs is the number of paired runs of a trial.
    """

    def __init__(
        self,
        searches: list[TaskSearch],
        library_builder: LibraryBuilder,
        pairs: int,
        is_over: Callable[[], bool],
        progress: Callable[[TaskSearch], None],
    ) -> None:
        super().__init__()
        self.searches, self.library_builder, self.pairs = searches, library_builder, pairs
        self.is_over, self.progress = is_over, progress

    def run(self, target: tvm.target.Target) -> None:
        for search in self.searches:
            trials = search.site.database.trials
            search.context.pre_tuning(_MAX_TRIALS, _BATCH_SIZE, database=trials, cost_model=search.model)
        sites = list(dict.fromkeys(search.site for search in self.searches))
        while not self.is_over():
            selected = [chosen for site in sites if (chosen := self._select_search(site)) is not None]
            if not selected:
                break
            self._run_round([_CandidateBatch(search, self.pairs) for search in selected], target)
        for search in self.searches:
            search.context.post_tuning()

    def next_task_id(self) -> int:
        """Return the most promising task of all sites, or -1 if none has candidates left. MetaSchedule calls it."""
        selected = [
            chosen for site in {search.site for search in self.searches} if (chosen := self._select_search(site))
        ]
        return self.searches.index(max(selected, key=self._estimate_gain)) if selected else -1

    def _select_search(self, site: MeasurementSite) -> TaskSearch | None:
        """Return the most promising search of a site, or None if none has candidates left."""
        candidates = [search for search in self.searches if search.site is site and search.stale < _MAX_STALE_BATCHES]
        return max(candidates, key=self._estimate_gain, default=None)

    def _estimate_gain(self, search: TaskSearch) -> float:
        rivals = [s.best for s in self.searches if s.site is search.site and s.name == search.name]
        return search.estimate_gain(min(rivals))

    def _run_round(self, batches: list[_CandidateBatch], target: tvm.target.Target) -> None:
        """Measure the batches, as many candidates of each at once as its site supports.

        Measurements are committed before the next candidates start.
        """
        for batch in batches:
            self.progress(batch.search)
        remaining = batches
        while remaining and not self.is_over():
            for batch in remaining:
                self.library_builder.folder = batch.search.folder
                batch.begin(CandidateBuilder(self.library_builder), target)
            for batch in remaining:
                batch.finish(target, self.progress)
            remaining = [batch for batch in remaining if batch.remaining]
        for batch in batches:
            batch.learn()


class _CandidateBatch:
    """Candidates of one task, from their selection to their results."""

    def __init__(self, search: TaskSearch, pairs: int) -> None:
        self.search = search
        self.remaining = list(search.context.generate_measure_candidates() or ())
        self._runner = CandidateRunner(search.site.bench, pairs, search.reference)
        self._pending: list[
            tuple[Any, str, Any]
        ] = []  # candidate, choice, and MetaSchedule's future of built candidates
        self._results: list[tuple[Any, ms.runner.RunnerResult]] = []
        self._new_indices: list[int] = []

    def begin(self, builder: Any, target: tvm.target.Target) -> None:
        """Build as many candidates as the site measures at once, and submit them. Skip those with a result."""
        search = self.search
        while self.remaining and len(self._pending) < search.site.bench.width:
            candidate = self.remaining.pop(0)
            text = read_choice(candidate.sch.mod) or ""
            seconds = search.timings.get(text)
            if seconds is not None or text in search.failures:
                self._add_result(candidate, seconds)
                continue
            search.trials += 1
            (built,) = builder.build([ms.builder.BuilderInput(candidate.sch.mod, target)])
            if built.error_msg is not None:
                self._fail(candidate, text, decode_failure(str(built.error_msg)))
                continue
            runner_input = ms.runner.RunnerInput(built.artifact_path, target.kind.name, candidate.args_info)
            (future,) = self._runner.run([runner_input])
            self._pending.append((candidate, text, future))

    def finish(self, target: tvm.target.Target, progress: Callable[[TaskSearch], None]) -> None:
        """Commit each measurement as soon as it is done.

        Raises InputError at the end if a candidate could not be measured.
        """
        search, device_error = self.search, None
        for candidate, text, future in self._pending:
            result = future.result()
            if result.error_msg is not None:
                try:
                    self._fail(candidate, text, decode_failure(str(result.error_msg)))
                except InputError as error:  # the last device is gone, or one has another architecture
                    device_error = error
                    continue
            else:
                seconds = search.timings[text] = float(result.run_secs[0])
                expected = predicted(search.model, search.context, candidate)
                search.site.database.commit(search.module, candidate.sch.trace, seconds, target, expected)
                self._new_indices.append(len(self._results))
                self._add_result(candidate, seconds)
            progress(search)
        self._pending.clear()
        if device_error is not None:
            raise device_error

    def learn(self) -> None:
        """Update the search and its model with the results."""
        search, (candidates, results) = self.search, zip(*self._results) if self._results else ((), ())
        search.stale = 0 if self._new_indices else search.stale + 1
        search.history.append(search.best)
        search.context.notify_runner_results(list(candidates), list(results))
        search.model.update(
            search.context, [candidates[k] for k in self._new_indices], [results[k] for k in self._new_indices]
        )

    def _fail(self, candidate: Any, text: str, error: CandidateFailure) -> None:
        search = self.search
        expected = predicted(search.model, search.context, candidate)
        search.failures[text] = search.site.database.record_failure(search.module, text, error, expected)
        self._new_indices.append(len(self._results))
        self._add_result(candidate, None)

    def _add_result(self, candidate: Any, seconds: float | None) -> None:
        result = ms.runner.RunnerResult([seconds], None) if seconds else ms.runner.RunnerResult(None, "failed")
        self._results.append((candidate, result))
