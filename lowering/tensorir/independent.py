"""Loops whose iterations need nothing of each other, in any order or at once.

`T.parallel` says the same, and wakes threads of a CPU. A loop that is only marked stays serial there, and becomes
threads on a GPU (schedules/cuda/loop_nests.py).
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
def independent(*extents: Any) -> Iterator[tuple[Any, ...]]:
    """Loops over all indices of a shape, of any rank: each iteration writes what no other reads or writes."""
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(T.serial(T.int64(extent) if isinstance(extent, int) else extent, annotations=_MARKED))
            for extent in extents
        )


def is_independent(stmt: tirx.Stmt) -> bool:
    """Whether a statement is a loop whose iterations may run at once."""
    if not isinstance(stmt, tirx.For):
        return False
    return stmt.kind == tirx.ForKind.PARALLEL or ANNOTATION in stmt.annotations


def nest_of(loop: tirx.For) -> tuple[Sequence[tirx.For], tirx.Stmt]:
    """The independent loops that lie directly inside each other from this one on, and the body of the last.

    The extents of all are known before the first iteration.
    """
    loops = [loop]
    while is_independent(loop.body) and not _depends(loop.body.extent, loops):
        loop = loop.body
        loops.append(loop)
    return loops, loop.body


def _depends(extent: Any, loops: Sequence[tirx.For]) -> bool:
    used = tirx.analysis.undefined_vars(extent) if not isinstance(extent, tirx.IntImm) else []
    return any(var.same_as(loop.loop_var) for var in used for loop in loops)
