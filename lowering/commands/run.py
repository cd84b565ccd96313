"""The command that runs an artifact on files: run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .options import VERIFY_KEY, arrays, positive
from .written import written


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
    r = add_parser("run", help="run an artifact on .npy files")
    r.add_argument("artifact", type=Path, help="the artifact folder")
    r.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="one per input")
    r.add_argument(
        "--output-dir", type=Path, help="write every output as NAME.npy into this folder, odd characters as %%XX"
    )
    r.add_argument("--threads", type=positive, help="number of workers")
    r.add_argument("--verify-key", type=Path, metavar="KEY.pem", help=VERIFY_KEY)
    r.set_defaults(run=_run)


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
            with written(arguments.output_dir / f"{quote(name, safe='')}.npy") as path, path.open("wb") as file:
                np.save(file, array.astype(str) if array.dtype == object else array, allow_pickle=False)
    return 0
