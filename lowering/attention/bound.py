"""A problem bound to the buffers of the function under construction: all that a kernel asks, as TIR expressions.

A kernel never reads the record's masks, windows or layouts itself. It asks `addressing` where an element lies, `keys`
which keys a tile of rows can see at all and which all of its rows see, and `scores` what the score of a pair is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .addressing import Addressing
from .expr.emit import broadcast, cast, lanes, scalar_type
from .keys import Keys, Range
from .parameters import Parameters
from .problem import AttentionProblem
from .scores import Scores


class Bound:
    """`problem` with the parameters of the PrimFunc frame that is open in the IRBuilder, declared here unless they are
    given; see `Parameters`."""

    def __init__(self, problem: AttentionProblem, scope: str = "global", parameters: Parameters | None = None) -> None:
        parameters = Parameters(problem, scope) if parameters is None else parameters
        self.problem, self.buffers, self.scratch = problem, parameters.buffers, parameters.scratch
        self.B, self.S, self.T = parameters.B, parameters.S, parameters.T
        self.addressing = Addressing(parameters)
        self.scores = Scores(parameters, self.addressing)
        self.keys, self.rows = Keys(parameters, self.addressing), self.addressing.rows

    @contextmanager
    def if_there(self, b: Expr, i: Expr) -> Iterator[None]:
        """Runs what it encloses if batch b has a row i < S: it need not where rows are packed."""
        if not self.problem.packed:
            yield
            return
        with T.If(i < cast(self.rows(b), scalar_type(i))), T.Then():
            yield

    @contextmanager
    def if_rows(self, b: Expr, least: int, most: int | None) -> Iterator[None]:
        """Runs what it encloses if batch b has so many rows: always, where rows are not packed and S says it."""
        if not self.problem.packed:
            yield
            return
        rows = self.rows(b)
        with T.If(tirx.all(rows >= least, *([] if most is None else [rows <= most]))), T.Then():
            yield

    @property
    def rows_differ(self) -> bool:
        """Whether a key that one row of a batch sees may be hidden from another: what is there must not reach it."""
        return self.keys.differ or self.scores.has_mask

    def without_mask_code(self, b: Expr, i0: Expr, i1: Expr) -> tuple[Range, ...]:
        """Of each range of `keys.of_tile`, the keys that every query of [i0, i1) sees, and that need no mask code: none
        where there is a mask."""
        if self.scores.has_mask:
            return tuple((lo, lo) for lo, _ in self.keys.of_tile(b, i0, i1))
        return self.keys.of_all(b, i0, i1)

    def visible(self, b: Expr, h: Expr, i: Expr, j: Expr, *, inside: bool = False, bias: Expr | None = None) -> Expr:
        """Whether row i of query head h sees key j: bool, with the lanes of j; False where j >= T.

        An additive mask of -inf hides a key. inside is as in `Scores.additive`; bias is what that gives, if it is at
        hand.
        """
        count, ranges = lanes(j), self.keys.of_row(b, i)
        ends = [[broadcast(cast(end, scalar_type(j)), count) for end in ends] for ends in ranges]
        conditions = [tirx.any(*(tirx.all(j >= lo, j < hi) for lo, hi in ends))]
        if bias is not None:
            conditions.append(bias > broadcast(tirx.const(float("-inf"), self.problem.acc_dtype), lanes(bias)))
        elif self.scores.has_mask:
            conditions.append(self.scores.unmasked(b, h, i, j, inside=inside))
        return tirx.all(*(broadcast(c, count) for c in conditions))
