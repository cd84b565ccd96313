"""Arithmetic of sizes: as text, which a manifest holds (names, numbers, + - * // %, min and max), and of memory."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

# No dimension is larger. Matmuls of a few such numbers still fit into 64 bits.
LARGEST_SIZE = 2**40

PAGE = 4096
"""Bytes: the granule of the runtime's allocator."""

_SIGNS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def size_class(size: int) -> int:
    """Bytes that are asked of the allocator for so many: a power of two, at least a page (passes/size_classes.py)."""
    return max(PAGE, 1 << max(size - 1, 0).bit_length())


def names(text: str) -> set[str]:
    """The sizes that the text is about."""
    return {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)} - {"min", "max"}


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """The number that the text gives for these sizes.

    Raises ValueError for anything else.
    """
    return value(ast.parse(text, mode="eval").body, values)


def value(node: ast.expr, values: Mapping[str, int]) -> int:
    """The same of an expression that has been parsed."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.BinOp(left=a, op=sign, right=b) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](value(a, values), value(b, values))
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[a, b]):
            return (min if name == "min" else max)(value(a, values), value(b, values))
    raise ValueError(f"'{ast.unparse(node)}' is no arithmetic of {', '.join(values)}")
