"""Expr: an expression as plain data, which has one form whatever its parameters were called.

Equal expressions are equal records with equal hashes, so that a record that holds one can be the key of a database.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

INDICES = ("b", "h", "i", "j")
"""Batch, query head, query row and key."""

COMMUTATIVE = ("add", "mul", "min", "max", "and", "or", "eq", "ne")

_Value = bool | int | str | None


@dataclass(frozen=True)
class Expr:
    """op(args), an element of type dtype. Types are NumPy's names.

    Leaves have a value: a `number` what it is (a float as Python writes it), an `index` its name, a `size` the place
    among the int64 scalars. A `load` has the place of its table, a vector, and one argument, the position. `sum` is
    that of integers, each argument a term, with its factor as the first of two arguments of a `mul`; a number comes
    last. Functions are called what TVM calls them.
    """

    op: str
    dtype: str
    args: tuple[Expr, ...] = ()
    value: _Value = None

    @property
    def number(self) -> float | int | bool:
        """Of a `number`."""
        assert self.op == "number" and self.value is not None
        return float(self.value) if isinstance(self.value, str) else self.value

    @property
    def place(self) -> int:
        """Of a `size` or a `load`: which scalar, which table."""
        assert self.op in ("size", "load") and isinstance(self.value, int)
        return self.value

    def walk(self) -> Iterator[Expr]:
        """Every node, each before its arguments."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo += reversed(node.args)

    def to_data(self) -> list[Any]:
        """Lists of text and numbers, which JSON can hold."""
        return [self.op, self.dtype, self.value, *(arg.to_data() for arg in self.args)]

    @staticmethod
    def from_data(data: list[Any]) -> Expr:
        op, dtype, value, *args = data
        return Expr(op, dtype, tuple(map(Expr.from_data, args)), value)


def number(value: float | int | bool, dtype: str) -> Expr:
    if dtype == "bool":
        return Expr("number", dtype, value=bool(value))
    return Expr("number", dtype, value=repr(float(value)) if "float" in dtype else int(value))


def canonical(expr: Expr) -> Expr:
    """The same with arguments in an order of their own, that of commuting operations, and integer sums as `sum`."""
    args = tuple(map(canonical, expr.args))
    if expr.op in ("gt", "ge"):
        return Expr({"gt": "lt", "ge": "le"}[expr.op], expr.dtype, (args[1], args[0]))
    if expr.dtype.startswith(("int", "uint")) and expr.op in ("add", "sub", "mul", "sum"):
        return _linear(replace(expr, args=args))
    if expr.op in COMMUTATIVE:
        args = tuple(sorted(args, key=_shape))
    return replace(expr, args=args)


def renumbered(expr: Expr) -> tuple[Expr, list[int], list[int]]:
    """The expression with sizes and tables numbered in the order in which they come up, and what each number was."""
    numbers: dict[str, list[int]] = {"size": [], "load": []}
    for node in expr.walk():
        if node.op in numbers and node.place not in numbers[node.op]:
            numbers[node.op].append(node.place)

    def renamed(node: Expr) -> Expr:
        value = numbers[node.op].index(node.place) if node.op in numbers else node.value
        return replace(node, args=tuple(map(renamed, node.args)), value=value)

    return renamed(expr), numbers["size"], numbers["load"]


def _shape(expr: Expr) -> str:
    """What is alike of expressions that differ in the numbers of their parameters alone."""

    def anonymous(node: Expr) -> list[Any]:
        value = None if node.op in ("size", "load") else node.value
        return [node.op, node.dtype, value, *map(anonymous, node.args)]

    return json.dumps(anonymous(expr))


def _linear(expr: Expr) -> Expr:
    """An integer sum or product whose arguments are canonical."""
    if expr.op == "mul" and not any(arg.op == "number" for arg in expr.args):
        return replace(expr, args=tuple(sorted(expr.args, key=_shape)))
    terms: dict[Expr, int] = {}
    constant = _collect(expr, 1, terms)
    parts = sorted(((term, factor) for term, factor in terms.items() if factor), key=lambda part: _shape(part[0]))
    args = [
        term if factor == 1 else Expr("mul", expr.dtype, (number(factor, expr.dtype), term)) for term, factor in parts
    ]
    if constant or not args:
        args.append(number(constant, expr.dtype))
    return args[0] if len(args) == 1 else Expr("sum", expr.dtype, tuple(args))


def _collect(expr: Expr, factor: int, terms: dict[Expr, int]) -> int:
    """Adds the terms of factor * expr, and returns its constant."""
    if expr.op == "number":
        return factor * int(expr.number)
    if expr.op in ("add", "sum"):
        return sum(_collect(arg, factor, terms) for arg in expr.args)
    if expr.op == "sub":
        return _collect(expr.args[0], factor, terms) + _collect(expr.args[1], -factor, terms)
    if expr.op == "mul":
        for k, arg in enumerate(expr.args):
            if arg.op == "number":
                return _collect(expr.args[1 - k], factor * int(arg.number), terms)
    terms[expr] = terms.get(expr, 0) + factor
    return 0


def terms(expr: Expr) -> list[tuple[int, Expr]]:
    """The terms of a `sum` with their factors; a number has its sign as factor."""
    found = []
    for arg in expr.args:
        if arg.op == "mul" and arg.args[0].op == "number":
            found.append((int(arg.args[0].number), arg.args[1]))
        elif arg.op == "number":
            found.append((1 if arg.number > 0 else -1, number(abs(arg.number), arg.dtype)))
        else:
            found.append((1, arg))
    return found


def over(expr: Expr) -> tuple[str, ...]:
    """Names of the indices that the expression depends on."""
    used = {node.value for node in expr.walk() if node.op == "index"}
    return tuple(name for name in INDICES if name in used)


def rewritten(expr: Expr, instead: Callable[[Expr], Expr | None]) -> Expr:
    """The expression with what `instead` gives for a node in its place, outermost nodes first; None keeps the node."""
    found = instead(expr)
    if found is not None:
        return found
    return replace(expr, args=tuple(rewritten(arg, instead) for arg in expr.args))
