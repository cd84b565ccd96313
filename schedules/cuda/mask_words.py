"""Elements of a mask tensor for the rows that a thread has of S [16, B_c], in registers before S is there.

A thread's columns are pairs of neighboring keys (fragments.py): where the mask lies so that each is a word of memory,
that is one load. What a row may not see is not read, and hidden: an end of its keys may cut a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.mask_pairs import MaskPairs
from lowering.attention.scores import Scores

from .ptx import let, put, registers

APART = 8
"""Keys from a pair of a thread to its next one."""


@dataclass(frozen=True)
class Span:
    """The keys of a row, [begin, end), counted from the thread's first one; begin None is no later than that."""

    begin: Expr | None
    end: Expr

    def holds(self, first: Expr, last: Expr) -> Expr:
        """Whether keys first to last are among them."""
        return last < self.end if self.begin is None else tirx.all(last < self.end, first >= self.begin)

    def cuts(self, count: int) -> Expr:
        """Whether it has one key of a pair of the thread's first so many, without the other."""
        ends = [self.end] if self.begin is None else [self.begin, self.end]
        inside = [tirx.all(n > 0, n < count * APART, tirx.truncmod(n, APART).equal(1)) for n in ends]
        return tirx.any(*inside)


class MaskWords:
    """So many pairs of each row from key `first` on. Rows are query head, row, and the keys it may see."""

    def __init__(self, scores: Scores, b: Expr, first: Expr, rows: list[tuple[Expr, Expr, Span]], count: int) -> None:
        self.pairs, self.b, self.first, self.count = MaskPairs(scores), b, first, count
        self.words = [registers(count, self.pairs.word) for _ in rows]
        whole = let(self.pairs.whole(b, first))
        for words in self.words:
            with T.unroll(count) as n:
                put(words, n, self.pairs.hidden)
        with T.If(whole), T.Then():
            for words, row in zip(self.words, rows):
                self.read_pairs(words, *row)
        with T.If(tirx.any(tirx.Not(whole), *(span.cuts(count) for _, _, span in rows))), T.Then():
            for words, row in zip(self.words, rows):
                self.read_elements(words, *row, whole)

    def read_pairs(self, words: tirx.Buffer, h: Expr, i: Expr, span: Span) -> None:
        """Those of which both keys are seen."""
        place = let(self.pairs.place(self.b, h, i, self.first))
        with T.unroll(self.count) as n, T.If(span.holds(n * APART, n * APART + 1)), T.Then():
            put(words, n, self.pairs.at(place + n * (APART // 2)))

    def read_elements(self, words: tirx.Buffer, h: Expr, i: Expr, span: Span, whole: Expr) -> None:
        """What is seen of the others."""
        with T.unroll(self.count) as n:
            read = tirx.all(whole, span.holds(n * APART, n * APART + 1))
            for x in range(2):
                key = n * APART + x
                with T.If(tirx.all(span.holds(key, key), tirx.Not(read))), T.Then():
                    put(words, n, self.pairs.with_element(words[n], (self.b, h, i, self.first + key), x))

    def under_mask(self, r: int, n: Expr, x: int, score: Expr, added: bool) -> Expr:
        """The score of row r and key x of its pair n under the mask, of which elements are added or only hide; -inf
        where the key is invisible, whatever the score is."""
        hidden = tirx.const(float("-inf"), "float32")
        element = let(self.pairs.added(self.words[r][n], x))
        return tirx.Select(tirx.NE(element, hidden), score + element if added else score, hidden)
