"""The command `onnx-lowering`: parses arguments, calls the library, prints.

No logic of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .errors import InputError, LoweringError

_TARGET = (
    "cpu (this machine, the default), cpu:x86-64-v3, cpu:x86-64-v4, cpu:aarch64, cuda (the GPU here), or cuda: and "
    "architectures: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120, with commas between"
)

_WEIGHTS = "compress the constant matrices of products"


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Returns 0, or 1 when the model, the comparison or an input is not all right.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except LoweringError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onnx-lowering", description="Compiles ONNX models ahead of time; attention becomes tiled TensorIR."
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    c = commands.add_parser("compile", help="compile a model into an artifact folder")
    c.add_argument("model", type=Path, help="the .onnx file")
    c.add_argument("-o", "--output", type=Path, required=True, help="the artifact folder to write")
    c.add_argument("--target", default="cpu", help=_TARGET)
    c.add_argument("--cc", help="the C compiler that links, for instance a cross compiler")
    c.add_argument("--donate", action="append", default=[], metavar="REGEX", help="inputs to consume; may be repeated")
    c.add_argument(
        "--dim", action="append", default=[], metavar="NAME=LOW..HIGH", help="legal sizes of a symbolic dimension"
    )
    c.add_argument(
        "--static-cache", type=int, metavar="TOKENS", help="turn a decoder's growing past into in-place slot caches"
    )
    c.add_argument("--weights", choices=("int8", "int4", "f16"), help=_WEIGHTS)
    c.add_argument("--threads", type=int, help="default number of workers (else the CPUs the caller may use)")
    c.add_argument("--dump-dir", type=Path, help="write fused.onnx and the module after every pass into this folder")
    c.set_defaults(run=_compile)

    r = commands.add_parser("run", help="run an artifact on .npy files")
    r.add_argument("artifact", type=Path, help="the artifact folder")
    r.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="one per input")
    r.add_argument("--output-dir", type=Path, help="write every output as NAME.npy into this folder")
    r.add_argument("--threads", type=int, help="number of workers")
    r.set_defaults(run=_run)

    b = commands.add_parser("bench", help="time an artifact, kernel by kernel, beside what this machine can do")
    b.add_argument("artifact", type=Path, help="the artifact folder")
    b.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help="one per symbolic dimension")
    b.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="others are made up")
    b.add_argument("--threads", type=int, default=1, help="number of workers (1)")
    b.add_argument("--seconds", type=float, default=2.0, help="how long to measure (2)")
    b.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    b.add_argument("--png", type=Path, metavar="FILE", help="draw the kernels' times; needs matplotlib")
    b.set_defaults(run=_bench)

    v = commands.add_parser("verify", help="compile, run, and compare every output with a reference")
    v.add_argument("model", type=Path, help="the .onnx file")
    v.add_argument("--against", choices=("reference", "onnxruntime"), default="reference")
    v.add_argument("--target", default="cpu", help=_TARGET)
    v.add_argument("--weights", choices=("int8", "int4", "f16"), help=_WEIGHTS)
    v.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="others are random")
    v.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help="a symbolic dimension (else 4)")
    v.add_argument("--rtol", type=float, default=1e-3)
    v.add_argument("--atol", type=float, default=1e-5)
    v.add_argument("--seed", type=int, default=0, help="of the random inputs")
    v.set_defaults(run=_verify)

    k = commands.add_parser("check", help="list every node that cannot be lowered, before any compile")
    k.add_argument("model", type=Path, help="the .onnx file")
    k.add_argument("--json", action="store_true", help="print the report as JSON")
    k.set_defaults(run=_check)

    d = commands.add_parser("demo", help="build, compile, load and run a small decoder with in-place caches")
    d.add_argument("-o", "--output", type=Path, help="keep the model and its artifact in this folder")
    d.set_defaults(run=_demo)
    return parser


def _compile(arguments: argparse.Namespace) -> int:
    import onnx_ir as ir

    from .compiler import compile_to

    steps = itertools.count(1)

    def dump(name: str, module: Any) -> None:
        if isinstance(module, ir.Model):
            ir.save(module, arguments.dump_dir / f"{name}.onnx", external_data=f"{name}.onnx.data")
            return
        (arguments.dump_dir / f"{next(steps):02}_{name}.py").write_text(module.script() + "\n")

    if arguments.dump_dir is not None:
        arguments.dump_dir.mkdir(parents=True, exist_ok=True)
    manifest = compile_to(
        arguments.output,
        arguments.model,
        arguments.target,
        arguments.donate,
        arguments.threads,
        arguments.cc,
        ranges=dict(_range(text) for text in arguments.dim),
        static_cache=arguments.static_cache,
        weights=arguments.weights,
        dump=dump if arguments.dump_dir is not None else None,
    )
    for note in manifest.notes:
        print(f"note: {note}")
    for title, tensors in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        print(f"{title}:")
        for t in tensors:
            where = manifest.donated.get(t.name)
            print(f"  {t.name}: {t.dtype}{list(t.dims)}" + (f", donated to {where}" if where else ""))
    print(f"weights: {sum(w.nbytes for w in manifest.weights) / 2**20:.1f} MiB")
    print(f"wrote {arguments.output} for {manifest.target}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    import numpy as np

    from .runtime import load

    model = load(arguments.artifact, threads=arguments.threads)
    outputs = model.run(_arrays(arguments.input))
    if arguments.output_dir is not None:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for name, array in outputs.items():
        print(f"{name}: {array.dtype}{list(array.shape)}")
        if arguments.output_dir is None:
            print(np.array2string(np.asarray(array), threshold=16, edgeitems=2))
        else:
            np.save(arguments.output_dir / f"{name.replace('/', '_')}.npy", array)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from .benchmark import bench

    inputs = _arrays(arguments.input)
    profile = bench(arguments.artifact, _sizes(arguments.dim), inputs, arguments.threads, arguments.seconds)
    print(profile)
    if arguments.json is not None:
        arguments.json.write_text(profile.to_json())
    if arguments.png is not None:
        profile.save_png(arguments.png)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from .verification import verify

    result = verify(
        arguments.model,
        arguments.against,
        arguments.target,
        _arrays(arguments.input),
        _sizes(arguments.dim),
        arguments.rtol,
        arguments.atol,
        arguments.seed,
        arguments.weights,
    )
    for c in result.comparisons:
        verdict = "ok" if c.close else "DIFFERS"
        print(f"{c.name}: max abs {c.max_abs:.3g}, max rel {c.max_rel:.3g}, rms {c.rms:.3g}, {verdict}")
    first = result.first_difference
    if first is None:
        print(f"all outputs agree with {arguments.against}")
        return 0
    print(f"first output that differs: {first.name}, most at {list(first.worst)}")
    return 1


def _check(arguments: argparse.Namespace) -> int:
    from .checking import check

    report = check(arguments.model)
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
    from .demo import demo

    return demo(arguments.output)


def _sizes(options: list[str]) -> dict[str, int]:
    sizes = {}
    for text in options:
        name, _, size = text.partition("=")
        if not size.isdigit():
            raise InputError(f"--dim {text}: write NAME=SIZE, for instance --dim batch=2.")
        sizes[name] = int(size)
    return sizes


def _range(text: str) -> tuple[str, tuple[int, int]]:
    name, _, bounds = text.partition("=")
    low, _, high = bounds.partition("..")
    if not (name and low.isdigit() and high.isdigit()):
        raise InputError(f"--dim {text}: write NAME=LOW..HIGH, for instance --dim batch=1..8.")
    return name, (int(low), int(high))


def _arrays(options: list[str]) -> dict:
    import numpy as np

    arrays = {}
    for option in options:
        name, _, path = option.rpartition("=")
        if not name:
            raise InputError(f"--input {option}: write NAME=FILE.npy.")
        try:
            arrays[name] = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"--input {option}: {path} cannot be read as a .npy file: {error}") from error
    return arrays
