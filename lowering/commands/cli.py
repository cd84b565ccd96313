"""The command `onnx-lowering`: parses arguments, calls the library, prints.

No logic of its own.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import signal
import sys
import traceback

from ..errors import LoweringError
from ..machine import runtime_alone
from ..version import VERSION
from . import bench, cache, check, compile, demo, doctor, inspect, package, quantise, run, tune, verify

_COMMANDS = (compile, tune, run, bench, inspect, verify, quantise, check, package, doctor, cache, demo)


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Returns 0, or 1 when the model, the comparison or an input is not all right, or as shells do 130 when it was
    interrupted and 141 when nobody reads what it prints. What went wrong is one sentence; with -v, Python's traceback
    comes before it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of any characters, whatever the locale can write
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    try:
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
        return (
            f"error: {command} needs the compiler, which onnx-lowering-runtime leaves out: "
            "pip uninstall onnx-lowering-runtime, then pip install onnx-lowering."
        )
    if isinstance(error, MemoryError):
        return f"error: {command} needs more memory than there is"
    return f"error: {command} failed by a fault of ours ({type(error).__name__}); please report it with what -v prints"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onnx-lowering", description="Compiles ONNX models ahead of time; attention becomes tiled TensorIR."
    )
    parser.add_argument("--version", action="version", version=f"onnx-lowering {VERSION}")
    subparsers = parser.add_subparsers(metavar="command", dest="command", required=True)
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("-v", "--verbose", action="store_true", help="on an error, print Python's traceback as well")
    add_parser = functools.partial(subparsers.add_parser, parents=[every])
    for command in _COMMANDS:
        command.add(add_parser)
    return parser
