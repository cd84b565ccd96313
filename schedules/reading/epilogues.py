"""Matmuls with epilogues: what becomes of a result, in one function with it.

A decoder's keys are rotated and go to their slots in a cache, its values go there as they are, its queries are rotated.
The stages of such a function are those of the matmuls (in parts, where a norm stands in front: row_segments.py), then
those of each epilogue; behind them stand updates of caches. An attribute says which results have epilogues.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tvm import s_tir, tirx

from lowering.tensorir.expressions import Expr
from lowering.tensorir.scatter import BoundUpdate, CacheUpdate

from .row_segments import split_segments
from .stages import Stage

EPILOGUES = "lowering.epilogues"
"""Attribute of a function: its epilogues, as JSON of EpilogueSpec."""


@dataclass(frozen=True)
class EpilogueSpec:
    """An epilogue by numbers of the function's parameters: the result that it reads; whether it has stages; the record
    of an update ("" for none), and its cache and write indices (-1 for none)."""

    rows: int
    has_stages: bool
    update: str = ""
    cache: int = -1
    indices: int = -1


@dataclass(frozen=True, eq=False)
class EpilogueUpdate:
    """New rows that go to a cache. In memory they lie as CacheUpdate has them; how many there are to a batch is a
    dimension of theirs (row_axis)."""

    record: CacheUpdate
    rows: tirx.Buffer
    cache: tirx.Buffer
    indices: tirx.Buffer | None

    @property
    def length(self) -> Expr:
        return self.rows.shape[self.record.row_axis]

    def inputs(self) -> list[tirx.Buffer]:
        """What it takes beside the rows."""
        return [self.cache, *([] if self.indices is None else [self.indices])]

    def bound(self) -> BoundUpdate:
        buffers = {"cache": self.cache, "update": self.rows}
        if self.indices is not None:
            buffers["write_indices"] = self.indices
        return BoundUpdate(self.record, buffers, self.length)


@dataclass(frozen=True, eq=False)
class FusedEpilogue:
    """What is made of `rows`, a result [..., N] of a matmul.

    stages: the rows as heads, [..., H, D] with N = H D, and element-wise ones, of which the last one is the result;
    none where the rows themselves are. update: where that goes; None for a parameter, like any other.
    """

    rows: tirx.Buffer
    stages: list[Stage]
    update: EpilogueUpdate | None


def to_json(epilogues: Sequence[EpilogueSpec]) -> str:
    return json.dumps([asdict(epilogue) for epilogue in epilogues])


def read_epilogues(func: tirx.PrimFunc) -> tuple[list[list[Stage]], list[FusedEpilogue]] | None:
    """The parts of the matmuls, and the epilogues, of a function that has some; None of any other."""
    if func.attrs is None or EPILOGUES not in func.attrs:
        return None
    specs = [EpilogueSpec(**each) for each in json.loads(str(func.attrs[EPILOGUES]))]
    parts = split_segments(_without_updates(func, sum(bool(spec.update) for spec in specs)))
    if parts is None:
        return None
    first = len(parts) - sum(spec.has_stages for spec in specs)
    own = iter(parts[first:])
    return parts[:first], [_epilogue(func, spec, next(own) if spec.has_stages else []) for spec in specs]


def _without_updates(func: tirx.PrimFunc, count: int) -> tirx.PrimFunc:
    root = func.body.block
    body = tirx.stmt_seq(*tirx.stmt_list(root.body)[: -count or None])
    block = s_tir.SBlock([], root.reads, root.writes, root.name_hint, body, alloc_buffers=root.alloc_buffers)
    return func.with_body(s_tir.SBlockRealize([], True, block))


def _epilogue(func: tirx.PrimFunc, spec: EpilogueSpec, stages: list[Stage]) -> FusedEpilogue:
    params = list(func.params)
    rows = params[spec.rows]
    if not spec.update:
        return FusedEpilogue(rows, stages, None)
    indices = params[spec.indices] if spec.indices >= 0 else None
    made = stages[-1].output if stages else rows
    return FusedEpilogue(
        rows, stages, EpilogueUpdate(CacheUpdate.from_json(spec.update), made, params[spec.cache], indices)
    )
