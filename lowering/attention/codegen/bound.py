"""A problem bound to the buffers of the function under construction, for kernels to query as TIR expressions.

A kernel never reads the masks, windows or layouts of the record itself. It asks `addressing` for the address of an
element, `keys` for the keys that some row and that every row of a tile can see, and `scores` for the score of a pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..expr.emit import broadcast, cast, lanes, scalar_type
from ..record.problem import AttentionProblem
from .addressing import Addressing
from .key_ranges import KeyRange, KeyRanges
from .parameters import AttentionParameters
from .scores import PairScores


class BoundAttention:
    """`problem` with the parameters of the PrimFunc frame that is open in the IRBuilder.

    The constructor declares the parameters unless the caller passes them; see `AttentionParameters`.
    """

    def __init__(
        self, problem: AttentionProblem, scope: str = "global", parameters: AttentionParameters | None = None
    ) -> None:
        parameters = AttentionParameters(problem, scope) if parameters is None else parameters
        self.problem, self.buffers, self.scratch = problem, parameters.buffers, parameters.scratch
        self.B, self.S, self.T = parameters.B, parameters.S, parameters.T
        self.addressing = Addressing(parameters)
        self.scores = PairScores(parameters, self.addressing)
        self.keys, self.rows = KeyRanges(parameters, self.addressing), self.addressing.rows

    @contextmanager
    def guard_row(self, b: Expr, i: Expr) -> Iterator[None]:
        """Run the enclosed code if batch b has a row i < S, which ragged rows do not imply."""
        if not self.problem.is_ragged:
            yield
            return
        with T.If(i < cast(self.rows(b), scalar_type(i))), T.Then():
            yield

    @contextmanager
    def guard_row_count(self, b: Expr, min_rows: int, max_rows: int | None) -> Iterator[None]:
        """Run the enclosed code if batch b has min_rows to max_rows rows.

        Always run it for dense rows, as S gives their number.
        """
        if not self.problem.is_ragged:
            yield
            return
        rows = self.rows(b)
        with T.If(tirx.all(rows >= min_rows, *([] if max_rows is None else [rows <= max_rows]))), T.Then():
            yield

    @property
    def has_row_dependent_keys(self) -> bool:
        """Whether a key that one row of a batch sees may be masked for another, whose result must not depend on it."""
        return self.keys.is_row_dependent or self.scores.has_mask

    def find_unmasked_ranges(self, b: Expr, i0: Expr, i1: Expr) -> tuple[KeyRange, ...]:
        """Return the subrange of each tile range that every query of [i0, i1) sees and that needs no mask code.

        The ranges are those of `keys.compute_tile_ranges`. The subranges are empty if there is a mask.
        """
        if self.scores.has_mask:
            return tuple((lo, lo) for lo, _ in self.keys.compute_tile_ranges(b, i0, i1))
        return self.keys.compute_common_ranges(b, i0, i1)

    def is_visible(self, b: Expr, h: Expr, i: Expr, j: Expr, *, inside: bool = False, bias: Expr | None = None) -> Expr:
        """Return whether row i of query head h sees key j: bool, with the lanes of j; False where j >= T.

        An additive mask of -inf masks a key. inside is as in `PairScores.compute_bias`; bias is the result of that, if
        the caller has it.
        """
        count, ranges = lanes(j), self.keys.compute_row_ranges(b, i)
        ends = [[broadcast(cast(end, scalar_type(j)), count) for end in ends] for ends in ranges]
        conditions = [tirx.any(*(tirx.all(j >= lo, j < hi) for lo, hi in ends))]
        if bias is not None:
            conditions.append(bias > broadcast(tirx.const(float("-inf"), self.problem.acc_dtype), lanes(bias)))
        elif self.scores.has_mask:
            conditions.append(self.scores.is_unmasked(b, h, i, j, inside=inside))
        return tirx.all(*(broadcast(c, count) for c in conditions))
