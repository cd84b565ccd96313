"""Pages of the documentation, as somebody follows them: their blocks of code, one behind the other, in one folder.

A page says what cannot be followed here, or takes long, by comments in front of a block, which readers do not see:

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from lowering.commands.cli import main

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(
    r"^(?:[ ]*<!-- (?P<mark>not run|slow): [^>]+ -->\n)?"
    r"(?P<indent>[ ]*)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_GIVEN = re.compile(r"^<!-- given: (\S+) is (\S+) -->$", re.MULTILINE)
_COMMAND = "onnx-lowering"
# What only a shell understands.
_SHELL = frozenset("|&;<>$`*")


@dataclass(frozen=True)
class Block:
    """A block of code: what it is in, where it begins, and its mark ("not run", "slow" or "")."""

    language: str
    text: str
    where: str
    mark: str

    def lines(self) -> Iterator[str]:
        """Commands of a shell, each on one line."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line

    def commands(self) -> Iterator[list[str]]:
        """The arguments of each onnx-lowering."""
        if self.language in ("", "bash"):
            for line in self.lines():
                for part in re.split(r"&&|\||>", line):
                    if part.split()[:1] == [_COMMAND]:
                        yield shlex.split(part, comments=True)[1:]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            found["language"],
            dedent(found["text"]),
            f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start('text'))}",
            found["mark"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def follow(page: Path, slow: bool = False) -> None:
    """Does in the current folder what the page says, with what is slow on request.

    Raises AssertionError where something goes wrong.
    """
    for name, source in _GIVEN.findall(page.read_text()):
        if source.endswith(".md"):
            _python(next(block for block in blocks(ROOT / source) if block.language == "python"), {})
        else:
            shutil.copy(ROOT / source, name)
        assert Path(name).is_file()
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        runs = not block.mark or (slow and block.mark == "slow")
        if runs and block.language == "python":
            _python(block, names)
        elif runs and block.language == "bash":
            for line in block.lines():
                _shell(line, block.where)
        elif block.language == "python":
            ast.parse(block.text, block.where)


def _python(block: Block, names: dict[str, Any]) -> None:
    if block.text.startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(block.text, names, block.where, None, None)
        assert not doctest.DocTestRunner(verbose=False).run(test).failed, block.where
        names.update(test.globs)
    else:
        exec(compile(block.text, block.where, "exec"), names)


def _shell(line: str, where: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == _COMMAND and not _SHELL & set("".join(words)):  # in this process, which has imported the compiler
        assert main(words[1:]) == 0, f"{where}: {line}"
        return
    Path("bin").mkdir(exist_ok=True)
    for name, command in ((_COMMAND, "-m lowering"), ("python", "")):
        script = Path("bin") / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        script.chmod(0o755)
    path = f"{Path('bin').absolute()}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{where}: {line}\n{done.stdout}{done.stderr}"
