"""The command that measures an artifact: bench."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError
from .options import RUNS, VERIFY_KEY, arrays, not_negative, positive, settings
from .printed import add_json, print_json
from .written import written


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
    b = add_parser(
        "bench",
        help="time an artifact, kernel by kernel, beside what this machine can do",
        description="Runs an artifact on inputs that are made up, or given, and tells where the time goes: by what is "
        "computed, by kernel and by call, each beside the limits of this machine, which are measured too.",
        example="bench out/ --dim batch=1 --dim tokens=128\n"
        "bench out/ --dim batch=1 --dim tokens=1,128 --against model.onnx",
    )
    b.add_argument("artifact", type=Path, help="the artifact folder")
    b.add_argument("--dim", action="append", default=[], metavar="NAME=SIZES", help=RUNS)
    b.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="others are made up")
    b.add_argument("--threads", type=positive, default=1, help="number of workers (1)")
    b.add_argument("--seconds", type=not_negative, default=2.0, help="how long to measure (2)")
    b.add_argument("--verify-key", type=Path, metavar="KEY.pem", help=VERIFY_KEY)
    b.add_argument(
        "--against", type=Path, metavar="MODEL.onnx", help="the model it was compiled from: onnxruntime takes turns"
    )
    add_json(b)
    b.add_argument("--trace", type=Path, metavar="FILE", help="write a run as a timeline for ui.perfetto.dev")
    b.add_argument("--png", type=Path, metavar="FILE", help="draw the kernels' times; needs matplotlib")
    b.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from ..profiling.benchmark import bench
    from ..profiling.report import overview
    from ..runtime import load

    inputs, every = arrays(arguments.input), settings(arguments.dim)
    if len(every) > 1 and (arguments.trace or arguments.png):
        raise InputError("--trace and --png are of one run: give each --dim one size.")
    model = load(arguments.artifact, verify_key=arguments.verify_key)
    profiles = []
    for each in every:
        profiles.append(bench(model, each, inputs, arguments.threads, arguments.seconds, arguments.against))
        if not arguments.json:
            print(profiles[-1], end="\n\n" if len(every) > 1 else "\n", flush=True)
    if arguments.json:
        found = [profile.to_data() for profile in profiles]
        print_json(found[0] if len(found) == 1 else found)
    elif len(every) > 1:
        print(overview(profiles))
    if arguments.trace is not None:
        with written(arguments.trace) as path:
            path.write_text(profiles[0].trace())
    if arguments.png is not None:
        with written(arguments.png) as path:
            profiles[0].save_png(path)
    return 0
