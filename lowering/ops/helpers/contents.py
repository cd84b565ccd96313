"""Contents of values that operators move. lowering/ops/helpers/symbolic.py does arithmetic on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from .symbolic import MAX_CONTENTS, has_contents


def can_fold_contents(*values: Value) -> bool:
    """Return whether all contents are static and small: these are moved at import instead of by a kernel."""
    return all(v.contents is not None and v.contents.size <= MAX_CONTENTS for v in values)


def fits_contents(shape: Shape) -> bool:
    """Return whether a result of this static shape is small enough to store as contents."""
    return all(isinstance(d, int) for d in shape) and int(np.prod(shape, dtype=object)) <= MAX_CONTENTS


def fold_contents(node: Node, like: Value, contents: np.ndarray) -> Value:
    """Return a value with contents selected from those of `like`, and its element type."""
    return node.sizes(contents, like.dtype) if has_contents(like) else node.constant(contents)


def read_sizes(value: Value | None) -> list[Size] | None:
    """Return the contents of an integer value as a flat list, or None if it is dynamic."""
    return value.sizes() if value is not None and has_contents(value) else None


def normalize_axis(node: Node, axis: int, rank: int, what: str = "axis") -> int:
    """Return the axis counted from the front.

    Raises:
        NodeError: The axis does not exist.
    """
    if not -rank <= axis < max(rank, 1):
        raise node.error(
            "node.axis_out_of_range",
            f"{what} {axis} does not exist in a tensor of rank {rank}.",
            f"Use {-rank} to {rank - 1}.",
        )
    return axis % max(rank, 1)


def read_constant_ints(node: Node, value: Value | None, attribute: str | None, what: str) -> list[int] | None:
    """Return integers from an input (newer versions) or an attribute (older ones), or None.

    Raises:
        NodeError: The input is not constant.
    """
    if value is None:
        values: Any = node.attr(attribute, None) if attribute else None
        return None if values is None else [int(v) for v in np.ravel(values)]
    if value.constant is None:
        raise node.error(
            "node.constant_required",
            f"input {what} is computed at run time, so the rank of the result is unknown.",
            "Make it a constant.",
        )
    return [int(v) for v in np.ravel(value.constant)]
