"""Expr: an expression as plain data, which has one form whatever its parameters were called.

Equal expressions are equal records with equal hashes, so that a record that holds one can be the key of a database.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

PAIR = ("b", "h", "i", "j")
"""Batch, query head, query row and key."""

INDICES = (*PAIR, "s")
"""And the score of such a pair, of which only changes of scores know."""

PARAMETERS = ("scalar", "load")
"""What reads a parameter of the kernel."""

COMMUTATIVE = ("add", "mul", "min", "max", "and", "or", "eq", "ne", "bit_and", "bit_or", "bit_xor")

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

_Value = bool | int | str | None


@dataclass(frozen=True)
class Expr:
    """op(args), an element of type dtype. Types are NumPy's names.

    Leaves have a value: a `number` what it is (a float as Python writes it), an `index` its name, a `scalar` the name
    of the kernel's int64 parameter. A `load` has the name of a table and its indices as arguments. `sum` is that of
    integers, each argument a term, with its factor as the first of two arguments of a `mul`; a number comes last.
    Functions are called what TVM calls them.
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
    def name(self) -> str:
        """Of an `index`, a `scalar` or a `load`."""
        assert self.op in ("index", *PARAMETERS) and isinstance(self.value, str)
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
    """The same with arguments in an order of their own, that of commuting operations, integer sums as `sum`, and truth
    values that are compared as numbers."""
    args = tuple(map(canonical, expr.args))
    if expr.op in COMPARISONS and args[0].dtype == "bool":
        args = tuple(Expr("cast", "int32", (arg,)) for arg in args)
    if expr.op in ("gt", "ge"):
        return Expr({"gt": "lt", "ge": "le"}[expr.op], expr.dtype, (args[1], args[0]))
    if expr.dtype.startswith(("int", "uint")) and expr.op in ("add", "sub", "mul", "sum"):
        return _linear(replace(expr, args=args))
    if expr.op in COMMUTATIVE:
        args = tuple(sorted(args, key=_shape))
    return replace(expr, args=args)


def renamed(expr: Expr, prefix: str = "") -> tuple[Expr, dict[str, str]]:
    """The expression with scalars called size_0, size_1, ... and tables table_0, ... in the order in which they come
    up, with a prefix if need be; and what each of these names was."""
    names: dict[str, str] = {}
    for op, word in zip(PARAMETERS, ("size", "table")):
        names |= {old: f"{prefix}{word}_{k}" for k, old in enumerate(parameters(expr, op))}

    def rename(node: Expr) -> Expr:
        value = names[node.name] if node.op in PARAMETERS else node.value
        return replace(node, args=tuple(map(rename, node.args)), value=value)

    return rename(expr), {new: old for old, new in names.items()}


def parameters(expr: Expr, op: str) -> dict[str, Expr]:
    """What the expression reads by `op`, "scalar" or "load": by name, in the order in which they come up, one node."""
    found: dict[str, Expr] = {}
    for node in expr.walk():
        if node.op == op:
            found.setdefault(node.name, node)
    return found


def _shape(expr: Expr) -> str:
    """What is alike of expressions that differ in the numbers of their parameters alone."""

    def anonymous(node: Expr) -> list[Any]:
        value = None if node.op in PARAMETERS else node.value
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
