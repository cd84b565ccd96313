"""Shells complete commands, options and values, by the scripts that `completion` prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lowering
from lowering.commands.cli import main

# Asks as bash does where Tab is pressed at the end of the line, which is argument 2; argument 1 is the script.
BASH = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2} COMP_TYPE=9
read -ra COMP_WORDS <<< "$2"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete onnx-lowering
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = """source $argv[1]; complete -C $argv[2]"""


@pytest.fixture
def script(tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Path:
    """The output of `completion`, next to a program onnx-lowering."""
    assert main(["completion", request.param]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    program = tmp_path / "onnx-lowering"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lowering "$@"\n')
    program.chmod(0o755)
    return tmp_path / "script"


def asked(command: list[str], script: Path, line: str) -> list[str]:
    root, path = str(Path(lowering.__file__).parents[1]), f"{script.parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": root, "HOME": str(script.parent)}
    done = subprocess.run([*command, script, line], env=environment, capture_output=True, text=True, timeout=60)
    return [word.split("\t")[0].strip() for word in done.stdout.splitlines()]


SHELLS = [("bash", ["bash", "-c", BASH, "bash"]), ("fish", ["fish", "-c", FISH])]


@pytest.mark.parametrize("script, command", SHELLS, indirect=["script"], ids=[name for name, _ in SHELLS])
def test_completions(script: Path, command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    assert asked(command, script, "onnx-lowering comp") == ["compile", "completion"]
    assert asked(command, script, "onnx-lowering compile m.onnx --stat") == ["--static-cache"]
    assert asked(command, script, "onnx-lowering db sh") == ["show"]
    assert {"bfloat16", "fast"} <= set(asked(command, script, "onnx-lowering verify m.onnx --precision "))


@pytest.mark.parametrize("script", ["bash", "zsh"], indirect=True)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_scripts_are_legal(script: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", script], check=True)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == (
        "error[toolchain.package_missing]: argcomplete is not installed. Install it: pip install argcomplete.\n"
    )
