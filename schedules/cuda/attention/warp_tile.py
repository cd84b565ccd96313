"""The matmuls of attention of 16 query rows by one warp: mma.sync on tiles in shared memory.

S and O are in registers as in fragments.py; P leaves the matmuls of Q K^T in the layout in which those of P V read it.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.record.problem import AttentionProblem

from ..primitives import ptx
from ..primitives.ptx import alloc_registers, store_element, unrolled
from ..primitives.shared_tile import SharedTile
from .attention_tiles import pad_head_dim

ROWS = 16


class WarpTile:
    """S, later P, [16, B_c] and O [16, Dv] of a warp; P in 16 bits too."""

    def __init__(self, problem: AttentionProblem, lane: Expr, keys: int) -> None:
        self.problem, self.lane, self.keys = problem, lane, keys
        self.S, self.O = alloc_registers(keys // 2, "float32"), alloc_registers(problem.v_head_dim // 2, "float32")
        self.P, self.q, self.kv = (
            alloc_registers(keys // 4, "uint32"),
            alloc_registers(4, "uint32"),
            alloc_registers(4, "uint32"),
        )
        with unrolled(problem.v_head_dim // 2) as n:
            store_element(self.O, n, T.float32(0))

    def scores(self, q: SharedTile, k: SharedTile) -> None:
        """Emit S := Q K_j^T."""
        q_at = q.make_reader(self.lane % 16, self.lane // 16)
        k_at = k.make_reader(self.lane // 16 * 8 + self.lane % 8, self.lane // 8 % 2)
        with unrolled(self.keys // 2) as n:
            store_element(self.S, n, T.float32(0))
        with unrolled(pad_head_dim(self.problem.head_dim) // 16) as step:
            ptx.load_matrices([self.q[x] for x in range(4)], q_at(0, step * 2))
            with unrolled(self.keys // 16) as pair:
                ptx.load_matrices([self.kv[x] for x in range(4)], k_at(pair * 16, step * 2))
                for x in range(2):
                    s = [self.S[(pair * 2 + x) * 4 + y] for y in range(4)]
                    a, b = [self.q[y] for y in range(4)], [self.kv[2 * x], self.kv[2 * x + 1]]
                    ptx.multiply_add(self.problem.dtype, s, a, b)

    def accumulate(self, v: SharedTile) -> None:
        """Emit O += P V_j."""
        v_at = v.make_reader(self.lane % 16, self.lane // 16)
        columns = self.problem.v_head_dim // 8
        with unrolled(self.keys // 16) as step:
            with unrolled(columns // 2) as pair:
                ptx.load_matrices([self.kv[x] for x in range(4)], v_at(step * 16, pair * 2), transposed=True)
                self.add_matmuls(step, pair * 2, 2)
            if columns % 2:
                last = v_at(step * 16, columns - 1)
                ptx.load_matrices([self.kv[x] for x in range(2)], last, transposed=True)
                self.add_matmuls(step, columns - 1, 1)

    def add_matmuls(self, step: Expr, column: Expr | int, count: int) -> None:
        """Emit the matmuls of 16 keys of P with V for `count` groups of 8 columns of O."""
        for x in range(count):
            o = [self.O[(column + x) * 4 + y] for y in range(4)]
            p = [self.P[step * 4 + y] for y in range(4)]
            ptx.multiply_add(self.problem.v_dtype, o, p, [self.kv[2 * x], self.kv[2 * x + 1]])
