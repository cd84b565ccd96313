"""Products with tails: what becomes of a result that nothing else reads, in one function with it.

A decoder's keys are rotated and go to their slots in a cache, its values go there as they are, its queries are rotated.
An attribute of the function says which results have tails. Its stages are those of the products (in parts, where a norm
stands in front: row_parts.py), then those of each tail; updates of caches are in no stage.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tvm import tirx

from lowering.tensorir.expressions import Expr
from lowering.tensorir.scatter import CacheUpdate

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
    """New rows, so many to a batch, that go to a cache: in memory they lie as CacheUpdate has them."""

    record: CacheUpdate
    cache: tirx.Buffer
    indices: tirx.Buffer | None
    length: Expr


@dataclass(frozen=True, eq=False)
class Tail:
    """What is made of `rows`, a result [..., N] of a product.

    stages: the rows as heads, [..., H, D] with N = H D, and element-wise ones, of which the last one is the result;
    none where the rows themselves are. update: where that goes; None for a parameter, like any other.
    """

    rows: tirx.Buffer
    stages: list[Stage]
    update: Update | None


def to_json(tails: list[TailSpec]) -> str:
    return json.dumps([asdict(tail) for tail in tails])


def cut_tails(func: tirx.PrimFunc) -> tuple[list[list[Stage]], list[Tail]] | None:
    """The parts of the products, and the tails, of a function that has some; None of any other."""
    parts = cut_parts(func)
    if parts is None or TAILS not in func.attrs:
        return None
    specs = [TailSpec(**each) for each in json.loads(str(func.attrs[TAILS]))]
    first = len(parts) - sum(spec.has_stages for spec in specs)
    own = iter(parts[first:])
    return parts[:first], [_tail(func, spec, next(own) if spec.has_stages else []) for spec in specs]


def axis_of_rows(update: CacheUpdate) -> int:
    """Along which the new rows of an update lie, one behind the other."""
    return 1 if update.rows_first else update.axis


def _tail(func: tirx.PrimFunc, spec: TailSpec, stages: list[Stage]) -> Tail:
    params = list(func.params)
    rows = params[spec.rows]
    if not spec.update:
        return Tail(rows, stages, None)
    record = CacheUpdate.from_json(spec.update)
    shape = (stages[-1].output if stages else rows).shape
    indices = params[spec.indices] if spec.indices >= 0 else None
    return Tail(rows, stages, Update(record, params[spec.cache], indices, shape[axis_of_rows(record)]))
