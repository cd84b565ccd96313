"""The Dockerfile of examples/docker, read: its commands exist, take these options, and copy what there is."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

from lowering.commands.cli import create_parser

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "docker"


def instructions() -> list[tuple[str, str]]:
    lines = (EXAMPLE / "Dockerfile").read_text().splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


def test_stages_copy_what_there_is() -> None:
    arguments, stages, outputs = set(), set(), {"/dist", "/artifact"}
    for word, rest in instructions():
        if word == "FROM":
            image, *named = rest.split(" AS ")
            assert re.fullmatch(r"python:3\.\d+-slim", image)
            stages |= set(named)
        elif word == "ARG":
            arguments.add(rest)
        elif word == "COPY":
            *sources, _ = rest.split()
            if sources[0].startswith("--from="):
                assert sources.pop(0).removeprefix("--from=") in stages and set(sources) <= outputs
            for source in sources:
                variable = re.fullmatch(r"\$\{(\w+)\}", source)
                assert variable[1] in arguments if variable else source in outputs or (ROOT / source).exists()
    readme = (EXAMPLE / "README.md").read_text()
    assert set(re.findall(r"--build-arg (\w+)=", readme)) == arguments == {"MODEL"}
    assert {word for word, _ in instructions()} <= {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENTRYPOINT"}


def test_commands_take_these_options() -> None:
    commands = [shlex.split(rest) for word, rest in instructions() if word == "RUN"]
    compile_commands = [command[1:] for command in commands if command[0] == "onnx-lowering"]
    modules = [command[2] for command in commands if command[:2] == ["python", "-m"]]
    assert [command[0] for command in compile_commands] == ["compile"] and len(modules) == 1
    (options,) = [create_parser().parse_args(command) for command in compile_commands]
    assert str(options.output) == "/artifact" and importlib.util.find_spec(modules[0]) is not None
    (entry,) = [json.loads(rest) for word, rest in instructions() if word == "ENTRYPOINT"]
    ((_, said),) = re.findall(r"^docker run (.*?) my-model (.*)$", (EXAMPLE / "README.md").read_text(), re.M)
    run = create_parser().parse_args([*entry[1:], *shlex.split(said)])
    assert (entry[0], run.command, str(run.artifact)) == ("onnx-lowering", "run", "/artifact") and len(run.input) == 1
