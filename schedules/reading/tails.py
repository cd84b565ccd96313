"""Matmuls with tails: what becomes of a result, in one function with it.

A decoder's keys are rotated and go to their slots in a cache, its values go there as they are, its queries are rotated.
The stages of such a function are those of the matmuls (in parts, where a norm stands in front: row_parts.py), then
those of each tail; behind them stand updates of caches. An attribute says which results have tails.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tvm import s_tir, tirx

from lowering.tensorir.expressions import Expr
from lowering.tensorir.scatter import BoundUpdate, CacheUpdate

from .row_parts import cut_parts
from .stages import Stage

TAILS = "lowering.tails"
"""Attribute of a function: its tails, as JSON of TailSpec."""


@dataclass(frozen=True)
class TailSpec:
    """A tail by numbers of the function's parameters: the result that it reads; whether it has stages; the record of an
    update ("" for none), and its cache and write indices (-1 for none)."""

    rows: int
    has_stages: bool
    update: str = ""
    cache: int = -1
    indices: int = -1


@dataclass(frozen=True, eq=False)
class Update:
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
class Tail:
    """What is made of `rows`, a result [..., N] of a matmul.

    stages: the rows as heads, [..., H, D] with N = H D, and element-wise ones, of which the last one is the result;
    none where the rows themselves are. update: where that goes; None for a parameter, like any other.
    """

    rows: tirx.Buffer
    stages: list[Stage]
    update: Update | None


def to_json(tails: Sequence[TailSpec]) -> str:
    return json.dumps([asdict(tail) for tail in tails])


def cut_tails(func: tirx.PrimFunc) -> tuple[list[list[Stage]], list[Tail]] | None:
    """The parts of the matmuls, and the tails, of a function that has some; None of any other."""
    if func.attrs is None or TAILS not in func.attrs:
        return None
    specs = [TailSpec(**each) for each in json.loads(str(func.attrs[TAILS]))]
    parts = cut_parts(_without_updates(func, sum(bool(spec.update) for spec in specs)))
    if parts is None:
        return None
    first = len(parts) - sum(spec.has_stages for spec in specs)
    own = iter(parts[first:])
    return parts[:first], [_tail(func, spec, next(own) if spec.has_stages else []) for spec in specs]


def _without_updates(func: tirx.PrimFunc, count: int) -> tirx.PrimFunc:
    root = func.body.block
    body = tirx.stmt_seq(*tirx.stmt_list(root.body)[: -count or None])
    block = s_tir.SBlock([], root.reads, root.writes, root.name_hint, body, alloc_buffers=root.alloc_buffers)
    return func.with_body(s_tir.SBlockRealize([], True, block))


def _tail(func: tirx.PrimFunc, spec: TailSpec, stages: list[Stage]) -> Tail:
    params = list(func.params)
    rows = params[spec.rows]
    if not spec.update:
        return Tail(rows, stages, None)
    indices = params[spec.indices] if spec.indices >= 0 else None
    made = stages[-1].output if stages else rows
    return Tail(rows, stages, Update(CacheUpdate.from_json(spec.update), made, params[spec.cache], indices))
