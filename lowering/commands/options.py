"""Options of commands: sizes, lengths of time, numbers and arrays, as people write them."""

from __future__ import annotations

import argparse
import functools
import math
import re
from pathlib import Path
from typing import Any

from ..arithmetic import LARGEST_SIZE
from ..errors import InputError

TARGET = (
    "cpu (this machine, the default), cpu:x86-64-v3, cpu:x86-64-v4, cpu:aarch64, cuda (the GPU here), or cuda: and "
    "architectures: sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120, with commas between"
)

DIM = "fix a symbolic dimension, or NAME=LOW..HIGH: its legal sizes"

WEIGHTS = "compress the constant matrices of products"

PRECISION = (
    "compute the products of a model of float32, and store weights and caches, in this type; fast: products of float32 "
    "and float16 in bfloat16 where the target multiplies it faster, with caches as they are; tf32, 3xtf32: multiply "
    "float32 itself on tensor cores, rounded to TF32 or in two parts"
)

VERIFY_KEY = "refuse an artifact that was not signed with the other half of this Ed25519 public key"

WEIGHT_SCHEMES = ("int8", "int4", "f16")
"""Of importing/quantised.py."""

PRECISIONS = ("float16", "bfloat16", "fast", "tf32", "3xtf32")
"""Of graph/precision.py, which takes a second to import."""


def sizes(options: list[str]) -> dict[str, int]:
    """Sizes by name, of --dim NAME=SIZE. Raises InputError."""
    found = {}
    for text in options:
        name, _, size = text.rpartition("=")
        if not (name and _is_size(size)):
            raise InputError(
                f"--dim {text}: write NAME=SIZE, for instance --dim batch=2; sizes are 0 to {LARGEST_SIZE}."
            )
        found[name] = int(size)
    return found


def settings(options: list[str]) -> list[dict[str, int]]:
    """Several settings of sizes: --dim n=1,128 are two; another dimension has one size for both, or two.

    Raises InputError.
    """
    lists = {}
    for text in options:
        name, _, said = text.rpartition("=")
        lists[name] = [sizes([f"{name}={size}"])[name] for size in said.split(",")]
    count = max(map(len, lists.values()), default=1)
    for name, found in lists.items():
        if len(found) not in (1, count):
            raise InputError(f"--dim {name}: {len(found)} sizes are given, and {count} of another dimension.")
    return [{name: found[k % len(found)] for name, found in lists.items()} for k in range(count)]


def address(text: str) -> tuple[str, int]:
    """A host and a port. Raises InputError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"{text!r}: write HOST:PORT.")
    return host, int(port)


def dim(text: str) -> tuple[str, int | tuple[int, int]]:
    """A dimension's name, and its size or the smallest and the largest one. Raises InputError."""
    name, _, said = text.rpartition("=")
    low, dots, high = said.partition("..")
    if not (name and _is_size(low) and (not dots or _is_size(high))):
        raise InputError(
            f"--dim {text}: write NAME=SIZE or NAME=LOW..HIGH, for instance --dim batch=1 or --dim tokens=1..512; "
            f"sizes are 0 to {LARGEST_SIZE}."
        )
    return name, (int(low), int(high)) if dots else int(low)


def _is_size(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,13}", text) is not None and int(text) <= LARGEST_SIZE


def _number(kind: type, least: float, text: str) -> Any:
    """An argument of that kind, finite and at least so large. Raises what argparse turns into its own error."""
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' if kind is int else ''}number from {least} on")
    return number


def seconds(text: str) -> float:
    """A length of time. Raises what argparse turns into its own error."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)", text)
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time, such as 90s, 20m or 2h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


positive = functools.partial(_number, int, 1)
natural = functools.partial(_number, int, 0)
not_negative = functools.partial(_number, float, 0)


def arrays(options: list[str]) -> dict[str, Any]:
    """Arrays by name, of --input NAME=FILE.npy. Raises InputError."""
    import numpy as np

    found = {}
    for option in options:
        name, _, path = option.rpartition("=")
        if not name:
            raise InputError(f"--input {option}: write NAME=FILE.npy.")
        try:
            with Path(path).open("rb") as file:
                found[name] = np.lib.format.read_array(file, allow_pickle=False)
        except OSError as error:
            raise InputError(f"--input {option}: {path} cannot be read: {error.strerror or error}.") from error
        except MemoryError as error:
            raise InputError(f"--input {option}: {path} says that it holds more than fits into memory.") from error
        except Exception as error:  # whatever NumPy and Python's parser think of a header
            raise InputError(
                f"--input {option}: {path} is no .npy file, or is cut off (numpy.save writes one)."
            ) from error
    return found


def call(path: Path) -> dict[str, Any]:
    """The arrays of a .npz file, by name. Raises InputError."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("one array")
            return {name: file[name] for name in file.files if not name.startswith("=")}
    except OSError as error:
        raise InputError(f"--calls {path}: it cannot be read: {error.strerror or error}.") from error
    except Exception as error:
        raise InputError(f"--calls {path}: it is no .npz file of arrays (numpy.savez writes one).") from error
