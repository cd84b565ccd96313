"""`tune`: measures what the kernels of a model could be, and keeps what is faster than the default."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tvm

from ..compiling import artifact
from ..compiling.compiler import compiled
from ..errors import InputError
from ..graph.declared_sizes import Dims
from ..graph.model import ModelLike
from ..importing.quantised import Scheme
from ..manifest import MOST_THREADS
from ..measuring.isolated import Failed
from ..runtime import load
from ..runtime.checks import whole_number
from ..target import Target, resolve
from .capture import Use, keep, uses
from .cost_model import TileModel
from .database import Database, identity
from .local import BASELINE, Builder, Runner, Workshop
from .scheduler import Context, Scheduler, Search, strategy
from .space import TileSpace
from .task import NotTunable, tiles_task, written

Effort = Literal["quick", "full"]

CLEAR_WIN = 1.03
"""A candidate takes the default's place where it is so many times faster in a last comparison."""

_SHARE = {"quick": 0.02, "full": 0.002}  # of a run, below which a kernel is left as it is
_PAIRS = {"quick": 6, "full": 12}
_LAST_PAIRS = 40
_LAST_SHARE = 0.15  # of the time, for last comparisons
_FINALISTS = 3


@dataclass(frozen=True)
class Outcome:
    """One task: seconds of a call by the reference of its default, and what kept candidates from being measured.

    seconds is the default's where no candidate won. why says what kept a kernel from being tuned, "" for nothing.
    """

    name: str
    nodes: tuple[str, ...]
    share: float
    default: float
    seconds: float
    trials: int
    failures: Mapping[str, int]
    choice: str
    why: str = ""

    @property
    def gain(self) -> float:
        """How many times faster than the default."""
        return self.default / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class Tuning:
    """What `tune` did. gain is that of a whole run, as the shares of its kernels tell it."""

    database: Path
    outcomes: tuple[Outcome, ...]
    seconds: float
    interrupted: bool

    @property
    def gain(self) -> float:
        return 1 / (1 - sum(o.share * (1 - 1 / o.gain) for o in self.outcomes))


@dataclass
class State:
    """What can be shown while it goes on: the searches, the one at work, and the seconds left."""

    searches: Sequence[Search]
    at_work: Search | None
    left: float
    comparing: bool = False


Progress = Callable[[State], None]


