"""The commands: `python -m benchmarks cpu|tune|cuda [case or group ...]`, `... compile|shares|stores|pages`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

_EXPORTS = "folder of the exported models, for 'models', 'published' and 'exporter'"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    cpu = commands.add_parser("cpu", help="measure us and the peers side by side")
    cpu.add_argument("case", nargs="*", help="names, groups or patterns of cases; default: all")
    cpu.add_argument("--list", action="store_true", help="print the cases and stop")
    cpu.add_argument("--peers", default="torch,onnxruntime,openvino", help="default: %(default)s")
    cpu.add_argument("--threads", type=int, default=1)
    cpu.add_argument("--target", default="cpu", help="what ours is compiled for, such as cpu:x86-64-v3")
    cpu.add_argument("--tuned", type=Path, metavar="DIR", help="measure ours with this database of `tune`, too")
    cpu.add_argument("--turns", type=int, default=7, help="turns of every contender; default: %(default)s")
    cpu.add_argument("--seconds", type=float, default=0.1, help="length of a turn; default: %(default)s")
    cpu.add_argument("--exports", type=Path, help=_EXPORTS)
    cpu.add_argument("--minutes", type=float, default=math.inf, help="then no new case is begun; default: no limit")
    cpu.add_argument(
        "--quick",
        action="store_true",
        help="3 turns of 0.05 seconds or one call, one opset for each model of 'published', and 30 minutes",
    )
    cpu.add_argument("--out", type=Path, help="write records to this JSON file, and draw a PNG next to it")
    cpu.add_argument("--resume", action="store_true", help="leave out the cases that --out already has")
    cpu.set_defaults(run=_cpu)
    tune = commands.add_parser("tune", help="tune the models of cases at their sizes, for `cpu --tuned`")
    tune.add_argument("case", nargs="*", help="names, groups or patterns of cases; default: all")
    tune.add_argument("--database", type=Path, required=True, metavar="DIR", help="where records are stored")
    tune.add_argument("--minutes", type=float, default=10.0, help="for each model; default: %(default)s")
    tune.add_argument("--effort", choices=("quick", "full"), default="full", help="as for `onnx-lowering tune`")
    tune.add_argument("--threads", type=int, default=1)
    tune.add_argument("--seed", type=int, default=0)
    tune.add_argument("--exports", type=Path, help=_EXPORTS)
    tune.set_defaults(run=_tune)
    cuda = commands.add_parser("cuda", help="check and time every kernel on a Hopper GPU, compared with PyTorch")
    cuda.add_argument("case", nargs="*", help="names, groups or patterns of cases; default: all")
    cuda.add_argument("--bundle", type=Path, help="measure nothing: build what a GPU host needs into this folder")
    cuda.add_argument("--python", help="version of Python on that host, such as 3.12; default: this one's")
    cuda.add_argument("--out", type=Path, help="folder of the results; existing ones stay")
    cuda.add_argument("--minutes", type=float, default=8.0, help="then no new job is started; default: %(default)s")
    cuda.add_argument("--copy", type=Path, help="a second folder that gets the results at once, too")
    cuda.add_argument("--with", nargs="*", default=[], dest="requested", help="peers that compile: flex, compiled")
    cuda.add_argument("--draw", type=Path, metavar="FILE", help="only print and draw a results file")
    cuda.set_defaults(run=_cuda)
    _add_compile(commands)
    shares = commands.add_parser("shares", help="how a decoder's work is divided among 8 to 64 threads, computed")
    shares.add_argument("--rows", type=int, nargs="+", default=[1, 512], help="new tokens; default: %(default)s")
    shares.add_argument("--past", type=int, default=1024, help="tokens before them; default: %(default)s")
    shares.add_argument("--threads", type=int, nargs="+", default=[8, 16, 32, 64], help="default: %(default)s")
    shares.set_defaults(run=_shares)
    stores = commands.add_parser(
        "stores", help="the cost of pages, offsets and quantization when a CPU reads and writes them"
    )
    stores.add_argument("--threads", type=int, default=1)
    stores.add_argument("--turns", type=int, default=7, help="turns of every contender; default: %(default)s")
    stores.add_argument("--seconds", type=float, default=0.1, help="length of a turn; default: %(default)s")
    stores.set_defaults(run=_stores)
    pages = commands.add_parser("pages", help="quote benchmarks/results in docs/results.md and README.md")
    pages.add_argument("--check", action="store_true", help="change nothing, fail where one is out of date")
    pages.set_defaults(run=_pages)
    arguments = parser.parse_args()
    arguments.run(arguments)


def _add_compile(commands: Any) -> None:
    compiled = commands.add_parser(
        "compile", help="CPU time and memory of compiling a decoder of a published width, such as `compile llama-8b`"
    )
    compiled.add_argument("decoder", nargs="+", choices=("llama-1b", "llama-8b"))
    compiled.add_argument("--dtype", choices=("float32", "float16", "bfloat16", "int4"), default="float16")
    compiled.add_argument("--folder", type=Path, help="where models and artifacts are for a while")
    compiled.add_argument("--options", default="", help="options of `onnx-lowering compile`, such as '--weights int4'")
    compiled.set_defaults(run=_compile)


def _cpu(arguments: argparse.Namespace) -> None:
    # Before anything with a thread pool of its own is imported.
    cores = sorted(os.sched_getaffinity(0))[-arguments.threads :]
    os.sched_setaffinity(0, cores)
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(arguments.threads)
    from .cases import chosen
    from .cases.published import quick

    try:
        cases = chosen(arguments.case, arguments.exports)
    except ValueError as error:
        sys.exit(str(error))
    if arguments.quick:
        cases = quick(cases)
        arguments.turns, arguments.seconds = 3, 0.05
        arguments.minutes = min(arguments.minutes, 30.0)
    if arguments.list:
        for case in cases:
            print(f"{case.group:12} {case.name}")
        return
    if len(cores) < arguments.threads:
        sys.exit(f"there are {len(cores)} CPUs for --threads {arguments.threads}.")
    if arguments.resume and arguments.out is None:
        sys.exit("--resume needs --out, which says what is there already.")
    from .run import run

    run(cases, arguments)


def _tune(arguments: argparse.Namespace) -> None:
    from .cases import chosen
    from .tune import run

    try:
        run(chosen(arguments.case, arguments.exports), arguments)
    except ValueError as error:
        sys.exit(str(error))


def _cuda(arguments: argparse.Namespace) -> None:
    from .gpu.command import run

    run(arguments)


def _compile(arguments: argparse.Namespace) -> None:
    from .large_decoders import run

    run(arguments.decoder, arguments.dtype, arguments.options.split(), arguments.folder)


def _shares(arguments: argparse.Namespace) -> None:
    from .thread_shares import run

    run(arguments.rows, arguments.past, arguments.threads)


def _stores(arguments: argparse.Namespace) -> None:
    import tvm_ffi

    from . import appends, page_reads, stores

    tvm_ffi.get_global_func("runtime.config_threadpool")(1, arguments.threads)
    for table in (stores, appends, page_reads):
        table.run(arguments.threads, arguments.turns, arguments.seconds)


def _pages(arguments: argparse.Namespace) -> None:
    from .pages import update

    update(arguments.check)


if __name__ == "__main__":
    main()
