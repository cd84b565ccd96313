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

from ..errors import InputError
from ..measuring.isolated import Failed
from ..measuring.measure import Measured
from .capture import Call
from .choices import annotated
from .context import Context
from .cost_model import LoopModel, TileModel, predicted
from .database import Trial
from .local import Builder, Runner, Site, Workshop, failed
from .space import Space

_BATCH = 8  # candidates between two looks at which task is worth the most
_MOST_TRIALS = 1 << 20  # time ends a search first
_STALE = 3  # batches in which nothing new comes up end a task


@dataclass
class Search:
    """A task under way.

    weight is how often a run of the model spends what the task's kernel takes; reference the seconds of its default
    when that was first measured, by which all others are told (database.py).
    """

    name: str
    call: Call
    task: str  # by hash
    site: Site
    module: tvm.IRModule
    weight: float
    folder: Path
    space: Space
    model: TileModel | LoopModel
    context: Context
    reference: float
    known: dict[str, float]
    failed: dict[str, Trial]
    trials: int = 0
    stale: int = 0
    won: str = ""  # the choice that is settled, its seconds, and those in whole runs by those of the default there
    won_seconds: float = 0.0
    in_model: Measured | None = None
    history: list[float] = field(default_factory=list)  # the best after each batch

    @property
    def has_won(self) -> bool:
        """Whether something else than the default is to be kept."""
        return self.won not in ("", self.space.default)

    def give_up(self) -> None:
        """Leaves it at the default."""
        self.won, self.won_seconds = self.space.default, self.reference

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

    def promise(self, best: float) -> float:
        """Seconds of a run that another batch may be worth: what the last ones gained, never less than some hope.

        best are the seconds of the kernel so far, which another search of it may have found.
        """
        recent = self.history[-3:]
        gained = (recent[0] - recent[-1]) / recent[0] if len(recent) > 1 else 1.0
        hope = 1 / (1 + len(self.history)) ** 2
        return self.weight * best * max(gained, hope)


@derived_object
class Scheduler(ms.task_scheduler.PyTaskScheduler):
    """Round by round until `over` says so: a batch for each site, of the task that promises most there. `progress` is
    called when a batch is begun and after each trial; pairs are the turns of a trial."""

    def __init__(
        self,
        searches: list[Search],
        workshop: Workshop,
        pairs: int,
        over: Callable[[], bool],
        progress: Callable[[Search], None],
    ) -> None:
        super().__init__()
        self.searches, self.workshop, self.pairs = searches, workshop, pairs
        self.over, self.progress = over, progress

    def run(self, target: tvm.target.Target) -> None:
        for search in self.searches:
            trials = search.site.database.trials
            search.context.pre_tuning(_MOST_TRIALS, _BATCH, database=trials, cost_model=search.model)
        sites = list(dict.fromkeys(search.site for search in self.searches))
        while not self.over():
            best = [found for site in sites if (found := self._most_promising(site)) is not None]
            if not best:
                break
            self._round([_Batch(search, self.pairs) for search in best], target)
        for search in self.searches:
            search.context.post_tuning()

    def next_task_id(self) -> int:
        """The most promising task of all sites, -1 when none has anything left to try: MetaSchedule's question."""
        best = [found for site in {search.site for search in self.searches} if (found := self._most_promising(site))]
        return self.searches.index(max(best, key=self._promise)) if best else -1

    def _most_promising(self, site: Site) -> Search | None:
        """None when no task there has anything left to try."""
        left = [search for search in self.searches if search.site is site and search.stale < _STALE]
        return max(left, key=self._promise, default=None)

    def _promise(self, search: Search) -> float:
        rivals = [s.best for s in self.searches if s.site is search.site and s.name == search.name]
        return search.promise(min(rivals))

    def _round(self, batches: list[_Batch], target: tvm.target.Target) -> None:
        """As many candidates of each batch at once as its site takes; what was measured is written down before the
        next ones are begun."""
        for batch in batches:
            self.progress(batch.search)
        left = batches
        while left and not self.over():
            for batch in left:
                self.workshop.folder = batch.search.folder
                batch.begin(Builder(self.workshop), target)
            for batch in left:
                batch.finish(target, self.progress)
            left = [batch for batch in left if batch.left]
        for batch in batches:
            batch.learn()


class _Batch:
    """Candidates of one task, from their choice to what came of them."""

    def __init__(self, search: Search, pairs: int) -> None:
        self.search = search
        self.left = list(search.context.generate_measure_candidates() or ())
        self._runner = Runner(search.site.bench, pairs, search.reference)
        self._begun: list[tuple[Any, str, Any]] = []  # candidate, choice, and MetaSchedule's future, if it was built
        self._told: list[tuple[Any, ms.runner.RunnerResult]] = []
        self._new: list[int] = []

    def begin(self, builder: Any, target: tvm.target.Target) -> None:
        """Builds as many as the site measures at once, and has them measured. Those that are known pass by."""
        search = self.search
        while self.left and len(self._begun) < search.site.bench.width:
            candidate = self.left.pop(0)
            text = annotated(candidate.sch.mod) or ""
            seconds = search.known.get(text)
            if seconds is not None or text in search.failed:
                self._tell(candidate, seconds)
                continue
            search.trials += 1
            (built,) = builder.build([ms.builder.BuilderInput(candidate.sch.mod, target)])
            if built.error_msg is not None:
                self._fail(candidate, text, failed(str(built.error_msg)))
                continue
            given = ms.runner.RunnerInput(built.artifact_path, target.kind.name, candidate.args_info)
            (future,) = self._runner.run([given])
            self._begun.append((candidate, text, future))

    def finish(self, target: tvm.target.Target, progress: Callable[[Search], None]) -> None:
        """Writes down what was measured, each as soon as it is. Raises InputError at the end where one could not be."""
        search, nobody = self.search, None
        for candidate, text, future in self._begun:
            result = future.result()
            if result.error_msg is not None:
                try:
                    self._fail(candidate, text, failed(str(result.error_msg)))
                except InputError as error:  # the last device is gone, or one is of another kind
                    nobody = error
                    continue
            else:
                seconds = search.known[text] = float(result.run_secs[0])
                expected = predicted(search.model, search.context, candidate)
                search.site.database.commit(search.module, candidate.sch.trace, seconds, target, expected)
                self._new.append(len(self._told))
                self._tell(candidate, seconds)
            progress(search)
        self._begun.clear()
        if nobody is not None:
            raise nobody

    def learn(self) -> None:
        """Tells the search and its model."""
        search, (candidates, results) = self.search, zip(*self._told) if self._told else ((), ())
        search.stale = 0 if self._new else search.stale + 1
        search.history.append(search.best)
        search.context.notify_runner_results(list(candidates), list(results))
        search.model.update(search.context, [candidates[k] for k in self._new], [results[k] for k in self._new])

    def _fail(self, candidate: Any, text: str, error: Failed) -> None:
        search = self.search
        expected = predicted(search.model, search.context, candidate)
        search.failed[text] = search.site.database.fail(search.module, text, error, expected)
        self._new.append(len(self._told))
        self._tell(candidate, None)

    def _tell(self, candidate: Any, seconds: float | None) -> None:
        result = ms.runner.RunnerResult([seconds], None) if seconds else ms.runner.RunnerResult(None, "failed")
        self._told.append((candidate, result))
