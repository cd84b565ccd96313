"""Q_i, S, P and O of a query tile as fragments of mma.sync, and their matmuls with K_j and V_j in shared memory.

Each warp has M blocks of 16 rows, whose S and O are in registers. Q is in shared memory. Its fragments are loaded once
per tile, or once per step along D. P leaves the matmuls of Q K^T in the layout in which those of P V read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention

from ..primitives import ptx
from ..primitives.ptx import WARP, alloc_registers, alloc_shared_memory, let, store_element, unrolled
from ..primitives.shared_tile import CHUNK, SharedTile
from .attention_tiles import MmaTiles, pad_head_dim

Reader: TypeAlias = Callable[[Expr | int, Expr | int], ptx.Element]


class QueryFragments:
    """The fragments of the rows of a block, and its shared memory, which starts with Q_i."""

    def __init__(self, bound: BoundAttention, tiles: MmaTiles, thread: Expr) -> None:
        self.bound, self.tiles, self.problem = bound, tiles, bound.problem
        self.thread, self.lane = thread, let(thread % WARP)
        p, self.M = self.problem, tiles.row_blocks
        self.row0 = let(thread // WARP * (16 * self.M))  # the warp's first row in the tile
        d, dv = pad_head_dim(p.head_dim) // CHUNK, p.v_head_dim // CHUNK
        self.d_steps, self.s_columns, self.o_columns = d // 2, tiles.kv // 8, dv
        self.memory = alloc_shared_memory(tiles.shared_memory(p) // 2, p.dtype, 128)
        self.Q, self.Y = SharedTile(self.memory, 0, d), SharedTile(self.memory, 0, dv)
        self.S, self.O = ([alloc_registers(n * 4, "float32") for _ in range(self.M)] for n in (self.s_columns, dv))
        self.q = alloc_registers(self.M * 4 * (self.d_steps if tiles.q_in_registers else 1), "uint32")
        self.P, self.operand = [alloc_registers(4, "uint32") for _ in range(self.M)], alloc_registers(4, "uint32")

    def make_q_reader(self) -> Reader:
        return self.Q.make_reader(self.row0 + self.lane % 16, self.lane // 16)

    def load_q(self, read: Reader, step: Expr) -> None:
        """Load the fragments of Q_i for one step of 16 along D."""
        for m in range(self.M):
            ptx.load_matrices(self.q_fragment(m, step), read(m * 16, step * 2))

    def q_fragment(self, m: int, step: Expr) -> list[ptx.Element]:
        first = (m * self.d_steps + step) * 4 if self.tiles.q_in_registers else m * 4
        return [self.q[first + x] for x in range(4)]

    def scores(self, keys: SharedTile) -> None:
        """Emit S = Q_i K_j^T."""
        read_k = keys.make_reader(self.lane // 16 * 8 + self.lane % 8, self.lane // 8 % 2)
        read_q = None if self.tiles.q_in_registers else self.make_q_reader()
        for S in self.S:
            with unrolled(self.s_columns * 4) as n:
                store_element(S, n, T.float32(0))
        with unrolled(self.d_steps) as step:
            if read_q is not None:
                self.load_q(read_q, step)
            with unrolled(self.s_columns // 2) as pair:
                ptx.load_matrices([self.operand[x] for x in range(4)], read_k(pair * 16, step * 2))
                for m, S in enumerate(self.S):
                    for x in range(2):
                        self.multiply_add(S, pair * 2 + x, self.q_fragment(m, step), x)

    def accumulate(self, values: SharedTile) -> None:
        """Emit O += P V_j."""
        read = values.make_reader(self.lane % 16, self.lane // 16)
        with unrolled(self.tiles.kv // 16) as step:
            for P, S in zip(self.P, self.S):
                with unrolled(4) as x:
                    ptx.pack(self.problem.dtype, P[x], S[step * 8 + x * 2], S[step * 8 + x * 2 + 1])
            with unrolled(self.o_columns // 2) as pair:
                ptx.load_matrices([self.operand[x] for x in range(4)], read(step * 16, pair * 2), transposed=True)
                self.add_matmuls(pair * 2, 2)
            if self.o_columns % 2:
                last = read(step * 16, self.o_columns - 1)
                ptx.load_matrices([self.operand[x] for x in range(2)], last, transposed=True)
                self.add_matmuls(self.o_columns - 1, 1)

    def add_matmuls(self, column: Expr | int, count: int) -> None:
        """Add the matmuls of the fragments of P with those of V to `count` groups of 8 columns of O."""
        for P, O in zip(self.P, self.O):
            for x in range(count):
                self.multiply_add(O, column + x, [P[y] for y in range(4)], x)

    def multiply_add(self, D: tirx.Buffer, column: Expr | int, a: list[ptx.Element], x: int) -> None:
        """Emit eight columns of D += a B, where B is half x of the fragments of K or V."""
        d, b = [D[column * 4 + y] for y in range(4)], [self.operand[2 * x], self.operand[2 * x + 1]]
        ptx.multiply_add(self.problem.dtype, d, a, b)

    def is_not_finite(self) -> Expr:
        """Return whether this thread's share of O has a NaN or an infinity: perhaps a hidden one, times P = 0."""
        largest = alloc_registers(1, "int32")
        store_element(largest, 0, tirx.const(0, "int32"))
        for O in self.O:
            with unrolled(self.o_columns * 4) as n:
                store_element(largest, 0, tirx.max(largest[0], T.bitwise_and(T.reinterpret("int32", O[n]), 0x7FFFFFFF)))
        return largest[0] >= 0x7F800000
