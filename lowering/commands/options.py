"""Options of commands: sizes, lengths of time, numbers and arrays, as people write them."""

from __future__ import annotations

import argparse
import functools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arithmetic import LARGEST_SIZE
from ..errors import InputError

if TYPE_CHECKING:
    from ..graph.serve import Serve

TARGET = (
    "cpu (this machine, the default), cpu:x86-64-v3, cpu:x86-64-v4, cpu:aarch64, of which +feature says what more they "
    "have (cpu:aarch64+dotprod), cuda (the GPU here), or cuda: and "
    "architectures: sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120, with commas between"
)

DIM = (
    "what is known of a symbolic dimension, by the model's name: batch=2, its size; tokens=1..512, its legal sizes; of "
    "an input that is a sequence its number of tensors, and of an optional one 1, or 0 for None"
)

RUNS = "the size of a symbolic dimension in a run, by the model's name; n=1,128: one run after the other"

WEIGHTS = "compress the constant matrices of matmuls, and tables of embeddings"

PRECISION = (
    "compute the matmuls of a model of float32, and store weights and caches, in this type; fast: matmuls of float32 "
    "and float16 in bfloat16 where the target multiplies it faster, with caches as they are; tf32, 3xtf32: multiply "
    "float32 itself on tensor cores, rounded to TF32 or in two parts; float32: do not quantize what the model "
    "quantizes while it runs"
)

SEED = (
    "the seed of random operators that have none: a number (default 0), by which every call draws the same numbers, or "
    "the name of a new input that gives it at each call"
)

VERIFY_KEY = "refuse an artifact that was not signed with the other half of this Ed25519 public key"


def seed(text: str) -> int | str:
    """A seed of --seed: a number, or else the name of an input."""
    return int(text) if text.isdecimal() else text


def dims(options: list[str]) -> dict[str, int | tuple[int, int]]:
    """By name a size that a dimension always has, or the smallest and the largest one, of --dim. Raises InputError."""
    found: dict[str, int | tuple[int, int]] = {}
    for name, said in _named(options).items():
        low, dots, high = said.partition("..")
        found[name] = (_size(name, low), _size(name, high)) if dots else _size(name, low)
    return found


def sizes(options: list[str]) -> dict[str, int]:
    """Sizes of one run by name, of --dim NAME=SIZE. Raises InputError."""
    found = settings(options)
    if len(found) > 1:
        raise InputError("--dim: this command runs a model at one size of each dimension: leave the others out.")
    return found[0]


def settings(options: list[str]) -> list[dict[str, int]]:
    """Several runs: --dim n=1,128 are two; another dimension has one size for both, or two.

    Raises InputError, also for a range, at which nothing can run.
    """
    lists = {}
    for name, said in _named(options).items():
        if ".." in said:
            last = said.rpartition("..")[2]
            raise InputError(
                f"--dim {name}={said}: a range bounds sizes for compile and check, and this command runs at one size: "
                f"write --dim {name}={last if last.isdecimal() else 128}."
            )
        lists[name] = [_size(name, size) for size in said.split(",")]
    count = max(map(len, lists.values()), default=1)
    for name, found in lists.items():
        if len(found) not in (1, count):
            raise InputError(f"--dim {name}: {len(found)} sizes are given, and {count} of another dimension.")
    return [{name: found[k % len(found)] for name, found in lists.items()} for k in range(count)]


def _named(options: list[str]) -> dict[str, str]:
    """What --dim says, by the name of the dimension, which may be of any characters. Raises InputError."""
    found: dict[str, str] = {}
    for text in options:
        name, equals, said = text.rpartition("=")
        if not (name and equals):
            raise InputError(f"--dim {text}: {_WRITE}")
        if name in found:
            raise InputError(f"--dim {text}: '{name}' is {found[name]} already: give each dimension once.")
        found[name] = said
    return found


def _size(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,13}", text) or int(text) > LARGEST_SIZE:
        raise InputError(f"--dim {name}: {text!r} is no size: {_WRITE}")
    return int(text)


_WRITE = f"write NAME=SIZE or NAME=LOW..HIGH, for instance batch=2 or tokens=1..512; sizes are 0 to {LARGEST_SIZE}."


def address(text: str) -> tuple[str, int]:
    """A host and a port. Raises InputError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"{text!r}: write HOST:PORT.")
    return host, int(port)


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


def add_serve(parser: argparse.ArgumentParser) -> None:
    """The options of commands that compile, of which `serve` makes what `compile` is told."""
    parser.add_argument(
        "--serve", type=positive, metavar="CONTEXT", help="serve packed requests of up to so many tokens, paged"
    )
    parser.add_argument(
        "--cache", choices=("model", "int8"), help="with --serve: the type of keys and values in the cache"
    )


def serve(arguments: argparse.Namespace) -> Serve | None:
    """Raises InputError for --cache without --serve."""
    if arguments.serve is None:
        if arguments.cache is not None:
            raise InputError("--cache says how --serve CONTEXT keeps keys and values: give both.")
        return None
    from ..graph.serve import Serve

    return Serve(arguments.serve, cache=arguments.cache or "model")


def add_calls(parser: argparse.ArgumentParser) -> None:
    """The option of commands that compile, whose files `call` reads."""
    parser.add_argument(
        "--calls", action="append", default=[], type=Path, metavar="FILE.npz",
        help="with --precision float16: inputs by name of one call, at whose numbers beyond its range nodes stay wide",
    )  # fmt: skip


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