def tune(
    model: ModelLike,
    database: str | Path,
    target: str = "cpu",
    budget: float = 1200.0,
    trials: int | None = None,
    effort: Effort = "full",
    sizes: Sequence[Mapping[str, int]] = ({},),
    threads: int = 1,
    dims: Dims | None = None,
    static_cache: int | None = None,
    weights: Scheme | None = None,
    donate: Sequence[str] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Tuning:
    """Searches the tiles of a model's kernels, for so many seconds or trials, and files all measurements in a database.

    sizes are settings of the symbolic dimensions (names and numbers, as for `bench`): kernels are tuned at all of
    them. target, dims, static_cache, weights and donate must be what `compile` is given, or its kernels are others.
    effort says how small a share of a run is still looked at, and how often is measured. Ctrl-C ends the search early,
    and what was found until then is compared and kept. progress is called after every trial.

    Raises what `compile` and `bench` raise, and InputError for numbers that make no sense.
    """
    if budget <= 0:
        raise InputError(f"budget={budget}: a number of seconds above 0 is needed.")
    if effort not in _SHARE:
        raise InputError(f"effort={effort!r} is neither 'quick' nor 'full'.")
    threads = whole_number(threads, "threads", 1, MOST_THREADS)
    most = None if trials is None else whole_number(trials, "trials", 0, 2**31)
    begin = time.monotonic()
    (found,) = resolve(target)
    records = Database(Path(database), found)
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-") as folder:
        workshop = Workshop(target, None, 0, threads)
        try:
            session = _Session(Path(folder), records, found, workshop, threads, effort, seed)
            session.extract(model, target, sizes, dims, static_cache, weights, donate)
            session.search(begin + budget, most, progress or (lambda state: None))
            return Tuning(records.folder, session.outcomes(), time.monotonic() - begin, session.interrupted)
        finally:
            workshop.close()


class _Session:
    """The steps of `tune`, and what they share."""

    def __init__(
        self,
        folder: Path,
        database: Database,
        target: Target,
        workshop: Workshop,
        threads: int,
        effort: Effort,
        seed: int,
    ) -> None:
        self.folder, self.database, self.target, self.workshop = folder, database, target, workshop
        self.threads, self.effort, self.seed = threads, effort, seed
        self.searches: dict[str, Search] = {}
        self.interrupted = False
        self._left_out: list[Outcome] = []
        self._uses: dict[str, Use] = {}
        self._modules: dict[str, tvm.IRModule] = {}
        self._run_seconds = 0.0

    def extract(
        self,
        model: ModelLike,
        target: str,
        sizes: Sequence[Mapping[str, int]],
        dims: Dims | None,
        static_cache: int | None,
        weights: Scheme | None,
        donate: Sequence[str],
    ) -> None:
        """Compiles and runs the model as it is, and makes a task of every kernel that takes a share of the time."""
        done = compiled(model, target, donate, self.threads, None, dims, static_cache, weights)
        where = self.folder / "model"
        artifact.write(where, done.libraries, done.manifest, done.weights)
        runnable = load(where)
        functions = done.unscheduled[0]
        for setting in sizes:
            found = uses(runnable, setting, self.threads, seconds=1.0)
            total = sum(use.seconds for use in found)
            self._run_seconds += total
            wanted: dict[Any, Path] = {}
            for use in found:
                if use.seconds < _SHARE[self.effort] * total:
                    continue
                task = self._task(use, functions[use.kernel.name])
                if task is None:
                    continue
                name = identity(task)
                if name in self._uses:
                    self._uses[name] = dataclasses.replace(
                        self._uses[name], seconds=self._uses[name].seconds + use.seconds
                    )
                    continue
                self._uses[name] = use
                place = self.folder / name
                place.mkdir()
                wanted[use.kernel.name, use.arguments] = place
                self._modules[name] = task
            keep(runnable, setting, self.threads, wanted, lambda kernel: written(functions[kernel]))

    def _task(self, use: Use, func: Any) -> tvm.IRModule | None:
        try:
            return tiles_task(func, use.shapes, self.target.tvm)
        except NotTunable as reason:
            self._left_out.append(_left_out(use, str(reason)))
            return None

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
            state.searches = list(self.searches.values())
            scheduler = Scheduler(state.searches, self.workshop, self.database, over, told)
            runner = Runner(self.workshop, _PAIRS[self.effort])
            scheduler.run(Builder(self.workshop), runner, self.target.tvm)
        except KeyboardInterrupt:
            self.interrupted = True
        state.comparing = True
        for search in self.searches.values():
            state.at_work, state.left = search, end - time.monotonic()
            progress(state)
            self._settle(search)

    def _begin(self, name: str) -> None:
        """Builds the default and what it is compared with."""
        module, use, folder = self._modules[name], self._uses[name], self.folder / name
        space = TileSpace(module, self.target.tvm)
        self.workshop.folder = folder
        try:
            plain = self.workshop.build(module, "plain.so", plain=True)
            self.workshop.build(module, BASELINE)
            self.workshop.expect(plain)
            measured = self.workshop.measure(folder / BASELINE, _PAIRS[self.effort])
        except Failed as failed:
            self._left_out.append(_left_out(use, f"its default failed: {failed}"))
            return
        known = self.database.known(module)
        default = space.default().to_json()
        reference = known.get(default)
        model = TileModel(space, self.seed)
        if reference is None:
            reference = measured.baseline
            (predicted,) = model.slowness_of([default])
            self.database.commit(module, space.default_trace(module), reference, self.target.tvm, predicted)
            known[default] = reference
        for choice, seconds in known.items():
            model.learn(choice, seconds)
        model.fit()
        title = f"{use.kernel.name} {' '.join('x'.join(map(str, s)) for s in use.shapes if isinstance(s, tuple))}"
        context = Context(module, self.target.tvm, space.generator(), strategy(), title, self.seed + 1)
        failed_before = self.database.failed(module)
        weight = use.seconds / measured.baseline
        self.searches[name] = Search(
            title, module, weight, folder, space, model, context, reference, known, failed_before
        )

    def _settle(self, search: Search) -> None:
        """Compares the fastest candidates with the default for a last time."""
        self.workshop.folder = search.folder
        default = search.space.default().to_json()
        traces = self.database.traces(search.module)
        finalists = sorted(search.known, key=search.known.__getitem__)[:_FINALISTS]
        won, seconds = default, search.reference
        for choice in finalists:
            if choice == default or search.known[choice] * CLEAR_WIN > search.reference:
                continue
            try:
                library = self.workshop.build_trace(search.module, traces[choice], self.target.tvm)
                measured = self.workshop.measure(library, _LAST_PAIRS)
            except Failed as failed:
                search.failed[choice] = self.database.fail(search.module, choice, failed)
                continue
            if measured.ratio + measured.spread < 1 / CLEAR_WIN and search.reference * measured.ratio < seconds:
                won, seconds = choice, search.reference * measured.ratio
        if self.database.settled(search.module) is None:
            trace = search.space.default_trace(search.module)
            self.database.settle(search.module, trace, search.reference, self.target.tvm)
        if won != default:
            self.database.settle(search.module, traces[won], seconds, self.target.tvm)
        search.won, search.won_seconds = won, seconds

    def outcomes(self) -> tuple[Outcome, ...]:
        found = []
        for name, search in self.searches.items():
            use = self._uses[name]
            found.append(
                Outcome(
                    search.name,
                    use.nodes,
                    use.seconds / self._run_seconds,
                    search.reference,
                    search.won_seconds,
                    search.trials,
                    search.causes(),
                    search.won,
                )
            )
        return (*sorted(found, key=lambda o: -o.share), *self._left_out)


def _left_out(use: Use, why: str) -> Outcome:
    return Outcome(use.kernel.name, use.nodes, 0.0, use.seconds / use.calls, use.seconds / use.calls, 0, {}, "", why)
