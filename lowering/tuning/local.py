"""Build candidates on this machine, and measure them here or elsewhere, in separate processes.

A candidate's library is in the folder of its task, next to the arguments, the expected results and the default's
library.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms

from ..compiling.build import warm_up
from ..errors import InputError
from ..measuring.batch import DEFAULT
from ..measuring.isolated import CandidateFailure, Cause, Helper
from ..measuring.machine import read_tuning_machine
from ..measuring.measure import Job, Measurement, expect
from ..measuring.trial import RUN_MEMORY, compare_candidate, runner, try_candidate
from ..target import resolve
from ..tuning_records.database import TuningDatabase
from . import build
from .search.whole_runs import WholeRunTimes, compare_whole_runs

_BUILD_SECONDS, _BUILD_MEMORY = 120.0, 8 << 30
_EXPECT_SECONDS = 120.0
_WHOLE_SECONDS = 600.0  # timeout for large models, which may be slow in each of the minimal rounds


# The cause of an InputError, which TVM would convert to a RuntimeError on the way; its code and text follow.
_NO_DEVICE = "nobody"


def encode_failure(cause: str, text: str) -> str:
    """Return the message that carries a Failed through MetaSchedule, which supports only messages."""
    return f"{cause}: {text}"


def decode_failure(message: str) -> CandidateFailure:
    """Return the Failed of such a message. Raises InputError if no device measured the candidate."""
    cause, _, text = message.partition(": ")
    if cause == _NO_DEVICE:
        code, _, text = text.partition(": ")
        raise InputError(code, text)
    return CandidateFailure(cast(Cause, cause), text)


def _build_in_child(module: tvm.IRModule, target: str, cc: str | None, number: int, path: str, plain: bool) -> None:
    """Build a candidate, or the unscheduled function, in a child process.

    The unscheduled function always runs on the CPU, whatever the target.
    """
    resolved = resolve(target, cc)[number]
    if plain:
        cpu_target = resolve("cpu")[0] if resolved.architecture else resolved
        Path(path).write_bytes(build.compile_library(build.get_unscheduled_function(module), cpu_target))
    else:
        build.build_library(module, resolved, path)


class Bench(Protocol):
    """The interface for measuring libraries: LocalBench, or a Fleet."""

    @property
    def width(self) -> int:
        """The number of candidates that are measured at once."""

    def submit(self, library: Path, baseline: Path, pairs: int, trial: bool) -> Future[Measurement]:
        """Measure a library against another one, in the folder of their arguments.

        It is a trial, or a single comparison. The future may raise Failed.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class MeasurementSite:
    """Machines of one architecture: how to reach them, and their records in the database.

    whole_runs compares two models in folders at some sizes for so many seconds, and may raise Failed. It is None if
    models cannot run there.
    """

    bench: Bench
    database: TuningDatabase
    whole_runs: Callable[[Path, Path, Mapping[str, int], float], WholeRunTimes] | None = None


class LocalBench:
    """This machine, or its first GPU. threads is the number of workers of a candidate."""

    width = 1

    def __init__(self, threads: int, gpu: bool) -> None:
        """Start the measuring process. Raises ArtifactError without a working GPU if one is needed."""
        self._threads, self._runner = threads, runner()
        self._models = Helper([compare_whole_runs.__module__])
        self.machine = read_tuning_machine(gpu)

    def submit(self, library: Path, baseline: Path, pairs: int, trial: bool) -> Future[Measurement]:
        on_gpu = bool(self.machine.gpu)
        job = Job(str(library), str(baseline), str(library.parent), self._threads, pairs, self.machine.largest, on_gpu)
        future: Future[Measurement] = Future()
        try:
            future.set_result((try_candidate if trial else compare_candidate)(self._runner, job))
        except CandidateFailure as failed:
            future.set_exception(failed)
        return future

    def whole_runs(self, was: Path, became: Path, sizes: Mapping[str, int], seconds: float) -> WholeRunTimes:
        """Compare whole runs of models for this CPU. Raises Failed."""
        timeout = _WHOLE_SECONDS + 2 * seconds
        return self._models.call(
            compare_whole_runs, str(was), str(became), sizes, self._threads, seconds, seconds=timeout, memory=None
        )

    def close(self) -> None:
        self._runner.close()
        self._models.close()


