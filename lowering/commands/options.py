"""Options of commands: sizes, durations, numbers and arrays."""

from __future__ import annotations

import argparse
import functools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arithmetic import LARGEST_SIZE
from ..choices import SCHEMES
from ..errors import InputError

if TYPE_CHECKING:
    from ..choices import Schemes
    from ..graph.paged.serve import Serve

TARGET = (
    "cpu (this machine, the default), cpu:x86-64-v3, cpu:x86-64-v4, cpu:aarch64, cpu:riscv64 (static objects), of "
    "which +feature says what more they have (cpu:aarch64+dotprod), cuda (the GPU here), or cuda: and "
    "architectures: sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120, with commas between"
)

DIM = (
    "what is known of a symbolic dimension, by the model's name: batch=2, its size; tokens=1..512, its legal sizes; of "
    "an input that is a sequence its number of tensors, and of an optional one 1, or 0 for None"
)

RUNS = "the size of a symbolic dimension in a run, by the model's name; n=1,128: one run after the other"

WEIGHTS = (
    "compress the constant matrices of matmuls, and tables of embeddings: int8, int4 or f16; NAME=SCHEME, repeated, "
    "chooses by the name of an initializer, node or PyTorch module, in which * stands for any characters: the first "
    "that matches counts, and NAME=none leaves a matrix as it is"
)

ACCURACY_LEVEL = (
    "how accurate the rows are that quantized matrices multiply, counted as in MatMulNBits: 4 permits to quantize them "
    "to int8, a lower level does not; default: as the model says, and 0 for --weights"
)

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


def parse_seed(text: str) -> int | str:
    """Return the seed of --seed: a number, or else the name of an input."""
    return int(text) if text.isdecimal() else text


def parse_dims(options: list[str]) -> dict[str, int | tuple[int, int]]:
    """Return by name the size of a dimension, or its smallest and largest size, of --dim.

    Raises:
        InputError: A text has another form.
    """
    parsed: dict[str, int | tuple[int, int]] = {}
    for name, value in _split_options(options).items():
        low, dots, high = value.partition("..")
        parsed[name] = (_parse_size(name, low), _parse_size(name, high)) if dots else _parse_size(name, low)
    return parsed


def add_weights_option(parser: argparse.ArgumentParser, text: str = WEIGHTS) -> None:
    parser.add_argument(
        "--weights", action="append", type=_check_scheme, default=[], metavar="[NAME=]SCHEME", help=text
    )


def _check_scheme(text: str) -> str:
    name, equals, scheme = text.rpartition("=")
    if scheme not in (*SCHEMES, "none") or (equals and not name):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write SCHEME or NAME=SCHEME; schemes are {', '.join(SCHEMES)} and none"
        )
    return text


def parse_schemes(options: list[str]) -> Schemes | None:
    """Return the schemes of --weights by patterns of names, None without it.

    Raises:
        InputError: Two options have one pattern.
    """
    parsed: dict[str, Any] = {}
    for option in options:
        name, equals, scheme = option.rpartition("=")
        pattern = name if equals else "*"
        if pattern in parsed:
            raise InputError(
                "argument.weights_repeated",
                f"--weights: the pattern '{pattern}' is given twice. Give each pattern one scheme.",
            )
        parsed[pattern] = None if scheme == "none" else scheme
    return parsed or None


def parse_sizes(options: list[str]) -> dict[str, int]:
    """Return the sizes of one run by name, of --dim NAME=SIZE.

    Raises:
        InputError: A text has another form, or there are several runs.
    """
    parsed = parse_runs(options)
    if len(parsed) > 1:
        raise InputError(
            "argument.run_count_mismatch",
            "--dim: this command runs a model at one size of each dimension. Leave the other sizes out.",
        )
    return parsed[0]


def parse_runs(options: list[str]) -> list[dict[str, int]]:
    """Return the sizes of one or several runs: --dim n=1,128 are two; another dimension has one size for both, or two.

    Raises:
        InputError: A text has another form, or is a range, for which nothing can run.
    """
    lists = {}
    for name, value in _split_options(options).items():
        if ".." in value:
            last = value.rpartition("..")[2]
            raise InputError(
                "argument.range_unsupported",
                f"--dim {name}={value}: ranges are for compile and check, and this command runs at one size. Write "
                f"--dim {name}={last if last.isdecimal() else 128}.",
            )
        lists[name] = [_parse_size(name, size) for size in value.split(",")]
    count = max(map(len, lists.values()), default=1)
    for name, sizes_of_dim in lists.items():
        if len(sizes_of_dim) not in (1, count):
            raise InputError(
                "argument.size_counts_differ",
                f"--dim {name}: {len(sizes_of_dim)} sizes are given, but {count} of another dimension. Give each "
                "dimension one size, or equally many.",
            )
    return [{name: sizes_of_dim[k % len(sizes_of_dim)] for name, sizes_of_dim in lists.items()} for k in range(count)]


