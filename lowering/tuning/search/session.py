"""The steps of tuning a model: extraction of tasks, search, final comparison."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tvm
from tvm.s_tir import meta_schedule as ms

from schedules import min_seconds

from ...compiling.progress import LOG
from ...measuring.batch import DEFAULT
from ...measuring.isolated import CandidateFailure
from ...runtime import load
from ...target import Target, resolve
from ...tuning_records import lookup
from ...tuning_records.candidate_choices import read_trace_choice
from ...tuning_records.database import TuningDatabase, find_similar_folders, hash_task, read_best_records
from ...tuning_records.task import NotTunable, create_loops_task, create_tiles_task, find_written_parameters
from .. import batches
from ..capture import KernelUse, profile_kernel_uses, save_arguments
from ..local import LibraryBuilder, MeasurementSite
from .context import TuningContext, create_candidate, create_search_strategy
from .cost_model import create_cost_model, predicted, train_on_database
from .final_comparison import FinalComparison
from .loop_space import LoopSpace
from .scheduler import SearchScheduler, TaskSearch
from .space import create_space
from .subject import TunedModel

Effort = Literal["quick", "full"]

End = Literal["time", "trials", "candidates", "interrupt"]
"""The exhausted resource of a search, or the interrupt that ended it."""

_MIN_SHARE = {"quick": 0.02, "full": 0.002}  # minimal share of a run; kernels with less are not tuned
_PAIRS = {"quick": 6, "full": 12}
_COMPARISON_SHARE = 0.15  # share of the time for final comparisons
_WHOLE_RUN_SECONDS = {"quick": 4.0, "full": 12.0}  # seconds of whole runs at each setting of sizes

EFFORTS = tuple(_MIN_SHARE)


@dataclass(frozen=True)
class TuningOutcome:
    """The outcome of a task. Times are seconds of a call, relative to the reference of its default.

    A kernel can be two tasks: searched is "tiles" or "loops". seconds is the default's if no candidate won.
    architecture is that of the measuring machine. failures counts failed candidates by cause. in_model is the ratio to
    the default in whole runs of the model, or None if it was not measured; slower choices are rejected. fastest is the
    seconds of the fastest candidate in the search, which the final comparison need not have confirmed, or None if
    nothing was searched. why is the reason why a kernel was not tuned, or "".
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
        """The speedup over the default."""
        return self.default / self.seconds if self.seconds else 1.0

    @property
    def unconfirmed(self) -> float:
        """The speedup of the fastest candidate in the search, or 1 if a choice was selected."""
        return self.default / self.fastest if self.fastest and self.gain == 1 else 1.0


@dataclass
class TuningState:
    """The state of a running session: the searches, the current one, and the seconds left."""

    searches: Sequence[TaskSearch]
    at_work: TaskSearch | None
    left: float
    step: str = "searching"


Progress = Callable[[TuningState], None]


