"""The commands about tuning: tune, measure, device, db."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..choices import ACCURACY_LEVELS, PRECISIONS
from ..deprecated import with_old_fields
from ..errors import InputError
from .json_output import add_json, print_json
from .options import (
    RUNS,
    TARGET,
    add_weights_option,
    parse_address,
    parse_duration,
    parse_natural,
    parse_positive,
    parse_runs,
    parse_schemes,
)

if TYPE_CHECKING:
    from ..tuning.tune import Tuning


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the commands and their options."""
    _add_tune(add_parser)
    _add_measure(add_parser)
    _add_device(add_parser)
    _add_db(add_parser)


def _add_tune(add_parser: Callable[..., Any]) -> None:
    t = add_parser(
        "tune",
        help="search the tiles of a model's kernels on this machine",
        description="Measures what the kernels of a model could be, at the sizes that you name, each candidate beside "
        "the default, and keeps everything in a database, which `compile --database` uses. It goes on where it ended.",
        example="tune model.onnx --database tuned/ --budget 20m --dim batch=1 --dim tokens=1,128",
    )
    t.add_argument("model", type=Path, help="the .onnx file")
    t.add_argument(
        "--database", type=Path, required=True, metavar="DIR", help="where records are kept, and resumed from"
    )
    t.add_argument("--target", default="cpu", help=TARGET)
    t.add_argument(
        "--budget", type=parse_duration, default=1200.0, metavar="TIME", help="such as 90s, 20m (default) or 2h"
    )
    t.add_argument("--trials", type=parse_natural, help="end after so many trials, if the time is not over before")
    t.add_argument("--effort", choices=("quick", "full"), default="full", help="how small a kernel is still tuned")
    t.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="NAME=SIZES",
        help=RUNS,
    )
    t.add_argument("--static-cache", type=parse_positive, metavar="TOKENS", help="as for compile")
    add_weights_option(t, "as for compile")
    t.add_argument("--accuracy-level", type=int, choices=ACCURACY_LEVELS, help="as for compile")
    t.add_argument("--precision", choices=PRECISIONS, help="as for compile")
    t.add_argument("--donate", action="append", default=[], metavar="REGEX", help="as for compile")
    t.add_argument("--threads", type=parse_positive, default=1, help="number of workers (1)")
    t.add_argument("--seed", type=parse_natural, default=0, help="of the search")
    t.add_argument("--runner", choices=("local", "rpc"), default="local", help="where candidates are measured (local)")
    t.add_argument("--tracker", metavar="HOST:PORT", help="rpc: TVM's tracker, `python -m tvm.exec.rpc_tracker`")
    t.add_argument("--key", action="append", default=[], help="rpc: of devices; may be repeated")
    t.add_argument(
        "--import-results",
        type=Path,
        metavar="DIR",
        help="file what `measure` measured in DIR; no search, but with --export-candidates the next ones",
    )
    t.add_argument(
        "--export-candidates",
        type=Path,
        metavar="DIR",
        help="build --trials candidates of each kernel (32) into a new folder for `measure`; no search",
    )
    add_json(t)
    t.set_defaults(run=_tune)


def _add_measure(add_parser: Callable[..., Any]) -> None:
    m = add_parser(
        "measure",
        help="measure the candidates of `tune --export-candidates`; needs no compiler",
        description="Measures the candidates in a folder that somebody carried to this machine, and writes the results "
        "beside them, for `tune --import-results`. It goes on where it ended.",
        example="measure candidates/",
    )
    m.add_argument("folder", type=Path, metavar="DIR", help="which also takes the results")
    add_json(m)
    m.set_defaults(run=_measure)


def _add_device(add_parser: Callable[..., Any]) -> None:
    e = add_parser(
        "device",
        help="measure candidates for `tune --runner rpc`; needs no compiler, and a trusted network",
        description="Registers this machine at a tracker of TVM and measures what `tune --runner rpc` sends, until it "
        "is interrupted. Who reaches the tracker runs code here.",
        example="device --tracker 10.0.0.1:9190 --key arm-board",
    )
    e.add_argument("--tracker", required=True, metavar="HOST:PORT", help="where this device registers")
    e.add_argument("--key", required=True, help="the name of machines like this one")
    e.set_defaults(run=_device)


def _add_db(add_parser: Callable[..., Any]) -> None:
    x = add_parser(
        "db",
        help="look at databases of `tune`, join them, keep what matters",
        description="Shows what was tuned (show, plot), joins databases (merge), removes all but the fastest trials "
        "(prune), and copies what won: for another machine (export), or compressed as presets are (pack).",
        example="db show tuned/\ndb merge here/ there/ -o both/",
    )
    x.add_argument("action", choices=("show", "merge", "prune", "export", "pack", "plot"))
    x.add_argument("databases", type=Path, nargs="+", metavar="DIR", help="of `tune --database`; merge takes several")
    x.add_argument(
        "-o", "--output", type=Path, help="the database to add to (merge, export, pack), or the picture (plot)"
    )
    x.add_argument("--keep", type=parse_positive, default=16, help="prune: trials that stay of each task (16)")
    x.add_argument("--least", type=float, default=1.03, help="pack: what won by so much, as presets are (1.03)")
    add_json(x)
    x.set_defaults(run=_db)