class LibraryBuilder:
    """Builds candidates and their baselines in `folder`, that of the current task. Close it after use."""

    def __init__(self, target: str, cc: str | None, number: int, threads: int) -> None:
        self._target = (target, cc, number)
        self._threads = threads
        self._builder = Helper([build.__name__, __name__])
        self._builder.prepare(warm_up, resolve(target, cc)[number].linker)
        self._answers = runner()
        self._numbers = itertools.count()
        self.folder = Path(os.devnull)

    def build(self, module: tvm.IRModule, name: str = "", plain: bool = False) -> Path:
        """Build the library of a candidate in the folder of the task. Raises Failed."""
        path = self.folder / (name or f"{next(self._numbers)}.so")
        try:
            self._builder.call(
                _build_in_child, module, *self._target, str(path), plain, seconds=_BUILD_SECONDS, memory=_BUILD_MEMORY
            )
        except CandidateFailure as error:
            raise CandidateFailure("build", f"{error.cause}: {error.text}") from error
        return path

    def build_trace(self, module: tvm.IRModule, trace: Trace, name: str = "") -> Path:
        """Build the library of a record. Raises Failed."""
        schedule = Schedule(module)
        trace.apply_to_schedule(schedule, remove_postproc=False)
        return self.build(schedule.mod, name)

    def expect(self, library: Path) -> None:
        """Store the library's results for the arguments next to it. Raises Failed."""
        self._answers.call(
            expect, str(library), str(library.parent), self._threads, seconds=_EXPECT_SECONDS, memory=RUN_MEMORY
        )

    def close(self) -> None:
        self._builder.close()
        self._answers.close()


@derived_object
class CandidateBuilder(ms.builder.PyBuilder):
    """The builder interface of MetaSchedule."""

    def __init__(self, library_builder: LibraryBuilder) -> None:
        super().__init__()
        self.library_builder = library_builder

    def build(self, build_inputs: list[ms.builder.BuilderInput]) -> list[ms.builder.BuilderResult]:
        return [self._build_candidate(build_input) for build_input in build_inputs]

    def _build_candidate(self, build_input: ms.builder.BuilderInput) -> ms.builder.BuilderResult:
        try:
            return ms.builder.BuilderResult(str(self.library_builder.build(build_input.mod)), None)
        except CandidateFailure as error:
            return ms.builder.BuilderResult(None, encode_failure(error.cause, error.text))


@derived_object
class TrialFuture(ms.runner.PyRunnerFuture):
    """MetaSchedule's future of a trial. Its seconds are the default's reference times the measured ratio."""

    def __init__(self, path: Path, measured: Future[Measurement], reference: float) -> None:
        super().__init__()
        self._path, self._measured, self._reference = path, measured, reference

    def done(self) -> bool:
        return self._measured.done()

    def result(self) -> ms.runner.RunnerResult:
        try:
            return ms.runner.RunnerResult([self._reference * self._measured.result().ratio], None)
        except CandidateFailure as error:
            return ms.runner.RunnerResult(None, encode_failure(error.cause, error.text))
        except InputError as error:
            return ms.runner.RunnerResult(None, encode_failure(_NO_DEVICE, f"{error.code}: {error}"))
        finally:
            self._path.unlink(missing_ok=True)


@derived_object
class CandidateRunner(ms.runner.PyRunner):
    """The runner interface of MetaSchedule. `reference` is the seconds of the default at its first measurement."""

    def __init__(self, bench: Bench, pairs: int, reference: float) -> None:
        super().__init__()
        self.bench, self.pairs, self.reference = bench, pairs, reference

    def run(self, runner_inputs: list[ms.runner.RunnerInput]) -> list[Any]:
        return [self._start_trial(Path(str(runner_input.artifact_path))) for runner_input in runner_inputs]

    def _start_trial(self, path: Path) -> Any:
        return TrialFuture(path, self.bench.submit(path, path.parent / DEFAULT, self.pairs, trial=True), self.reference)
