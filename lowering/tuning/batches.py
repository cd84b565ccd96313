"""Batches of candidates for machines that the network does not reach: built here, measured there, filed here.

A batch is a folder (measuring/batch.py). In the folder of a task lie also the task, the texts of its candidates in
order and a database with their traces, by which the results become records like any other.
"""

from __future__ import annotations

from ..compiling import without_torch  # noqa: F401  (before whatever imports tvm)

# isort: split

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import cast

import tvm
from tvm.s_tir import Trace
from tvm.s_tir import meta_schedule as ms

from ..errors import InputError
from ..measuring.batch import BATCH, DEFAULT, FORMAT, Batch, BatchTask, Result, read, results
from ..measuring.isolated import Cause, Failed
from ..measuring.trial import wins
from ..target import Target, resolve
from .choices import annotated, recorded
from .context import Context, candidate, strategy
from .cost_model import learn, model_of, predicted
from .database import Database, opened
from .local import Workshop
from .space import space_of
from .task import MAIN

_TASK, _CHOICES = "task.json", "choices.jsonl"


@dataclass(frozen=True)
class Filed:
    """What `file_results` did: tasks and trials that were filed, and how many tasks have a faster choice now."""

    tasks: int
    trials: int
    won: int


def export(
    folder: Path,
    tasks: Mapping[str, tuple[str, tvm.IRModule]],
    database: Database,
    workshop: Workshop,
    target: Target,
    threads: int,
    pairs: int,
    count: int,
    seed: int,
) -> Batch:
    """Builds so many candidates of each task, by hash and with a title, beside its arguments, which are in the folder.

    They are those that the database's records let expect most of. Raises Failed for a default that cannot be built.
    """
    listed = []
    for name, (title, module) in tasks.items():
        place = folder / name
        workshop.folder = place
        plain = workshop.build(module, "plain.so", plain=True)
        workshop.build(module, DEFAULT)
        workshop.expect(plain)
        plain.unlink()
        choices: list[str] = []
        traces = opened(place)
        workload = traces.commit_workload(module)
        for choice, trace in _proposed(module, target.tvm, threads, database, count, seed):
            try:
                workshop.build_trace(module, trace, f"{len(choices)}.so")
            except Failed as failed:
                database.fail(module, choice, failed)
                continue
            info = ms.arg_info.ArgInfo.from_prim_func(module[MAIN])
            traces.commit_tuning_record(ms.database.TuningRecord(trace, workload, None, target.tvm, info))
            choices.append(choice)
        (place / _TASK).write_text(tvm.ir.save_json(module))
        (place / _CHOICES).write_text("".join(f"{choice}\n" for choice in choices))
        listed.append(BatchTask(name, title, len(choices)))
    batch = Batch(FORMAT, target.name, target.cpu_features, target.architecture, threads, pairs, tuple(listed))
    (folder / BATCH).write_text(json.dumps(asdict(batch), indent=1))
    return batch


def _proposed(
    module: tvm.IRModule, target: tvm.target.Target, threads: int, database: Database, count: int, seed: int
) -> list[tuple[str, Trace]]:
    """Candidates that the database knows nothing of, the most promising first."""
    space = space_of(module, target, threads)
    model = model_of(space, seed)
    context = Context(module, space.target, space.generator(), strategy(), "export", seed + 1)
    learn(model, context, module, database)
    old = {space.default, *database.known(module), *database.failed(module)}
    asked = 2 * count + len(old)  # what is known comes up again
    context.pre_tuning(asked, asked, database=database.trials, cost_model=model)
    candidates = list(context.generate_measure_candidates() or ())
    candidates.sort(key=lambda candidate: predicted(model, context, candidate))
    found = {text: c.sch.trace for c in candidates if (text := annotated(c.sch.mod)) is not None}
    context.post_tuning()
    return [(choice, trace) for choice, trace in found.items() if choice not in old][:count]


def file_results(folder: Path, database: Path, target: str) -> Filed:
    """Files what was measured in a batch in the database, for the architecture of the machine that measured.

    target is the one that the batch was made for. What is there already is not filed again. Raises InputError where
    nothing was measured.
    """
    batch, measured = read(folder), results(folder)
    if measured is None:
        raise InputError(f"Nothing in '{folder}' was measured yet: run `onnx-lowering measure` there.")
    (found,) = resolve(target)
    measured_on, lines = measured
    records = Database(database, found, measured_on)
    tasks = trials = won = 0
    for task in batch.tasks:
        mine = [result for result in lines if result.task == task.name]
        if mine:
            module = tvm.ir.load_json((folder / task.name / _TASK).read_text())
            choices = (folder / task.name / _CHOICES).read_text().splitlines()
            its = opened(folder / task.name).get_all_tuning_records()
            traces = {recorded(record.trace): record.trace for record in its}
            filed, better = _file(records, module, [traces[c] for c in choices], mine, found.tvm)
            tasks, trials, won = tasks + 1, trials + filed, won + better
    return Filed(tasks, trials, won)


def _file(
    records: Database, module: tvm.IRModule, traces: list[Trace], found: list[Result], target: tvm.target.Target
) -> tuple[int, bool]:
    """How many trials of a task were filed, and whether one has won."""
    space = space_of(module, target)
    known, failed = records.known(module), records.failed(module)
    reference = known.get(space.default)
    if reference is None:
        reference = median([r.default for r in found if r.cause is None] or [1.0])
        records.commit(module, space.default_trace(module), reference, target)
    if records.best_record(module) is None:
        records.record_best(module, space.default_trace(module), reference, target)
    model, filed = model_of(space, 0), 0
    context = Context(module, space.target, space.generator(), strategy(), "import", 1)
    best: tuple[float, Trace] | None = None
    for result in found:
        trace = traces[result.candidate]
        choice = recorded(trace) or ""
        if result.cause is not None:
            if choice not in failed:
                records.fail(module, choice, Failed(cast(Cause, result.cause), result.text))
                filed += 1
        elif result.last:
            if wins(result.ratio, result.spread) and (best is None or result.ratio < best[0]):
                best = result.ratio, trace
        elif choice not in known:
            expected = predicted(model, context, candidate(module, trace))
            records.commit(module, trace, reference * result.ratio, target, expected)
            filed += 1
    if best is not None:
        records.record_best(module, best[1], reference * best[0], target)
    return filed, best is not None
