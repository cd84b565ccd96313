"""The command `onnx-lowering`: parses arguments, calls the library, prints.

No logic of its own.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..errors import InputError, LoweringError
from ..machine import runtime_alone
from ..version import VERSION
from . import cache, doctor, inspecting, packaging, tuning
from .options import PRECISIONS, arrays, call, dim, natural, not_negative, positive, settings, sizes

if TYPE_CHECKING:
    from ..graph.serve import Serve
    from .verification import Comparison

_TARGET = (
    "cpu (this machine, the default), cpu:x86-64-v3, cpu:x86-64-v4, cpu:aarch64, cuda (the GPU here), or cuda: and "
    "architectures: sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120, with commas between"
)

_DIM = "fix a symbolic dimension, or NAME=LOW..HIGH: its legal sizes"

_WEIGHTS = "compress the constant matrices of products"

_PRECISION = (
    "compute the products of a model of float32, and store weights and caches, in this type; fast: products of float32 "
    "and float16 in bfloat16 where the target multiplies it faster, with caches as they are; tf32, 3xtf32: multiply "
    "float32 itself on tensor cores, rounded to TF32 or in two parts"
)

_VERIFY = "refuse an artifact that was not signed with the other half of this Ed25519 public key"


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Returns 0, or 1 when the model, the comparison or an input is not all right, or as shells do 130 when it was
    interrupted and 141 when nobody reads what it prints. What went wrong is one sentence; with -v, Python's traceback
    comes before it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of any characters, whatever the locale can write
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still wants to write at its end
        return 128 + signal.SIGPIPE
    except (Exception, KeyboardInterrupt) as error:
        if arguments.verbose:
            traceback.print_exc()
        print(_sentence(arguments, error), file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _sentence(arguments: argparse.Namespace, error: BaseException) -> str:
    command = arguments.command
    if isinstance(error, KeyboardInterrupt):
        return f"{command} was interrupted"
    if isinstance(error, LoweringError):
        return f"error: {error}"
    if isinstance(error, OSError):
        files = [name for name in (error.filename, error.filename2) if name is not None]
        if not files and getattr(arguments, "output", None) is not None:
            files = [arguments.output]  # what was being written: errors of a write, such as a full disk, name no file
        return f"error: {command}: {error.strerror or error}" + (f": {' and '.join(map(str, files))}" if files else "")
    if isinstance(error, ModuleNotFoundError) and runtime_alone():
        return (
            f"error: {command} needs the compiler, which onnx-lowering-runtime leaves out: "
            "pip uninstall onnx-lowering-runtime, then pip install onnx-lowering."
        )
    if isinstance(error, MemoryError):
        return f"error: {command} needs more memory than there is"
    return f"error: {command} failed by a fault of ours ({type(error).__name__}); please report it with what -v prints"


def _serve(arguments: argparse.Namespace) -> Serve | None:
    if arguments.serve is None:
        if arguments.cache is not None:
            raise InputError("--cache says how --serve CONTEXT keeps keys and values: give both.")
        return None
    from ..graph.serve import Serve

    return Serve(arguments.serve, cache=arguments.cache or "model")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onnx-lowering", description="Compiles ONNX models ahead of time; attention becomes tiled TensorIR."
    )
    parser.add_argument("--version", action="version", version=f"onnx-lowering {VERSION}")
    subparsers = parser.add_subparsers(metavar="command", dest="command", required=True)
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("-v", "--verbose", action="store_true", help="on an error, print Python's traceback as well")
    add_parser = functools.partial(subparsers.add_parser, parents=[every])

    c = add_parser("compile", help="compile a model into an artifact folder")
    c.add_argument("model", type=Path, help="the .onnx file")
    c.add_argument("-o", "--output", type=Path, required=True, help="the artifact folder to write")
    c.add_argument("--target", default="cpu", help=_TARGET)
    c.add_argument("--cc", help="the C compiler that links, for instance a cross compiler")
    c.add_argument("--donate", action="append", default=[], metavar="REGEX", help="inputs to consume; may be repeated")
    c.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help=_DIM)
    c.add_argument(
        "--static-cache", type=positive, metavar="TOKENS", help="turn a growing past into in-place slot caches"
    )
    c.add_argument(
        "--serve", type=positive, metavar="CONTEXT", help="serve packed requests of up to so many tokens, paged"
    )
    c.add_argument("--cache", choices=("model", "int8"), help="with --serve: the type of keys and values in the cache")
    c.add_argument("--weights", choices=("int8", "int4", "f16"), help=_WEIGHTS)
    c.add_argument("--precision", choices=PRECISIONS, help=_PRECISION)
    c.add_argument("--database", type=Path, metavar="DIR", help="records of `tune` that pick the tiles of kernels")
    c.add_argument("--threads", type=positive, help="default number of workers (else the CPUs the caller may use)")
    c.add_argument("--no-checks", action="store_true", help="runs look at no tables of serving operators")
    c.add_argument("--sign", type=Path, metavar="KEY.pem", help="sign the artifact with this Ed25519 private key")
    c.add_argument("--dump-dir", type=Path, help="write fused.onnx and the module after every pass into this folder")
    c.set_defaults(run=_compile)

    tuning.add(add_parser, _TARGET)

    r = add_parser("run", help="run an artifact on .npy files")
    r.add_argument("artifact", type=Path, help="the artifact folder")
    r.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="one per input")
    r.add_argument(
        "--output-dir", type=Path, help="write every output as NAME.npy into this folder, odd characters as %%XX"
    )
    r.add_argument("--threads", type=positive, help="number of workers")
    r.add_argument("--verify-key", type=Path, metavar="KEY.pem", help=_VERIFY)
    r.set_defaults(run=_run)

    b = add_parser("bench", help="time an artifact, kernel by kernel, beside what this machine can do")
    b.add_argument("artifact", type=Path, help="the artifact folder")
    b.add_argument(
        "--dim", action="append", default=[], metavar="NAME=SIZE[,SIZE]",
        help="one per symbolic dimension; several sizes are measured one after the other",
    )  # fmt: skip
    b.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="others are made up")
    b.add_argument("--threads", type=positive, default=1, help="number of workers (1)")
    b.add_argument("--seconds", type=not_negative, default=2.0, help="how long to measure (2)")
    b.add_argument("--verify-key", type=Path, metavar="KEY.pem", help=_VERIFY)
    b.add_argument(
        "--against", type=Path, metavar="MODEL.onnx", help="the model it was compiled from: onnxruntime takes turns"
    )
    b.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    b.add_argument("--trace", type=Path, metavar="FILE", help="write a run as a timeline for ui.perfetto.dev")
    b.add_argument("--png", type=Path, metavar="FILE", help="draw the kernels' times; needs matplotlib")
    b.set_defaults(run=_bench)

    inspecting.add(add_parser)

    v = add_parser("verify", help="compile, run, and compare every output with a reference")
    v.add_argument("model", type=Path, help="the .onnx file")
    v.add_argument("--against", choices=("reference", "onnxruntime"), default="reference")
    v.add_argument("--target", default="cpu", help=_TARGET)
    v.add_argument("--weights", choices=("int8", "int4", "f16"), help=_WEIGHTS)
    v.add_argument("--precision", choices=PRECISIONS, help=_PRECISION)
    v.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="others are made up")
    v.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help="a symbolic dimension (else 4)")
    v.add_argument("--rtol", type=not_negative, help="allowed of an element (1e-3; where numbers are rounded, by type)")
    v.add_argument("--atol", type=not_negative, help="allowed beside it (1e-5)")
    v.add_argument("--seed", type=natural, default=0, help="of the inputs that are made up")
    v.add_argument("--donate", action="append", default=[], metavar="REGEX", help="as for compile")
    v.add_argument("--threads", type=positive, help="number of workers")
    v.add_argument("--json", action="store_true", help="print the comparisons as JSON")
    v.set_defaults(run=_verify)

    q = add_parser("quantise", help="write a float model with its products in 8 bits, and tell the error by node")
    q.add_argument("model", type=Path, help="the .onnx file")
    q.add_argument("-o", "--output", type=Path, required=True, help="the .onnx file to write")
    q.add_argument(
        "--calls", action="append", default=[], type=Path, metavar="FILE.npz", help="inputs by name of one call"
    )
    q.add_argument("--dynamic", action="store_true", help="scales from each call, also with --calls")
    q.add_argument("--weights", choices=("int8", "uint8"), default="int8", help="the type of weights (int8)")
    q.add_argument("--per-tensor", action="store_true", help="one scale for a matrix, not one for each column")
    q.add_argument("--exclude", action="append", default=[], metavar="NODE", help="a product that stays in floats")
    q.add_argument("--json", type=Path, metavar="FILE", help="write the report, with all nodes")
    q.set_defaults(run=_quantise)

    k = add_parser("check", help="list every node that cannot be lowered, before any compile")
    k.add_argument("model", type=Path, help="the .onnx file")
    k.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help=_DIM)
    k.add_argument("--json", action="store_true", help="print the report as JSON")
    k.set_defaults(run=_check)

    packaging.add(add_parser)
    doctor.add(add_parser)
    cache.add(add_parser)

    d = add_parser("demo", help="build, compile, load and run a small decoder with in-place caches")
    d.add_argument("-o", "--output", type=Path, help="keep the model and its artifact in this folder")
    d.set_defaults(run=_demo)
    return parser


def _compile(arguments: argparse.Namespace) -> int:
    import onnx_ir as ir

    from ..compiling.compiler import compile_to
    from . import progress

    steps = itertools.count(1)

    def dump(name: str, module: Any) -> None:
        if isinstance(module, ir.Model):
            ir.save(module, arguments.dump_dir / f"{name}.onnx", external_data=f"{name}.onnx.data")
            return
        (arguments.dump_dir / f"{next(steps):02}_{name}.py").write_text(module.script() + "\n")

    if arguments.dump_dir is not None:
        arguments.dump_dir.mkdir(parents=True, exist_ok=True)
    with progress.shown():
        manifest = compile_to(
            arguments.output,
            arguments.model,
            arguments.target,
            arguments.donate,
            arguments.threads,
            arguments.cc,
            dims=dict(dim(text) for text in arguments.dim),
            static_cache=arguments.static_cache,
            weights=arguments.weights,
            database=arguments.database,
            serve=_serve(arguments),
            dump=dump if arguments.dump_dir is not None else None,
            sign_key=arguments.sign,
            checks=not arguments.no_checks,
            precision=arguments.precision,
        )
    for note in manifest.notes:
        print(f"note: {note}")
    for title, tensors in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        print(f"{title}:")
        for t in tensors:
            where = manifest.donated.get(t.name)
            print(f"  {t.name}: {t.dtype}{list(t.dims)}" + (f", donated to {where}" if where else ""))
    if arguments.database is not None or any(kernel.source for kernel in manifest.kernels):
        for kernel in manifest.kernels:
            print(f"{kernel.name}: {kernel.source or 'default'}")
    print(f"weights: {sum(w.nbytes for w in manifest.weights) / 2**20:.1f} MiB")
    print(f"wrote {arguments.output} for {manifest.target}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    import numpy as np

    from ..runtime import load

    model = load(arguments.artifact, threads=arguments.threads, verify_key=arguments.verify_key)
    outputs = model.run(arrays(arguments.input))
    for name, array in outputs.items():
        print(f"{name}: {array.dtype}{list(array.shape)}")
        if arguments.output_dir is None:
            print(np.array2string(np.asarray(array), threshold=16, edgeitems=2))
        else:
            with _written(arguments.output_dir / f"{quote(name, safe='')}.npy") as path, path.open("wb") as file:
                np.save(file, array.astype(str) if array.dtype == object else array, allow_pickle=False)
    return 0


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """A file that is whole when it has its name: written beside it first. Raises LoweringError, which says where."""
    part = path.with_name(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except OSError as error:
        raise LoweringError(f"'{path}' cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            part.unlink()


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
        print(profiles[-1], end="\n\n" if len(every) > 1 else "\n", flush=True)
    if len(every) > 1:
        print(overview(profiles))
    if arguments.json is not None:
        found = [profile.to_json() for profile in profiles]
        with _written(arguments.json) as path:
            path.write_text(found[0] if len(every) == 1 else f"[{','.join(found)}]\n")
    if arguments.trace is not None:
        with _written(arguments.trace) as path:
            path.write_text(profiles[0].trace())
    if arguments.png is not None:
        profiles[0].save_png(arguments.png)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from .verification import verify

    result = verify(
        arguments.model,
        arguments.against,
        arguments.target,
        arrays(arguments.input),
        sizes(arguments.dim),
        arguments.rtol,
        arguments.atol,
        arguments.seed,
        arguments.weights,
        arguments.precision,
        arguments.donate,
        arguments.threads,
    )
    first = result.first_difference
    if arguments.json:
        said = {"ok": first is None, "allowed": result.allowed, "seed": arguments.seed}
        print(json.dumps({**said, "comparisons": [_as_json(c) for c in result.comparisons]}, indent=1))
        return int(first is not None)
    for c in result.comparisons:
        verdict = "ok" if c.close else "DIFFERS"
        print(f"{c.name}: max abs {c.max_abs:.3g}, max rel {c.max_rel:.3g}, rms {c.rms:.3g} of its rms, {verdict}")
    print(f"allowed: {result.allowed}; inputs that are made up are of seed {arguments.seed}")
    if first is None:
        print(f"all outputs agree with {arguments.against}")
        return 0
    print(f"first output that differs: {first.name}, most at {list(first.worst)}")
    return 1


def _as_json(comparison: Comparison) -> dict[str, Any]:
    """What JSON can say of it: no infinite numbers."""
    return {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in asdict(comparison).items()}


def _quantise(arguments: argparse.Namespace) -> int:
    from ..quantising import quantise

    report = quantise(
        arguments.model,
        arguments.output,
        [call(path) for path in arguments.calls],
        "dynamic" if arguments.dynamic else None,
        arguments.weights,
        not arguments.per_tensor,
        arguments.exclude,
    )
    print(report)
    if arguments.json is not None:
        arguments.json.write_text(report.to_json())
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from .checking import check

    report = check(arguments.model, dict(dim(text) for text in arguments.dim))
    if arguments.json:
        print(json.dumps({"ok": report.ok, **asdict(report)}, indent=1))
    else:
        for finding in report.findings:
            print(f"{finding.where}: {finding.what} {finding.remedy}".rstrip())
        for warning in report.warnings:
            print(f"warning: {warning}")
        behind = f", {report.unexamined} behind them could not be examined" if report.unexamined else ""
        print(f"{report.nodes} nodes, {len(report.findings)} cannot be lowered{behind}")
    return 0 if report.ok else 1


def _demo(arguments: argparse.Namespace) -> int:
    from ..demo import demo

    return demo(arguments.output)
