"""A chunk of tokens of a head of linear attention (see linear.py), whose rows lie in tiles."""

from __future__ import annotations

from typing import TypeAlias

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.linear import ACC

from .linear_head import Head, total_of
from .vector import Register, let, like, load, splat, store, transpose

_Rows: TypeAlias = tuple[str, str, Expr]
"""A tile, the tile of its matmuls with keys, and the first row of both."""


class Chunk:
    """The code for the tokens whose rows `head` holds; y is left in a tile, and the state carried on."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def emit(self) -> None:
        self.transposed_keys()
        self.pairs()
        if self.head.p.decay:
            self.decayed_rows()
        self.head.column_blocks(self.head.tiles.vectors, self.columns)

    def transposed_keys(self) -> None:
        """kt[d][j] = k[j][d]."""
        k, kt, W, D, C = self.head.memory["k"], self.head.memory["kt"], self.head.W, self.head.D, self.head.C
        with T.serial(T.int64(C // W)) as block:
            with T.serial(T.int64(D // W)) as n:
                rows = [let(load(k, W, (block * W + j) * D + n * W)) for j in range(W)]
                for d, column in enumerate(transpose(rows)):
                    store(kt, column, (n * W + d) * C + block * W)
            with T.grid(T.int64(D % W), T.int64(W)) as (d, j):
                d, j = D // W * W + d, block * W + j
                T.buffer_store(kt, k[j * D + d], [d * C + j])

    def pairs(self) -> None:
        """kk and qk, row after row, with a vector's lanes along j: P_ij = 1 in the lanes that are not before i."""
        head, W, C = self.head, self.head.W, self.head.C
        rows: list[_Rows] = [("k", "kk", T.int64(0))] * bool(head.p.betas)
        rows += [("q", "qk", T.int64(g * C)) for g in range(head.G)]
        lanes = [let(T.ramp(T.int32(v * W), 1, W)) for v in range(C // W)]
        by_head = [Register(splat(1.0, W, ACC)) for _ in lanes] if head.p.decay == 1 else None
        with T.serial(T.int64(C)) as i:
            row = let(splat(i.astype("int32"), W, "int32"))
            for lane, register in zip(lanes, by_head or []):
                faded = let(register.value * head.number("a", i))
                register.value = tirx.Select(lane < row, faded, like(1.0, faded))
            if head.p.decay > 1:
                self.fade_keys(i, lanes, row)
            for first in range(0, len(rows), 2):
                self.dot_products(i, rows[first : first + 2], by_head)

    def fade_keys(self, i: Expr, lanes: list[Expr], row: Expr) -> None:
        """kt[d][j] *= the decay of element d of token i, for j < i."""
        head, kt = self.head, self.head.memory["kt"]
        with T.serial(T.int64(head.D)) as d:
            decay = T.bind(head.one_decay(i, d))
            for v, lane in enumerate(lanes):
                at = d * head.C + v * head.W
                key = let(load(kt, head.W, at))
                faded = let(key * decay)
                store(kt, tirx.Select(lane < row, faded, key), at)

    def dot_products(self, i: Expr, some: list[_Rows], by_head: list[Register] | None) -> None:
        """Row i of each of these tiles times kt, times P_ij where it is by head."""
        head, W, C, D = self.head, self.head.W, self.head.C, self.head.D
        vectors, split = C // W, max(1, 4 * W // C)  # sums of every so many elements, which do not wait for each other
        sums = [[[Register(splat(0.0, W, ACC)) for _ in range(split)] for _ in range(vectors)] for _ in some]

        def add(d: Expr, s: int) -> None:
            for v in range(vectors):
                key = T.bind(load(head.memory["kt"], W, d * C + v * W))
                for (name, _, first), registers in zip(some, sums):
                    registers[v][s].value += key * head.number(name, (first + i) * D + d)

        with T.serial(T.int64(D // split)) as d:
            for s in range(split):
                add(d * split + s, s)
        for s in range(D % split):
            add(T.int64(D // split * split + s), s)
        for (_, to, first), registers in zip(some, sums):
            for v, parts in enumerate(registers):
                total = total_of(parts)
                total = total if by_head is None else total * by_head[v].value
                store(head.memory[to], total, (first + i) * C + v * W)

    def decayed_rows(self) -> None:
        """kw = P_Cj k_j, then k = P_i k_i and q = P_i q_i, and in the decays' last row P_C."""
        memory, C, D = self.head.memory, self.head.C, self.head.D

        def vector(d: Expr, w: int) -> None:
            p = Register(splat(1.0, w, ACC))
            with T.serial(T.int64(C)) as n:
                j = let(C - 1 - n)
                store(memory["kw"], load(memory["k"], w, j * D + d) * p.value, j * D + d)
                p.value = p.value * self.head.decay(j, d, w)
            p.value = splat(1.0, w, ACC)
            with T.serial(T.int64(C)) as i:
                p.value = p.value * self.head.decay(i, d, w)
                for name, row in [("k", T.int64(0)), *(("q", T.int64(g * C)) for g in range(self.head.G))]:
                    at = let((row + i) * D + d)
                    store(memory[name], load(memory[name], w, at) * p.value, at)
            if self.head.p.decay > 1:
                store(memory["a"], p.value, T.int64((C - 1) * D) + d)

        self.head.row(D, vector)
        if self.head.p.decay == 1:
            matmul = Register(tirx.const(1.0, ACC))
            with T.serial(T.int64(C)) as i:
                matmul.value = matmul.value * memory["a"][i]
            T.buffer_store(memory["a"], matmul.value, [T.int64(C - 1)])

    def columns(self, first: Expr, count: int) -> None:
        """So many vectors of columns of a chunk."""
        columns = [let(first + c * self.head.W) for c in range(count)]
        if self.head.p.betas:
            self.remembered(columns)
            for c in columns:
                self.substitute(c)
        with T.serial(T.int64(self.head.G)) as g:
            self.outputs(g, columns)
        self.update(columns)

    def multiply(self, sums: list[list[Register]], weights: list[Expr], row: list[Expr], sign: int = 1) -> None:
        """sums[r] += sign * weights[r] * row."""
        row = [T.bind(x) for x in row]
        for registers, weight in zip(sums, weights, strict=True):
            x = T.bind(weight)
            for c, register in enumerate(registers):
                register.value = register.value + x * row[c] if sign > 0 else register.value - x * row[c]

    def remembered(self, columns: list[Expr]) -> None:
        """u_i = v_i - S^T (P_i k_i)."""
        rows, u = self.head.tiles.rows, self.head.memory["u"]
        with T.serial(T.int64(self.head.C // rows)) as block:
            i = [let(block * rows + r) for r in range(rows)]
            sums = [[Register(load(u, self.head.W, row * self.head.width + c)) for c in columns] for row in i]
            with T.serial(T.int64(self.head.D)) as d:
                state = [self.head.state(d, c) for c in columns]
                self.multiply(sums, [self.head.number("k", row * self.head.D + d) for row in i], state, sign=-1)
            for r, row in enumerate(i):
                for n, c in enumerate(columns):
                    store(u, sums[r][n].value, row * self.head.width + c)

    def substitute(self, c: Expr) -> None:
        """u_i = beta_i (u_i - sum over j < i of kk_ij u_j)."""
        C, u = self.head.C, self.head.memory["u"]
        left = [Register(load(u, self.head.W, T.int64(i * self.head.width) + c)) for i in range(C)]
        for j in range(C):
            done = T.bind(left[j].value * self.head.number("beta", T.int64(j)))
            store(u, done, T.int64(j * self.head.width) + c)
            for i in range(j + 1, C):
                left[i].value = left[i].value - self.head.number("kk", T.int64(i * C + j)) * done

    def outputs(self, g: Expr, columns: list[Expr]) -> None:
        """y_i = S^T (P_i q_i) + sum over j <= i of qk_ij u_j. Later tokens have no part in it, whatever they are."""
        for first in range(0, self.head.C, self.head.tiles.rows):
            self.output_rows(g, first, columns)

    def output_rows(self, g: Expr, first: int, columns: list[Expr]) -> None:
        head = self.head
        W, C, D, u = head.W, head.C, head.D, head.memory["u"]
        i = [let(g * C + first + r) for r in range(head.tiles.rows)]
        sums = [[Register(splat(0.0, W, ACC)) for _ in columns] for _ in i]

        def done(j: Expr) -> list[Expr]:
            return [load(u, W, j * head.width + c) for c in columns]

        def add(rows: slice, j: Expr) -> None:
            self.multiply(sums[rows], [head.number("qk", row * C + j) for row in i[rows]], done(j))

        with T.serial(T.int64(D)) as d:
            weights = [head.number("q", row * D + d) for row in i]
            self.multiply(sums, weights, [head.state(d, c) for c in columns])
        with T.serial(T.int64(first)) as j:
            add(slice(None), j)
        for n in range(len(i)):
            add(slice(n, None), T.int64(first + n))
        for row, registers in zip(i, sums):
            for c, register in zip(columns, registers):
                store(head.memory["y"], register.value, row * head.width + c)

    def update(self, columns: list[Expr]) -> None:
        """S = P_C S + sum over j of (P_Cj k_j) u_j^T."""
        rows, C, D, u = self.head.tiles.rows, self.head.C, self.head.D, self.head.memory["u"]
        keys = "kw" if self.head.p.decay else "k"

        def block(first: Expr, count: int) -> None:
            d = [let(first + r) for r in range(count)]
            sums = []
            for row in d:
                old = [self.head.state(row, c) for c in columns]
                if self.head.p.decay:
                    decay = T.bind(self.head.one_decay(T.int64(C - 1), row))
                    old = [x * decay for x in old]
                sums.append([Register(x) for x in old])
            with T.serial(T.int64(C)) as j:
                done = [load(u, self.head.W, j * self.head.width + c) for c in columns]
                self.multiply(sums, [self.head.number(keys, j * D + row) for row in d], done)
            for r, row in enumerate(d):
                for n, c in enumerate(columns):
                    self.head.put_state(sums[r][n].value, row, c)

        if D // rows:
            with T.serial(T.int64(D // rows)) as n:
                block(let(n * rows), rows)
        if D % rows:
            block(T.int64(D // rows * rows), D % rows)
