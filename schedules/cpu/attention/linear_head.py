"""Memory of a head of linear attention while tokens are processed: their rows in tiles, and the state."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.expr.emit import widen_to
from lowering.attention.linear import ACC, BoundLinearAttention, LinearSequence

from ..primitives.vector import (
    LOG2_E,
    Buffer,
    CpuFeatures,
    Register,
    allocate_workspace,
    convert,
    exp2,
    let,
    load,
    splat,
    splat_like,
    store,
)
from .linear_tiles import LinearTiles


class LinearHead:
    """The code for head h of the state of a sequence."""

    def __init__(
        self, bound: BoundLinearAttention, tiles: LinearTiles, cpu: CpuFeatures, sequence: LinearSequence, h: Expr
    ) -> None:
        self.bound, self.tiles, self.cpu, self.sequence, self.h = bound, tiles, cpu, sequence, h
        self.p = p = bound.linear
        self.W, self.C = cpu.lanes(ACC), tiles.chunk
        self.D, self.Dv, self.G = p.head_dim, p.v_head_dim, p.group
        self.width = -(-self.Dv // self.W) * self.W  # of rows in tiles: whole vectors
        self.direct = p.state_dtype == ACC and self.width == self.Dv
        C, D = self.C, self.D
        self.memory = allocate_workspace(
            k=(C * D, ACC),  # k_i, then P_i k_i
            q=(self.G * C * D, ACC),
            kt=(D * C, ACC),  # [element][token]: k_j, by rows of i P_ij k_j
            kw=(C * D, ACC),  # P_Cj k_j
            u=(C * self.width, ACC),  # v_i, then u_i
            y=(self.G * C * self.width, ACC),
            kk=(C * C, ACC),  # k_i . P_ij k_j, for j < i
            qk=(self.G * C * C, ACC),  # q_i . P_ij k_j, for j <= i
            a=(C * max(p.decay, 1), ACC),  # the decays of a token
            beta=(C, ACC),
            S=(0 if self.direct else D * self.width, ACC),
        )

    def clear(self, buffer: Buffer) -> None:
        with T.serial(buffer.shape[0]) as n:
            T.buffer_store(buffer, tirx.const(0.0, ACC), [n])

    def row(self, size: int, body: Callable[[Expr, int], None]) -> None:
        """Emit body(first, w) for vectors of w lanes that cover a row exactly."""
        first, w = 0, self.W
        while first < size:
            if size - first >= w:
                with T.serial(T.int64((size - first) // w)) as n:
                    body(let(n * w + first), w)
                first += (size - first) // w * w
            w //= 2

    def read(self, name: str, t: Expr, at: Expr, w: int) -> Expr:
        """Load elements [at, at + w) of row t of a parameter."""
        return convert(load(self.bound.buffers[name], w, *self.index(t), at), ACC, self.cpu)

    def index(self, t: Expr) -> tuple[Expr, Expr]:
        """Return the indices of row t of a parameter."""
        return self.sequence.batch, let(self.sequence.first + t)

    def load_state(self) -> None:
        """Load the state before the first token to where the tokens read it."""
        if not self.direct:
            self.copy_state(out=False)
        if self.sequence.is_new is not None:
            with T.If(self.sequence.is_new), T.Then():
                zeros = splat(0.0, self.W, ACC)
                with T.serial(T.int64(self.D)) as d, T.serial(T.int64(self.width // self.W)) as n:
                    self.store_state(zeros, d, let(n * self.W))

    def copy_state(self, out: bool) -> None:
        S, state = self.memory["S"], self.bound.state
        with T.serial(T.int64(self.D)) as d:

            def vector(c: Expr, w: int) -> None:
                if out:
                    value = convert(load(S, w, d * self.width + c), self.p.state_dtype, self.cpu)
                    store(state, value, self.sequence.state, self.h, d, c)
                else:
                    value = convert(load(state, w, self.sequence.state, self.h, d, c), ACC, self.cpu)
                    store(S, value, d * self.width + c)

            self.row(self.Dv, vector)

    def state(self, d: Expr, c: Expr) -> Expr:
        """Load a vector of row d of the state."""
        if self.direct:
            return load(self.bound.state, self.W, self.sequence.state, self.h, d, c)
        return load(self.memory["S"], self.W, d * self.width + c)

    def store_state(self, value: Expr, d: Expr, c: Expr) -> None:
        if self.direct:
            store(self.bound.state, value, self.sequence.state, self.h, d, c)
        else:
            store(self.memory["S"], value, d * self.width + c)

    def splat_number(self, name: str, at: Expr) -> Expr:
        """Return an element of a tile in every lane."""
        return splat(self.memory[name][at], self.W, ACC)

    def decay(self, i: Expr, d: Expr, w: int) -> Expr:
        """Return the decays of elements [d, d + w) of token i; of one, in every lane."""
        if self.p.decay == 1:
            return splat(self.memory["a"][i], w, ACC)
        return load(self.memory["a"], w, i * self.D + d)

    def splat_decay(self, i: Expr, d: Expr) -> Expr:
        return splat(self.memory["a"][i if self.p.decay == 1 else i * self.D + d], self.W, ACC)

    def load_tokens(self, first: Expr, count: Expr) -> None:
        """Load the rows of `count` tokens into tiles."""
        p, bound, memory = self.p, self.bound, self.memory
        with T.serial(count) as i:
            t = let(first + i)

            def copy(name: str, to: str, at: Callable[[Expr], Expr], row: Expr, size: int) -> None:
                self.row(size, lambda d, w: store(memory[to], self.read(name, t, at(d), w), row + d))

            copy("k", "k", lambda d: bound.k_at(self.h, d), i * self.D, self.D)
            with T.serial(T.int64(self.G)) as g:
                copy("q", "q", lambda d: bound.q_at(self.h, g, d), (g * self.C + i) * self.D, self.D)
            copy("v", "u", lambda c: bound.v_at(self.h, c), i * self.width, self.Dv)
            if p.decay:
                self.row(
                    p.decay,
                    lambda d, w: store(
                        memory["a"], _exp(self.read("decay", t, bound.decay_at(self.h, d), w)), i * p.decay + d
                    ),
                )
            if p.betas:
                value = widen_to(bound.buffers["beta"][(*self.index(t), bound.beta_at(self.h))], ACC)
                T.buffer_store(memory["beta"], value, [i])

    def store_outputs(self, first: Expr, count: Expr) -> None:
        """Store the outputs of `count` tokens to y."""
        with T.serial(T.int64(self.G)) as g, T.serial(count) as i:

            def vector(c: Expr, w: int) -> None:
                value = load(self.memory["y"], w, (g * self.C + i) * self.width + c)
                value = convert(value * splat(self.p.scale, w, ACC), self.p.dtype, self.cpu)
                store(self.bound.buffers["y"], value, *self.index(first + i), self.bound.y_at(self.h, g, c))

            self.row(self.Dv, vector)

    def emit_column_blocks(self, vectors: int, body: Callable[[Expr, int], None]) -> None:
        """Emit body(first column, count of vectors)."""
        whole, rest = divmod(self.width // self.W, vectors)
        if whole:
            with T.serial(T.int64(whole)) as n:
                body(let(n * (vectors * self.W)), vectors)
        if rest:
            body(T.int64(whole * vectors * self.W), rest)


def _exp(x: Expr) -> Expr:
    """Return e^x, or infinity where it exceeds float32."""
    power = let(x * splat_like(LOG2_E, x))
    return tirx.Select(power >= splat_like(128.0, power), splat_like(float("inf"), power), exp2(power))


def sum_registers(registers: list[Register]) -> Expr:
    total = registers[0].value
    for register in registers[1:]:
        total = total + register.value
    return T.bind(total)
