"""Scripts of modules in a dump, parsed by Python's parser, whose grammar they have."""

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


class UnknownSizeError(Exception):
    """A number that does not follow from the bound sizes."""


@dataclass(frozen=True)
class ModuleScript:
    """The text of each function by its name, and the line of the file at which it begins."""

    path: Path
    functions: dict[str, str]
    lines: dict[str, int]

    def read_attribute(self, function: str, name: str) -> str | None:
        """Return a string attribute of a function, or None."""
        for node in _find_calls(self.functions.get(function, ""), "func_attr"):
            for key, value in zip(node.args[0].keys, node.args[0].values):
                if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                    return str(value.value)
        return None

    @functools.cached_property
    def main(self) -> MainFunction:
        """Return the main function.

        Raises:
            UnknownSizeError: There is none, or it cannot be parsed.
        """
        if "main" not in self.functions:
            raise UnknownSizeError
        return MainFunction(_parse_function(self.functions["main"]))


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel."""

    kernel: str
    arguments: tuple[ast.expr, ...]


class MainFunction:
    """The main function: the types of its variables, and its statements in the order of execution."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.parameters = [argument.arg for argument in function.args.args]
        self.types = {a.arg: a.annotation for a in function.args.args if a.annotation is not None}
        self.statements = list(_flatten(function.body))
        for statement in self.statements:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                self.types[statement.target.id] = statement.annotation

    def calls(self) -> list[KernelCall]:
        return [call for statement in self.statements if (call := read_kernel_call(statement)) is not None]

    def read_shape(self, variable: str) -> list[ast.expr] | None:
        """Return the shape of a tensor, or None where the script does not state it."""
        match self.types.get(variable):
            case ast.Call(func=ast.Attribute(attr="Tensor"), args=[ast.Tuple(elts=dims), *_]):
                return dims
        return None


def read_kernel_call(statement: ast.stmt) -> KernelCall | None:
    """Return the kernel call that a statement is, or None."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="cls"), attr=kernel), args=arguments)):
            return KernelCall(kernel, tuple(arguments))
    return None


def evaluate_size(expr: ast.expr, sizes: Sizes) -> int:
    """Return the value of an expression of sizes, as a script has it.

    Raises:
        UnknownSizeError: A size is unbound.
    """
    try:
        return arithmetic.evaluate_node(_PlainArithmetic().visit(copy.deepcopy(expr)), sizes)
    except (ValueError, ZeroDivisionError) as error:
        raise UnknownSizeError from error


class _PlainArithmetic(ast.NodeTransformer):
    """Rewrite T.int64(n) as n, T.min as min, and -n as 0 - n."""

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


def _parse_function(text: str) -> ast.FunctionDef:
    try:
        (function,) = ast.parse(textwrap.dedent(text)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnknownSizeError from error
    if not isinstance(function, ast.FunctionDef):
        raise UnknownSizeError
    return function


def _find_calls(text: str, name: str) -> Iterator[Any]:
    """Yield the calls of a method that have lines of their own."""
    for line in text.splitlines():
        if f".{name}(" in line:
            try:
                value = ast.parse(line.strip()).body[0]
            except (SyntaxError, ValueError):
                continue
            if isinstance(value, ast.Expr) and isinstance(value.value, ast.Call):
                yield value.value


def _flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, with both branches of an if in order."""
    for statement in body:
        if isinstance(statement, ast.If | ast.With):
            yield from _flatten(statement.body)
            yield from _flatten(getattr(statement, "orelse", []))
        else:
            yield statement
