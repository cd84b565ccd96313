"""Functions that were several, between which only whole rows pass: matmuls and what is done to their rows.

Of such a function an attribute says how many stages each part has. Between the parts lie tensors that have the axes of
the matmuls' rows first: a part reads of them what it needs for a row in that very row, so that a block of rows can go
through all parts before the next one is begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import prim

from lowering.tensorir.expressions import is_int, loads

from .matmul import MatmulGroup, read_groups
from .stages import Axis, Stage, read_stages

SEGMENTS = "lowering.row_parts"
"""Attribute of a function of several parts: how many stages each has."""


@dataclass(frozen=True, eq=False)
class RowSegment:
    """Some stages of a function. parameters are the tensors that it does not make, or that others read; `group` is that
    of its matmul, if it has one."""

    stages: list[Stage]
    parameters: set[tirx.Buffer]
    group: MatmulGroup | None


@dataclass(frozen=True, eq=False)
class RowSegments:
    """The parts, of which the first and the last are matmuls, with the same batch axes and rows; and the tensors
    between them."""

    segments: list[RowSegment]
    intermediates: list[tirx.Buffer]

    @property
    def groups(self) -> list[MatmulGroup]:
        return [part.group for part in self.segments if part.group is not None]


def split_segments(func: tirx.PrimFunc) -> list[list[Stage]] | None:
    """The stages of each part of a function that has some, None of any other."""
    if func.attrs is None or SEGMENTS not in func.attrs:
        return None
    stages = read_stages(func)
    counts = [int(count) for count in func.attrs[SEGMENTS]]
    if stages is None or len(stages) != sum(counts):
        return None
    cut: list[list[Stage]] = []
    for count in counts:
        cut, stages = [*cut, stages[:count]], stages[count:]
    return cut


def read_row_segments(func: tirx.PrimFunc) -> RowSegments | None:
    """The parts of a function that has some, None where rows do not go through them one by one."""
    cut = split_segments(func)
    if cut is None:
        return None
    parameters = set(func.params)
    place = {stage.output: n for n, part in enumerate(cut) for stage in part}
    readers = {(node.source, n) for n, part in enumerate(cut) for stage in part for node in loads(stage.value)}
    between = [buffer for buffer, n in place.items() if any((buffer, k) in readers for k in range(n + 1, len(cut)))]
    parts = [_part(stages, parameters | set(between)) for stages in cut]
    ends = parts[0].group, parts[-1].group
    if None in ends or len(cut) < 2 or any(place[buffer] < len(cut) - 1 for buffer in parameters & place.keys()):
        return None
    found = RowSegments(parts, between)
    rows = _rows(found.groups)
    return found if rows is not None and all(_in_rows(part.stages, set(between), rows) for part in parts) else None


def _part(stages: list[Stage], shared: set[tirx.Buffer]) -> RowSegment:
    inputs = {node.source for stage in stages for node in loads(stage.value)} - {stage.output for stage in stages}
    parameters = inputs | ({stage.output for stage in stages} & shared)
    groups = read_groups(stages, parameters)
    one = groups is not None and len(groups) == 1 and len(groups[0].matmuls) == 1
    return RowSegment(stages, parameters, groups[0] if groups and one else None)


def _rows(groups: Sequence[MatmulGroup]) -> tuple[Axis, ...] | None:
    """The axes of batches and rows, in this order, that all matmuls have; None where they differ."""
    first = groups[0].matmuls[0]
    axes = first.stage.axes[:-1]
    for matmul in (group.matmuls[0] for group in groups):
        own = matmul.stage.axes[:-1]
        several = [axis for axis in own if not is_int(axis.extent, 1)]
        split = sum(axis in several for axis in matmul.batch)
        if len(own) != len(axes) or split != sum(not is_int(axis.extent, 1) for axis in first.batch):
            return None
        if any((axis in matmul.batch) != (n < split) for n, axis in enumerate(several)):
            return None
        if not all(prim.expr_deep_equal(a.extent, b.extent) for a, b in zip(own, axes)):
            return None
    return axes


def _in_rows(stages: Sequence[Stage], between: set[tirx.Buffer], rows: Sequence[Axis]) -> bool:
    """Whether tensors between the parts are made of rows, and read in the row that is written."""
    for stage in stages:
        others = (node for node in loads(stage.value) if not node.source.same_as(stage.output))
        read = [node for node in others if node.source in between]
        if stage.output not in between and not read:
            continue
        own = stage.axes[: len(rows)]
        if len(own) < len(rows) or not all(prim.expr_deep_equal(a.extent, b.extent) for a, b in zip(own, rows)):
            return False
        if stage.output in between and len(stage.axes) != len(rows) + 1:
            return False
        for node in read:
            at = zip(own, node.indices)
            if not all(index.same_as(axis.var) or is_int(axis.extent, 1) for axis, index in at):
                return False
    return True