def _split_options(options: list[str]) -> dict[str, str]:
    """Return the values of --dim by the name of the dimension, which may have any characters.

    Raises:
        InputError: A text has another form, or a dimension occurs twice.
    """
    parsed: dict[str, str] = {}
    for text in options:
        name, equals, value = text.rpartition("=")
        if not (name and equals):
            raise InputError("argument.dim_invalid", f"--dim {text}: the name or the size is missing. {_USAGE}")
        if name in parsed:
            raise InputError(
                "argument.dim_repeated", f"--dim {text}: '{name}' is {parsed[name]} already. Give each dimension once."
            )
        parsed[name] = value
    return parsed


def _parse_size(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,13}", text) or int(text) > LARGEST_SIZE:
        raise InputError("argument.dim_invalid", f"--dim {name}: {text!r} is not a size. {_USAGE}")
    return int(text)


_USAGE = f"Write NAME=SIZE or NAME=LOW..HIGH, for instance batch=2 or tokens=1..512; sizes are 0 to {LARGEST_SIZE}."


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        InputError: The text has another form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError("argument.address_invalid", f"{text!r} is not an address. Write HOST:PORT.")
    return host, int(port)


def _parse_number(kind: type, minimum: float, text: str) -> Any:
    """Return a finite number of that kind, at least the minimum; raise ArgumentTypeError otherwise."""
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not minimum <= number < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a {'whole ' if kind is int else ''}number of {minimum} or more"
        )
    return number


def parse_duration(text: str) -> float:
    """Return a duration in seconds; raise ArgumentTypeError for texts of another form."""
    parsed = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)", text)
    if parsed is None or float(parsed[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration, such as 90s, 20m or 2h")
    return float(parsed[1]) * {"s": 1, "m": 60, "h": 3600}[parsed[2]]


parse_positive = functools.partial(_parse_number, int, 1)
parse_natural = functools.partial(_parse_number, int, 0)
parse_nonnegative = functools.partial(_parse_number, float, 0)


def load_arrays(options: list[str]) -> dict[str, Any]:
    """Return arrays by name, of --input NAME=FILE.npy.

    Raises:
        InputError: A text has another form, or a file cannot be read.
    """
    import numpy as np

    parsed = {}
    for option in options:
        name, _, path = option.rpartition("=")
        if not name:
            raise InputError("argument.input_invalid", f"--input {option}: the name is missing. Write NAME=FILE.npy.")
        try:
            with Path(path).open("rb") as file:
                parsed[name] = np.lib.format.read_array(file, allow_pickle=False)
        except OSError as error:
            raise InputError(
                "argument.file_unreadable", f"--input {option}: {path} cannot be read: {error.strerror or error}."
            ) from error
        except MemoryError as error:
            raise InputError(
                "argument.file_too_large", f"--input {option}: {path} declares more data than fits into memory."
            ) from error
        except Exception as error:  # NumPy and Python's parser raise many types for a bad header
            raise InputError(
                "argument.file_invalid",
                f"--input {option}: {path} is not a .npy file, or is truncated. Write it by numpy.save.",
            ) from error
    return parsed


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve` to a command that compiles; `build_serve` reads them."""
    parser.add_argument(
        "--serve", type=parse_positive, metavar="CONTEXT", help="serve packed requests of up to so many tokens, paged"
    )
    parser.add_argument(
        "--cache", choices=("model", "int8"), help="with --serve: the type of keys and values in the cache"
    )


def build_serve(arguments: argparse.Namespace) -> Serve | None:
    """Return the `serve` argument of `compile`, or None.

    Raises:
        InputError: --cache is given without --serve.
    """
    if arguments.serve is None:
        if arguments.cache is not None:
            raise InputError(
                "argument.option_requires_other",
                "--cache is only for --serve CONTEXT: it chooses how keys and values are stored. Give --serve as well.",
            )
        return None
    from ..graph.paged.serve import Serve

    return Serve(arguments.serve, cache=arguments.cache or "model")


def add_calls_option(parser: argparse.ArgumentParser) -> None:
    """Add --calls to a command that compiles; `load_call` reads its files."""
    parser.add_argument(
        "--calls", action="append", default=[], type=Path, metavar="FILE.npz",
        help="with --precision float16: inputs by name of one call, at whose numbers beyond its range nodes stay wide",
    )  # fmt: skip


def load_call(path: Path) -> dict[str, Any]:
    """Return the arrays of a .npz file, by name.

    Raises:
        InputError: The file cannot be read, or is not a .npz file of arrays.
    """
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("one array")
            return {name: file[name] for name in file.files if not name.startswith("=")}
    except OSError as error:
        raise InputError(
            "argument.file_unreadable", f"--calls {path}: it cannot be read: {error.strerror or error}."
        ) from error
    except Exception as error:
        raise InputError(
            "argument.file_invalid", f"--calls {path}: it is not a .npz file of arrays. Write it by numpy.savez."
        ) from error
