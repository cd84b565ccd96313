"""The attention rule: chooses the kernel for a problem on a CPU, at run time where sizes are symbolic."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.parameters import AttentionParameters
from lowering.attention.record.problem import ATTRIBUTE, AttentionProblem

from ...rejections import fits
from ...variant import Variant
from ..primitives.vector import CpuFeatures, of_vectors, read_cpu_features
from .attention_tiles import DecodeTiles, PrefillTiles
from .decode import decode
from .prefill import prefill

_LARGEST_HEAD = 1024


def attention(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Schedule a function that has an AttentionProblem attribute.

    Return None if it has a qk output, or heads that are empty or unreasonably large, because code is unrolled along
    them.
    """
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    problem = AttentionProblem.from_json(func.attrs[ATTRIBUTE])
    sizes = problem.head_dim, problem.v_head_dim
    needs = {
        "the scores themselves are no output": problem.qk_mode is None,
        f"heads have 1 to {_LARGEST_HEAD} elements": min(sizes) >= 1 and max(sizes) <= _LARGEST_HEAD,
    }
    if not fits("tiled", needs):
        return None
    cpu = read_cpu_features(target)
    tiles = {"prefill": PrefillTiles.default(problem, cpu), "decode": DecodeTiles.default(problem, cpu)}
    return [Variant("tiled", problem, cpu, tiles, lambda t: attention_kernel(problem, cpu, t["prefill"], t["decode"]))]


def attention_kernel(
    problem: AttentionProblem, cpu: CpuFeatures, prefill_tiles: PrefillTiles, decode_tiles: DecodeTiles
) -> tirx.PrimFunc:
    """Return the PrimFunc with the parameters of `plain(problem)`.

    It runs `decode` for up to decode_tiles.q_len query rows and `prefill` for more, batch by batch if rows are ragged.
    """
    with IRBuilder() as builder, T.prim_func():
        T.func_name("attention")
        bound = BoundAttention(problem, parameters=AttentionParameters(problem, emit_vector_call=of_vectors))
        if problem.is_ragged:
            decode(bound, decode_tiles, cpu)
            with T.If(T.int64(1) * bound.S > decode_tiles.q_len), T.Then():
                prefill(bound, prefill_tiles, cpu, more_than=decode_tiles.q_len)
        elif problem.q_len is None:
            with T.If(tirx.LE(bound.S, T.int64(decode_tiles.q_len))):
                with T.Then():
                    decode(bound, decode_tiles, cpu)
                with T.Else():
                    prefill(bound, prefill_tiles, cpu)
        elif problem.q_len <= decode_tiles.q_len:
            decode(bound, decode_tiles, cpu)
        else:
            prefill(bound, prefill_tiles, cpu)
    return builder.get()