def _tune(arguments: argparse.Namespace) -> int:
    document: dict[str, Any] = {}
    tuning = None
    if arguments.import_results is not None:
        from ..tuning.batches import file_results

        filed = file_results(arguments.import_results, arguments.database, arguments.target)
        document["filed"] = asdict(filed)
        if not arguments.json:
            faster = f"{filed.won} of these are faster than the default"
            print(f"filed {filed.trials} trials of {filed.tasks} kernels; {faster}")
    if arguments.import_results is None or arguments.export_candidates is not None:
        tuning = _run_tuning(arguments)
        if arguments.export_candidates is not None:
            _report_export(arguments, tuning, document)
        elif arguments.json:
            outcomes = [{**vars(o), "failures": dict(o.failures), "gain": o.gain} for o in tuning.outcomes]
            document |= {**vars(tuning), "outcomes": outcomes, "gain": tuning.gain, "interrupted": tuning.interrupted}
        else:
            from ..tuning.table import print_tuning

            print_tuning(tuning)
    if arguments.json:
        print_json(document)
    return 130 if tuning is not None and tuning.interrupted else 0


def _report_export(arguments: argparse.Namespace, tuning: Tuning, document: dict[str, Any]) -> None:
    total, folder = sum(outcome.trials for outcome in tuning.outcomes), arguments.export_candidates
    document["exported"] = {"folder": folder, "candidates": total, "kernels": len(tuning.outcomes)}
    if not arguments.json:
        print(f"wrote {total} candidates of {len(tuning.outcomes)} kernels to {folder}")


def _run_tuning(arguments: argparse.Namespace) -> Tuning:
    from ..tuning.table import ProgressDisplay
    from ..tuning.tune import tune

    with ProgressDisplay() as watch:
        return tune(
            arguments.model,
            arguments.database,
            arguments.target,
            budget=arguments.budget,
            trials=arguments.trials,
            effort=arguments.effort,
            sizes=parse_runs(arguments.dim),
            threads=arguments.threads,
            static_cache=arguments.static_cache,
            weights=parse_schemes(arguments.weights),
            accuracy_level=arguments.accuracy_level,
            donate=arguments.donate,
            seed=arguments.seed,
            progress=watch,
            tracker=_read_tracker(arguments),
            keys=arguments.key,
            export=arguments.export_candidates,
            precision=arguments.precision,
        )


def _read_tracker(arguments: argparse.Namespace) -> tuple[str, int] | None:
    """Return host and port of the tracker, or None.

    Raises:
        InputError: Options do not go together.
    """
    if arguments.runner == "rpc" and (arguments.tracker is None or not arguments.key):
        raise InputError("argument.option_missing", "--runner rpc needs --tracker HOST:PORT and --key NAME.")
    if arguments.runner == "local" and (arguments.tracker is not None or arguments.key):
        raise InputError(
            "argument.option_requires_other",
            "--tracker and --key are only for --runner rpc. Leave them out, or give --runner rpc.",
        )
    return None if arguments.tracker is None else parse_address(arguments.tracker)


def _device(arguments: argparse.Namespace) -> int:
    from ..fleet.device import serve

    host, port = parse_address(arguments.tracker)
    print(f"registers at {host}:{port} as '{arguments.key}'; Ctrl-C ends it", flush=True)
    serve((host, port), arguments.key)
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    from ..measuring.batch import BatchTask, Result, measure_batch

    def report(task: BatchTask, result: Result) -> None:
        outcome = (
            f"{1 / result.ratio:.3f}x the default's speed" if result.cause is None else f"{result.cause}: {result.text}"
        )
        print(f"{task.title} [{result.candidate}]{' again' if result.last else ''}: {outcome}", flush=True)

    if arguments.json:
        print_json({"results": [asdict(result) for result in measure_batch(arguments.folder)]})
        return 0
    results = measure_batch(arguments.folder, report)
    failed = sum(result.cause is not None for result in results)
    print(f"{len(results)} results in {arguments.folder}, {failed} of candidates that failed")
    return 0


def _db(arguments: argparse.Namespace) -> int:
    from ..tuning.db import run_action

    result = run_action(arguments.action, arguments.databases, arguments.output, arguments.keep, arguments.least)
    if arguments.json:
        print_json(with_old_fields(result.document))
    else:
        print(result.text)
    return 0
