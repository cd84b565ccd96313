"""Tokens of a head of linear attention one by one: those of decoding, and those after the last whole chunk."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.linear import ACC

from ..primitives.vector import Register, let, load, splat, store
from .linear_head import LinearHead, sum_registers

_READERS = 4
"""Query heads that read a row of the state while it is in registers."""


class LinearSteps:
    """The code for the tokens whose rows `head` holds; it leaves y in a tile, and updates the state."""

    def __init__(self, head: LinearHead) -> None:
        self.head = head

    def emit(self, count: Expr, first: Expr, vectors: int) -> None:
        """Emit `count` tokens, on vectors of columns from the first on."""
        columns = [let(first + c * self.head.W) for c in range(vectors)]
        u = self.head.memory["u"]
        with T.serial(count) as i:
            new = [Register(load(u, self.head.W, i * self.head.width + c)) for c in columns]
            if self.head.p.betas:
                recalled = self.accumulate_over_state(i, columns, [("k", i)], update=None)
                beta = T.bind(self.head.splat_number("beta", i))
                for n, register in enumerate(new):
                    register.value = (register.value - recalled[0][n]) * beta
            for g in range(0, self.head.G, _READERS):
                readers = [("q", T.int64((g + n) * self.head.C) + i) for n in range(min(_READERS, self.head.G - g))]
                totals = self.accumulate_over_state(i, columns, readers, update=new if g == 0 else None, fresh=g > 0)
                for (_, row), values in zip(readers, totals):
                    for c, value in zip(columns, values):
                        store(self.head.memory["y"], value, row * self.head.width + c)

    def accumulate_over_state(
        self,
        i: Expr,
        columns: list[Expr],
        readers: list[tuple[str, Expr]],
        update: list[Register] | None,
        fresh: bool = False,
    ) -> list[list[Expr]]:
        """Return, for each reader, its elements times rows of the state, accumulated; a reader is a tile and its row.

        It reads the decayed state; with update, that after token i, which it also stores. fresh says that the stored
        state already is that.
        """
        D = self.head.D
        split = 2 if len(readers) == 1 else 1
        accumulators = [
            [[Register(splat(0.0, self.head.W, ACC)) for _ in range(split)] for _ in columns] for _ in readers
        ]

        def add(d: Expr, s: int) -> None:
            weights = [T.bind(self.head.splat_number(name, row * D + d)) for name, row in readers]
            key = T.bind(self.head.splat_number("k", i * D + d)) if update is not None else None
            decay = T.bind(self.head.splat_decay(i, d)) if self.head.p.decay and not fresh else None
            for n, c in enumerate(columns):
                value = self.head.state(d, c)
                value = value if decay is None else value * decay
                value = value if update is None else value + key * update[n].value
                value = let(value)
                if update is not None:
                    self.head.store_state(value, d, c)
                for r, weight in enumerate(weights):
                    accumulators[r][n][s].value += weight * value

        with T.serial(T.int64(D // split)) as d:
            for s in range(split):
                add(d * split + s, s)
        for s in range(D % split):
            add(T.int64(D - 1), s)
        return [[sum_registers(partials) for partials in reader] for reader in accumulators]
