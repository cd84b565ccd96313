"""Batches of candidates for machines without a network: built here, measured there, and filed here.

A batch is a folder (measuring/batch.py). The folder of a task also has the task, the choices of its candidates in
order, and a database with their traces, which turn the results into ordinary records.
"""

from __future__ import annotations

from ..compiling import without_torch  # noqa: F401  (before any import of tvm)

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
from ..measuring.batch import BATCH, DEFAULT, FORMAT, Batch, BatchTask, Result, read_batch, read_results
from ..measuring.isolated import CandidateFailure, Cause
from ..measuring.trial import is_win
from ..target import Target, resolve
from ..tuning_records.candidate_choices import read_choice, read_trace_choice
from ..tuning_records.database import TuningDatabase, open_writable
from ..tuning_records.task import MAIN
from .local import LibraryBuilder
from .search.context import TuningContext, create_candidate, create_search_strategy
from .search.cost_model import create_cost_model, predicted, train_on_database
from .search.space import create_space

_TASK, _CHOICES = "task.json", "choices.jsonl"


@dataclass(frozen=True)
class FilingResult:
    """The result of `file_results`: filed tasks and trials, and the number of tasks with a faster choice."""

    tasks: int
    trials: int
    won: int


def export_batch(
    folder: Path,
    tasks: Mapping[str, tuple[str, tvm.IRModule]],
    database: TuningDatabase,
    library_builder: LibraryBuilder,
    target: Target,
    threads: int,
    pairs: int,
    count: int,
    seed: int,
) -> Batch:
    """Build `count` candidates of each task, by hash and with a title, next to its arguments.

    The arguments are in the folder already. The candidates are those that the database's records predict to be fastest.
    Raises Failed for a default that cannot be built.
    """
    batch_tasks = []
    for name, (title, module) in tasks.items():
        task_folder = folder / name
        library_builder.folder = task_folder
        unscheduled_library = library_builder.build(module, "plain.so", plain=True)
        library_builder.build(module, DEFAULT)
        library_builder.expect(unscheduled_library)
        unscheduled_library.unlink()
        choices: list[str] = []
        traces = open_writable(task_folder)
        workload = traces.commit_workload(module)
        for choice, trace in _propose_candidates(module, target.tvm, threads, database, count, seed):
            try:
                library_builder.build_trace(module, trace, f"{len(choices)}.so")
            except CandidateFailure as failed:
                database.record_failure(module, choice, failed)
                continue
            info = ms.arg_info.ArgInfo.from_prim_func(module[MAIN])
            traces.commit_tuning_record(ms.database.TuningRecord(trace, workload, None, target.tvm, info))
            choices.append(choice)
        (task_folder / _TASK).write_text(tvm.ir.save_json(module))
        (task_folder / _CHOICES).write_text("".join(f"{choice}\n" for choice in choices))
        batch_tasks.append(BatchTask(name, title, len(choices)))
    batch = Batch(FORMAT, target.name, target.cpu_features, target.architecture, threads, pairs, tuple(batch_tasks))
    (folder / BATCH).write_text(json.dumps(asdict(batch), indent=1))
    return batch


def _propose_candidates(
    module: tvm.IRModule, target: tvm.target.Target, threads: int, database: TuningDatabase, count: int, seed: int
) -> list[tuple[str, Trace]]:
    """Return candidates without a record in the database, the most promising first."""
    space = create_space(module, target, threads)
    model = create_cost_model(space, seed)
    context = TuningContext(module, space.target, space.generator(), create_search_strategy(), "export", seed + 1)
    train_on_database(model, context, module, database)
    excluded = {space.default, *database.measured_seconds(module), *database.failures(module)}
    population = 2 * count + len(excluded)  # recorded candidates are proposed again
    context.pre_tuning(population, population, database=database.trials, cost_model=model)
    candidates = list(context.generate_measure_candidates() or ())
    candidates.sort(key=lambda proposal: predicted(model, context, proposal))
    traces_by_choice = {text: c.sch.trace for c in candidates if (text := read_choice(c.sch.mod)) is not None}
    context.post_tuning()
    return [(choice, trace) for choice, trace in traces_by_choice.items() if choice not in excluded][:count]


def file_results(folder: Path, database: Path, target: str) -> FilingResult:
    """File the measurements of a batch in the database, for the architecture of the measuring machine.

    Measurements that are already filed are skipped.

    Args:
        folder: The folder of the batch.
        database: The database folder.
        target: The target that the batch was exported for.

    Returns:
        The numbers of filed tasks, filed trials and tasks with a faster choice.

    Raises:
        InputError: The batch lacks measurements.
    """
    batch, measured = read_batch(folder), read_results(folder)
    if measured is None:
        raise InputError(
            "measure.results_missing", f"Nothing in '{folder}' was measured yet. Run `onnx-lowering measure` there."
        )
    (resolved,) = resolve(target)
    measured_on, all_results = measured
    records = TuningDatabase(database, resolved, measured_on)
    tasks = trials = won = 0
    for task in batch.tasks:
        task_results = [result for result in all_results if result.task == task.name]
        if task_results:
            module = tvm.ir.load_json((folder / task.name / _TASK).read_text())
            choices = (folder / task.name / _CHOICES).read_text().splitlines()
            task_records = open_writable(folder / task.name).get_all_tuning_records()
            traces = {read_trace_choice(record.trace): record.trace for record in task_records}
            filed, has_won = _file_task(records, module, [traces[c] for c in choices], task_results, resolved.tvm)
            tasks, trials, won = tasks + 1, trials + filed, won + has_won
    return FilingResult(tasks, trials, won)


def _file_task(
    records: TuningDatabase,
    module: tvm.IRModule,
    traces: list[Trace],
    read_results: list[Result],
    target: tvm.target.Target,
) -> tuple[int, bool]:
    """File the results of a task. Return the number of trials, and whether a candidate has won."""
    space = create_space(module, target)
    timings, failures = records.measured_seconds(module), records.failures(module)
    reference = timings.get(space.default)
    if reference is None:
        reference = median([r.default for r in read_results if r.cause is None] or [1.0])
        records.commit(module, space.default_trace(module), reference, target)
    if records.best_record(module) is None:
        records.record_best(module, space.default_trace(module), reference, target)
    model, filed = create_cost_model(space, 0), 0
    context = TuningContext(module, space.target, space.generator(), create_search_strategy(), "import", 1)
    best: tuple[float, Trace] | None = None
    for result in read_results:
        trace = traces[result.candidate]
        choice = read_trace_choice(trace) or ""
        if result.cause is not None:
            if choice not in failures:
                records.record_failure(module, choice, CandidateFailure(cast(Cause, result.cause), result.text))
                filed += 1
        elif result.last:
            if is_win(result.ratio, result.spread) and (best is None or result.ratio < best[0]):
                best = result.ratio, trace
        elif choice not in timings:
            expected = predicted(model, context, create_candidate(module, trace))
            records.commit(module, trace, reference * result.ratio, target, expected)
            filed += 1
    if best is not None:
        records.record_best(module, best[1], reference * best[0], target)
    return filed, best is not None
