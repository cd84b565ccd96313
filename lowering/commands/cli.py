"""The command `onnx-lowering`: parses arguments, calls the library, prints.

No logic of its own.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import textwrap
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from .. import deprecated
from ..errors import LoweringError
from ..machine import get_compiler, runtime_alone
from ..version import VERSION
from . import bench, cache, check, compile, completion, demo, doctor, inspect, package, quantize, run, tune, verify

_COMMANDS = (compile, tune, run, bench, inspect, verify, quantize, check, package, doctor, cache, completion, demo)

_DESCRIPTION = (
    "Compiles ONNX models ahead of time, with attention as tiled kernels. What comes out is a folder, an artifact, "
    "which runs from Python or C++ without a compiler."
)
_EXAMPLE = """\
check model.onnx
compile model.onnx -o out/
run out/ --input x=x.npy"""
_VERBOSE = "log stages and their seconds on stderr, -vv: all passes and kernels; on an error print Python's traceback"
_WIDTH = 79  # of descriptions


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Returns 0, or 1 when the model, the comparison or an input is not all right, or as shells do 130 when it was
    interrupted and 141 when nobody reads what it prints. What went wrong is one sentence; with -v, Python's traceback
    comes before it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of any characters, whatever the locale can write
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    completion.answer(parser)
    arguments = parser.parse_args(_with_new_name(sys.argv[1:] if argv is None else argv))
    try:
        if "model" in arguments and vars(arguments).get("import_results") is None:  # which reads no model
            _check_model(arguments.model)
        with _logged(arguments.verbose):
            code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still wants to write at its end
        return 128 + signal.SIGPIPE
    except (Exception, KeyboardInterrupt) as error:
        if arguments.verbose:
            traceback.print_exc()
        print(_sentence(arguments, error), file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _with_new_name(argv: list[str]) -> list[str]:
    """Return the arguments with the new name of a command whose name has changed."""
    if not argv or argv[0] not in deprecated.COMMANDS:
        return argv
    new = deprecated.COMMANDS[argv[0]]
    print(f"warning: the command {argv[0]} is now {new}", file=sys.stderr)
    return [new, *argv[1:]]


def _check_model(path: Path) -> None:
    """Refuse a misspelt name before a command imports the compiler."""
    from ..graph.model_file import check_model_file

    check_model_file(path)


def _logged(verbosity: int) -> AbstractContextManager[None]:
    """While a command works; without -v the log costs no import."""
    if not verbosity:
        return nullcontext()
    from .log import shown

    return shown(verbosity)


def _sentence(arguments: argparse.Namespace, error: BaseException) -> str:
    command = arguments.command
    if isinstance(error, KeyboardInterrupt):
        return f"{command} was interrupted"
    if isinstance(error, LoweringError):
        return f"error: {error}"
    if isinstance(error, OSError):
        files = [name for name in (error.filename, error.filename2) if name is not None]
        if not files and getattr(arguments, "output", None) is not None:
            files = [arguments.output]  # what was being written: errors of a write, such as a full disk, name no file
        return f"error: {command}: {error.strerror or error}" + (f": {' and '.join(map(str, files))}" if files else "")
    if isinstance(error, ModuleNotFoundError) and runtime_alone():
        return f"error: {command} needs the compiler, which onnx-lowering-runtime leaves out: {get_compiler()}."
    if isinstance(error, MemoryError):
        return f"error: {command} needs more memory than there is"
    return f"error: {command} failed by a fault of ours ({type(error).__name__}); please report it with what -v prints"


def _parser() -> argparse.ArgumentParser:
    """The command line. Each command has a line of help, a description and an example, which is a command line too."""
    whole = argparse.ArgumentParser(**_texts(_DESCRIPTION, _EXAMPLE), prog="onnx-lowering")
    whole.add_argument("--version", action="version", version=f"onnx-lowering {VERSION}")
    subparsers = whole.add_subparsers(metavar="command", dest="command", required=True)
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("-v", "--verbose", action="count", default=0, help=_VERBOSE)

    def add_parser(name: str, help: str, description: str, example: str) -> argparse.ArgumentParser:
        return subparsers.add_parser(name, help=help, parents=[every], **_texts(description, example))

    for command in _COMMANDS:
        command.add(add_parser)
    return whole


def _texts(description: str, example: str) -> dict[str, Any]:
    lines = [f"  onnx-lowering {line}" for line in example.splitlines()]
    return {
        "description": textwrap.fill(description, _WIDTH),
        "epilog": "\n".join(["example:" if len(lines) == 1 else "examples:", *lines]),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
