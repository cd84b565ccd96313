"""Hash the TensorIR of every scheduled kernel of the sample exports, so that a refactoring can be shown to keep it.

`python -m tests.exports.kernel_hashes FILE` writes the hashes; `--against OLD` lists the models whose kernels differ
from those of another file. Names do not count: of variables, buffers, blocks, functions, and attributes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

TARGETS = ("cpu:x86-64-v3", "cpu:x86-64-v4", "cuda:sm_90a", "cuda:sm_80")
LAST_PASS = "guard_divisions"  # the first pass after those that change kernels

_FOLDER = Path(__file__).resolve().parent
_TOKEN = re.compile(r'"[^"\n]*"|T\.[A-Za-z_.0-9]+|[A-Za-z_]\w*')


def sample_models() -> list[Path]:
    return sorted(path for name in ("samples", "decoders", "graphs") for path in (_FOLDER / name).rglob("*.onnx"))


class _ScheduledError(Exception):
    """Ends a compile once its kernels are scheduled."""


def kernel_hash(function: Any) -> str:
    """Return the hash of a PrimFunc's script, whose names are numbered in the order of their appearance."""
    for key in list(function.attrs.keys()) if function.attrs else ():
        function = function.without_attr(key)
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        token = match.group()
        return token if token.startswith("T.") else numbers.setdefault(token, f"name{len(numbers)}")

    _, definition, body = function.script().partition("@T.prim_func")  # symbolic sizes before it come in any order
    return hashlib.sha256(_TOKEN.sub(number, definition + body).encode()).hexdigest()[:16]


def kernel_hashes(path: Path, target: str) -> list[str]:
    """Return the sorted hashes of a model's kernels, or the kind of error that rejects it."""
    from tvm import tirx

    import lowering

    hashes: list[str] = []

    def dump(name: str, module: Any) -> None:
        if name == LAST_PASS:
            functions = (function for _, function in module.functions_items())
            hashes.extend(kernel_hash(function) for function in functions if isinstance(function, tirx.PrimFunc))
            raise _ScheduledError

    try:
        lowering.compile(path, target=target, dump=dump)
    except _ScheduledError:
        return sorted(hashes)
    except lowering.LoweringError as error:
        return [type(error).__name__]
    raise AssertionError(f"no pass is called {LAST_PASS}")


def model_hashes(path: Path) -> dict[str, list[str]]:
    return {f"{path.relative_to(_FOLDER)} {target}": kernel_hashes(path, target) for target in TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="JSON to write")
    parser.add_argument("--against", type=Path, help="JSON of another commit")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    hashes: dict[str, list[str]] = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for entries in pool.map(model_hashes, sample_models()):
            hashes |= entries
    arguments.file.write_text(json.dumps(hashes, indent=1))
    print(f"kernels: {sum(map(len, hashes.values()))} of {len(hashes)} models and targets")
    if arguments.against:
        old = json.loads(arguments.against.read_text())
        for name in sorted(old.keys() | hashes.keys()):
            if old.get(name) != hashes.get(name):
                print(f"differs: {name}")


if __name__ == "__main__":
    main()
