"""A chunk of tokens of a head of linear attention (see linear.py), whose rows are in tiles."""

from __future__ import annotations

from typing import TypeAlias

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.linear import ACC

from ..primitives.vector import Register, let, load, splat, splat_like, store, transpose
from .linear_head import LinearHead, sum_registers

_Rows: TypeAlias = tuple[str, str, Expr]
"""A tile, the tile of its dot products with keys, and the first row of both."""


class LinearChunk:
    """The code for the tokens whose rows `head` holds; it leaves y in a tile, and updates the state."""

    def __init__(self, head: LinearHead) -> None:
        self.head = head

    def emit(self) -> None:
        self.transpose_keys()
        self.emit_pairs()
        if self.head.p.decay:
            self.apply_decays()
        self.head.emit_column_blocks(self.head.tiles.vectors, self.emit_columns)

    def transpose_keys(self) -> None:
        """Emit kt[d][j] = k[j][d]."""
        k, kt, W, D, C = self.head.memory["k"], self.head.memory["kt"], self.head.W, self.head.D, self.head.C
        with T.serial(T.int64(C // W)) as block:
            with T.serial(T.int64(D // W)) as n:
                rows = [let(load(k, W, (block * W + j) * D + n * W)) for j in range(W)]
                for d, column in enumerate(transpose(rows)):
                    store(kt, column, (n * W + d) * C + block * W)
            with T.grid(T.int64(D % W), T.int64(W)) as (d, j):
                d, j = D // W * W + d, block * W + j
                T.buffer_store(kt, k[j * D + d], [d * C + j])

    def emit_pairs(self) -> None:
        """Emit kk and qk, row by row, with a vector's lanes along j: P_ij = 1 in the lanes that are not before i."""
        head, W, C = self.head, self.head.W, self.head.C
        rows: list[_Rows] = [("k", "kk", T.int64(0))] * bool(head.p.betas)
        rows += [("q", "qk", T.int64(g * C)) for g in range(head.G)]
        lanes = [let(T.ramp(T.int32(v * W), 1, W)) for v in range(C // W)]
        by_head = [Register(splat(1.0, W, ACC)) for _ in lanes] if head.p.decay == 1 else None
        with T.serial(T.int64(C)) as i:
            row = let(splat(i.astype("int32"), W, "int32"))
            for lane, register in zip(lanes, by_head or []):
                faded = let(register.value * head.splat_number("a", i))
                register.value = tirx.Select(lane < row, faded, splat_like(1.0, faded))
            if head.p.decay > 1:
                self.fade_keys(i, lanes, row)
            for first in range(0, len(rows), 2):
                self.emit_dot_products(i, rows[first : first + 2], by_head)

    def fade_keys(self, i: Expr, lanes: list[Expr], row: Expr) -> None:
        """Emit kt[d][j] *= the decay of element d of token i, for j < i."""
        head, kt = self.head, self.head.memory["kt"]
        with T.serial(T.int64(head.D)) as d:
            decay = T.bind(head.splat_decay(i, d))
            for v, lane in enumerate(lanes):
                at = d * head.C + v * head.W
                key = let(load(kt, head.W, at))
                faded = let(key * decay)
                store(kt, tirx.Select(lane < row, faded, key), at)

    def emit_dot_products(self, i: Expr, tiles: list[_Rows], by_head: list[Register] | None) -> None:
        """Emit row i of each of these tiles times kt, times P_ij if decays are by head."""
        head, W, C, D = self.head, self.head.W, self.head.C, self.head.D
        vectors, split = C // W, max(1, 4 * W // C)  # independent accumulators, each of every `split`-th element
        accumulators = [[[Register(splat(0.0, W, ACC)) for _ in range(split)] for _ in range(vectors)] for _ in tiles]

        def add(d: Expr, s: int) -> None:
            for v in range(vectors):
                key = T.bind(load(head.memory["kt"], W, d * C + v * W))
                for (name, _, first), registers in zip(tiles, accumulators):
                    registers[v][s].value += key * head.splat_number(name, (first + i) * D + d)

        with T.serial(T.int64(D // split)) as d:
            for s in range(split):
                add(d * split + s, s)
        for s in range(D % split):
            add(T.int64(D // split * split + s), s)
        for (_, to, first), registers in zip(tiles, accumulators):
            for v, partials in enumerate(registers):
                total = sum_registers(partials)
                total = total if by_head is None else total * by_head[v].value
                store(head.memory[to], total, (first + i) * C + v * W)

    def apply_decays(self) -> None:
        """Emit kw = P_Cj k_j, then k = P_i k_i and q = P_i q_i, and P_C in the decays' last row."""
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
                    offset = let((row + i) * D + d)
                    store(memory[name], load(memory[name], w, offset) * p.value, offset)
            if self.head.p.decay > 1:
                store(memory["a"], p.value, T.int64((C - 1) * D) + d)

        self.head.row(D, vector)
        if self.head.p.decay == 1:
            total_decay = Register(tirx.const(1.0, ACC))
            with T.serial(T.int64(C)) as i:
                total_decay.value = total_decay.value * memory["a"][i]
            T.buffer_store(memory["a"], total_decay.value, [T.int64(C - 1)])

    def emit_columns(self, first: Expr, count: int) -> None:
        """Emit `count` vectors of columns of a chunk."""
        columns = [let(first + c * self.head.W) for c in range(count)]
        if self.head.p.betas:
            self.subtract_recalled(columns)
            for c in columns:
                self.substitute(c)
        with T.serial(T.int64(self.head.G)) as g:
            self.emit_outputs(g, columns)
        self.update_state(columns)

    def multiply(self, accumulators: list[list[Register]], weights: list[Expr], row: list[Expr], sign: int = 1) -> None:
        """Emit accumulators[r] += sign * weights[r] * row."""
        row = [T.bind(x) for x in row]
        for registers, weight in zip(accumulators, weights, strict=True):
            x = T.bind(weight)
            for c, register in enumerate(registers):
                register.value = register.value + x * row[c] if sign > 0 else register.value - x * row[c]

    def subtract_recalled(self, columns: list[Expr]) -> None:
        """Emit u_i = v_i - S^T (P_i k_i)."""
        rows, u = self.head.tiles.rows, self.head.memory["u"]
        with T.serial(T.int64(self.head.C // rows)) as block:
            i = [let(block * rows + r) for r in range(rows)]
            accumulators = [[Register(load(u, self.head.W, row * self.head.width + c)) for c in columns] for row in i]
            with T.serial(T.int64(self.head.D)) as d:
                state = [self.head.state(d, c) for c in columns]
                self.multiply(
                    accumulators, [self.head.splat_number("k", row * self.head.D + d) for row in i], state, sign=-1
                )
            for r, row in enumerate(i):
                for n, c in enumerate(columns):
                    store(u, accumulators[r][n].value, row * self.head.width + c)

    def substitute(self, c: Expr) -> None:
        """Emit u_i = beta_i (u_i - sum over j < i of kk_ij u_j)."""
        C, u = self.head.C, self.head.memory["u"]
        unsolved = [Register(load(u, self.head.W, T.int64(i * self.head.width) + c)) for i in range(C)]
        for j in range(C):
            solved = T.bind(unsolved[j].value * self.head.splat_number("beta", T.int64(j)))
            store(u, solved, T.int64(j * self.head.width) + c)
            for i in range(j + 1, C):
                unsolved[i].value = unsolved[i].value - self.head.splat_number("kk", T.int64(i * C + j)) * solved

    def emit_outputs(self, g: Expr, columns: list[Expr]) -> None:
        """Emit y_i = S^T (P_i q_i) + sum over j <= i of qk_ij u_j. Later tokens never contribute."""
        for first in range(0, self.head.C, self.head.tiles.rows):
            self.emit_output_rows(g, first, columns)

    def emit_output_rows(self, g: Expr, first: int, columns: list[Expr]) -> None:
        head = self.head
        W, C, D, u = head.W, head.C, head.D, head.memory["u"]
        i = [let(g * C + first + r) for r in range(head.tiles.rows)]
        accumulators = [[Register(splat(0.0, W, ACC)) for _ in columns] for _ in i]

        def solved(j: Expr) -> list[Expr]:
            return [load(u, W, j * head.width + c) for c in columns]

        def add(rows: slice, j: Expr) -> None:
            self.multiply(accumulators[rows], [head.splat_number("qk", row * C + j) for row in i[rows]], solved(j))

        with T.serial(T.int64(D)) as d:
            weights = [head.splat_number("q", row * D + d) for row in i]
            self.multiply(accumulators, weights, [head.state(d, c) for c in columns])
        with T.serial(T.int64(first)) as j:
            add(slice(None), j)
        for n in range(len(i)):
            add(slice(n, None), T.int64(first + n))
        for row, registers in zip(i, accumulators):
            for c, register in zip(columns, registers):
                store(head.memory["y"], register.value, row * head.width + c)

    def update_state(self, columns: list[Expr]) -> None:
        """Emit S = P_C S + sum over j of (P_Cj k_j) u_j^T."""
        rows, C, D, u = self.head.tiles.rows, self.head.C, self.head.D, self.head.memory["u"]
        keys = "kw" if self.head.p.decay else "k"

        def block(first: Expr, count: int) -> None:
            d = [let(first + r) for r in range(count)]
            accumulators = []
            for row in d:
                old = [self.head.state(row, c) for c in columns]
                if self.head.p.decay:
                    decay = T.bind(self.head.splat_decay(T.int64(C - 1), row))
                    old = [x * decay for x in old]
                accumulators.append([Register(x) for x in old])
            with T.serial(T.int64(C)) as j:
                solved = [load(u, self.head.W, j * self.head.width + c) for c in columns]
                self.multiply(accumulators, [self.head.splat_number(keys, j * D + row) for row in d], solved)
            for r, row in enumerate(d):
                for n, c in enumerate(columns):
                    self.head.store_state(accumulators[r][n].value, row, c)

        if D // rows:
            with T.serial(T.int64(D // rows)) as n:
                block(let(n * rows), rows)
        if D % rows:
            block(T.int64(D // rows * rows), D % rows)
