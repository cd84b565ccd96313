"""The command that writes artifacts: compile."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..choices import ACCURACY_LEVELS, PRECISIONS
from ..errors import InputError
from .json_output import add_json, print_json
from .options import (
    ACCURACY_LEVEL,
    DIM,
    PRECISION,
    SEED,
    TARGET,
    add_calls_option,
    add_serve_options,
    add_weights_option,
    build_serve,
    load_call,
    parse_dims,
    parse_positive,
    parse_schemes,
    parse_seed,
)

if TYPE_CHECKING:
    from ..manifest import Manifest


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
    c = add_parser(
        "compile",
        help="compile a model into an artifact folder",
        description="Compiles a model into a folder that holds a shared library, weights and a manifest. It serves "
        "every size that the model leaves open, from Python or C++, and needs no compiler.",
        example="compile model.onnx -o out/\n"
        "compile model.onnx -o out/ --dim batch=1 --dim tokens=1..512 --target cpu:x86-64-v3\n"
        "compile decoder.onnx -o out/ --static-cache 1024 --weights int4\n"
        "compile model.onnx -o out/ --emit static --name encoder",
    )
    c.add_argument("model", type=Path, help="the .onnx file")
    c.add_argument("-o", "--output", type=Path, required=True, help="the artifact folder to write")
    c.add_argument("--target", default="cpu", help=TARGET)
    c.add_argument("--cc", help="the C compiler that links, for instance a cross compiler")
    c.add_argument("--donate", action="append", default=[], metavar="REGEX", help="inputs to consume; may be repeated")
    c.add_argument("--dim", action="append", default=[], metavar="NAME=SIZES", help=DIM)
    c.add_argument(
        "--static-cache", type=parse_positive, metavar="TOKENS", help="turn a growing past into in-place slot caches"
    )
    add_serve_options(c)
    add_weights_option(c)
    c.add_argument("--accuracy-level", type=int, choices=ACCURACY_LEVELS, help=ACCURACY_LEVEL)
    c.add_argument("--precision", choices=PRECISIONS, help=PRECISION)
    add_calls_option(c)
    c.add_argument("--database", type=Path, metavar="DIR", help="records of `tune` that pick the tiles of kernels")
    c.add_argument(
        "--threads", type=parse_positive, help="default number of workers (else the CPUs the caller may use)"
    )
    c.add_argument("--seed", type=parse_seed, default=0, metavar="NUMBER|INPUT", help=SEED)
    c.add_argument("--no-checks", action="store_true", help="runs look at no tables of serving operators")
    c.add_argument(
        "--emit",
        choices=("artifact", "library", "static"),
        default="artifact",
        help="artifact: a folder that Python and C++ load; library: model.so and lowering.c, which C programs load; "
        "static: model.o and model.h, with C functions that need no runtime",
    )
    c.add_argument("--name", help="the prefix of a static object's C names; default: model")
    c.add_argument("--sign", type=Path, metavar="KEY.pem", help="sign the artifact with this Ed25519 private key")
    c.add_argument(
        "--dump-dir",
        type=Path,
        help="write the model before and after fusion, and the module after every pass, into this folder",
    )
    add_json(c)
    c.set_defaults(run=_compile)


def _compile(arguments: argparse.Namespace) -> int:
    from ..compiling import progress_bar
    from ..compiling.compiler import compile_library, compile_static, compile_to
    from ..compiling.dump_folder import DumpFolder

    _check_emitted(arguments)
    dump = None if arguments.dump_dir is None else DumpFolder(arguments.dump_dir)
    options: dict[str, Any] = {
        "donate": arguments.donate,
        "threads": arguments.threads,
        "cc": arguments.cc,
        "dims": parse_dims(arguments.dim),
        "static_cache": arguments.static_cache,
        "weights": parse_schemes(arguments.weights),
        "accuracy_level": arguments.accuracy_level,
        "database": arguments.database,
        "serve": build_serve(arguments),
        "dump": dump,
        "checks": not arguments.no_checks,
        "precision": arguments.precision,
        "calls": [load_call(path) for path in arguments.calls],
        "seed": arguments.seed,
    }
    with progress_bar.show_progress_bar():
        if arguments.emit == "static":
            name = "model" if arguments.name is None else arguments.name
            manifest = compile_static(arguments.output, arguments.model, arguments.target, name=name, **options)
        elif arguments.emit == "library":
            manifest = compile_library(arguments.output, arguments.model, arguments.target, **options)
        else:
            manifest = compile_to(
                arguments.output, arguments.model, arguments.target, sign_key=arguments.sign, **options
            )
    if dump is not None:
        dump.finish(manifest)
    if arguments.json:
        print_json(_summarize(arguments.output, manifest))
        return 0
    for note in manifest.notes:
        print(f"note: {note}")
    listed = (
        ("inputs", manifest.inputs, manifest.input_lists),
        ("outputs", manifest.outputs, manifest.output_lists),
    )
    for title, tensors, lists in listed:
        print(f"{title}:")
        for spec in lists:
            print(f"  {spec}")
        for t in tensors:
            donated_output = manifest.donated.get(t.name)
            print(f"  {t.name}: {t.dtype}{list(t.dims)}" + (f", donated to {donated_output}" if donated_output else ""))
    if arguments.database is not None or any(kernel.source for kernel in manifest.kernels):
        for kernel in manifest.kernels:
            print(f"{kernel.name}: {kernel.source or 'default'}")
    print(f"weights: {sum(w.nbytes for w in manifest.weights) / 2**20:.1f} MiB")
    print(f"wrote {arguments.output} for {manifest.target}")
    return 0


def _summarize(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the document of --json, with the field names of `inspect --json`."""
    kernels = [
        {name: getattr(kernel, name) for name in ("name", "kind", "schedule", "source")} for kernel in manifest.kernels
    ]
    return {
        "output": folder,
        "target": manifest.target,
        "inputs": [asdict(tensor) for tensor in manifest.inputs],
        "outputs": [asdict(tensor) for tensor in manifest.outputs],
        "input_lists": [asdict(spec) for spec in manifest.input_lists],
        "output_lists": [asdict(spec) for spec in manifest.output_lists],
        "donated": manifest.donated,
        "ranges": manifest.ranges,
        "weights_bytes": sum(weight.nbytes for weight in manifest.weights),
        "kernels": kernels,
        "notes": manifest.notes,
    }


def _check_emitted(arguments: argparse.Namespace) -> None:
    """Reject options that mean nothing for what is emitted."""
    if arguments.emit != "artifact" and arguments.sign is not None:
        raise InputError(
            "static.sign_unsupported",
            "--sign signs artifacts, not C code. Sign the program that it is a part of.",
        )
    if arguments.emit != "static" and arguments.name is not None:
        raise InputError(
            "argument.name_without_static", "--name names the C functions of a static object. Add --emit static."
        )
