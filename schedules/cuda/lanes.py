"""Vectors that the lanes of a warp share: lane n has every 32nd element from n on; a warp reads a row in one go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .ptx import WARP


def per_lane(size: int) -> int:
    """Elements that a lane keeps of a vector."""
    return -(-size // WARP)


@contextmanager
def lane_elements(size: int, lane: Expr) -> Iterator[tuple[Expr, Expr]]:
    """A loop over a lane's elements of a vector: where it keeps the element, and which element it is."""
    with ExitStack() as inside:
        place = inside.enter_context(T.unroll(per_lane(size)))
        d = T.bind(place * WARP + lane)
        if size % WARP:
            inside.enter_context(T.If(d < size))
            inside.enter_context(T.Then())
        yield place, d
