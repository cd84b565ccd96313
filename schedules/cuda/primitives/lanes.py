"""Vectors distributed over the lanes of a warp.

Lane n has every 32nd element from n on, so that a warp reads a row in one access.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .ptx import WARP


def per_lane(size: int) -> int:
    """Return the number of elements of a vector that a lane has."""
    return -(-size // WARP)


@contextmanager
def lane_elements(size: int, lane: Expr) -> Iterator[tuple[Expr, Expr]]:
    """Loop over a lane's elements of a vector; yield the index in the lane's registers, and the index in the vector."""
    with ExitStack() as inside:
        slot = inside.enter_context(T.unroll(per_lane(size)))
        d = T.bind(slot * WARP + lane)
        if size % WARP:
            inside.enter_context(T.If(d < size))
            inside.enter_context(T.Then())
        yield slot, d
