"""Choice of the functions in which matmuls are computed: all that the matrix kernel supports, in separate functions.

Fusion groups operators by their order. This pass queries the target's matrix kernel instead
(schedules.accepts_siblings), after fusion:

1. A function with a matmul that the kernel does not support is split: matmuls become separate functions, with the
   adjacent element-wise stages that the kernel supports.
2. Matmuls of one matrix with several constant ones (gate and up, queries, keys and values) become one function. In it,
   readers of several of them are computed from the accumulators. An accumulator without other readers is never stored.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from tvm import relax, tirx

import schedules
from schedules.reading.matmul import read_matmul
from schedules.reading.stages import Stage

from ...tensorir.expressions import loads
from ...tensorir.memo import Memo
from ..compile_state import CompileState
from .fuser import Fuser, fuse_groups
from .group import FusionGroup, concatenate_groups


def group_matmuls(state: CompileState) -> CompileState:
    """Move the matmuls of a module that FuseTIR wrote to functions of their own, alone or grouped."""
    answers, target = Memo[bool | None](), state.target.tvm

    def accepts_siblings(group: FusionGroup) -> bool | None:
        return answers(group.build_function()[0], lambda function: schedules.accepts_siblings(function, target))

    return fuse_groups(state, lambda fuser: _find_siblings(fuser, accepts_siblings))


_BlockItem: TypeAlias = FusionGroup | relax.Binding
_AcceptsSiblings: TypeAlias = Callable[[FusionGroup], bool | None]

_MAX_MATMULS = 6
"""Maximum number of matmuls of a function.

Code grows with each, and its compile time grows faster: there are dozens of matmuls of one style vector, or of a source
that all layers attend to. One layer has five: queries, keys, values, gate and up.
"""


def _find_siblings(fuser: Fuser, accepts_siblings: _AcceptsSiblings) -> None:
    items: list[_BlockItem] = []
    for n, binding in enumerate(fuser.block.bindings):
        group = fuser.read_group(n) if fuser.read_function(n)[1] else None
        parts = [] if group is None else _split_group(fuser, group, accepts_siblings)
        if group is None or (len(group.outputs) > 1 and len(parts) == 1):
            items.append(binding)
            continue
        items += parts
        if len(group.outputs) > 1:
            items.append(fuser.bind_tuple(binding.var, group.outputs))
    joined = _join_groups(fuser, items, accepts_siblings)
    new = [fuser.emit_group(item) if isinstance(item, FusionGroup) else [item] for item in joined]
    fuser.replacements = {n: [] for n in range(len(fuser.block.bindings))} | {0: list(itertools.chain(*new))}


def _split_group(fuser: Fuser, group: FusionGroup, accepts_siblings: _AcceptsSiblings) -> list[FusionGroup]:
    """Return the group, or several groups if the kernel supports a matmul in it, but not the whole group."""
    if accepts_siblings(group) is not None:
        return [group]
    supported = [
        bool(stage.reduce) and accepts_siblings(_make_part(group, [stage])) is not None for stage in group.stages
    ]
    if not any(supported):
        return [group]
    parts: list[list[Stage]] = []
    has_matmul = False  # whether the last part has a matmul that the kernel supports
    for stage, is_supported in zip(group.stages, supported):
        wider = [*parts[-1], stage] if parts else [stage]
        if not (has_matmul or is_supported) or accepts_siblings(_make_part(group, wider)) is not None:
            parts[-1:], has_matmul = [wider], has_matmul or is_supported
        else:
            parts.append([stage])
            has_matmul = is_supported
    if len(parts) == 1:
        return [group]
    groups = [_make_part(group, stages, f"{group.name}_{n}") for n, stages in enumerate(parts)]
    for buffer in (output for part in groups for output in part.outputs if output not in fuser.names):
        ty = relax.TensorType(relax.ShapeExpr(list(buffer.shape)), buffer.dtype)
        fuser.bind_buffer(buffer, fuser.block.kind(buffer.name, ty))
    return groups


def _make_part(group: FusionGroup, stages: list[Stage], name: str = "") -> FusionGroup:
    """Return a group of some stages of a group; stages that others read are outputs."""
    read = {node.source for stage in group.stages if stage not in stages for node in loads(stage.value)}
    outputs = [stage.output for stage in stages if stage.output in read | set(group.outputs)]
    return replace(group, name=name, segments=(stages,), outputs=outputs, binding=None)


def _join_groups(fuser: Fuser, items: Sequence[_BlockItem], accepts_siblings: _AcceptsSiblings) -> list[_BlockItem]:
    """Fuse matmuls of one tensor with constant matrices into one group, at the position of the first."""
    result: list[_BlockItem] = []
    producers: dict[tirx.Buffer, int] = {}  # the index of the item in the result that computes a tensor
    first: dict[tirx.Buffer, int] = {}  # the index of the item that multiplies a tensor
    for item in items:
        outputs = item.outputs if isinstance(item, FusionGroup) else [fuser.tensors.get(item.var)]
        operand = _find_shared_operand(item) if isinstance(item, FusionGroup) and accepts_siblings(item) else None
        index, joined = first.get(operand, -1), None
        if index >= 0 and all(producers.get(buffer, -1) <= index for buffer in item.list_inputs()):
            joined = _join_pair(fuser, result[index], item)
        if joined is not None and accepts_siblings(joined) is not None:
            result[index] = joined
        else:
            index = len(result)
            result.append(item)
            if operand is not None:
                first[operand] = index
        producers |= dict.fromkeys(outputs, index)
    return result


def _find_shared_operand(group: FusionGroup) -> tirx.Buffer | None:
    """Return the tensor that all matmuls of a group multiply by constant matrices."""
    sources = {matmul.a.source for matmul in map(read_matmul, group.stages) if matmul is not None}
    return sources.pop() if len(sources) == 1 else None


def _join_pair(fuser: Fuser, a: FusionGroup, b: FusionGroup) -> FusionGroup | None:
    """Return two groups as one without outputs that nothing else reads; None if it has too many matmuls."""
    stages = [*a.stages, *b.stages]
    if sum(read_matmul(stage) is not None for stage in stages) > _MAX_MATMULS:
        return None
    read = Counter(fuser.names[buffer] for buffer in b.list_inputs() if buffer in fuser.names)
    outputs = [x for x in a.outputs if fuser.uses[fuser.names[x]] > read[fuser.names[x]]]
    return replace(concatenate_groups((a, b), [*outputs, *b.outputs]), segments=(stages,))
