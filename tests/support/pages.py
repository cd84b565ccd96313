"""Pages of the documentation, as a reader follows them: their blocks of code, one after the other, in one terminal.

It starts in an empty folder. What `cd` and `export` do lasts, and Python runs in the folder where the shell is.

A page marks blocks that cannot be followed here, or take long, by comments before them, which readers do not see:

    <!-- not run: needs a GPU -->
    <!-- slow: searches for a minute -->

and which files its reader has by a comment anywhere in it:

    <!-- given: decoder.onnx is tests/exports/samples/llama-past-dynamo23/model.onnx -->
    <!-- given: model.onnx is docs/tutorial.md -->

which is a file of the checkout, or what the first block of Python in another page writes.
"""

from __future__ import annotations

import ast
import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from lowering.commands.cli import main

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(
    r"^(?:[ ]*<!-- (?P<mark>not run|slow): [^>]+ -->\n)?"
    r"(?P<indent>[ ]*)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_GIVEN = re.compile(r"^<!-- given: (\S+) is (\S+) -->$", re.MULTILINE)
_COMMAND = "onnx-lowering"
# Characters that only a shell understands.
_SHELL = frozenset("|&;<>$`*")


@dataclass(frozen=True)
class Block:
    """A block of code: what it is in, where it begins, and its mark ("not run", "slow" or "")."""

    language: str
    text: str
    where: str
    mark: str

    def lines(self) -> Iterator[str]:
        """Yield commands of a shell, each on one line."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line

    def commands(self) -> Iterator[list[str]]:
        """Yield the arguments of each onnx-lowering."""
        if self.language in ("", "bash"):
            for line in self.lines():
                for command in re.split(r"&&|\||>", line):
                    if command.split()[:1] == [_COMMAND]:
                        yield shlex.split(command, comments=True)[1:]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            match["language"],
            dedent(match["text"]),
            f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start('text'))}",
            match["mark"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def follow(page: Path, slow: bool = False) -> None:
    """Do what the page says, from the current folder on, with what is slow on request.

    Raises AssertionError where something goes wrong.
    """
    for name, source in _GIVEN.findall(page.read_text()):
        if source.endswith(".md"):
            _python(next(block for block in blocks(ROOT / source) if block.language == "python"), {})
        else:
            shutil.copy(ROOT / source, name)
        assert Path(name).is_file()
    names: dict[str, Any] = {"__name__": "__main__"}
    start = Path.cwd()
    with tempfile.TemporaryDirectory() as programs:
        terminal = Terminal(Path(programs))
        try:
            for block in blocks(page):
                runs = not block.mark or (slow and block.mark == "slow")
                if runs and block.language == "python":
                    _python(block, names)
                elif runs and block.language == "bash":
                    for line in block.lines():
                        terminal.type(line, block.where)
                elif block.language == "python":
                    ast.parse(block.text, block.where)
        finally:
            terminal.close()
            os.chdir(start)


def _python(block: Block, names: dict[str, Any]) -> None:
    if block.text.startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(block.text, names, block.where, None, None)
        assert not doctest.DocTestRunner(verbose=False).run(test).failed, block.where
        names.update(test.globs)
    else:
        exec(compile(block.text, block.where, "exec"), names)


class Terminal:
    """One shell, into which a reader types all lines of a page: folders and variables stay what a line has made them.

    It starts in the current folder, and the current folder follows it: a program of Python is started from it, too.
    """

    def __init__(self, programs: Path) -> None:
        """Programs is an empty folder, for onnx-lowering and python as they are installed here."""
        for name, command in ((_COMMAND, "-m lowering"), ("python", "")):
            script = programs / name
            script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {command} "$@"\n')
            script.chmod(0o755)
        environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
        environment.pop("PYTHONPATH", None)  # it would come before the packages of another environment
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-uo", "pipefail"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def type(self, line: str, where: str) -> None:
        """Raise AssertionError where a line ends with another status than 0."""
        arguments = shlex.split(line, comments=True)
        if arguments[0] == _COMMAND and not _SHELL & set(
            "".join(arguments)
        ):  # in this process, which has imported the compiler
            assert main(arguments[1:]) == 0, f"{where}: {line}"
            return
        assert self._bash.stdin is not None and self._bash.stdout is not None
        end = uuid.uuid4().hex
        self._bash.stdin.write(f"eval {shlex.quote(line)} < /dev/null\nprintf '\\n%s %s %s\\n' {end} $? \"$PWD\"\n")
        self._bash.stdin.flush()
        printed: list[str] = []
        for said in self._bash.stdout:
            if said.startswith(end):
                _, status, folder = said.rstrip("\n").split(" ", 2)
                assert status == "0", f"{where}: {line}\n{''.join(printed)}"
                os.chdir(folder)
                return
            printed.append(said)
        raise AssertionError(f"{where}: {line}: the shell ended\n{''.join(printed)}")

    def close(self) -> None:
        """End the shell."""
        self._bash.communicate()
