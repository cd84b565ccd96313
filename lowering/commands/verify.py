"""The command that compares a compiled model with a reference: verify."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import (
    PRECISION,
    PRECISIONS,
    TARGET,
    WEIGHT_SCHEMES,
    WEIGHTS,
    arrays,
    natural,
    not_negative,
    positive,
    sizes,
)

if TYPE_CHECKING:
    from ..checking.verification import Comparison


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
    v = add_parser("verify", help="compile, run, and compare every output with a reference")
    v.add_argument("model", type=Path, help="the .onnx file")
    v.add_argument("--against", choices=("reference", "onnxruntime"), default="reference")
    v.add_argument("--target", default="cpu", help=TARGET)
    v.add_argument("--weights", choices=WEIGHT_SCHEMES, help=WEIGHTS)
    v.add_argument("--precision", choices=PRECISIONS, help=PRECISION)
    v.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="others are made up")
    v.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help="a symbolic dimension (else 4)")
    v.add_argument("--rtol", type=not_negative, help="allowed of an element (1e-3; where numbers are rounded, by type)")
    v.add_argument("--atol", type=not_negative, help="allowed beside it (1e-5)")
    v.add_argument("--seed", type=natural, default=0, help="of the inputs that are made up")
    v.add_argument("--donate", action="append", default=[], metavar="REGEX", help="as for compile")
    v.add_argument("--threads", type=positive, help="number of workers")
    v.add_argument("--json", action="store_true", help="print the comparisons as JSON")
    v.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from ..checking.verification import verify

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
