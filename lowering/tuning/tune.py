"""`tune`: measure candidates for the kernels of a model, and record those that beat the default."""

from __future__ import annotations

from ..compiling import without_torch  # noqa: F401  (before any import of tvm)

# isort: split

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..compiling.options import CompileOptions, KernelArguments
from ..compiling.progress import stage
from ..errors import ArtifactError, InputError
from ..fleet.devices import Fleet
from ..graph.loading.model import ModelLike
from ..manifest import MAX_THREADS
from ..runtime.artifact.checks import check_integer
from ..runtime.gpu import read_gpu_architecture, runs_on
from ..target import Target, resolve
from ..tuning_records.database import TuningDatabase, find_last_machine
from .local import LibraryBuilder, LocalBench, MeasurementSite
from .search.session import EFFORTS, Effort, End, Progress, TuningOutcome, TuningSession
from .search.subject import TunedModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DEFAULT_CANDIDATES = 32  # candidates of each task for measuring elsewhere


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`.

    database is the folder of the architecture; with several device keys, of that of the first. gain is the speedup of
    a run of the whole model on it, estimated from the times of its kernels. whole_gain is the measured speedup, a
    geometric mean over the sizes; None if devices of a tracker measured, which run kernels alone. budget and seconds
    are the time limit and the time used. ended is the reason for the end of the search: "time", "trials", "candidates"
    (no new ones were left) or "interrupt".
    """

    database: Path
    outcomes: tuple[TuningOutcome, ...]
    seconds: float
    budget: float
    ended: End
    whole_gain: float | None = None

    def __repr__(self) -> str:
        from .table import format_summary

        return f"Tuning({format_summary(self)}; records: {self.database})"

    def _repr_html_(self) -> str:
        from .table import render_html

        return render_html(self)

    @property
    def interrupted(self) -> bool:
        return self.ended == "interrupt"

    @property
    def gain(self) -> float:
        saved: dict[str, float] = {}
        for o in self.outcomes:
            if o.architecture in ("", self.database.name):
                saved[o.name] = max(saved.get(o.name, 0.0), o.share * (1 - 1 / o.gain))
        return 1 / (1 - sum(saved.values()))


@dataclass(frozen=True)
class _Search:
    """The checked arguments of `tune`, without the model and its options."""

    database: Path
    target: str
    threads: int
    budget: float
    max_trials: int | None
    effort: Effort
    seed: int
    progress: Progress | None
    tracker: tuple[str, int] | None
    keys: Sequence[str]
    export: str | Path | None


def tune(
    model: ModelLike,
    database: str | Path,
    target: str = "cpu",
    *,
    budget: float = 1200.0,
    trials: int | None = None,
    effort: Effort = "full",
    sizes: Sequence[Mapping[str, int]] = ({},),
    threads: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    tracker: tuple[str, int] | None = None,
    keys: Sequence[str] = (),
    export: str | Path | None = None,
    **arguments: Unpack[KernelArguments],
) -> Tuning:
    """Search the tiles and loops of a model's kernels, and record all measurements in a database.

    Ctrl-C ends the search early; the results so far are compared and recorded. With `tracker`, candidates are measured
    in parallel on all devices of the tracker. Devices with different keys may differ in architecture, and have separate
    records. With `export`, candidates are written to a folder: `onnx-lowering measure` measures them on a machine that
    has only the runtime, and `file_results` records the results. A later export proposes candidates based on the
    results that were recorded last. This machine's CPU computes the expected results, so target is a GPU, or a CPU
    whose code this one can run.

    Args:
        model: The model.
        database: Folder of the database.
        target: Target of the kernels, as for `compile`.
        budget: Time limit in seconds.
        trials: Largest number of trials; with `export`, candidates of each task (32).
        effort: "quick" or "full": the smallest share of a run that is tuned, and the number of measurements.
        sizes: Settings of the symbolic dimensions (names and numbers, as for `bench`). Kernels are tuned at all of
            them.
        threads: Number of threads.
        seed: Seed of the search.
        progress: Function that is called after every trial.
        tracker: Host and port of a TVM tracker.
        keys: Keys of devices that `onnx-lowering device` registered at the tracker.
        export: Folder to write candidates to, instead of measuring them.
        arguments: As for `compile`: donate, dims, static_cache, weights, accuracy_level, precision. Compile with the
            same values, since records are of the kernels that they give.

    Returns:
        The result, with an outcome for each kernel.

    Raises:
        InputError: A number is out of range, or an argument is invalid. `compile` and `bench` may raise further errors.
    """
    _check_limits(budget, effort)
    threads = check_integer(threads, "threads", 1, MAX_THREADS)
    # Inputs for tuning are synthetic: checks would reject the tables of serving operators.
    options = CompileOptions(target=target, threads=threads, checks=False, **arguments)
    max_trials = None if trials is None else check_integer(trials, "trials", 0, 2**31)
    search = _Search(Path(database), target, threads, budget, max_trials, effort, seed, progress, tracker, keys, export)
    return _run_search(model, sizes, options, search)


def _check_limits(budget: float, effort: str) -> None:
    if budget <= 0:
        raise InputError("tune.budget_out_of_range", f"budget={budget}: a number of seconds above 0 is needed.")
    if effort not in EFFORTS:
        raise InputError("tune.effort_unknown", f"effort={effort!r} is neither 'quick' nor 'full'.")


def _run_search(
    model: ModelLike, sizes: Sequence[Mapping[str, int]], options: CompileOptions, search: _Search
) -> Tuning:
    """Find the kernels to tune, and measure candidates or export them."""
    begin = time.monotonic()
    target, database, export = _resolve_single(search.target), search.database, search.export
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-") as temporary, ExitStack() as stack:
        folder = Path(temporary) if export is None else _create_empty_folder(Path(export))
        sites = [] if export is not None else _create_sites(search, target, stack)
        library_builder = LibraryBuilder(search.target, None, 0, search.threads)
        stack.callback(library_builder.close)
        subject = TunedModel(model, sizes, options)
        session = TuningSession(folder, subject, sites, target, library_builder, search.effort, search.seed)
        with stage("finding kernels to tune"):
            session.extract(Path(temporary) / "model")
        if export is not None:
            records = TuningDatabase(database, target, find_last_machine(database, target))
            with stage("building candidates"):
                session.export(records, _DEFAULT_CANDIDATES if search.max_trials is None else search.max_trials)
        else:
            records = sites[0].database
            with stage("searching"):
                session.search(begin + search.budget, search.max_trials, search.progress or (lambda state: None))
        seconds = time.monotonic() - begin
        return Tuning(records.folder, session.outcomes(), seconds, search.budget, session.ended, session.whole_gain)


def _resolve_single(target: str) -> Target:
    """Return the target. Raises InputError if it has several architectures."""
    resolved, *other_targets = resolve(target)
    if other_targets:
        raise InputError(
            "tune.several_targets",
            f"target='{target}' has several architectures, each of which has records of its own. Tune for one after "
            "the other.",
        )
    return resolved


def _create_empty_folder(folder: Path) -> Path:
    """Return a new folder. Raises InputError if it has any content."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InputError("argument.folder_not_empty", f"'{folder}' is not empty. Name a new folder for the candidates.")
    return folder


def _create_local_bench(target: Target, threads: int) -> LocalBench:
    """Return this machine. Raises InputError for a GPU that is not installed."""
    try:
        bench = LocalBench(threads, bool(target.architecture))
        local_architecture = read_gpu_architecture(0) if target.architecture else ""
    except ArtifactError as error:
        raise InputError(
            "tune.target_unavailable",
            f"Target '{target.name}' cannot be tuned on this machine: {error} Use the devices of a tracker (--runner "
            "rpc), or --export-candidates for a machine that the network does not reach.",
        ) from error
    if target.architecture and not runs_on(target.architecture, local_architecture):
        raise InputError(
            "gpu.architecture_mismatch",
            f"The GPU here is {local_architecture}, which does not run code for {target.architecture}.",
        )
    return bench


def _create_sites(search: _Search, target: Target, stack: ExitStack) -> list[MeasurementSite]:
    """Return this machine, or the devices of each key. Raises InputError if they cannot run the code."""
    gpu, database, threads = target.architecture, search.database, search.threads
    if search.tracker is None:
        bench = _create_local_bench(target, threads)
        stack.callback(bench.close)
        return [
            MeasurementSite(bench, TuningDatabase(database, target, bench.machine), None if gpu else bench.whole_runs)
        ]
    if not search.keys:
        raise InputError(
            "tune.key_missing", "A tracker identifies devices by keys, and no key is given. Name at least one."
        )
    sites = []
    for key in search.keys:
        fleet = Fleet(search.tracker, key, threads, bool(gpu))
        stack.callback(fleet.close)
        if gpu and not runs_on(gpu, fleet.described["gpu_architecture"]):
            raise InputError(
                "tune.device_gpu_mismatch",
                f"GPUs with the key '{key}' are {fleet.described['gpu_architecture']}, not {gpu}.",
            )
        missing = [f for f in target.cpu_features if f not in fleet.described["cpu_flags"]]
        if missing:
            raise InputError(
                "tune.device_features_missing",
                f"Devices with the key '{key}' lack {', '.join(missing)}. Name a smaller target, such as "
                "cpu:x86-64-v3.",
            )
        sites.append(MeasurementSite(fleet, TuningDatabase(database, target, fleet.machine)))
    return sites
