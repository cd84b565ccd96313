"""The command that compares a compiled model with a reference: verify."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..choices import ACCURACY_LEVELS, PRECISIONS
from ..deprecated import with_old_fields
from .json_output import add_json, print_json
from .options import (
    ACCURACY_LEVEL,
    PRECISION,
    TARGET,
    VERIFY_KEY,
    add_calls_option,
    add_serve_options,
    add_weights_option,
    build_serve,
    load_arrays,
    load_call,
    parse_natural,
    parse_nonnegative,
    parse_positive,
    parse_schemes,
    parse_sizes,
)

if TYPE_CHECKING:
    from ..checking.verification import Verification


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
    v = add_parser(
        "verify",
        help="compile a model, or load its artifact, and compare every output with a reference",
        description="Compiles a model, runs it on synthetic inputs, or given, and compares every output with "
        "that of ONNX's reference or of onnxruntime. Ends with 1 where one differs; --reduce finds the smallest part "
        "of the model that does.",
        example="verify model.onnx --against onnxruntime --dim batch=2\n"
        "verify decoder.onnx --static-cache 64\n"
        "verify decoder.onnx --serve 2048 --cache int8\n"
        "verify model.onnx --artifact out/",
    )
    v.add_argument("model", type=Path, help="the .onnx file")
    v.add_argument(
        "--artifact", type=Path, metavar="DIR", help="compare this artifact of the model, and compile nothing"
    )
    v.add_argument("--verify-key", type=Path, metavar="KEY.pem", help=f"with --artifact: {VERIFY_KEY}")
    v.add_argument("--against", choices=("reference", "onnxruntime"), default="reference")
    v.add_argument("--target", default="cpu", help=TARGET)
    add_weights_option(v)
    v.add_argument("--accuracy-level", type=int, choices=ACCURACY_LEVELS, help=ACCURACY_LEVEL)
    v.add_argument("--precision", choices=PRECISIONS, help=PRECISION)
    add_calls_option(v)
    v.add_argument("--donate", action="append", default=[], metavar="REGEX", help="as for compile")
    v.add_argument(
        "--static-cache", type=parse_positive, metavar="TOKENS", help="as for compile; a prompt and steps follow it"
    )
    add_serve_options(v)
    v.add_argument("--threads", type=parse_positive, help="number of workers")
    v.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="others are synthetic")
    v.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="a symbolic dimension (else as inputs say, or 4)",
    )
    v.add_argument("--seed", type=parse_natural, default=0, help="of the synthetic inputs")
    v.add_argument(
        "--rtol", type=parse_nonnegative, help="allowed of an element (1e-3; where numbers are rounded, by type)"
    )
    v.add_argument("--atol", type=parse_nonnegative, help="allowed beside it (1e-5)")
    v.add_argument(
        "--reduce", type=Path, metavar="DIR", help="write the smallest part of the model that fails, to this new folder"
    )
    add_json(v)
    v.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from ..checking.verification import verify
    from ..compiling import progress_bar
    from ..errors import InputError
    from ..runtime import load

    artifact = None
    if arguments.artifact is not None:
        artifact = load(arguments.artifact, arguments.threads, verify_key=arguments.verify_key)
    elif arguments.verify_key is not None:
        raise InputError(
            "argument.option_requires_other", "--verify-key is only for an artifact. Give --artifact as well."
        )
    with progress_bar.show_progress_bar():
        result = verify(
            arguments.model,
            arguments.target,
            against=arguments.against,
            inputs=load_arrays(arguments.input),
            sizes=parse_sizes(arguments.dim),
            rtol=arguments.rtol,
            atol=arguments.atol,
            seed=arguments.seed,
            artifact=artifact,
            reduce=arguments.reduce,
            weights=parse_schemes(arguments.weights),
            accuracy_level=arguments.accuracy_level,
            precision=arguments.precision,
            donate=arguments.donate,
            threads=arguments.threads if artifact is None else None,
            static_cache=arguments.static_cache,
            calls=[load_call(path) for path in arguments.calls],
            serve=build_serve(arguments),
        )
    if arguments.json:
        print_json(with_old_fields(_to_json(result, arguments)))
    else:
        print("\n".join(map(str, result.comparisons)))
        print(f"allowed: {result.allowed}; synthetic inputs are of seed {arguments.seed}")
        print(_format_verdict(result, arguments))
    return int(result.first_difference is not None)


def _format_verdict(result: Verification, arguments: argparse.Namespace) -> str:
    first = result.first_difference
    if first is None:
        return f"all outputs agree with {arguments.against}"
    text = f"first output that differs: {first.name}, most at {list(first.worst)}"
    if arguments.reduce is None:
        return text
    return f"{text}\n{result.reproducer or 'asked once more, no output differs: nothing is left to reduce'}"


def _to_json(result: Verification, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "ok": result.first_difference is None,
        "allowed": result.allowed,
        "seed": arguments.seed,
        "against": arguments.against,
        "verdict": _format_verdict(result, arguments),
        "comparisons": [{**asdict(c), "said": str(c)} for c in result.comparisons],
        "reproducer": None if result.reproducer is None else asdict(result.reproducer),
    }
