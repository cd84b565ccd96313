"""What is computed along the axis n of a tensor [outer, n, inner] and is no reduction: running sums, and the order of
elements.

A function that does that without a schedule has a record as its attribute, by which kernels of ours know it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.ir import Expr


@dataclass(frozen=True)
class RunningSum:
    """(x [outer, n, inner], y of the same shape): y[i] is the sum of all x[j] with j <= i; with `exclusive` j < i, with
    `reverse` j >= i or j > i."""

    exclusive: bool = False
    reverse: bool = False


@dataclass(frozen=True)
class Top:
    """(x [outer, n, inner], ..., values [outer, k, inner], indices int64 of that shape): the k largest elements, or the
    smallest, in that order, equal ones as they stand in x; and where they are along n."""

    largest: bool = True


@dataclass(frozen=True)
class Grouped:
    """(x [n], sorted, order, positions, int64 [n]): x in ascending order, its numbers taken as the nearest one below
    `groups`; which element is at each place, equal ones as they stand in x; and where each element has gone."""

    groups: int


AlongRows: TypeAlias = RunningSum | Top | Grouped

ATTRIBUTE = "lowering.along_rows"

_KINDS = {kind.__name__: kind for kind in (RunningSum, Top, Grouped)}


def to_json(what: AlongRows) -> str:
    """The value of the attribute."""
    return json.dumps([type(what).__name__, dataclasses.asdict(what)])


def read_along_rows(func: tirx.PrimFunc) -> AlongRows | None:
    """What the function computes; None where it is anything else."""
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    kind, fields = json.loads(str(func.attrs[ATTRIBUTE]))
    return _KINDS[kind](**fields)


def less(a: Expr, b: Expr) -> Expr:
    """a < b, where NaN is larger than all numbers, as NumPy and PyTorch sort."""
    if "float" not in str(a.ty):
        return a < b
    return tirx.Or(a < b, tirx.And(_is_nan(b), tirx.Not(_is_nan(a))))


def _is_nan(x: Expr) -> Expr:
    return tirx.isnan(x if x.ty == "float64" else x.astype("float32"))
