"""The command that runs an artifact on files: run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .json_output import add_json, print_json
from .options import VERIFY_KEY, load_arrays, parse_positive
from .output_files import replace_file


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
    r = add_parser(
        "run",
        help="run an artifact on .npy files",
        description="Runs an artifact once and prints its outputs, or writes each into a file of its own; the arrays "
        "of a list are NAME[0], NAME[1] and so on. Needs no compiler.",
        example="run out/ --input x=x.npy --output-dir results/",
    )
    r.add_argument("artifact", type=Path, help="the artifact folder")
    r.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="one per input; NAME[0], NAME[1] and so on for a list",
    )
    r.add_argument(
        "--output-dir", type=Path, help="write every output as NAME.npy into this folder, odd characters as %%XX"
    )
    r.add_argument("--threads", type=parse_positive, help="number of workers")
    r.add_argument("--verify-key", type=Path, metavar="KEY.pem", help=VERIFY_KEY)
    add_json(r)
    r.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import numpy as np

    from ..runtime import load
    from ..runtime.arrays.lists import flatten_lists

    model = load(arguments.artifact, threads=arguments.threads, verify_key=arguments.verify_key)
    outputs = model.run(load_arrays(arguments.input))
    documents = []
    names = [tensor.name for tensor in model.outputs]
    for name, array in flatten_lists(outputs, names, model.manifest.output_lists, "output").items():
        output_path = None
        if arguments.output_dir is not None:
            output_path = arguments.output_dir / f"{quote(name, safe='')}.npy"
            with replace_file(output_path) as path, path.open("wb") as file:
                np.save(file, array.astype(str) if array.dtype == object else array, allow_pickle=False)
        documents.append({"name": name, "dtype": str(array.dtype), "shape": list(array.shape), "file": output_path})
        if not arguments.json:
            print(f"{name}: {array.dtype}{list(array.shape)}")
            if output_path is None:
                print(np.array2string(np.asarray(array), threshold=16, edgeitems=2))
    if arguments.json:
        print_json({"outputs": documents})
    return 0
