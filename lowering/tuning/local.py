"""Building and measuring candidates on this machine, in processes of their own.

A candidate's library lies in the folder of its task, beside the arguments, the expected answers and the default's
library.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, cast

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms

from ..compiling.build import warm_up
from ..measuring.isolated import Cause, Failed, Helper
from ..measuring.measure import Job, Measured, expect, measure
from ..target import resolve
from . import build
from .architecture import caches

BASELINE = "default.so"

_BUILD_SECONDS, _BUILD_MEMORY = 120.0, 8 << 30
_RUN_SECONDS, _RUN_MEMORY = 20.0, 4 << 30
_EXPECT_SECONDS = 120.0

_LOOK_AGAIN, _MORE = 0.98, 3


def failure(cause: str, text: str) -> str:
    """How a Failed travels through MetaSchedule, which knows messages only."""
    return f"{cause}: {text}"


def failed(message: str) -> Failed:
    """The Failed of such a message."""
    cause, _, text = message.partition(": ")
    return Failed(cast(Cause, cause), text)


def _library(module: tvm.IRModule, target: str, cc: str | None, number: int, path: str, plain: bool) -> None:
    """Runs in a child: builds a candidate, or the unscheduled function."""
    found = resolve(target, cc)[number]
    if plain:
        Path(path).write_bytes(build.compiled(build.unscheduled(module), found))
    else:
        build.library(module, found, path)


class Workshop:
    """Builds and measures for one task after the other; close it when done.

    folder is that of the task in hand, reference the seconds of its default that all records of it are relative to.
    """

    def __init__(self, target: str, cc: str | None, number: int, threads: int) -> None:
        self._target = (target, cc, number)
        self._threads = threads
        self._builder = Helper([build.__name__, __name__])
        self._builder.prepare(warm_up, resolve(target, cc)[number].linker)
        self._runner = Helper([measure.__module__])
        self._caches = max(caches(), default=32 << 20)
        self._numbers = itertools.count()
        self.folder, self.reference = Path(os.devnull), 0.0

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

    def build_trace(self, module: tvm.IRModule, trace: Trace, target: tvm.target.Target) -> Path:
        """The library of a record. Raises Failed."""
        schedule = Schedule(module)
        trace.apply_to_schedule(schedule, remove_postproc=False)
        return self.build(schedule.mod)

    def expect(self, library: Path) -> None:
        """Keeps what the library answers for the arguments beside it. Raises Failed."""
        self._runner.call(
            expect, str(library), str(library.parent), self._threads, seconds=_EXPECT_SECONDS, memory=_RUN_MEMORY
        )

    def measure(self, library: Path, pairs: int) -> Measured:
        """A candidate beside the default. Raises Failed."""
        folder = library.parent
        job = Job(str(library), str(folder / BASELINE), str(folder), self._threads, pairs, self._caches)
        return self._runner.call(measure, job, seconds=_RUN_SECONDS, memory=_RUN_MEMORY)

    def close(self) -> None:
        self._builder.close()
        self._runner.close()


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
class Future(ms.runner.PyRunnerFuture):
    """A result that is there."""

    def __init__(self, result: ms.runner.RunnerResult) -> None:
        super().__init__()
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> ms.runner.RunnerResult:
        return self._result


@derived_object
class Runner(ms.runner.PyRunner):
    """MetaSchedule's runner: seconds are the default's reference times the ratio to it that was measured."""

    def __init__(self, workshop: Workshop, pairs: int) -> None:
        super().__init__()
        self.workshop, self.pairs = workshop, pairs

    def run(self, runner_inputs: list[ms.runner.RunnerInput]) -> list[Any]:
        return [Future(self._one(given)) for given in runner_inputs]

    def _one(self, given: ms.runner.RunnerInput) -> ms.runner.RunnerResult:
        path = Path(str(given.artifact_path))
        try:
            measured = self.workshop.measure(path, self.pairs)
            if measured.ratio < _LOOK_AGAIN:  # of many candidates the luckiest would win
                measured = self.workshop.measure(path, _MORE * self.pairs)
        except Failed as error:
            return ms.runner.RunnerResult(None, failure(error.cause, error.text))
        finally:
            path.unlink(missing_ok=True)
        return ms.runner.RunnerResult([self.workshop.reference * measured.ratio], None)
