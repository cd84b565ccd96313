"""The leading axes that the stages of a function share, so that it can be computed row by row."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import ir, tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, flatten_index, is_int, loads, substitute

from .stages import Stage

Read = tuple[tirx.Buffer, list[Expr]]


def count_shared_axes(materialized: list[Stage], stages: list[Stage]) -> int:
    """Return how many leading axes the materialized stages share.

    They have equal extents on these axes, and read each other's output at their own point. This includes reads through
    stages that are not materialized, which are computed where they are read. An axis of one element is always shared,
    whatever the index looks like.
    """
    reads = _collect_reads(materialized, stages)
    for rank in range(min(len(stage.axes) for stage in materialized)):
        extent = materialized[0].axes[rank].extent
        for stage in materialized:
            if not prim.expr_deep_equal(stage.axes[rank].extent, extent):
                return rank
            is_own_point = all(stage.indices[rank].same_as(indices[rank]) for _, indices in reads[stage.output])
            if not is_own_point and not is_int(extent, 1):
                return rank
    return min(len(stage.axes) for stage in materialized)


def _collect_reads(materialized: list[Stage], stages: list[Stage]) -> dict[tirx.Buffer, list[Read]]:
    """Return the points of materialized stages that each stage reads, in terms of its own axes; each point once."""
    outputs = {stage.output for stage in materialized}
    axes = {stage.output: stage.indices for stage in stages}
    reads: dict[tirx.Buffer, list[Read]] = {}
    for stage in stages:
        reads[stage.output] = []
        for node in loads(stage.value):
            if node.source in outputs:
                _append_new_reads(reads[stage.output], [(node.source, list(node.indices))])
            elif node.source in reads:
                values = dict(zip(axes[node.source], node.indices))
                points = [(buffer, [substitute(i, values) for i in indices]) for buffer, indices in reads[node.source]]
                _append_new_reads(reads[stage.output], points)
    return reads


def _append_new_reads(reads: list[Read], candidates: Iterable[Read]) -> None:
    for buffer, indices in candidates:
        if not any(b.same_as(buffer) and all(map(prim.expr_deep_equal, i, indices)) for b, i in reads):
            reads.append((buffer, indices))


def is_contiguous_across(stage: Stage, rank: int) -> bool:
    """Return whether the inputs of a reduction are contiguous along axis rank - 1, but not along the reduced axis.

    That axis is then better treated as part of the row: with vectors along it, and a partial result for each of its
    elements.
    """
    along, inner = stage.indices[rank - 1], stage.reduce[-1].var
    input_loads = [node for node in loads(stage.value) if not node.source.same_as(stage.output)]
    strides = [(_find_stride(node, along), _find_stride(node, inner)) for node in input_loads]
    return any(a == 1 for a, _ in strides) and not any(k == 1 for _, k in strides)


def _find_stride(node: ir.TensorLoad, var: tirx.Var) -> int | None:
    position = flatten_index(node.source.shape, node.indices)
    step = Analyzer().simplify(substitute(position, {var: var + 1}) - position)
    return step.value if isinstance(step, tirx.IntImm) else None


def has_many_elements(stage: Stage, rank: int) -> bool:
    """Return whether the stage has more than one element per row."""
    return not all(is_int(axis.extent, 1) for axis in stage.axes[rank:])
