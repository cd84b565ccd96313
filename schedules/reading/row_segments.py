"""Functions fused from several, which exchange only whole rows: matmuls and operations on their rows.

An attribute of such a function is the number of stages of each segment. The tensors between the segments have the axes
of the matmuls' rows first. To compute a row, a segment reads these tensors in that row alone. So a block of rows can go
through all segments before the next block is begun (back-to-back GEMM fusion).
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
"""Attribute of a function of several segments: the number of stages of each."""


@dataclass(frozen=True, eq=False)
class RowSegment:
    """The stages of one segment of a function.

    parameters are the tensors that it does not compute, or that others read; `group` is that of its matmul, if it has
    one.
    """

    stages: list[Stage]
    parameters: set[tirx.Buffer]
    group: MatmulGroup | None


@dataclass(frozen=True, eq=False)
class RowSegments:
    """The segments of a function, and the tensors between them.

    The first and the last segment are matmuls, with the same batch axes and rows.
    """

    segments: list[RowSegment]
    intermediates: list[tirx.Buffer]

    @property
    def groups(self) -> list[MatmulGroup]:
        return [segment.group for segment in self.segments if segment.group is not None]


def split_segments(func: tirx.PrimFunc) -> list[list[Stage]] | None:
    """Return the stages of each segment of a function that has some, else None."""
    if func.attrs is None or SEGMENTS not in func.attrs:
        return None
    stages = read_stages(func)
    counts = [int(count) for count in func.attrs[SEGMENTS]]
    if stages is None or len(stages) != sum(counts):
        return None
    segments: list[list[Stage]] = []
    for count in counts:
        segments, stages = [*segments, stages[:count]], stages[count:]
    return segments


def read_row_segments(func: tirx.PrimFunc) -> RowSegments | None:
    """Return the segments of a function that has some, or None if rows do not go through them independently."""
    segment_stages = split_segments(func)
    if segment_stages is None:
        return None
    parameters = set(func.params)
    segment_of = {stage.output: n for n, stages in enumerate(segment_stages) for stage in stages}
    readers = {
        (node.source, n) for n, stages in enumerate(segment_stages) for stage in stages for node in loads(stage.value)
    }
    intermediates = [
        buffer
        for buffer, n in segment_of.items()
        if any((buffer, k) in readers for k in range(n + 1, len(segment_stages)))
    ]
    segments = [_build_segment(stages, parameters | set(intermediates)) for stages in segment_stages]
    ends = segments[0].group, segments[-1].group
    if (
        None in ends
        or len(segment_stages) < 2
        or any(segment_of[buffer] < len(segment_stages) - 1 for buffer in parameters & segment_of.keys())
    ):
        return None
    result = RowSegments(segments, intermediates)
    rows = _find_row_axes(result.groups)
    return (
        result
        if rows is not None and all(_is_row_local(segment.stages, set(intermediates), rows) for segment in segments)
        else None
    )


def _build_segment(stages: list[Stage], shared: set[tirx.Buffer]) -> RowSegment:
    inputs = {node.source for stage in stages for node in loads(stage.value)} - {stage.output for stage in stages}
    parameters = inputs | ({stage.output for stage in stages} & shared)
    groups = read_groups(stages, parameters)
    is_single = groups is not None and len(groups) == 1 and len(groups[0].matmuls) == 1
    return RowSegment(stages, parameters, groups[0] if groups and is_single else None)


def _find_row_axes(groups: Sequence[MatmulGroup]) -> tuple[Axis, ...] | None:
    """Return the axes of batches and rows, in this order, that all matmuls have; None if they differ."""
    first = groups[0].matmuls[0]
    axes = first.stage.axes[:-1]
    for matmul in (group.matmuls[0] for group in groups):
        candidate = matmul.stage.axes[:-1]
        nontrivial = [axis for axis in candidate if not is_int(axis.extent, 1)]
        batch_count = sum(axis in nontrivial for axis in matmul.batch)
        if len(candidate) != len(axes) or batch_count != sum(not is_int(axis.extent, 1) for axis in first.batch):
            return None
        if any((axis in matmul.batch) != (n < batch_count) for n, axis in enumerate(nontrivial)):
            return None
        if not all(prim.expr_deep_equal(a.extent, b.extent) for a, b in zip(candidate, axes)):
            return None
    return axes


def _is_row_local(stages: Sequence[Stage], intermediates: set[tirx.Buffer], rows: Sequence[Axis]) -> bool:
    """Return whether tensors between the segments have rows, and are read in the row that is written."""
    for stage in stages:
        input_loads = (node for node in loads(stage.value) if not node.source.same_as(stage.output))
        row_loads = [node for node in input_loads if node.source in intermediates]
        if stage.output not in intermediates and not row_loads:
            continue
        own_axes = stage.axes[: len(rows)]
        if len(own_axes) < len(rows) or not all(
            prim.expr_deep_equal(a.extent, b.extent) for a, b in zip(own_axes, rows)
        ):
            return False
        if stage.output in intermediates and len(stage.axes) != len(rows) + 1:
            return False
        for node in row_loads:
            pairs = zip(own_axes, node.indices)
            if not all(index.same_as(axis.var) or is_int(axis.extent, 1) for axis, index in pairs):
                return False
    return True
