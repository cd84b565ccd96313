"""Computations along axis n of a tensor [outer, n, inner] that are not reductions: running sums and sorting.

A function that does one of these without a schedule has a record as its attribute, by which kernel rules recognize it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.ir import Expr

from ..records import decode, encode


@dataclass(frozen=True)
class RunningSum:
    """A function (x [outer, n, inner], y of the same shape): y[i] is the sum of all x[j] with j <= i.

    With `exclusive` the condition is j < i, with `reverse` j >= i or j > i.
    """

    exclusive: bool = False
    reverse: bool = False


@dataclass(frozen=True)
class Top:
    """A function (x [outer, n, inner], ..., values [outer, k, inner], indices int64 of that shape).

    The values are the k largest or smallest elements, in that order, and the indices are their positions along n. Equal
    elements stay in the order of x.
    """

    largest: bool = True


@dataclass(frozen=True)
class Grouped:
    """A function (x [n], sorted, order, positions, int64 [n]) that sorts x in ascending order.

    Numbers of x are clamped below `groups`. `order` is the index of the element at each position, equal elements in the
    order of x; `positions` is the new position of each element.
    """

    groups: int


AlongRows: TypeAlias = RunningSum | Top | Grouped

ATTRIBUTE = "lowering.along_rows"

_KINDS = {kind.__name__: kind for kind in (RunningSum, Top, Grouped)}


def to_json(record: AlongRows) -> str:
    """Return the value of the attribute."""
    return json.dumps([type(record).__name__, encode(record)])


def read_along_rows(func: tirx.PrimFunc) -> AlongRows | None:
    """Return the record of the function's computation, None if it has none."""
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    kind, fields = json.loads(str(func.attrs[ATTRIBUTE]))
    return decode(_KINDS[kind], fields, kind)


def is_less(a: Expr, b: Expr) -> Expr:
    """Return a < b, where NaN is larger than all numbers, as NumPy and PyTorch sort."""
    if "float" not in str(a.ty):
        return a < b
    return tirx.Or(a < b, tirx.And(_is_nan(b), tirx.Not(_is_nan(a))))


def _is_nan(x: Expr) -> Expr:
    return tirx.isnan(x if x.ty == "float64" else x.astype("float32"))
