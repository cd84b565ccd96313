"""The steps of tuning a model: its tasks, the search, last comparisons."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tvm

from schedules.cuda.cycles import least_seconds
from schedules.cuda.device import device

from ..compiling import artifact
from ..compiling.compiler import compiled
from ..graph.declared_sizes import Dims
from ..graph.model import ModelLike
from ..importing.quantised import Scheme
from ..measuring.batch import DEFAULT
from ..measuring.isolated import Failed
from ..measuring.trial import CLEAR_WIN, LAST_PAIRS, wins
from ..runtime import load
from ..target import Target, resolve
from . import batches
from .capture import Use, keep, uses
from .context import Context, candidate, strategy
from .cost_model import learn, model_of, predicted
from .database import Database, identity
from .local import Site, Workshop
from .loop_space import LoopSpace
from .scheduler import Scheduler, Search
from .space import space_of
from .task import NotTunable, loops_task, tiles_task, written

Effort = Literal["quick", "full"]

_SHARE = {"quick": 0.02, "full": 0.002}  # of a run, below which a kernel is left as it is
_PAIRS = {"quick": 6, "full": 12}
_LAST_SHARE = 0.15  # of the time, for last comparisons
_FINALISTS = 3

EFFORTS = tuple(_SHARE)


@dataclass(frozen=True)
class Outcome:
    """One task: seconds of a call by the reference of its default, and what kept candidates from being measured.

    A kernel can be two tasks: searched is "tiles" or "loops". seconds is the default's where no candidate won,
    architecture that of the machine that measured. why says what kept a kernel from being tuned, "" for nothing.
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
    why: str = ""

    @property
    def gain(self) -> float:
        """How many times faster than the default."""
        return self.default / self.seconds if self.seconds else 1.0


@dataclass
class State:
    """What can be shown while it goes on: the searches, the one at work, and the seconds left."""

    searches: Sequence[Search]
    at_work: Search | None
    left: float
    comparing: bool = False


Progress = Callable[[State], None]


class Session:
    """The steps of `tune`, and what they share."""

    def __init__(
        self,
        folder: Path,
        sites: Sequence[Site],
        target: Target,
        workshop: Workshop,
        threads: int,
        effort: Effort,
        seed: int,
    ) -> None:
        self.folder, self.sites, self.target, self.workshop = folder, sites, target, workshop
        self.threads, self.effort, self.seed = threads, effort, seed
        self.searches: list[Search] = []
        self.interrupted = False
        self._left_out: list[Outcome] = []
        self._uses: dict[str, Use] = {}
        self._modules: dict[str, tvm.IRModule] = {}
        self._run_seconds = 0.0

    def extract(
        self,
        where: Path,
        model: ModelLike,
        target: str,
        sizes: Sequence[Mapping[str, int]],
        dims: Dims | None,
        static_cache: int | None,
        weights: Scheme | None,
        donate: Sequence[str],
    ) -> None:
        """Compiles the model as it is into a folder and runs it; every kernel that takes a share of the time becomes a
        task."""
        stand_in = resolve("cpu")[0] if self.target.architecture else None
        done = compiled(model, target, donate, self.threads, None, dims, static_cache, weights, stand_in=stand_in)
        artifact.write(where, done.libraries, done.manifest, done.weights)
        runnable = load(where)
        functions = done.unscheduled[0]
        for setting in sizes:
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
        return dataclasses.replace(use, seconds=least_seconds(use.flops, use.bytes, device(self.target.tvm)))

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
        stop = end - _LAST_SHARE * left

        def late() -> bool:
            return time.monotonic() >= stop

        def over() -> bool:
            return late() or (most is not None and sum(s.trials for s in state.searches) >= most)

        def told(search: Search) -> None:
            state.at_work, state.left = search, end - time.monotonic()
            progress(state)

        try:
            for name, use in self._uses.items():
                if late():
                    self._left_out.append(_left_out(use, "the time was over before it was begun"))
                else:
                    self._begin(name)
            state.searches = self.searches
            Scheduler(self.searches, self.workshop, _PAIRS[self.effort], over, told).run(self.target.tvm)
        except KeyboardInterrupt:
            self.interrupted = True
        state.comparing = True
        for search in self.searches:
            state.at_work, state.left = search, end - time.monotonic()
            progress(state)
            self._settle(search)

    def _begin(self, name: str) -> None:
        """Builds the default and what it is compared with, and has it measured everywhere."""
        module, use, folder = self._modules[name], self._uses[name], self.folder / name
        self.workshop.folder = folder
        try:
            plain = self.workshop.build(module, "plain.so", plain=True)
            default = self.workshop.build(module, DEFAULT)
            self.workshop.expect(plain)
            pairs = _PAIRS[self.effort]
            begun = [site.bench.submit(default, default, pairs, trial=False) for site in self.sites]
            for site, measured in zip(self.sites, begun):
                self.searches.append(self._searched(name, site, module, use, measured.result().baseline))
        except Failed as failed:
            self._left_out.append(_left_out(use, f"its default failed: {failed}"))

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
            title, name, site, module, use.seconds / seconds, self.folder / name, space, model, context, reference,
            known, database.failed(module),
        )  # fmt: skip

    def _settle(self, search: Search) -> None:
        """Compares the fastest candidates with the default for a last time."""
        self.workshop.folder, database = search.folder, search.site.database
        default = search.space.default
        traces = database.traces(search.module)
        finalists = sorted(search.known, key=search.known.__getitem__)[:_FINALISTS]
        won, seconds = default, search.reference
        for choice in finalists:
            if choice == default or search.known[choice] * CLEAR_WIN > search.reference:
                continue
            try:
                library = self.workshop.build_trace(search.module, traces[choice])
                measured = search.site.bench.submit(library, search.folder / DEFAULT, LAST_PAIRS, trial=False).result()
            except Failed as failed:
                search.failed[choice] = database.fail(search.module, choice, failed)
                continue
            if wins(measured.ratio, measured.spread) and search.reference * measured.ratio < seconds:
                won, seconds = choice, search.reference * measured.ratio
        if database.settled(search.module) is None:
            trace = search.space.default_trace(search.module)
            database.settle(search.module, trace, search.reference, self.target.tvm)
        if won != default:
            database.settle(search.module, traces[won], seconds, self.target.tvm)
        search.won, search.won_seconds = won, seconds

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
