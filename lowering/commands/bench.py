"""The command that measures an artifact: bench."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import InputError
from .json_output import add_json, print_json
from .options import RUNS, VERIFY_KEY, load_arrays, parse_nonnegative, parse_positive, parse_runs
from .output_files import replace_file

if TYPE_CHECKING:
    from ..profiling.benchmark import Profile
    from ..profiling.throughput import Throughput
    from ..runtime import Model

_Runs: TypeAlias = list[dict[str, int]]


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
    b = add_parser(
        "bench",
        help="time an artifact, kernel by kernel, beside what this machine can do",
        description="Runs an artifact on synthetic inputs, or given, and tells where the time goes: by what is "
        "computed, by kernel and by call, each beside the limits of this machine, which are measured too. With "
        "--callers it tells requests per second and their latency instead.",
        example="bench out/ --dim batch=1 --dim tokens=128\n"
        "bench out/ --dim batch=1 --dim tokens=1,128 --against model.onnx\n"
        "bench out/ --dim batch=1 --dim tokens=128 --callers 4",
    )
    b.add_argument("artifact", type=Path, help="the artifact folder")
    b.add_argument("--dim", action="append", default=[], metavar="NAME=SIZES", help=RUNS)
    b.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="others are synthetic")
    b.add_argument("--threads", type=parse_positive, default=1, help="number of workers (1)")
    b.add_argument("--seconds", type=parse_nonnegative, default=2.0, help="how long to measure (2)")
    b.add_argument(
        "--warm-up", type=parse_nonnegative, default=0.2, metavar="SECONDS", help="how long to run before (0.2)"
    )
    b.add_argument(
        "--callers",
        type=parse_positive,
        metavar="N",
        help="throughput: so many threads call the model at the same time",
    )
    b.add_argument("--verify-key", type=Path, metavar="KEY.pem", help=VERIFY_KEY)
    b.add_argument(
        "--against", type=Path, metavar="MODEL.onnx", help="the model it was compiled from: onnxruntime takes turns"
    )
    add_json(b)
    b.add_argument("--trace", type=Path, metavar="FILE", help="write a run as a timeline for ui.perfetto.dev")
    b.add_argument("--png", type=Path, metavar="FILE", help="draw the kernels' times; needs matplotlib")
    b.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from ..runtime import load

    inputs, runs = load_arrays(arguments.input), parse_runs(arguments.dim)
    if len(runs) > 1 and (arguments.trace or arguments.png):
        raise InputError("argument.run_count_mismatch", "--trace and --png show one run. Give each --dim one size.")
    if arguments.callers is not None and (arguments.trace or arguments.png or arguments.against):
        raise InputError(
            "argument.conflicting_options",
            "--callers measures requests, and --against, --trace and --png measure kernels. Leave one of them out.",
        )
    model = load(arguments.artifact, verify_key=arguments.verify_key)
    return (_measure_kernels if arguments.callers is None else _measure_requests)(arguments, model, inputs, runs)


def _measure_kernels(arguments: argparse.Namespace, model: Model, inputs: Mapping[str, Any], runs: _Runs) -> int:
    from ..profiling.benchmark import bench
    from ..profiling.report import format_overview

    timing = arguments.threads, arguments.seconds, arguments.against, arguments.warm_up
    profiles = []
    for run_sizes in runs:
        profiles.append(bench(model, run_sizes, inputs, *timing))
        if not arguments.json:
            print(profiles[-1], end="\n\n" if len(runs) > 1 else "\n", flush=True)
    if arguments.json:
        _print_json(profiles)
    elif len(runs) > 1:
        print(format_overview(profiles))
    if arguments.trace is not None:
        with replace_file(arguments.trace) as path:
            path.write_text(profiles[0].trace())
    if arguments.png is not None:
        with replace_file(arguments.png) as path:
            profiles[0].save_png(path)
    return 0


def _measure_requests(arguments: argparse.Namespace, model: Model, inputs: Mapping[str, Any], runs: _Runs) -> int:
    from ..profiling.throughput import throughput

    timing = arguments.callers, arguments.threads, arguments.seconds, arguments.warm_up
    results = []
    for run_sizes in runs:
        results.append(throughput(model, run_sizes, inputs, *timing))
        if not arguments.json:
            print(results[-1], flush=True)
    if arguments.json:
        _print_json(results)
    return 0


def _print_json(results: Sequence[Profile | Throughput]) -> None:
    """Print one document for one run, and a list for several."""
    data = [result.to_data() for result in results]
    print_json(data[0] if len(data) == 1 else data)
