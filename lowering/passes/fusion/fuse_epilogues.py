"""Epilogue fusion: RoPE and KV-cache stores are fused into the matmul, if the target has a kernel for both, on GPUs.

The keys of a decoder are rotated and stored in a cache, its values are stored there, its queries are rotated: in a
decode step a launch that reads three small tensors from memory and writes them again. With few rows the thread blocks
of the matmul do it (schedules/cuda/fusion/fused_epilogues.py); with more, a launch after the matmul.

A result has an epilogue if a single function reads it: an in-place update of a cache, or an element-wise function,
whose result may in turn be used by such an update. The matmul moves to the position of the last of them, unless a
binding in between accesses the same memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import ir, tirx
from tvm.ir import prim

import schedules
from schedules.reading.epilogues import FusedEpilogue
from schedules.reading.stages import Axis, Stage

from ..compile_state import CompileState
from .fuser import Fuser, fuse_groups
from .group import FusionGroup, concatenate_groups

_MIN_EPILOGUES = 2  # a single one may not save a launch


def fuse_epilogues(state: CompileState) -> CompileState:
    """Fuse RoPE and KV-cache stores into matmuls of a module without dataflow blocks."""
    return fuse_groups(state, _find_epilogues)


@dataclass(frozen=True)
class _Epilogue:
    """The epilogue of output `number` of a matmul.

    elementwise and update are the positions of the element-wise function and of the cache update in the block, None if
    absent; `views` are the bindings between them.
    """

    number: int
    elementwise: int | None
    update: int | None
    views: tuple[int, ...]

    @property
    def positions(self) -> list[int]:
        return [position for position in (self.elementwise, self.update) if position is not None]


def _find_epilogues(fuser: Fuser) -> None:
    for n in range(len(fuser.block.bindings)):
        if not fuser.read_function(n)[1]:
            continue
        reads = fuser.block.find_single_reads(n)
        epilogues = [epilogue for read in reads if (epilogue := _read_epilogue(fuser, *read)) is not None]
        if len(epilogues) >= _MIN_EPILOGUES and any(_does_arithmetic(fuser, epilogue) for epilogue in epilogues):
            _fuse_matmul(fuser, n, epilogues)


def _read_epilogue(fuser: Fuser, number: int, views: tuple[int, ...], reader: int) -> _Epilogue | None:
    """Return the epilogue of an output, or of a view of it, that a single binding reads; None if it is not one."""
    if fuser.is_update(reader):
        return _Epilogue(number, None, reader, views)
    if not fuser.is_elementwise(reader):
        return None
    sole_reader = fuser.block.find_sole_reader(fuser.block.bindings[reader].var)
    if sole_reader is not None and fuser.is_update(sole_reader[1]):
        return _Epilogue(number, reader, sole_reader[1], (*views, *sole_reader[0]))
    return _Epilogue(number, reader, None, views)


def _does_arithmetic(fuser: Fuser, epilogue: _Epilogue) -> bool:
    """Return whether an epilogue does more than transpose.

    Encoders only transpose results, have many rows, and would gain nothing.
    """
    stages = [] if epilogue.elementwise is None else fuser.read_function(epilogue.elementwise)[0]
    return epilogue.update is not None or any(not isinstance(stage.value, ir.TensorLoad) for stage in stages)


def _fuse_matmul(fuser: Fuser, n: int, epilogues: Sequence[_Epilogue]) -> None:
    """Fuse matmul n with its epilogues, if each of them reads one fused tensor."""
    block = fuser.block
    positions = {n, *(position for epilogue in epilogues for position in (*epilogue.positions, *epilogue.views))}
    inner = {block.bindings[position].var for position in positions}
    readers = [position for epilogue in epilogues for position in epilogue.positions]
    if any(sum(var in inner for var in block.reads[position]) != 1 for position in readers):
        return
    groups = [_read_groups(fuser, n, epilogue) for epilogue in epilogues]
    if all(groups):
        group = concatenate_groups([fuser.read_group(n), *itertools.chain(*groups)])
        fuser.fuse(schedules.EPILOGUE_MATMUL, group, positions)


def _read_groups(fuser: Fuser, n: int, epilogue: _Epilogue) -> list[FusionGroup]:
    """Return the groups of an epilogue of matmul n, over the matmul's result; [] if it uses another view of it."""
    rows, bindings = fuser.read_group(n).outputs[epilogue.number], fuser.block.bindings
    elementwise = epilogue.elementwise
    groups, stages = list[FusionGroup](), list[Stage]()
    if elementwise is not None:
        reads = fuser.block.reads[elementwise]
        viewed = next(var for k in (n, *epilogue.views) if (var := bindings[k].var) in reads)
        heads = _make_heads_stage(rows, fuser.get_buffer(viewed, "heads"))
        if heads is None:
            return []
        group = fuser.read_group(elementwise)
        stages = [heads, *group.stages]
        fused = (FusedEpilogue(rows, stages, None),) if epilogue.update is None else ()
        outputs = group.outputs if epilogue.update is None else ()
        groups.append(replace(group, segments=(stages,), outputs=outputs, epilogues=fused))
    if epilogue.update is not None:
        groups.append(fuser.read_update(epilogue.update, rows, stages))
        if any(update.length_parameter is not None for update in groups[-1].updates):
            return []
    return groups


def _make_heads_stage(rows: tirx.Buffer, heads: tirx.Buffer) -> Stage | None:
    """Return a stage that views a result [..., N] as heads [..., H, D]; None for another view."""
    *lead, H, D = heads.shape
    *outer, N = rows.shape
    has_same_outer = len(lead) == len(outer) and all(map(prim.expr_deep_equal, lead, outer))
    splits_columns = all(isinstance(size, tirx.IntImm) for size in (H, D, N)) and int(H) * int(D) == int(N)
    if heads.same_as(rows) or not has_same_outer or not splits_columns:
        return None
    axes = tuple(Axis(tirx.Var(f"v{k}", "int64"), extent) for k, extent in enumerate(heads.shape))
    *row, h, d = (axis.var for axis in axes)
    return Stage(heads, axes, (), None, tirx.BufferLoad(rows, [*row, h * D + d]))
