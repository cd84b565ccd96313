"""Which leading axes the stages of a function have in common, so that it can be computed row by row."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import ir, tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, flatten_index, is_int, loads, substitute

from .stages import Stage

Read = tuple[tirx.Buffer, list[Expr]]


def count_shared_axes(kept: list[Stage], stages: list[Stage]) -> int:
    """How many leading axes the kept stages share.

    They have equal extents there, and read each other's output at their own point, also by way of stages that are not
    kept, which are computed where they are read. On an axis of one element that is so whatever the index looks like.
    """
    reads = _reads(kept, stages)
    for rank in range(min(len(stage.axes) for stage in kept)):
        extent = kept[0].axes[rank].extent
        for stage in kept:
            if not prim.expr_deep_equal(stage.axes[rank].extent, extent):
                return rank
            own = all(stage.indices[rank].same_as(indices[rank]) for _, indices in reads[stage.output])
            if not own and not is_int(extent, 1):
                return rank
    return min(len(stage.axes) for stage in kept)


def _reads(kept: list[Stage], stages: list[Stage]) -> dict[tirx.Buffer, list[Read]]:
    """For each stage, at which points of the kept ones it reads, in terms of its own axes; each point once."""
    outputs = {stage.output for stage in kept}
    axes = {stage.output: stage.indices for stage in stages}
    reads: dict[tirx.Buffer, list[Read]] = {}
    for stage in stages:
        reads[stage.output] = []
        for node in loads(stage.value):
            if node.source in outputs:
                _add(reads[stage.output], [(node.source, list(node.indices))])
            elif node.source in reads:
                at = dict(zip(axes[node.source], node.indices))
                there = [(buffer, [substitute(i, at) for i in indices]) for buffer, indices in reads[node.source]]
                _add(reads[stage.output], there)
    return reads


def _add(found: list[Read], more: Iterable[Read]) -> None:
    for buffer, indices in more:
        if not any(b.same_as(buffer) and all(map(prim.expr_deep_equal, i, indices)) for b, i in found):
            found.append((buffer, indices))


def is_contiguous_across(stage: Stage, rank: int) -> bool:
    """Whether the inputs of a reduction are contiguous along axis rank - 1, and not along what it reduces.

    Then that axis is better part of the row: vectors along it, and a partial result for each of its elements.
    """
    along, inner = stage.indices[rank - 1], stage.reduce[-1].var
    found = [node for node in loads(stage.value) if not node.source.same_as(stage.output)]
    strides = [(_stride(node, along), _stride(node, inner)) for node in found]
    return any(a == 1 for a, _ in strides) and not any(k == 1 for _, k in strides)


def _stride(node: ir.TensorLoad, var: tirx.Var) -> int | None:
    position = flatten_index(node.source.shape, node.indices)
    step = Analyzer().simplify(substitute(position, {var: var + 1}) - position)
    return step.value if isinstance(step, tirx.IntImm) else None


def has_many_elements(stage: Stage, rank: int) -> bool:
    """Whether the stage has more than one element per row."""
    return not all(is_int(axis.extent, 1) for axis in stage.axes[rank:])
