"""Expr: an expression as plain data, in one canonical form whatever its parameters were called.

Equal expressions are equal records with equal hashes, so that a record with one can be the key of a database.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

PAIR = ("b", "h", "i", "j")
"""Batch, query head, query row and key."""

INDICES = (*PAIR, "s")
"""The pair, and its score, which only score modifications have."""

PARAMETERS = ("scalar", "load")
"""Operations that read a parameter of the kernel."""

COMMUTATIVE = ("add", "mul", "min", "max", "and", "or", "eq", "ne", "bit_and", "bit_or", "bit_xor")

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

_Value = bool | int | str | None


@dataclass(frozen=True)
class Expr:
    """op(args), an element of type dtype. Types are NumPy's names.

    Leaves have a value: a `number` its value (a float as Python writes it), an `index` its name, a `scalar` the name of
    the kernel's int64 parameter. A `load` has the name of a table and its indices as arguments. `sum` is a sum of
    integers: each argument is a term, or a `mul` whose first argument is the factor of the term; a number comes last.
    Functions have TVM's names.
    """

    op: str
    dtype: str
    args: tuple[Expr, ...] = ()
    value: _Value = None

    @property
    def number(self) -> float | int | bool:
        """The value of a `number`."""
        assert self.op == "number" and self.value is not None
        return float(self.value) if isinstance(self.value, str) else self.value

    @property
    def name(self) -> str:
        """The name of an `index`, a `scalar` or a `load`."""
        assert self.op in ("index", *PARAMETERS) and isinstance(self.value, str)
        return self.value

    def walk(self) -> Iterator[Expr]:
        """Yield every node, each before its arguments."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo += reversed(node.args)

    def to_data(self) -> list[Any]:
        """Return lists of text and numbers, which JSON can represent."""
        return [self.op, self.dtype, self.value, *(arg.to_data() for arg in self.args)]

    @staticmethod
    def from_data(data: list[Any]) -> Expr:
        op, dtype, value, *args = data
        return Expr(op, dtype, tuple(map(Expr.from_data, args)), value)


def make_number(value: float | int | bool, dtype: str) -> Expr:
    if dtype == "bool":
        return Expr("number", dtype, value=bool(value))
    return Expr("number", dtype, value=repr(float(value)) if "float" in dtype else int(value))


def canonicalize(expr: Expr) -> Expr:
    """Return the canonical form of an expression.

    Arguments of commutative operations are sorted, integer sums become `sum`, and bools are compared as integers.
    """
    args = tuple(map(canonicalize, expr.args))
    if expr.op in COMPARISONS and args[0].dtype == "bool":
        args = tuple(Expr("cast", "int32", (arg,)) for arg in args)
    if expr.op in ("gt", "ge"):
        return Expr({"gt": "lt", "ge": "le"}[expr.op], expr.dtype, (args[1], args[0]))
    if expr.dtype.startswith(("int", "uint")) and expr.op in ("add", "sub", "mul", "sum"):
        return _linearize(replace(expr, args=args))
    if expr.op in COMMUTATIVE:
        args = tuple(sorted(args, key=_sort_key))
    return replace(expr, args=args)


def rename_parameters(expr: Expr, prefix: str = "") -> tuple[Expr, dict[str, str]]:
    """Rename scalars to size_0, size_1, ... and tables to table_0, ... in order of appearance, with a prefix if given.

    Also return the old name of each new one.
    """
    names: dict[str, str] = {}
    for op, stem in zip(PARAMETERS, ("size", "table")):
        names |= {old: f"{prefix}{stem}_{k}" for k, old in enumerate(find_parameters(expr, op))}

    def rename(node: Expr) -> Expr:
        value = names[node.name] if node.op in PARAMETERS else node.value
        return replace(node, args=tuple(map(rename, node.args)), value=value)

    return rename(expr), {new: old for old, new in names.items()}


def find_parameters(expr: Expr, op: str) -> dict[str, Expr]:
    """Return one node for each parameter read by `op`, "scalar" or "load", by name, in order of appearance."""
    nodes: dict[str, Expr] = {}
    for node in expr.walk():
        if node.op == op:
            nodes.setdefault(node.name, node)
    return nodes


def _sort_key(expr: Expr) -> str:
    """Return a text that is equal for expressions that differ in the numbers of their parameters alone."""

    def anonymous(node: Expr) -> list[Any]:
        value = None if node.op in PARAMETERS else node.value
        return [node.op, node.dtype, value, *map(anonymous, node.args)]

    return json.dumps(anonymous(expr))


def _linearize(expr: Expr) -> Expr:
    """Return the canonical form of integer arithmetic whose arguments are canonical."""
    if expr.op == "mul" and not any(arg.op == "number" for arg in expr.args):
        return replace(expr, args=tuple(sorted(expr.args, key=_sort_key)))
    factors: dict[Expr, int] = {}
    constant = _collect(expr, 1, factors)
    sorted_terms = sorted(
        ((term, factor) for term, factor in factors.items() if factor), key=lambda item: _sort_key(item[0])
    )
    args = [
        term if factor == 1 else Expr("mul", expr.dtype, (make_number(factor, expr.dtype), term))
        for term, factor in sorted_terms
    ]
    if constant or not args:
        args.append(make_number(constant, expr.dtype))
    return args[0] if len(args) == 1 else Expr("sum", expr.dtype, tuple(args))


def _collect(expr: Expr, factor: int, factors: dict[Expr, int]) -> int:
    """Add the terms of factor * expr, and return its constant."""
    if expr.op == "number":
        return factor * int(expr.number)
    if expr.op in ("add", "sum"):
        return sum(_collect(arg, factor, factors) for arg in expr.args)
    if expr.op == "sub":
        return _collect(expr.args[0], factor, factors) + _collect(expr.args[1], -factor, factors)
    if expr.op == "mul":
        for k, arg in enumerate(expr.args):
            if arg.op == "number":
                return _collect(expr.args[1 - k], factor * int(arg.number), factors)
    factors[expr] = factors.get(expr, 0) + factor
    return 0


def split_terms(expr: Expr) -> list[tuple[int, Expr]]:
    """Return the terms of a `sum` with their factors; a number has its sign as factor."""
    terms = []
    for arg in expr.args:
        if arg.op == "mul" and arg.args[0].op == "number":
            terms.append((int(arg.args[0].number), arg.args[1]))
        elif arg.op == "number":
            terms.append((1 if arg.number > 0 else -1, make_number(abs(arg.number), arg.dtype)))
        else:
            terms.append((1, arg))
    return terms


def find_indices(expr: Expr) -> tuple[str, ...]:
    """Return the names of the indices that the expression depends on."""
    used = {node.value for node in expr.walk() if node.op == "index"}
    return tuple(name for name in INDICES if name in used)


def rewrite_expr(expr: Expr, replacement: Callable[[Expr], Expr | None]) -> Expr:
    """Replace nodes by the result of `replacement`, outermost nodes first; None keeps the node."""
    new = replacement(expr)
    if new is not None:
        return new
    return replace(expr, args=tuple(rewrite_expr(arg, replacement) for arg in expr.args))
