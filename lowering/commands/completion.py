"""The command for shells: completion. The printed script asks this program for completions, by argcomplete."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from ..errors import InputError
from ..machine import describe_missing_package


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
    s = add_parser(
        "completion",
        help="print what makes a shell complete commands, options and files",
        description="Prints a script by which a shell completes commands, options, their values and files. For bash "
        'and zsh put `eval "$(onnx-lowering completion bash)"` into .bashrc or .zshrc; for fish write it to '
        "~/.config/fish/completions/onnx-lowering.fish.",
        example="completion bash",
    )
    s.add_argument("shell", choices=("bash", "zsh", "fish"))
    s.set_defaults(run=_completion)


def answer_shell(parser: argparse.ArgumentParser) -> None:
    """Print the completions and end the process if a shell asks for them."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        raise SystemExit(1) from None  # a shell cannot show a message
    argcomplete.autocomplete(parser, always_complete_options=False)


def _completion(arguments: argparse.Namespace) -> int:
    try:
        import argcomplete
    except ImportError as error:
        raise InputError("toolchain.package_missing", describe_missing_package("argcomplete")) from error
    print(argcomplete.shellcode(["onnx-lowering"], shell=arguments.shell))
    return 0
