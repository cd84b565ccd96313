"""The command for shells: completion. What it prints asks this program for words, which argcomplete finds."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from ..errors import InputError
from ..machine import not_installed


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
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


def answer(parser: argparse.ArgumentParser) -> None:
    """Where a shell asks, tells it the words that come next, and ends the process; else nothing."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        raise SystemExit(1) from None  # a shell has no place for words about it
    argcomplete.autocomplete(parser, always_complete_options=False)


def _completion(arguments: argparse.Namespace) -> int:
    try:
        import argcomplete
    except ImportError as error:
        raise InputError(not_installed("argcomplete")) from error
    print(argcomplete.shellcode(["onnx-lowering"], shell=arguments.shell))
    return 0
