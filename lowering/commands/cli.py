"""The command `onnx-lowering`: parse arguments, call the library, print the result. It has no logic of its own."""

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
_WIDTH = 79  # characters of a line of a description


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments, without the program's name; None for those of the process.

    Returns:
        The exit status: 0, or 1 when the model, the comparison or an input has a problem. As in shells it is 130 after
        an interrupt, and 141 when the reader of the output has closed it. An error is one sentence; with -v, Python's
        traceback comes before it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may have characters that the locale lacks
            stream.reconfigure(errors="backslashreplace")
    parser = create_parser()
    completion.answer_shell(parser)
    arguments = parser.parse_args(_replace_old_name(sys.argv[1:] if argv is None else argv))
    try:
        if (
            "model" in arguments and vars(arguments).get("import_results") is None
        ):  # `tune --import-results` reads no model
            _check_model(arguments.model)
        with _enable_log(arguments.verbose):
            code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed its end, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout at exit
        return 128 + signal.SIGPIPE
    except (Exception, KeyboardInterrupt) as error:
        if arguments.verbose:
            traceback.print_exc()
        print(_format_error(arguments, error), file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _replace_old_name(argv: list[str]) -> list[str]:
    """Return the arguments with the new name of a command whose name has changed."""
    if not argv or argv[0] not in deprecated.COMMANDS:
        return argv
    new_name = deprecated.COMMANDS[argv[0]]
    print(f"warning: the command {argv[0]} is now {new_name}", file=sys.stderr)
    return [new_name, *argv[1:]]


def _check_model(path: Path) -> None:
    """Reject a misspelt name before a command imports the compiler."""
    from ..graph.loading.model_file import check_model_file

    check_model_file(path)


def _enable_log(verbosity: int) -> AbstractContextManager[None]:
    """Return a context in which the log is shown; without -v the log costs no import."""
    if not verbosity:
        return nullcontext()
    from .log import show_log

    return show_log(verbosity)


def _format_error(arguments: argparse.Namespace, error: BaseException) -> str:
    command = arguments.command
    if isinstance(error, KeyboardInterrupt):
        return f"{command} was interrupted"
    if isinstance(error, LoweringError):
        return f"error[{error.code}]: {error}"
    if isinstance(error, OSError):
        files = [name for name in (error.filename, error.filename2) if name is not None]
        if not files and getattr(arguments, "output", None) is not None:
            files = [arguments.output]  # errors of a write, such as a full disk, name no file
        return f"error: {command}: {error.strerror or error}" + (f": {' and '.join(map(str, files))}" if files else "")
    if isinstance(error, ModuleNotFoundError) and runtime_alone():
        return f"error: {command} needs the compiler, which onnx-lowering-runtime leaves out: {get_compiler()}."
    if isinstance(error, MemoryError):
        return f"error: {command} needs more memory than there is"
    fault = f"{command} failed because of a bug of the compiler ({type(error).__name__})"
    return f"error: {fault}. Please report it with the output of -v"


def create_parser() -> argparse.ArgumentParser:
    """Return the parser; each command has a line of help, a description, and an example command line."""
    root = argparse.ArgumentParser(**_make_texts(_DESCRIPTION, _EXAMPLE), prog="onnx-lowering")
    root.add_argument("--version", action="version", version=f"onnx-lowering {VERSION}")
    subparsers = root.add_subparsers(metavar="command", dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-v", "--verbose", action="count", default=0, help=_VERBOSE)

    def add_parser(name: str, help: str, description: str, example: str) -> argparse.ArgumentParser:
        return subparsers.add_parser(name, help=help, parents=[common], **_make_texts(description, example))

    for command in _COMMANDS:
        command.add_command(add_parser)
    return root


def _make_texts(description: str, example: str) -> dict[str, Any]:
    lines = [f"  onnx-lowering {line}" for line in example.splitlines()]
    return {
        "description": textwrap.fill(description, _WIDTH),
        "epilog": "\n".join(["example:" if len(lines) == 1 else "examples:", *lines]),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
