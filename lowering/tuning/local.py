"""Building candidates on this machine, and measuring them here or elsewhere, in processes of their own.

A candidate's library lies in the folder of its task, beside the arguments, the expected answers and the default's
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
from ..measuring.isolated import Cause, Failed, Helper
from ..measuring.machine import machine
from ..measuring.measure import Job, Measured, expect
from ..measuring.trial import RUN_MEMORY, compared, runner, tried
from ..target import resolve
from . import build
from .database import Database
from .whole_runs import WholeRuns, whole_runs

_BUILD_SECONDS, _BUILD_MEMORY = 120.0, 8 << 30
_EXPECT_SECONDS = 120.0
_WHOLE_SECONDS = 600.0  # of large models, each of the fewest turns can take long


# In place of a cause: an InputError, which TVM would make a RuntimeError on the way.
_NOBODY = "nobody"


def failure(cause: str, text: str) -> str:
    """How a Failed travels through MetaSchedule, which knows messages only."""
    return f"{cause}: {text}"


def failed(message: str) -> Failed:
    """The Failed of such a message. Raises InputError where no device measured it."""
    cause, _, text = message.partition(": ")
    if cause == _NOBODY:
        raise InputError(text)
    return Failed(cast(Cause, cause), text)


def _library(module: tvm.IRModule, target: str, cc: str | None, number: int, path: str, plain: bool) -> None:
    """Runs in a child: builds a candidate, or the unscheduled function, which the CPU runs whatever it is for."""
    found = resolve(target, cc)[number]
    if plain:
        runs_on = resolve("cpu")[0] if found.architecture else found
        Path(path).write_bytes(build.compiled(build.unscheduled(module), runs_on))
    else:
        build.library(module, found, path)


class Bench(Protocol):
    """Where libraries are measured: LocalBench, or a Fleet."""

    @property
    def width(self) -> int:
        """Candidates that are measured at once."""

    def submit(self, library: Path, baseline: Path, pairs: int, trial: bool) -> Future[Measured]:
        """The measurement of a library beside another one, in the folder of their arguments: a trial, or one
        comparison. Its result may raise Failed."""

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Site:
    """Machines of one architecture: where they are, the part of the database that is theirs, and how two models in
    folders are compared there at some sizes, for so many seconds (it may raise Failed), None where models do not run.
    """

    bench: Bench
    database: Database
    whole_runs: Callable[[Path, Path, Mapping[str, int], float], WholeRuns] | None = None


class LocalBench:
    """This machine, or its first GPU. threads is the number of workers of a candidate."""

    width = 1

    def __init__(self, threads: int, gpu: bool) -> None:
        """Raises ArtifactError where there is no GPU that works."""
        self._threads, self._runner = threads, runner()
        self._models = Helper([whole_runs.__module__])
        self.machine = machine(gpu)

    def submit(self, library: Path, baseline: Path, pairs: int, trial: bool) -> Future[Measured]:
        on_gpu = bool(self.machine.gpu)
        job = Job(str(library), str(baseline), str(library.parent), self._threads, pairs, self.machine.largest, on_gpu)
        done: Future[Measured] = Future()
        try:
            done.set_result((tried if trial else compared)(self._runner, job))
        except Failed as failed:
            done.set_exception(failed)
        return done

    def whole_runs(self, was: Path, became: Path, sizes: Mapping[str, int], seconds: float) -> WholeRuns:
        """Of models for this CPU. Raises Failed."""
        patience = _WHOLE_SECONDS + 2 * seconds
        return self._models.call(
            whole_runs, str(was), str(became), sizes, self._threads, seconds, seconds=patience, memory=None
        )

    def close(self) -> None:
        self._runner.close()
        self._models.close()


class Workshop:
    """Builds candidates, and what they are compared with, in `folder`, that of the task in hand; close it when done."""

    def __init__(self, target: str, cc: str | None, number: int, threads: int) -> None:
        self._target = (target, cc, number)
        self._threads = threads
        self._builder = Helper([build.__name__, __name__])
        self._builder.prepare(warm_up, resolve(target, cc)[number].linker)
        self._answers = runner()
        self._numbers = itertools.count()
        self.folder = Path(os.devnull)

    def build(self, module: tvm.IRModule, name: str = "", plain: bool = False) -> Path:
        """The library of a candidate in the folder of the task. Raises Failed."""
        path = self.folder / (name or f"{next(self._numbers)}.so")
        try:
            self._builder.call(
                _library, module, *self._target, str(path), plain, seconds=_BUILD_SECONDS, memory=_BUILD_MEMORY
            )
        except Failed as error:
            raise Failed("build", f"{error.cause}: {error.text}") from error
        return path

    def build_trace(self, module: tvm.IRModule, trace: Trace, name: str = "") -> Path:
        """The library of a record. Raises Failed."""
        schedule = Schedule(module)
        trace.apply_to_schedule(schedule, remove_postproc=False)
        return self.build(schedule.mod, name)

    def expect(self, library: Path) -> None:
        """Keeps what the library answers for the arguments beside it. Raises Failed."""
        self._answers.call(
            expect, str(library), str(library.parent), self._threads, seconds=_EXPECT_SECONDS, memory=RUN_MEMORY
        )

    def close(self) -> None:
        self._builder.close()
        self._answers.close()


@derived_object
class Builder(ms.builder.PyBuilder):
    """MetaSchedule's builder."""

    def __init__(self, workshop: Workshop) -> None:
        super().__init__()
        self.workshop = workshop

    def build(self, build_inputs: list[ms.builder.BuilderInput]) -> list[ms.builder.BuilderResult]:
        return [self._one(given) for given in build_inputs]

    def _one(self, given: ms.builder.BuilderInput) -> ms.builder.BuilderResult:
        try:
            return ms.builder.BuilderResult(str(self.workshop.build(given.mod)), None)
        except Failed as error:
            return ms.builder.BuilderResult(None, failure(error.cause, error.text))


@derived_object
class Trial(ms.runner.PyRunnerFuture):
    """MetaSchedule's future: seconds are the default's reference times the ratio to it that was measured."""

    def __init__(self, path: Path, measured: Future[Measured], reference: float) -> None:
        super().__init__()
        self._path, self._measured, self._reference = path, measured, reference

    def done(self) -> bool:
        return self._measured.done()

    def result(self) -> ms.runner.RunnerResult:
        try:
            return ms.runner.RunnerResult([self._reference * self._measured.result().ratio], None)
        except Failed as error:
            return ms.runner.RunnerResult(None, failure(error.cause, error.text))
        except InputError as error:
            return ms.runner.RunnerResult(None, failure(_NOBODY, str(error)))
        finally:
            self._path.unlink(missing_ok=True)


@derived_object
class Runner(ms.runner.PyRunner):
    """MetaSchedule's runner, of candidates whose default took `reference` seconds when it was first measured."""

    def __init__(self, bench: Bench, pairs: int, reference: float) -> None:
        super().__init__()
        self.bench, self.pairs, self.reference = bench, pairs, reference

    def run(self, runner_inputs: list[ms.runner.RunnerInput]) -> list[Any]:
        return [self._begun(Path(str(given.artifact_path))) for given in runner_inputs]

    def _begun(self, path: Path) -> Any:
        return Trial(path, self.bench.submit(path, path.parent / DEFAULT, self.pairs, trial=True), self.reference)
