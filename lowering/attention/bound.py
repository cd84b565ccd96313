"""A problem bound to the buffers of the function under construction: all that a kernel asks, as TIR expressions.

A kernel never reads the record's masks, windows or layouts itself. It asks `places` where an element lies, `keys` which
keys a tile of rows can see at all and which all of its rows see, and `scores` what the score of a pair is.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from .expr.emit import cast, lanes, scalar_type
from .keys import Keys
from .parameters import Parameters
from .places import Places
from .problem import AttentionProblem
from .scores import Scores, broadcast


class Bound:
    """`problem` with the parameters of the PrimFunc frame that is open in the IRBuilder; see `Parameters`."""

    def __init__(self, problem: AttentionProblem, scope: str = "global") -> None:
        parameters = Parameters(problem, scope)
        self.problem, self.buffers, self.scratch = problem, parameters.buffers, parameters.scratch
        self.B, self.S, self.T = parameters.B, parameters.S, parameters.T
        self.places, self.keys, self.scores = Places(parameters), Keys(parameters), Scores(parameters)

    @property
    def rows_differ(self) -> bool:
        """Whether a key that one row of a batch sees may be hidden from another: what is there must not reach it."""
        return self.keys.differ or self.scores.has_mask

    def full_range(self, b: Expr, i0: Expr, i1: Expr) -> tuple[Expr, Expr]:
        """The keys [lo, hi) that every query of [i0, min(i1, S)) sees, and that need no mask code; lo = hi where there
        is none, and with a mask always."""
        if self.scores.has_mask:
            first, _ = self.keys.of_tile(b, i0, i1)
            return first, first
        return self.keys.of_all(b, i0, i1)

    def visible(self, b: Expr, h: Expr, i: Expr, j: Expr, *, inside: bool = False, bias: Expr | None = None) -> Expr:
        """Whether row i of query head h sees key j: bool, with the lanes of i or j; False where j >= T.

        An additive mask of -inf hides a key. inside is as in `Scores.additive`; bias is what that gives, if it is at
        hand.
        """
        over_rows = lanes(i) > 1
        lo, hi = self.keys.rows_of(b, j) if over_rows else self.keys.of_row(b, i)
        x = i if over_rows else j
        conditions = [x >= cast(lo, scalar_type(x)), x < cast(hi, scalar_type(x))]
        if bias is not None:
            conditions.append(bias > broadcast(tirx.const(float("-inf"), self.problem.acc_dtype), lanes(bias)))
        elif self.scores.has_mask:
            conditions.append(self.scores.unmasked(b, h, i, j, inside=inside))
        return tirx.all(*(broadcast(c, lanes(x)) for c in conditions))
