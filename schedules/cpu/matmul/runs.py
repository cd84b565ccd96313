"""Runs: steps along k whose elements of A have a constant stride, such as the elements of one row of a window."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import prim

from lowering.tensorir.expressions import Expr, is_int, substitute, uses, walk

from ...reading.stages import Axis
from .results import MatmulResults


@dataclass(frozen=True)
class StrideRuns:
    """A partition of all steps into runs of `length` steps.

    A step's element lies `distance` after that of step 0, and `step` after the previous one in its run.
    """

    length: int
    distance: Expr
    step: Expr


def find_runs(values: list[Expr], k: Axis, results: MatmulResults) -> StrideRuns | None:
    """Return the runs of steps k, or None if all steps are one run or there are none.

    values are the offsets of a step's elements from those of step 0: one, or those of packed lanes, which must be
    consecutive.
    """
    distance, facts = values[0], results.facts
    divisions = [n for n in walk(distance) if isinstance(n, prim.FloorDiv | prim.FloorMod) and uses(n.a, {k.var})]
    if not divisions or not all(isinstance(node.b, tirx.IntImm) for node in divisions):
        return None
    length = math.gcd(*(node.b.value for node in divisions))
    number, within = tirx.Var("number", "int64"), tirx.Var("within", "int64")
    facts.bind(number, 0, k.extent)
    facts.bind(within, 0, tirx.const(length, "int64"))
    in_run = [results.simplify(substitute(at, {k.var: number * length + within})) for at in values]
    step = results.simplify(substitute(in_run[0], {within: within + 1}) - in_run[0])
    if uses(step, {number, within}) or not is_int(results.simplify(k.extent % length), 0):
        return None
    count = len(values)
    neighbors = all(is_int(results.simplify(at - in_run[0]), n) for n, at in enumerate(in_run))
    if count > 1 and not (neighbors and is_int(step, count)):
        return None
    return StrideRuns(length, distance, step)
