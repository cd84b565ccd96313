"""Errors by their stable codes: what the source raises, and the context in which a test expects one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lowering.errors import LoweringError

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"[a-z0-9_]+\.[a-z0-9_]+")
ERRORS = frozenset(
    [
        "LoweringError",
        "ModelError",
        "NodeError",
        "CompilerError",
        "TargetError",
        "ArtifactError",
        "InputError",
        "PoolFullError",
        "DatabaseError",
        "ArgumentError",
    ]
)
RAISERS = {"refuse": 0, "require": 3, "_require": 2, "check_condition": 2}
"""Functions that raise the error of a code, and the index of this argument."""


@contextmanager
def raises(*codes: str, kind: type[Exception] = LoweringError) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error of one of these codes."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code in codes, f"{caught.value.code}: {caught.value}"


FORWARDING = frozenset(
    [
        "lowering/flex/mod.py",
        "lowering/flex/problem.py",
        "lowering/functions/gpt_checks/contents.py",
        "lowering/functions/gpt_checks/values.py",
        "lowering/importing/node.py",
        "lowering/ops/helpers/assertions.py",
        "lowering/ops/helpers/requirements.py",
        "lowering/ops/flex/reads.py",
        "lowering/runtime/decoding/decoder.py",
        "lowering/runtime/executor.py",
        "lowering/runtime/graphs.py",
        "lowering/serving/source_pool.py",
        "lowering/tuning/local.py",
    ]
)
"""Files with a call that passes on the code of another error, or of a caller."""

_NATIVE = re.compile(r"""\b(?:fail|reject|begin_error)\(\s*([^;]*?);""", re.DOTALL)
_ASSERTION = re.compile(r"\[([a-z0-9_]+\.[a-z0-9_]+)\] ([^\"]*)")


@dataclass(frozen=True)
class RaiseSite:
    """A call that creates an error: its path and line, the code (None if it is not a literal), and its text."""

    path: str
    line: int
    code: str | None
    text: str


def find_raise_sites() -> Iterator[RaiseSite]:
    """Yield the calls that create errors in lowering/ and schedules/."""
    requirements = _read_requirements()
    for path in sorted((*(ROOT / "lowering").rglob("*.py"), *(ROOT / "schedules").rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in requirements:
                code, text = requirements[node.func.id]
                code = next((getattr(k.value, "value", None) for k in node.keywords if k.arg == "code"), code)
                yield RaiseSite(str(path.relative_to(ROOT)), node.lineno, code, text)
            elif isinstance(node, ast.Call) and (index := _find_code_argument(node)) is not None:
                arguments = node.args[index : index + 3]
                code = arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else None
                code = code if isinstance(code, str) and CODE.fullmatch(code) else None
                text = " ".join(_read_text(argument) for argument in arguments[1:])
                yield RaiseSite(str(path.relative_to(ROOT)), node.lineno, code, text)


def _read_requirements() -> dict[str, tuple[str, str]]:
    """Return the default code and the text of each function that raises an error with the code of an argument."""
    requirements: dict[str, tuple[str, str]] = {}
    for function in ast.parse((ROOT / "lowering/ops/helpers/requirements.py").read_text()).body:
        if isinstance(function, ast.FunctionDef) and function.args.args[-1].arg == "code":
            raised = [n for n in ast.walk(function) if isinstance(n, ast.Call) and _find_code_argument(n) is not None]
            strings = {
                n.targets[0].id: _read_text(n.value)
                for n in ast.walk(function)
                if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
            }
            text = " ".join(
                strings.get(a.id, "{remedy}") if isinstance(a, ast.Name) else _read_text(a)
                for call in raised[:1]
                for a in call.args[1:]
            )
            requirements[function.name] = ast.literal_eval(function.args.defaults[-1]), text
    requirements["read_choice"] = requirements["read_choice"][0], requirements["require_choice"][1]
    return requirements


def find_native_codes() -> Iterator[tuple[str, str]]:
    """Yield the codes of checks in C, and of assertions in kernels, with their texts."""
    for path in sorted((ROOT / "lowering").rglob("*.[ch]")):
        for call in _NATIVE.findall(path.read_text()):
            literals = re.findall(r'"((?:[^"\\]|\\.)*)"', call)
            texts = " ".join(text for text in literals if not CODE.fullmatch(text))
            yield from ((code, texts) for code in literals if CODE.fullmatch(code))
    for path in sorted((ROOT / "lowering").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                match = _ASSERTION.match(_read_text(node))
                if match:
                    yield match[1], match[2]


def _find_code_argument(call: ast.Call) -> int | None:
    """Return the index of the code among the arguments of a call that creates an error; None for other calls."""
    if isinstance(call.func, ast.Name):
        return 0 if call.func.id in ERRORS else RAISERS.get(call.func.id)
    if isinstance(call.func, ast.Attribute):
        return 0 if call.func.attr == "error" else RAISERS.get(call.func.attr)
    return None


def _read_text(argument: ast.expr) -> str:
    """Return the text of a literal, with its placeholders as in the source."""
    if isinstance(argument, ast.Constant):
        return str(argument.value)
    if isinstance(argument, ast.JoinedStr):
        values = (
            _read_text(v) if isinstance(v, ast.Constant) else f"{{{ast.unparse(v.value)}}}" for v in argument.values
        )  # type: ignore[attr-defined]
        return "".join(values)
    return f"{{{ast.unparse(argument)}}}"
