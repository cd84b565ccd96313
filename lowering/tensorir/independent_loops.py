"""Loops with independent iterations, which may run in any order or concurrently.

`T.parallel` says the same, and uses the threads of a CPU. A loop that is only marked is serial on a CPU, and becomes
threads on a GPU (schedules/cuda/elementwise/loop_nests.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

ANNOTATION = "lowering.independent"
_MARKED = {ANNOTATION: True}


@contextmanager
def independent_loops(*extents: Any) -> Iterator[tuple[Any, ...]]:
    """Loop over all indices of a shape, of any rank: no iteration accesses data that another one writes."""
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(T.serial(T.int64(extent) if isinstance(extent, int) else extent, annotations=_MARKED))
            for extent in extents
        )


def is_independent(stmt: tirx.Stmt) -> bool:
    """Return whether a statement is a loop whose iterations may run concurrently."""
    if not isinstance(stmt, tirx.For):
        return False
    return stmt.kind == tirx.ForKind.PARALLEL or ANNOTATION in stmt.annotations


def read_independent_nest(loop: tirx.For) -> tuple[Sequence[tirx.For], tirx.Stmt]:
    """Return the independent loops nested directly inside each other, from this one on, and the body of the last.

    Their extents do not depend on the loop variables.
    """
    loops = [loop]
    while is_independent(loop.body) and not _depends(loop.body.extent, loops):
        loop = loop.body
        loops.append(loop)
    return loops, loop.body


def _depends(extent: Any, loops: Sequence[tirx.For]) -> bool:
    used = tirx.analysis.undefined_vars(extent) if not isinstance(extent, tirx.IntImm) else []
    return any(var.same_as(loop.loop_var) for var in used for loop in loops)
