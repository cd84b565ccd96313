"""Scripts of modules, as a dump has them: Python's grammar, read by Python's parser."""

from __future__ import annotations

import ast
import copy
import functools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import arithmetic

Sizes = Mapping[str, int]


class Unknown(Exception):
    """A number that does not follow from the sizes that are known."""


@dataclass(frozen=True)
class Script:
    """The text of each function by its name, and the line of the file at which it begins."""

    path: Path
    functions: dict[str, str]
    lines: dict[str, int]

    def attribute(self, function: str, name: str) -> str | None:
        """A string that a function has as attribute."""
        for node in _calls(self.functions.get(function, ""), "func_attr"):
            for key, value in zip(node.args[0].keys, node.args[0].values):
                if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                    return str(value.value)
        return None

    @functools.cached_property
    def main(self) -> Main:
        """Raises Unknown where there is none that can be read."""
        if "main" not in self.functions:
            raise Unknown
        return Main(_parsed(self.functions["main"]))


@dataclass(frozen=True)
class Call:
    """A call of a kernel."""

    kernel: str
    arguments: tuple[ast.expr, ...]


class Main:
    """The main function: the types of its variables, and its statements in the order of execution."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.parameters = [argument.arg for argument in function.args.args]
        self.types = {a.arg: a.annotation for a in function.args.args if a.annotation is not None}
        self.statements = list(_flat(function.body))
        for statement in self.statements:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                self.types[statement.target.id] = statement.annotation

    def calls(self) -> list[Call]:
        return [call for statement in self.statements if (call := called(statement)) is not None]

    def shape(self, variable: str) -> list[ast.expr] | None:
        """Of a tensor; None where it is not written down."""
        match self.types.get(variable):
            case ast.Call(func=ast.Attribute(attr="Tensor"), args=[ast.Tuple(elts=dims), *_]):
                return dims
        return None


def called(statement: ast.stmt) -> Call | None:
    """The call of a kernel that a statement is."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="cls"), attr=kernel), args=arguments)):
            return Call(kernel, tuple(arguments))
    return None


def number(expr: ast.expr, sizes: Sizes) -> int:
    """Arithmetic of sizes, as a script has it. Raises Unknown."""
    try:
        return arithmetic.value(_Plain().visit(copy.deepcopy(expr)), sizes)
    except (ValueError, ZeroDivisionError) as error:
        raise Unknown from error


class _Plain(ast.NodeTransformer):
    """Makes T.int64(n) n, T.min min, and -n 0 - n."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(attr="int64" | "int32"), args=[a]):
                return a
            case ast.Call(func=ast.Attribute(attr="min" | "max" as name), args=arguments):
                return ast.Call(ast.Name(name, ast.Load()), arguments, [])
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return ast.BinOp(ast.Constant(0), ast.Sub(), node.operand) if isinstance(node.op, ast.USub) else node


def _parsed(text: str) -> ast.FunctionDef:
    try:
        (function,) = ast.parse(textwrap.dedent(text)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unknown from error
    if not isinstance(function, ast.FunctionDef):
        raise Unknown
    return function


def _calls(text: str, name: str) -> Iterator[Any]:
    """The calls of a method that stand on lines of their own."""
    for line in text.splitlines():
        if f".{name}(" in line:
            try:
                value = ast.parse(line.strip()).body[0]
            except (SyntaxError, ValueError):
                continue
            if isinstance(value, ast.Expr) and isinstance(value.value, ast.Call):
                yield value.value


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Both branches of an if one after the other."""
    for statement in body:
        if isinstance(statement, ast.If | ast.With):
            yield from _flat(statement.body)
            yield from _flat(getattr(statement, "orelse", []))
        else:
            yield statement
