"""Runs: steps along k whose elements of A are equally far apart, as the places of a row of a window are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import prim

from lowering.tensorir.expressions import Expr, is_int, substitute, uses, walk

from ..reading.stages import Axis
from .results import Results


@dataclass(frozen=True)
class Runs:
    """All steps are runs of `length`. A step's element lies `behind` that of step 0, and `step` behind the one before
    it in its run."""

    length: int
    behind: Expr
    step: Expr


def find_runs(values: list[Expr], k: Axis, results: Results) -> Runs | None:
    """The runs of steps k, whose values lie so far behind those of step 0: one, or those of a word, which must be
    neighbors. None where all steps are one run, and where there are none."""
    behind, facts = values[0], results.facts
    parts = [n for n in walk(behind) if isinstance(n, prim.FloorDiv | prim.FloorMod) and uses(n.a, {k.var})]
    if not parts or not all(isinstance(node.b, tirx.IntImm) for node in parts):
        return None
    length = math.gcd(*(node.b.value for node in parts))
    number, within = tirx.Var("number", "int64"), tirx.Var("within", "int64")
    facts.bind(number, 0, k.extent)
    facts.bind(within, 0, tirx.const(length, "int64"))
    in_run = [results.simplify(substitute(at, {k.var: number * length + within})) for at in values]
    step = results.simplify(substitute(in_run[0], {within: within + 1}) - in_run[0])
    if uses(step, {number, within}) or not is_int(results.simplify(k.extent % length), 0):
        return None
    together = len(values)
    neighbors = all(is_int(results.simplify(at - in_run[0]), n) for n, at in enumerate(in_run))
    if together > 1 and not (neighbors and is_int(step, together)):
        return None
    return Runs(length, behind, step)
