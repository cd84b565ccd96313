"""`tune`: measures what the kernels of a model could be, and keeps what is faster than the default."""

from __future__ import annotations

from ..compiling import without_torch  # noqa: F401  (before whatever imports tvm)

# isort: split

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..choices import Precision, Scheme
from ..compiling.options import Options
from ..compiling.progress import stage
from ..errors import ArtifactError, InputError
from ..fleet.devices import Fleet
from ..graph.declared_sizes import Dims
from ..graph.model import ModelLike
from ..manifest import MOST_THREADS
from ..runtime.checks import whole_number
from ..runtime.gpu import architecture_here, runs_on
from ..target import Target, resolve
from .database import Database, last_measured_on
from .local import LocalBench, Site, Workshop
from .session import EFFORTS, Effort, End, Outcome, Progress, Session
from .subject import Subject

_CANDIDATES = 32  # of each task, to be measured elsewhere


@dataclass(frozen=True)
class Tuning:
    """What `tune` did; database is the part for the (first) architecture. gain is that of a whole run there, as the
    shares of its kernels tell it; whole_gain was measured, on geometric average over the sizes, None where models do
    not run: on other machines. It had `budget` seconds and took `seconds`; ended says what ended the search: "time",
    "trials", "candidates" (none was left that is new) or "interrupt"."""

    database: Path
    outcomes: tuple[Outcome, ...]
    seconds: float
    budget: float
    ended: End
    whole_gain: float | None = None

    def __repr__(self) -> str:
        from .table import summary

        return f"Tuning({summary(self)}; records: {self.database})"

    def _repr_html_(self) -> str:
        from .table import html

        return html(self)

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
    tracker: tuple[str, int] | None = None,
    keys: Sequence[str] = (),
    export: str | Path | None = None,
    precision: Precision | None = None,
) -> Tuning:
    """Searches the tiles of a model's kernels, for so many seconds or trials, and files all measurements in a database.

    sizes are settings of the symbolic dimensions (names and numbers, as for `bench`): kernels are tuned at all of
    them. target, dims, static_cache, weights, precision and donate must be what `compile` is given, or its kernels are
    others. effort says how small a share of a run is still looked at, and how often is measured. Ctrl-C ends the search
    early, and what was found until then is compared and kept. progress is called after every trial.

    tracker is host and port of a TVM tracker, and keys are those of devices that `onnx-lowering device` registered
    there: candidates are measured on them, as many at once as there are, those of each key for its own architecture.

    export is a folder to write candidates into instead, `trials` of each task (32): `onnx-lowering measure` measures
    them on a machine that has the runtime alone, and `file_results` files what came out; those that follow are chosen
    by what was measured last. target may be a GPU, or another CPU whose code this one can run: this machine's CPU
    computes the expected answers.

    Raises what `compile` and `bench` raise, and InputError for numbers that make no sense.
    """
    if budget <= 0:
        raise InputError(f"budget={budget}: a number of seconds above 0 is needed.")
    if effort not in EFFORTS:
        raise InputError(f"effort={effort!r} is neither 'quick' nor 'full'.")
    threads = whole_number(threads, "threads", 1, MOST_THREADS)
    # What runs of a tuner are fed is made up: tables of serving operators would be refused.
    options = Options(target, donate, threads, None, dims, static_cache, weights, checks=False, precision=precision)
    most = None if trials is None else whole_number(trials, "trials", 0, 2**31)
    begin = time.monotonic()
    found, *others = resolve(target)
    if others:
        raise InputError(f"target='{target}': tune for one architecture after the other, each has records of its own.")
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-") as temporary, ExitStack() as stack:
        folder = Path(temporary) if export is None else _empty(Path(export))
        sites = [] if export is not None else _sites(Path(database), found, threads, tracker, keys, stack)
        workshop = Workshop(target, None, 0, threads)
        stack.callback(workshop.close)
        subject = Subject(model, sizes, options)
        session = Session(folder, subject, sites, found, workshop, effort, seed)
        with stage("finding kernels to tune"):
            session.extract(Path(temporary) / "model")
        if export is not None:
            known = Database(Path(database), found, last_measured_on(Path(database), found))
            with stage("building candidates"):
                session.export(known, _CANDIDATES if most is None else most)
        else:
            known = sites[0].database
            with stage("searching"):
                session.search(begin + budget, most, progress or (lambda state: None))
        seconds = time.monotonic() - begin
        return Tuning(known.folder, session.outcomes(), seconds, budget, session.ended, session.whole_gain)


def _empty(folder: Path) -> Path:
    """A new folder. Raises InputError for one that holds anything."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InputError(f"'{folder}' is not empty: candidates need a folder of their own.")
    return folder


def _local(target: Target, threads: int) -> LocalBench:
    """This machine. Raises InputError for a GPU that is not here."""
    try:
        bench = LocalBench(threads, bool(target.architecture))
        here = architecture_here(0) if target.architecture else ""
    except ArtifactError as error:
        raise InputError(
            f"Target '{target.name}' is not tuned on this machine: {error} Use the devices of a tracker (--runner "
            "rpc), or --export-candidates for a machine that the network does not reach."
        ) from error
    if target.architecture and not runs_on(target.architecture, here):
        raise InputError(f"The GPU here is {here}, which does not run code for {target.architecture}.")
    return bench


def _sites(
    database: Path,
    target: Target,
    threads: int,
    tracker: tuple[str, int] | None,
    keys: Sequence[str],
    stack: ExitStack,
) -> list[Site]:
    """This machine, or the devices of each key. Raises InputError where such code cannot run."""
    gpu = target.architecture
    if tracker is None:
        bench = _local(target, threads)
        stack.callback(bench.close)
        return [Site(bench, Database(database, target, bench.machine), None if gpu else bench.whole_runs)]
    if not keys:
        raise InputError("A tracker has devices by keys: name at least one.")
    sites = []
    for key in keys:
        fleet = Fleet(tracker, key, threads, bool(gpu))
        stack.callback(fleet.close)
        if gpu and not runs_on(gpu, fleet.described["gpu_architecture"]):
            raise InputError(f"GPUs with the key '{key}' are {fleet.described['gpu_architecture']}, not {gpu}.")
        missing = [f for f in target.cpu_features if f not in fleet.described["cpu_flags"]]
        if missing:
            raise InputError(
                f"Devices with the key '{key}' lack {', '.join(missing)}: name a smaller target, such as cpu:x86-64-v3."
            )
        sites.append(Site(fleet, Database(database, target, fleet.machine)))
    return sites
