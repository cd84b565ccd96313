"""Candidates in a folder, measured on a machine that only has the runtime: `onnx-lowering measure DIR`.

    DIR/batch.json     the machine they are for, and the number of candidates of each task
       /TASK/          arguments.json, arguments.bin, expected.bin, default.so, and 0.so, 1.so, ...
       /machine.json   the machine that measured
       /results.jsonl  a line for every candidate, written when it was measured

The tuner that writes the folder adds the files that it needs to interpret the results (tuning/batches.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ArtifactError, InputError
from ..records import decode
from ..runtime.artifact.checks import check_machine
from ..runtime.gpu import read_gpu_architecture, runs_on
from .isolated import CandidateFailure, Helper
from .lines import append_line, repair_lines
from .machine import TuningMachine, read_tuning_machine
from .measure import Job, Measurement
from .trial import LAST_PAIRS, compare_candidate, runner, try_candidate

FORMAT = 2
BATCH, MACHINE, RESULTS, DEFAULT = "batch.json", "machine.json", "results.jsonl", "default.so"

_FINALISTS = 3
_HEADER = 64  # bytes of an ELF file that identify its machine


@dataclass(frozen=True)
class BatchTask:
    """A task by its folder, with a title for people."""

    name: str
    title: str
    candidates: int


@dataclass(frozen=True)
class Batch:
    """A folder of candidates.

    cpu_features are Linux's names of the features that the code uses. architecture is that of the GPU it is for, "" for
    none. threads are the workers, pairs the maximum number of runs of each.
    """

    format: int
    target: str
    cpu_features: tuple[str, ...]
    architecture: str
    threads: int
    pairs: int
    tasks: tuple[BatchTask, ...]


@dataclass(frozen=True)
class Result:
    """The result of a candidate: the default's seconds, the ratio to them with its standard error, or a failure.

    last: of a final comparison. at is Unix time.
    """

    task: str
    candidate: int
    last: bool
    default: float
    ratio: float
    spread: float
    at: float
    cause: str | None = None
    text: str = ""


def read_batch(folder: Path) -> Batch:
    """Read a batch. Raises InputError for a folder that is not a batch of this version."""
    try:
        batch = decode(Batch, json.loads((folder / BATCH).read_text()), BATCH)
    except FileNotFoundError as error:
        raise InputError(
            "measure.candidates_missing", f"'{folder}' contains no candidates: {BATCH} is missing."
        ) from error
    except (OSError, ValueError) as error:
        raise InputError("measure.file_unreadable", f"'{folder / BATCH}' cannot be read: {error}.") from error
    if batch.format != FORMAT:
        raise InputError(
            "measure.format_unsupported", f"'{folder}' has format {batch.format}, and this version reads {FORMAT}."
        )
    return batch


def read_results(folder: Path) -> tuple[TuningMachine, list[Result]] | None:
    """Return the results so far, None if there are none. An unfinished line is left out.

    Raises InputError for damaged results.
    """
    if not (folder / MACHINE).exists():
        return None
    try:
        measured_on = decode(TuningMachine, json.loads((folder / MACHINE).read_text()), MACHINE)
        text = (folder / RESULTS).read_text() if (folder / RESULTS).exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return measured_on, [decode(Result, json.loads(line), RESULTS) for line in lines]
    except (OSError, ValueError) as error:
        raise InputError("measure.file_unreadable", f"The results in '{folder}' cannot be read: {error}.") from error


def measure_batch(
    folder: Path, report: Callable[[BatchTask, Result], None] = lambda task, result: None
) -> list[Result]:
    """Measure every candidate that has no result yet, then the fastest of each task once more.

    Raises InputError for a folder that is not a batch, ArtifactError where its code cannot run here, and OSError.
    """
    batch = read_batch(folder)
    for task in batch.tasks[:1]:
        code = (folder / task.name / DEFAULT).read_bytes()[:_HEADER]
        check_machine(code, batch.cpu_features, batch.target, f"'{folder}'", "measure it on the machine it is for.")
    here, previous = read_tuning_machine(bool(batch.architecture)), read_results(folder)
    if batch.architecture and not runs_on(batch.architecture, read_gpu_architecture(0)):
        raise ArtifactError(
            "measure.gpu_mismatch",
            f"'{folder}' contains candidates for GPUs of architecture {batch.architecture}, but the GPU here is "
            f"{read_gpu_architecture(0)}. Measure it on a GPU of its architecture.",
        )
    if previous is None:
        (folder / MACHINE).write_text(json.dumps(asdict(here)))
    elif previous[0] != here:
        other = f"another GPU ({previous[0].gpu})" if here.gpu else "a machine with other caches"
        raise InputError(
            "measure.machine_mismatch", f"'{folder}' was begun on {other}. Continue there, or remove {RESULTS}."
        )
    repair_lines(folder / RESULTS)
    run = _Run(folder, batch, here, [] if previous is None else previous[1], report)
    try:
        for task in batch.tasks:
            run.task(task)
    finally:
        run.helper.close()
    return run.results


class _Run:
    """A measurement that writes each result at once, and does not repeat existing ones."""

    def __init__(
        self,
        folder: Path,
        batch: Batch,
        here: TuningMachine,
        existing: list[Result],
        report: Callable[[BatchTask, Result], None],
    ) -> None:
        self.folder, self.batch, self.machine, self.results, self.report = folder, batch, here, existing, report
        self.helper = runner()

    def task(self, task: BatchTask) -> None:
        for candidate in range(task.candidates):
            self._measure(task, candidate, try_candidate, self.batch.pairs, last=False)
        good = [r for r in self.results if r.task == task.name and not r.last and r.cause is None and r.ratio < 1]
        for result in sorted(good, key=lambda r: r.ratio)[:_FINALISTS]:
            self._measure(task, result.candidate, compare_candidate, LAST_PAIRS, last=True)

    def _measure(
        self,
        task: BatchTask,
        candidate: int,
        compare: Callable[[Helper, Job], Measurement],
        pairs: int,
        last: bool,
    ) -> None:
        if any((r.task, r.candidate, r.last) == (task.name, candidate, last) for r in self.results):
            return
        task_folder = self.folder / task.name
        library, default = str(task_folder / f"{candidate}.so"), str(task_folder / DEFAULT)
        on_gpu = bool(self.machine.gpu)
        job = Job(library, default, str(task_folder), self.batch.threads, pairs, self.machine.largest, on_gpu)
        try:
            measured = compare(self.helper, job)
            result = Result(task.name, candidate, last, measured.baseline, measured.ratio, measured.spread, time.time())
        except CandidateFailure as failure:
            result = Result(task.name, candidate, last, 0.0, 0.0, 0.0, time.time(), failure.cause, failure.text)
        self.results.append(result)
        append_line(self.folder / RESULTS, asdict(result))
        self.report(task, result)
