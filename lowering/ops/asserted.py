"""Shapes that an operator requires of its inputs."""

from __future__ import annotations

from ..node import Node
from ..values import Shape, Value


def asserted(node: Node, value: Value, shape: Shape) -> Value:
    """The value, which is known or asserted at run time to have this shape."""
    known = all(node.symbols.equal(a, b) for a, b in zip(value.shape, shape, strict=True))
    return value if known else node.cast_shape(value, shape)
