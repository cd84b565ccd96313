"""The command that measures an artifact: bench."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import InputError
from .options import RUNS, VERIFY_KEY, arrays, not_negative, positive, settings
from .printed import add_json, print_json
from .written import written

if TYPE_CHECKING:
    from ..profiling.benchmark import Profile
    from ..profiling.throughput import Throughput
    from ..runtime import Model

_Settings: TypeAlias = list[dict[str, int]]


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
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
    b.add_argument("--threads", type=positive, default=1, help="number of workers (1)")
    b.add_argument("--seconds", type=not_negative, default=2.0, help="how long to measure (2)")
    b.add_argument("--warm-up", type=not_negative, default=0.2, metavar="SECONDS", help="how long to run before (0.2)")
    b.add_argument(
        "--callers", type=positive, metavar="N", help="throughput: so many threads call the model at the same time"
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

    inputs, every = arrays(arguments.input), settings(arguments.dim)
    if len(every) > 1 and (arguments.trace or arguments.png):
        raise InputError("--trace and --png are of one run: give each --dim one size.")
    if arguments.callers is not None and (arguments.trace or arguments.png or arguments.against):
        raise InputError("--callers measures requests, and --against, --trace and --png kernels: leave one out.")
    model = load(arguments.artifact, verify_key=arguments.verify_key)
    return (_kernels if arguments.callers is None else _requests)(arguments, model, inputs, every)


def _kernels(arguments: argparse.Namespace, model: Model, inputs: Mapping[str, Any], every: _Settings) -> int:
    from ..profiling.benchmark import bench
    from ..profiling.report import overview

    timing = arguments.threads, arguments.seconds, arguments.against, arguments.warm_up
    profiles = []
    for each in every:
        profiles.append(bench(model, each, inputs, *timing))
        if not arguments.json:
            print(profiles[-1], end="\n\n" if len(every) > 1 else "\n", flush=True)
    if arguments.json:
        _print_json(profiles)
    elif len(every) > 1:
        print(overview(profiles))
    if arguments.trace is not None:
        with written(arguments.trace) as path:
            path.write_text(profiles[0].trace())
    if arguments.png is not None:
        with written(arguments.png) as path:
            profiles[0].save_png(path)
    return 0


def _requests(arguments: argparse.Namespace, model: Model, inputs: Mapping[str, Any], every: _Settings) -> int:
    from ..profiling.throughput import throughput

    timing = arguments.callers, arguments.threads, arguments.seconds, arguments.warm_up
    results = []
    for each in every:
        results.append(throughput(model, each, inputs, *timing))
        if not arguments.json:
            print(results[-1], flush=True)
    if arguments.json:
        _print_json(results)
    return 0


def _print_json(results: Sequence[Profile | Throughput]) -> None:
    """Print one document for one run, and a list for several."""
    data = [result.to_data() for result in results]
    print_json(data[0] if len(data) == 1 else data)