class TuningSession:
    """The steps of `tune`, and their shared state."""

    def __init__(
        self,
        folder: Path,
        subject: TunedModel,
        sites: Sequence[MeasurementSite],
        target: Target,
        library_builder: LibraryBuilder,
        effort: Effort,
        seed: int,
    ) -> None:
        """Work in an empty folder, which contains the tasks at the end."""
        self.folder, self.subject, self.sites, self.target, self.library_builder = (
            folder,
            subject,
            sites,
            target,
            library_builder,
        )
        self.threads, self.effort, self.seed = subject.threads, effort, seed
        self.searches: list[TaskSearch] = []
        self.ended: End = "time"
        self.whole_gain: float | None = None
        self._untuned: list[TuningOutcome] = []
        self._uses: dict[str, KernelUse] = {}
        self._modules: dict[str, tvm.IRModule] = {}
        self._run_seconds = 0.0
        self._presets: dict[MeasurementSite, list[ms.database.TuningRecord]] = {}

    def extract(self, folder: Path) -> None:
        """Compile the model with defaults into a folder, and run it.

        Every kernel with a sufficient share of the time becomes a task.
        """
        begin = time.monotonic()
        stand_in = resolve("cpu")[0] if self.target.architecture else None
        compiled = self.subject.compile_into(folder, stand_in=stand_in)
        self._model, self._compile_seconds = folder, time.monotonic() - begin
        runnable = load(folder)
        functions = compiled.unscheduled[0]
        for setting in self.subject.sizes:
            kernel_uses = [
                self._estimate_seconds(use) for use in profile_kernel_uses(runnable, setting, self.threads, seconds=1.0)
            ]
            total = sum(use.seconds for use in kernel_uses)
            self._run_seconds += total
            argument_folders: dict[Any, list[Path]] = {}
            for use in kernel_uses:
                if use.seconds < _MIN_SHARE[self.effort] * total:
                    continue
                for task in self._create_tasks(use, functions[use.kernel.name]):
                    name = hash_task(task)
                    if name in self._uses:
                        seconds = self._uses[name].seconds + use.seconds
                        self._uses[name] = dataclasses.replace(self._uses[name], seconds=seconds)
                        continue
                    self._uses[name], self._modules[name] = use, task
                    task_folder = self.folder / name
                    task_folder.mkdir()
                    argument_folders.setdefault((use.kernel.name, use.arguments), []).append(task_folder)
            save_arguments(
                runnable,
                setting,
                self.threads,
                argument_folders,
                lambda kernel: find_written_parameters(functions[kernel]),
            )

    def _estimate_seconds(self, use: KernelUse) -> KernelUse:
        """Return the use with its seconds on the target. A GPU's are estimated, as the CPU ran instead."""
        if not self.target.architecture:
            return use
        return dataclasses.replace(use, seconds=min_seconds(use.flops, use.bytes, self.target.tvm))

    def _create_tasks(self, use: KernelUse, func: Any) -> list[tvm.IRModule]:
        """Return the tasks of a kernel: tiles, loops, both or none."""
        try:
            tiles = create_tiles_task(func, use.shapes, self.target.tvm)
            loops = create_loops_task(func, use.shapes, self.target.tvm)
        except NotTunable as reason:
            self._untuned.append(_create_untuned_outcome(use, str(reason)))
            return []
        if loops is not None and LoopSpace(loops, self.target.tvm, self.threads).is_empty:
            loops = None
        return [task for task in (tiles, loops) if task is not None]

    def export(self, database: TuningDatabase, count: int) -> None:
        """Build so many candidates of each task without a record in the database, for measuring elsewhere."""
        tasks = {
            name: (f"{_create_title(self._uses[name])} ({create_space(module, self.target.tvm).kind})", module)
            for name, module in self._modules.items()
        }
        pairs = _PAIRS[self.effort]
        batch = batches.export_batch(
            self.folder, tasks, database, self.library_builder, self.target, self.threads, pairs, count, self.seed
        )
        for task in batch.tasks:
            use = self._uses[task.name]
            share, seconds = use.seconds / self._run_seconds, use.seconds / use.calls
            self._untuned.append(
                TuningOutcome(task.title, "", use.nodes, share, seconds, seconds, task.candidates, {}, "")
            )

    def search(self, end: float, max_trials: int | None, progress: Progress) -> None:
        """Search until `end`, final comparisons included, or for `max_trials` trials."""
        state = TuningState([], None, end - time.monotonic())
        seconds_left = end - time.monotonic()
        comparison_seconds = self._compile_seconds + _WHOLE_RUN_SECONDS[self.effort] * len(self.subject.sizes)
        deadline = end - _COMPARISON_SHARE * seconds_left - min(comparison_seconds, seconds_left / 4)

        def is_late() -> bool:
            return time.monotonic() >= deadline

        def is_over() -> bool:
            return is_late() or (max_trials is not None and sum(s.trials for s in state.searches) >= max_trials)

        def report(search: TaskSearch, step: str = "searching") -> None:
            state.at_work, state.step, state.left = search, step, end - time.monotonic()
            LOG.debug("%s %s: %d trials, %.2fx", step, search.name, search.trials, search.gain)
            progress(state)

        try:
            for name, use in self._uses.items():
                if is_late():
                    self._untuned.append(_create_untuned_outcome(use, "the time was over before it was begun"))
                else:
                    self._begin_search(name)
            state.searches = self.searches
            SearchScheduler(self.searches, self.library_builder, _PAIRS[self.effort], is_over, report).run(
                self.target.tvm
            )
            self.ended = "candidates" if not is_over() else "time" if is_late() else "trials"
        except KeyboardInterrupt:
            self.ended = "interrupt"
        comparison_folder = self.folder / "final_comparison"
        final_comparison = FinalComparison(
            self.searches, self.subject, self._model, comparison_folder, self.library_builder, self.target
        )
        final_comparison.run(_WHOLE_RUN_SECONDS[self.effort], report)
        self.whole_gain = final_comparison.gain

    def _begin_search(self, name: str) -> None:
        """Build the default and the unscheduled baseline, and measure the default at all sites."""
        module, use, folder = self._modules[name], self._uses[name], self.folder / name
        LOG.info("kernel %s: %.1f%% of a run", _create_title(use), 100 * use.seconds / self._run_seconds)
        self.library_builder.folder = folder
        try:
            unscheduled_library = self.library_builder.build(module, "plain.so", plain=True)
            default_library = self.library_builder.build(module, DEFAULT)
            self.library_builder.expect(unscheduled_library)
            pairs = _PAIRS[self.effort]
            measurements = [
                site.bench.submit(default_library, default_library, pairs, trial=False) for site in self.sites
            ]
            for site, measured in zip(self.sites, measurements):
                search = self._create_search(name, site, module, use, measured.result().baseline)
                self.searches.append(search)
                self._try_presets(search)
        except CandidateFailure as failed:
            self._untuned.append(_create_untuned_outcome(use, f"its default failed: {failed}"))

    def _try_presets(self, search: TaskSearch) -> None:
        """Measure the presets' choices: they apply only until the database has a record, as it soon will."""
        site, name = search.site, search.task
        if site not in self._presets:
            preset_folders = find_similar_folders(lookup.PRESETS, site.database.architecture)
            self._presets[site] = [
                record for preset_folder in preset_folders for record in read_best_records(preset_folder)
            ]
        for record in (r for r in self._presets[site] if hash_task(r.workload.mod) == name):
            choice = read_trace_choice(record.trace) or ""
            if choice in search.timings or choice in search.failures:
                continue
            expected = predicted(search.model, search.context, create_candidate(search.module, record.trace))
            try:
                library = self.library_builder.build_trace(search.module, record.trace)
                default_library = search.folder / DEFAULT
                measured = site.bench.submit(library, default_library, _PAIRS[self.effort], trial=True).result()
            except CandidateFailure as failed:
                search.failures[choice] = site.database.record_failure(search.module, choice, failed, expected)
                continue
            seconds = search.timings[choice] = search.reference * measured.ratio
            site.database.commit(search.module, record.trace, seconds, self.target.tvm, expected)

    def _create_search(
        self, name: str, site: MeasurementSite, module: tvm.IRModule, use: KernelUse, seconds: float
    ) -> TaskSearch:
        """Return the search of a task whose default takes so many seconds at a site."""
        space, database = create_space(module, self.target.tvm, self.threads), site.database
        model, timings = create_cost_model(space, self.seed), database.measured_seconds(module)
        title = _create_title(use)
        context = TuningContext(module, space.target, space.generator(), create_search_strategy(), title, self.seed + 1)
        reference = timings.get(space.default)
        if reference is None:
            reference = timings[space.default] = seconds
            trace = space.default_trace(module)
            expected = predicted(model, context, create_candidate(module, trace))
            database.commit(module, trace, reference, self.target.tvm, expected)
        train_on_database(model, context, module, database)
        return TaskSearch(
            title, use.call, name, site, module, use.seconds / seconds, self.folder / name, space, model, context,
            reference, timings, database.failures(module),
        )  # fmt: skip

    def outcomes(self) -> tuple[TuningOutcome, ...]:
        """Return the outcomes of all kernels, tuned ones first, by decreasing share."""
        outcomes = []
        for search in self.searches:
            use = self._uses[search.task]
            outcomes.append(
                TuningOutcome(
                    search.name,
                    search.space.kind,
                    use.nodes,
                    use.seconds / self._run_seconds,
                    search.reference,
                    search.won_seconds,
                    search.trials,
                    search.count_causes(),
                    search.won,
                    search.site.database.architecture.name,
                    search.in_model.ratio if search.in_model else None,
                    search.best,
                )
            )
        return (*sorted(outcomes, key=lambda o: -o.share), *self._untuned)


def _create_title(use: KernelUse) -> str:
    """Return the name of a kernel and the shapes of its arguments."""
    return f"{use.kernel.name} {' '.join('x'.join(map(str, s)) for s in use.shapes if isinstance(s, tuple))}"


def _create_untuned_outcome(use: KernelUse, why: str) -> TuningOutcome:
    return TuningOutcome(
        use.kernel.name, "", use.nodes, 0.0, use.seconds / use.calls, use.seconds / use.calls, 0, {}, "", why=why
    )
