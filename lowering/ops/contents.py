"""Contents of values that operators move: see lowering/importing/symbolic.py for arithmetic on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..importing.node import Node
from ..importing.symbolic import MOST_ELEMENTS, known
from ..importing.values import Shape, Size, Value


def movable(*values: Value) -> bool:
    """Whether all contents are known and few: then moving them is better done at import than by a kernel."""
    return all(v.contents is not None and v.contents.size <= MOST_ELEMENTS for v in values)


def few(shape: Shape) -> bool:
    """Whether a result of this shape may be held as contents."""
    return all(isinstance(d, int) for d in shape) and int(np.prod(shape, dtype=object)) <= MOST_ELEMENTS


def moved(node: Node, like: Value, contents: np.ndarray) -> Value:
    """A value of the element type of `like` with contents that were picked from known ones."""
    return node.sizes(contents, like.dtype) if known(like) else node.constant(contents)


def sizes(value: Value | None) -> list[Size] | None:
    """The contents of an integer value as a flat list, or None where they are known at run time only."""
    return value.sizes() if value is not None and known(value) else None


def static_axis(node: Node, axis: int, rank: int, what: str = "axis") -> int:
    """The axis counted from the front. Raises NodeError if there is no such axis."""
    if not -rank <= axis < max(rank, 1):
        raise node.error(f"{what} {axis} does not exist in a tensor of rank {rank}.", f"Use {-rank} to {rank - 1}.")
    return axis % max(rank, 1)


def constant_ints(node: Node, value: Value | None, attribute: str | None, what: str) -> list[int] | None:
    """Integers given by an input (newer versions) or an attribute (older ones), None where absent.

    Raises NodeError for an input that is not constant.
    """
    if value is None:
        given: Any = node.attr(attribute, None) if attribute else None
        return None if given is None else [int(v) for v in np.ravel(given)]
    if value.constant is None:
        raise node.error(f"input {what} is computed at run time, so the rank of the result is unknown.")
    return [int(v) for v in np.ravel(value.constant)]
