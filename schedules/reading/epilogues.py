"""Matmuls with fused epilogues: rotary embedding and KV-cache writes of the results, in one function with the matmuls.

In a decoder, keys are rotated and written to their slots in a cache, values are written unchanged, queries are rotated.
Such a function has the stages of the matmuls (as row segments if a norm prologue is fused: row_segments.py), then those
of each epilogue, and after them the updates of caches. An attribute says which results have epilogues.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import s_tir, tirx

from lowering.records import decode, encode
from lowering.tensorir.expressions import Expr
from lowering.tensorir.scatter import BoundUpdate, CacheUpdate

from .row_segments import split_segments
from .stages import Stage

EPILOGUES = "lowering.epilogues"
"""Attribute of a function: its epilogues, as JSON of EpilogueSpec."""


@dataclass(frozen=True)
class EpilogueSpec:
    """An epilogue, by indices of the function's parameters.

    rows is the result of the matmul, -1 without a matmul. has_stages is whether element-wise stages follow, such as
    RoPE. update is the JSON of a CacheUpdate ("" for none), cache and indices are its cache and write indices (-1 for
    none). length is the number of its rows, -1 if it is an extent of the result.
    """

    rows: int
    has_stages: bool
    update: str = ""
    cache: int = -1
    indices: int = -1
    length: int = -1


@dataclass(frozen=True, eq=False)
class EpilogueUpdate:
    """A write of new rows to a cache.

    The memory layout of the rows is that of CacheUpdate. The number of rows of a batch is one of their dimensions
    (row_axis), or an integer parameter, where the rows have other dimensions.
    """

    record: CacheUpdate
    rows: tirx.Buffer
    cache: tirx.Buffer
    indices: tirx.Buffer | None
    length_parameter: tirx.Var | None = None

    @property
    def length(self) -> Expr:
        return self.rows.shape[self.record.row_axis] if self.length_parameter is None else self.length_parameter

    def inputs(self) -> list[tirx.Buffer]:
        """Return the inputs other than the rows."""
        return [self.cache, *([] if self.indices is None else [self.indices])]

    def bound(self) -> BoundUpdate:
        buffers = {"cache": self.cache, "update": self.rows}
        if self.indices is not None:
            buffers["write_indices"] = self.indices
        return BoundUpdate(self.record, buffers, self.length)


@dataclass(frozen=True, eq=False)
class FusedEpilogue:
    """The epilogue of `rows`, a result [..., N] of a matmul.

    The first of the stages reshapes rows to heads [..., H, D], with N = H D. Element-wise stages follow, and the last
    one computes the result. Without stages, rows is the result. update is the cache write of the result; None if the
    result is an ordinary parameter. Without a matmul, rows is the result of the stages, which are the whole function.
    """

    rows: tirx.Buffer
    stages: list[Stage]
    update: EpilogueUpdate | None


def to_json(epilogues: Sequence[EpilogueSpec]) -> str:
    return json.dumps(encode(list(epilogues)))


def read_epilogues(func: tirx.PrimFunc) -> tuple[list[list[Stage]], list[FusedEpilogue]] | None:
    """Return the row segments of the matmuls, and the epilogues, of a function that has some; else None."""
    if func.attrs is None or EPILOGUES not in func.attrs:
        return None
    specs = decode(tuple[EpilogueSpec, ...], json.loads(str(func.attrs[EPILOGUES])), EPILOGUES)
    segments = split_segments(_remove_updates(func, sum(bool(spec.update) for spec in specs)))
    if segments is None:
        return None
    first = len(segments) - sum(spec.has_stages for spec in specs)
    epilogue_stages = iter(segments[first:])
    return segments[:first], [
        _read_epilogue(func, spec, next(epilogue_stages) if spec.has_stages else []) for spec in specs
    ]


def _remove_updates(func: tirx.PrimFunc, count: int) -> tirx.PrimFunc:
    root = func.body.block
    body = tirx.stmt_seq(*tirx.stmt_list(root.body)[: -count or None])
    block = s_tir.SBlock([], root.reads, root.writes, root.name_hint, body, alloc_buffers=root.alloc_buffers)
    return func.with_body(s_tir.SBlockRealize([], True, block))


def _read_epilogue(func: tirx.PrimFunc, spec: EpilogueSpec, stages: list[Stage]) -> FusedEpilogue:
    params = list(func.params)
    rows = params[spec.rows] if spec.rows >= 0 else stages[-1].output
    if not spec.update:
        return FusedEpilogue(rows, stages, None)
    indices = params[spec.indices] if spec.indices >= 0 else None
    length = params[spec.length] if spec.length >= 0 else None
    result, record = stages[-1].output if stages else rows, CacheUpdate.from_json(spec.update)
    return FusedEpilogue(rows, stages, EpilogueUpdate(record, result, params[spec.cache], indices, length))
