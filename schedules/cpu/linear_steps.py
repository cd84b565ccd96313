"""Tokens of a head of linear attention one by one: those of decoding, and those behind the last whole chunk."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.linear import ACC

from .linear_head import Head, total_of
from .vector import Register, let, load, splat, store

_READERS = 4
"""Query heads that read a row of the state while it is in registers."""


class Steps:
    """The code for the tokens whose rows `head` holds; y is left in a tile, and the state carried on."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def emit(self, count: Expr, first: Expr, vectors: int) -> None:
        """So many tokens, on vectors of columns from the first on."""
        columns = [let(first + c * self.head.W) for c in range(vectors)]
        u = self.head.memory["u"]
        with T.serial(count) as i:
            new = [Register(load(u, self.head.W, i * self.head.width + c)) for c in columns]
            if self.head.p.betas:
                recalled = self.sums_over_state(i, columns, [("k", i)], update=None)
                beta = T.bind(self.head.number("beta", i))
                for n, register in enumerate(new):
                    register.value = (register.value - recalled[0][n]) * beta
            for g in range(0, self.head.G, _READERS):
                readers = [("q", T.int64((g + n) * self.head.C) + i) for n in range(min(_READERS, self.head.G - g))]
                sums = self.sums_over_state(i, columns, readers, update=new if g == 0 else None, fresh=g > 0)
                for (_, row), values in zip(readers, sums):
                    for c, value in zip(columns, values):
                        store(self.head.memory["y"], value, row * self.head.width + c)

    def sums_over_state(
        self,
        i: Expr,
        columns: list[Expr],
        readers: list[tuple[str, Expr]],
        update: list[Register] | None,
        fresh: bool = False,
    ) -> list[list[Expr]]:
        """For each reader, a tile and its row, sums of its elements times rows of the state: of the decayed one, with
        update of the one behind token i, which is stored; fresh says that the state is that already."""
        D = self.head.D
        split = 2 if len(readers) == 1 else 1
        sums = [[[Register(splat(0.0, self.head.W, ACC)) for _ in range(split)] for _ in columns] for _ in readers]

        def add(d: Expr, s: int) -> None:
            weights = [T.bind(self.head.number(name, row * D + d)) for name, row in readers]
            key = T.bind(self.head.number("k", i * D + d)) if update is not None else None
            decay = T.bind(self.head.one_decay(i, d)) if self.head.p.decay and not fresh else None
            for n, c in enumerate(columns):
                value = self.head.state(d, c)
                value = value if decay is None else value * decay
                value = value if update is None else value + key * update[n].value
                value = let(value)
                if update is not None:
                    self.head.put_state(value, d, c)
                for r, weight in enumerate(weights):
                    sums[r][n][s].value += weight * value

        with T.serial(T.int64(D // split)) as d:
            for s in range(split):
                add(d * split + s, s)
        for s in range(D % split):
            add(T.int64(D - 1), s)
        return [[total_of(parts) for parts in reader] for reader in sums]
