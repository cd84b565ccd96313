"""Arithmetic of sizes: as text in a manifest (names, numbers, + - * // %, min and max), and of memory."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

# The largest dimension. Products of a few such numbers still fit into 64 bits.
LARGEST_SIZE = 2**40

PAGE = 4096
"""The granule of the runtime's allocator, in bytes."""

_SIGNS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def round_to_size_class(size: int) -> int:
    """Return the bytes to allocate for a size: a power of two, at least a page (passes/memory/size_classes.py)."""
    return max(PAGE, 1 << max(size - 1, 0).bit_length())


def list_names(text: str) -> set[str]:
    """Return the names of sizes in a text."""
    return {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)} - {"min", "max"}


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """Return the value of a text for these sizes.

    Raises:
        ValueError: The text is anything else.
    """
    return evaluate_node(ast.parse(text, mode="eval").body, values)


def evaluate_node(node: ast.expr, values: Mapping[str, int]) -> int:
    """Return the value of a parsed expression.

    Raises:
        ValueError: The expression is anything else.
    """
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.BinOp(left=a, op=sign, right=b) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](evaluate_node(a, values), evaluate_node(b, values))
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[a, b]):
            return (min if name == "min" else max)(evaluate_node(a, values), evaluate_node(b, values))
    raise ValueError(f"'{ast.unparse(node)}' is not arithmetic of {', '.join(values)}")
