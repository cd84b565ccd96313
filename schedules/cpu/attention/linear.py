"""Linear attention in chunks of C tokens (Yang et al., arXiv:2412.06464, section 3.3), in CPU registers.

Within a chunk, P_ij is the cumulative decay of tokens j + 1 to i, P_i that of 0 to i, by element or by head:

    u_i = beta_i (v_i - S^T (P_i k_i) - sum over j < i of (k_i . P_ij k_j) u_j)       by substitution, row after row
    y_i = scale (S^T (P_i q_i) + sum over j <= i of (q_i . P_ij k_j) u_j)
    S   = P_C S + sum over j of (P_Cj k_j) u_j^T

So the state is read for C tokens at a time, by matmuls with rows in registers (linear_chunk.py). Decays are only
multiplied, never divided by: small ones underflow to 0, as they do token by token. The tokens after the last whole
chunk are processed one by one, like those of decoding (linear_steps.py). Columns of the state do not depend on each
other, and are processed block by block.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.linear import ATTRIBUTE, BoundLinearAttention, LinearAttention

from ...variant import Variant
from ..elementwise.loops import split_among_threads
from ..primitives.vector import CpuFeatures, let, read_cpu_features
from .linear_chunk import LinearChunk
from .linear_head import LinearHead
from .linear_steps import LinearSteps
from .linear_tiles import LinearTiles

_PARALLEL_WORK = 1 << 17
"""Multiplications from which on threads share the heads."""

_LARGEST_STATE = 1 << 18
"""Elements of a head's state, which a task may have to copy."""


def linear(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Schedule a function that has a LinearAttention attribute, and updates its state in place."""
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    problem = LinearAttention.from_json(func.attrs[ATTRIBUTE])
    if problem.head_dim * problem.v_head_dim > _LARGEST_STATE or len(func.params) != len(problem.inputs()) + 1:
        return None
    cpu = read_cpu_features(target)
    tiles = {"linear": LinearTiles.default(problem, cpu)}
    return [Variant("chunks", problem, cpu, tiles, lambda t: linear_kernel(problem, cpu, t["linear"]))]


def linear_kernel(problem: LinearAttention, cpu: CpuFeatures, tiles: LinearTiles) -> tirx.PrimFunc:
    """Return the PrimFunc (*inputs, y), with the state in place."""
    with IRBuilder() as builder, T.prim_func():
        bound = BoundLinearAttention(problem)
        tasks = T.int64(problem.v_heads) * bound.B
        work = bound.tokens * (problem.v_heads * problem.head_dim * problem.v_head_dim)

        def task(index: Expr) -> None:
            sequence = bound.sequence(let(index // problem.v_heads), let)
            with T.If(sequence.count > 0), T.Then():
                _tokens(LinearHead(bound, tiles, cpu, sequence, let(index % problem.v_heads)))

        split_among_threads(tasks, work, _PARALLEL_WORK, task)
    return builder.get()


def _tokens(head: LinearHead) -> None:
    """Emit all tokens of a head, by chunks and then one by one."""
    length = head.sequence.count
    for name in ("u", "S"):  # rows are wider than the rows copied into them
        if head.width > head.Dv:
            head.clear(head.memory[name])
    head.load_state()
    chunks = let(length // head.C)
    with T.serial(chunks) as n:
        first, count = let(n * head.C), T.int64(head.C)
        head.load_tokens(first, count)
        LinearChunk(head).emit()
        head.store_outputs(first, count)
    remainder = let(chunks * head.C)
    rest = let(length - remainder)
    with T.If(rest > 0), T.Then():
        head.load_tokens(remainder, rest)
        head.emit_column_blocks(
            head.tiles.step_vectors, lambda column, vectors: LinearSteps(head).emit(rest, column, vectors)
        )
        head.store_outputs(remainder, rest)
    if not head.direct:
        head.copy_state(out=True)
