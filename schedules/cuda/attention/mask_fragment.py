"""Elements of a mask tensor for the rows that a thread has of S [16, B_c], in registers before S is computed.

A thread's columns are pairs of neighboring keys (fragments.py). Where each pair is one aligned word of memory, one load
reads it. Elements that a row may not see are not read and count as hidden; the end of its keys may split a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.mask_pairs import MaskPairs
from lowering.attention.codegen.scores import PairScores

from ..primitives.ptx import alloc_registers, let, store_element

PAIR_STRIDE = 8
"""Keys from a pair of a thread to its next one."""


@dataclass(frozen=True)
class KeySpan:
    """The keys of a row, [begin, end), counted from the thread's first key. begin None: not after that key."""

    begin: Expr | None
    end: Expr

    def holds(self, first: Expr, last: Expr) -> Expr:
        """Return whether keys first to last are in the span."""
        return last < self.end if self.begin is None else tirx.all(last < self.end, first >= self.begin)

    def cuts(self, count: int) -> Expr:
        """Return whether the span has one key of a pair without the other, among the thread's first `count` pairs."""
        ends = [self.end] if self.begin is None else [self.begin, self.end]
        inside = [tirx.all(n > 0, n < count * PAIR_STRIDE, tirx.truncmod(n, PAIR_STRIDE).equal(1)) for n in ends]
        return tirx.any(*inside)


class MaskFragment:
    """The mask of `count` pairs of each row from key `first` on. Rows are query head, row, and the span of visible
    keys.
    """

    def __init__(
        self, scores: PairScores, b: Expr, first: Expr, rows: list[tuple[Expr, Expr, KeySpan]], count: int
    ) -> None:
        self.pairs, self.b, self.first, self.count = MaskPairs(scores), b, first, count
        self.packed = [alloc_registers(count, self.pairs.pair_dtype) for _ in rows]
        is_aligned = let(self.pairs.whole(b, first))
        for packed in self.packed:
            with T.unroll(count) as n:
                store_element(packed, n, self.pairs.hidden)
        with T.If(is_aligned), T.Then():
            for packed, row in zip(self.packed, rows):
                self.read_pairs(packed, *row)
        with T.If(tirx.any(tirx.Not(is_aligned), *(span.cuts(count) for _, _, span in rows))), T.Then():
            for packed, row in zip(self.packed, rows):
                self.read_elements(packed, *row, is_aligned)

    def read_pairs(self, packed: tirx.Buffer, h: Expr, i: Expr, span: KeySpan) -> None:
        """Read the pairs both of whose keys are visible."""
        index = let(self.pairs.pair_offset(self.b, h, i, self.first))
        with T.unroll(self.count) as n, T.If(span.holds(n * PAIR_STRIDE, n * PAIR_STRIDE + 1)), T.Then():
            store_element(packed, n, self.pairs.at(index + n * (PAIR_STRIDE // 2)))

    def read_elements(self, packed: tirx.Buffer, h: Expr, i: Expr, span: KeySpan, is_aligned: Expr) -> None:
        """Read the visible elements of the remaining pairs."""
        with T.unroll(self.count) as n:
            is_read = tirx.all(is_aligned, span.holds(n * PAIR_STRIDE, n * PAIR_STRIDE + 1))
            for x in range(2):
                key = n * PAIR_STRIDE + x
                with T.If(tirx.all(span.holds(key, key), tirx.Not(is_read))), T.Then():
                    store_element(packed, n, self.pairs.with_element(packed[n], (self.b, h, i, self.first + key), x))

    def mask_score(self, r: int, n: Expr, x: int, score: Expr, added: bool) -> Expr:
        """Return the score of row r and key x of its pair n under the mask, whose elements are added or only hide.

        It is -inf where the key is invisible, whatever the score is.
        """
        hidden = tirx.const(float("-inf"), "float32")
        element = let(self.pairs.convert_to_bias(self.packed[r][n], x))
        return tirx.Select(tirx.NE(element, hidden), score + element if added else score, hidden)
