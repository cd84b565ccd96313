"""The steps of tuning a model: its tasks, the search, last comparisons."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tvm
from tvm.s_tir import meta_schedule as ms

from schedules.cuda.cost_model import min_seconds
from schedules.cuda.device import device

from ..compiling.progress import LOG
from ..measuring.batch import DEFAULT
from ..measuring.isolated import Failed
from ..runtime import load
from ..target import Target, resolve
from . import batches, lookup
from .capture import Use, keep, uses
from .choices import recorded
from .context import Context, candidate, strategy
from .cost_model import learn, model_of, predicted
from .database import Database, best, identity, parts_like
from .final_comparison import FinalComparison
from .local import Site, Workshop
from .loop_space import LoopSpace
from .scheduler import Scheduler, Search
from .space import space_of
from .subject import Subject
from .task import NotTunable, loops_task, tiles_task, written

Effort = Literal["quick", "full"]

End = Literal["time", "trials", "candidates", "interrupt"]
"""What a search ran out of, or what ended it."""

_SHARE = {"quick": 0.02, "full": 0.002}  # of a run, below which a kernel is left as it is
_PAIRS = {"quick": 6, "full": 12}
_LAST_SHARE = 0.15  # of the time, for last comparisons
_WHOLE_SECONDS = {"quick": 4.0, "full": 12.0}  # of whole runs at each setting of sizes

EFFORTS = tuple(_SHARE)


@dataclass(frozen=True)
class Outcome:
    """One task: seconds of a call by the reference of its default, and what kept candidates from being measured.

    A kernel can be two tasks: searched is "tiles" or "loops". seconds is the default's where no candidate won,
    architecture that of the machine that measured. in_model is the seconds in whole runs of the model by those of the
    default there, None where that was not measured; what takes longer there is not kept. fastest is the seconds of the
    fastest candidate while the search went on, which the last comparison need not have confirmed; None where nothing
    was searched. why says what kept a kernel from being tuned, "" for nothing.
    """

    name: str
    searched: str
    nodes: tuple[str, ...]
    share: float
    default: float
    seconds: float
    trials: int
    failures: Mapping[str, int]
    choice: str
    architecture: str = ""
    in_model: float | None = None
    fastest: float | None = None
    why: str = ""

    @property
    def gain(self) -> float:
        """How many times faster than the default."""
        return self.default / self.seconds if self.seconds else 1.0

    @property
    def unconfirmed(self) -> float:
        """How many times faster than the default the fastest candidate seemed, 1 where something is kept."""
        return self.default / self.fastest if self.fastest and self.gain == 1 else 1.0


@dataclass
class State:
    """What can be shown while it goes on: the searches, the one at work, and the seconds left."""

    searches: Sequence[Search]
    at_work: Search | None
    left: float
    step: str = "searching"


Progress = Callable[[State], None]


class Session:
    """The steps of `tune`, and what they share."""

    def __init__(
        self,
        folder: Path,
        subject: Subject,
        sites: Sequence[Site],
        target: Target,
        workshop: Workshop,
        effort: Effort,
        seed: int,
    ) -> None:
        """Works in the folder, which is empty, and where the tasks are when it is over."""
        self.folder, self.subject, self.sites, self.target, self.workshop = folder, subject, sites, target, workshop
        self.threads, self.effort, self.seed = subject.threads, effort, seed
        self.searches: list[Search] = []
        self.ended: End = "time"
        self.whole_gain: float | None = None
        self._left_out: list[Outcome] = []
        self._uses: dict[str, Use] = {}
        self._modules: dict[str, tvm.IRModule] = {}
        self._run_seconds = 0.0
        self._presets: dict[Site, list[ms.database.TuningRecord]] = {}

    def extract(self, where: Path) -> None:
        """Compiles the model as it is into a folder and runs it; every kernel that takes a share of the time becomes a
        task."""
        begin = time.monotonic()
        stand_in = resolve("cpu")[0] if self.target.architecture else None
        done = self.subject.compile_into(where, stand_in=stand_in)
        self._model, self._compile_seconds = where, time.monotonic() - begin
        runnable = load(where)
        functions = done.unscheduled[0]
        for setting in self.subject.sizes:
            found = [self._timed(use) for use in uses(runnable, setting, self.threads, seconds=1.0)]
            total = sum(use.seconds for use in found)
            self._run_seconds += total
            wanted: dict[Any, list[Path]] = {}
            for use in found:
                if use.seconds < _SHARE[self.effort] * total:
                    continue
                for task in self._tasks(use, functions[use.kernel.name]):
                    name = identity(task)
                    if name in self._uses:
                        seconds = self._uses[name].seconds + use.seconds
                        self._uses[name] = dataclasses.replace(self._uses[name], seconds=seconds)
                        continue
                    self._uses[name], self._modules[name] = use, task
                    place = self.folder / name
                    place.mkdir()
                    wanted.setdefault((use.kernel.name, use.arguments), []).append(place)
            keep(runnable, setting, self.threads, wanted, lambda kernel: written(functions[kernel]))

    def _timed(self, use: Use) -> Use:
        """With the seconds that it takes on the target, of which a GPU's are estimated: the CPU ran in its place."""
        if not self.target.architecture:
            return use
        return dataclasses.replace(use, seconds=min_seconds(use.flops, use.bytes, device(self.target.tvm)))

    def _tasks(self, use: Use, func: Any) -> list[tvm.IRModule]:
        """What can be searched of a kernel: tiles, loops, both or nothing."""
        try:
            tiles = tiles_task(func, use.shapes, self.target.tvm)
            loops = loops_task(func, use.shapes, self.target.tvm)
        except NotTunable as reason:
            self._left_out.append(_left_out(use, str(reason)))
            return []
        if loops is not None and LoopSpace(loops, self.target.tvm, self.threads).is_empty:
            loops = None
        return [task for task in (tiles, loops) if task is not None]

    def export(self, database: Database, count: int) -> None:
        """Builds so many candidates of each task, of which the database knows nothing, to be measured elsewhere."""
        tasks = {
            name: (f"{_title(self._uses[name])} ({space_of(module, self.target.tvm).kind})", module)
            for name, module in self._modules.items()
        }
        pairs = _PAIRS[self.effort]
        batch = batches.export(
            self.folder, tasks, database, self.workshop, self.target, self.threads, pairs, count, self.seed
        )
        for task in batch.tasks:
            use = self._uses[task.name]
            share, seconds = use.seconds / self._run_seconds, use.seconds / use.calls
            self._left_out.append(Outcome(task.title, "", use.nodes, share, seconds, seconds, task.candidates, {}, ""))

    def search(self, end: float, most: int | None, progress: Progress) -> None:
        """Until so late, last comparisons included, or after so many trials."""
        state = State([], None, end - time.monotonic())
        left = end - time.monotonic()
        whole = self._compile_seconds + _WHOLE_SECONDS[self.effort] * len(self.subject.sizes)
        stop = end - _LAST_SHARE * left - min(whole, left / 4)

        def late() -> bool:
            return time.monotonic() >= stop

        def over() -> bool:
            return late() or (most is not None and sum(s.trials for s in state.searches) >= most)

        def told(search: Search, step: str = "searching") -> None:
            state.at_work, state.step, state.left = search, step, end - time.monotonic()
            LOG.debug("%s %s: %d trials, %.2fx", step, search.name, search.trials, search.gain)
            progress(state)

        try:
            for name, use in self._uses.items():
                if late():
                    self._left_out.append(_left_out(use, "the time was over before it was begun"))
                else:
                    self._begin(name)
            state.searches = self.searches
            Scheduler(self.searches, self.workshop, _PAIRS[self.effort], over, told).run(self.target.tvm)
            self.ended = "candidates" if not over() else "time" if late() else "trials"
        except KeyboardInterrupt:
            self.ended = "interrupt"
        place = self.folder / "final_comparison"
        final_comparison = FinalComparison(self.searches, self.subject, self._model, place, self.workshop, self.target)
        final_comparison.run(_WHOLE_SECONDS[self.effort], told)
        self.whole_gain = final_comparison.gain

    def _begin(self, name: str) -> None:
        """Builds the default and what it is compared with, and has it measured everywhere."""
        module, use, folder = self._modules[name], self._uses[name], self.folder / name
        LOG.info("kernel %s: %.1f%% of a run", _title(use), 100 * use.seconds / self._run_seconds)
        self.workshop.folder = folder
        try:
            plain = self.workshop.build(module, "plain.so", plain=True)
            default = self.workshop.build(module, DEFAULT)
            self.workshop.expect(plain)
            pairs = _PAIRS[self.effort]
            begun = [site.bench.submit(default, default, pairs, trial=False) for site in self.sites]
            for site, measured in zip(self.sites, begun):
                search = self._searched(name, site, module, use, measured.result().baseline)
                self.searches.append(search)
                self._try_presets(search)
        except Failed as failed:
            self._left_out.append(_left_out(use, f"its default failed: {failed}"))

    def _try_presets(self, search: Search) -> None:
        """Measures what presets say: it serves where the database knows nothing, which it now will."""
        site, name = search.site, search.task
        if site not in self._presets:
            parts = parts_like(lookup.PRESETS, site.database.architecture)
            self._presets[site] = [record for part in parts for record in best(part)]
        for record in (r for r in self._presets[site] if identity(r.workload.mod) == name):
            choice = recorded(record.trace) or ""
            if choice in search.known or choice in search.failed:
                continue
            expected = predicted(search.model, search.context, candidate(search.module, record.trace))
            try:
                library = self.workshop.build_trace(search.module, record.trace)
                default = search.folder / DEFAULT
                measured = site.bench.submit(library, default, _PAIRS[self.effort], trial=True).result()
            except Failed as failed:
                search.failed[choice] = site.database.fail(search.module, choice, failed, expected)
                continue
            seconds = search.known[choice] = search.reference * measured.ratio
            site.database.commit(search.module, record.trace, seconds, self.target.tvm, expected)

    def _searched(self, name: str, site: Site, module: tvm.IRModule, use: Use, seconds: float) -> Search:
        """The search of a task whose default takes so many seconds on a site."""
        space, database = space_of(module, self.target.tvm, self.threads), site.database
        model, known = model_of(space, self.seed), database.known(module)
        title = _title(use)
        context = Context(module, space.target, space.generator(), strategy(), title, self.seed + 1)
        reference = known.get(space.default)
        if reference is None:
            reference = known[space.default] = seconds
            trace = space.default_trace(module)
            expected = predicted(model, context, candidate(module, trace))
            database.commit(module, trace, reference, self.target.tvm, expected)
        learn(model, context, module, database)
        return Search(
            title, use.call, name, site, module, use.seconds / seconds, self.folder / name, space, model, context,
            reference, known, database.failed(module),
        )  # fmt: skip

    def outcomes(self) -> tuple[Outcome, ...]:
        found = []
        for search in self.searches:
            use = self._uses[search.task]
            found.append(
                Outcome(
                    search.name,
                    search.space.kind,
                    use.nodes,
                    use.seconds / self._run_seconds,
                    search.reference,
                    search.won_seconds,
                    search.trials,
                    search.causes(),
                    search.won,
                    search.site.database.architecture.name,
                    search.in_model.ratio if search.in_model else None,
                    search.best,
                )
            )
        return (*sorted(found, key=lambda o: -o.share), *self._left_out)


def _title(use: Use) -> str:
    """A kernel, and the shapes of its arguments."""
    return f"{use.kernel.name} {' '.join('x'.join(map(str, s)) for s in use.shapes if isinstance(s, tuple))}"


def _left_out(use: Use, why: str) -> Outcome:
    return Outcome(
        use.kernel.name, "", use.nodes, 0.0, use.seconds / use.calls, use.seconds / use.calls, 0, {}, "", why=why
    )
