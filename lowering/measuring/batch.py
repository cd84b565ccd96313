"""Candidates in a folder, measured on a machine that has the runtime alone: `onnx-lowering measure DIR`.

    DIR/batch.json     for which machine they are, and how many there are of each task
       /TASK/          arguments.json, arguments.bin, expected.bin, default.so, and 0.so, 1.so, ...
       /machine.json   the machine that measured
       /results.jsonl  a line for every candidate, written when it was measured

Who made the folder keeps what he needs to understand the results in it, too (tuning/batches.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ArtifactError, InputError
from ..records import decode
from ..runtime.checks import check_machine
from ..runtime.gpu import read_gpu_architecture, runs_on
from .isolated import Failed, Helper
from .lines import append_line, repair_lines
from .machine import Machine, machine
from .measure import Job, Measured
from .trial import LAST_PAIRS, compared, runner, tried

FORMAT = 2
BATCH, MACHINE, RESULTS, DEFAULT = "batch.json", "machine.json", "results.jsonl", "default.so"

_FINALISTS = 3
_HEADER = 64  # bytes of an ELF file that tell its machine


@dataclass(frozen=True)
class BatchTask:
    """A task by its folder, with a title for people."""

    name: str
    title: str
    candidates: int


@dataclass(frozen=True)
class Batch:
    """cpu_features are Linux's names of what the code uses; architecture is that of the GPU it is for, "" for none;
    threads are the workers, pairs the most turns of each."""

    format: int
    target: str
    cpu_features: tuple[str, ...]
    architecture: str
    threads: int
    pairs: int
    tasks: tuple[BatchTask, ...]


@dataclass(frozen=True)
class Result:
    """What came of a candidate: seconds of the default beside it, the ratio to them and how sure that is, or why
    there is none. last: of a last comparison. at is Unix time."""

    task: str
    candidate: int
    last: bool
    default: float
    ratio: float
    spread: float
    at: float
    cause: str | None = None
    text: str = ""


def read(folder: Path) -> Batch:
    """Raises InputError for what is no batch of this version."""
    try:
        batch = decode(Batch, json.loads((folder / BATCH).read_text()), BATCH)
    except FileNotFoundError as error:
        raise InputError(f"'{folder}' holds no candidates: {BATCH} is missing.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"'{folder / BATCH}' cannot be read: {error}.") from error
    if batch.format != FORMAT:
        raise InputError(f"'{folder}' has format {batch.format}, and this version reads {FORMAT}.")
    return batch


def results(folder: Path) -> tuple[Machine, list[Result]] | None:
    """What was measured so far, None for nothing. A line that was being written is left out.

    Raises InputError for damaged results.
    """
    if not (folder / MACHINE).exists():
        return None
    try:
        measured_on = decode(Machine, json.loads((folder / MACHINE).read_text()), MACHINE)
        text = (folder / RESULTS).read_text() if (folder / RESULTS).exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return measured_on, [decode(Result, json.loads(line), RESULTS) for line in lines]
    except (OSError, ValueError) as error:
        raise InputError(f"The results in '{folder}' cannot be read: {error}.") from error


def measure(folder: Path, report: Callable[[BatchTask, Result], None] = lambda task, result: None) -> list[Result]:
    """Measures every candidate that has no result yet, then the fastest of each task once more.

    Raises InputError for a folder that is no batch, ArtifactError where its code cannot run here, and OSError.
    """
    batch = read(folder)
    for task in batch.tasks[:1]:
        code = (folder / task.name / DEFAULT).read_bytes()[:_HEADER]
        check_machine(code, batch.cpu_features, batch.target, f"'{folder}'", "measure it on the machine it is for.")
    here, known = machine(bool(batch.architecture)), results(folder)
    if batch.architecture and not runs_on(batch.architecture, read_gpu_architecture(0)):
        raise ArtifactError(
            f"'{folder}' holds candidates for GPUs of architecture {batch.architecture} and the one here is "
            f"{read_gpu_architecture(0)}: measure it on one that it is for."
        )
    if known is None:
        (folder / MACHINE).write_text(json.dumps(asdict(here)))
    elif known[0] != here:
        other = f"another GPU ({known[0].gpu})" if here.gpu else "a machine with other caches"
        raise InputError(f"'{folder}' was begun on {other}. Go on there, or remove {RESULTS}.")
    repair_lines(folder / RESULTS)
    run = _Run(folder, batch, here, [] if known is None else known[1], report)
    try:
        for task in batch.tasks:
            run.task(task)
    finally:
        run.helper.close()
    return run.found


class _Run:
    """What is measured is written down at once, and what is known is not measured again."""

    def __init__(
        self,
        folder: Path,
        batch: Batch,
        machine: Machine,
        found: list[Result],
        report: Callable[[BatchTask, Result], None],
    ) -> None:
        self.folder, self.batch, self.machine, self.found, self.report = folder, batch, machine, found, report
        self.helper = runner()

    def task(self, task: BatchTask) -> None:
        for candidate in range(task.candidates):
            self._measure(task, candidate, tried, self.batch.pairs, last=False)
        good = [r for r in self.found if r.task == task.name and not r.last and r.cause is None and r.ratio < 1]
        for result in sorted(good, key=lambda r: r.ratio)[:_FINALISTS]:
            self._measure(task, result.candidate, compared, LAST_PAIRS, last=True)

    def _measure(
        self, task: BatchTask, candidate: int, way: Callable[[Helper, Job], Measured], pairs: int, last: bool
    ) -> None:
        if any((r.task, r.candidate, r.last) == (task.name, candidate, last) for r in self.found):
            return
        place = self.folder / task.name
        library, default = str(place / f"{candidate}.so"), str(place / DEFAULT)
        on_gpu = bool(self.machine.gpu)
        job = Job(library, default, str(place), self.batch.threads, pairs, self.machine.largest, on_gpu)
        try:
            m = way(self.helper, job)
            result = Result(task.name, candidate, last, m.baseline, m.ratio, m.spread, time.time())
        except Failed as failed:
            result = Result(task.name, candidate, last, 0.0, 0.0, 0.0, time.time(), failed.cause, failed.text)
        self.found.append(result)
        append_line(self.folder / RESULTS, asdict(result))
        self.report(task, result)
