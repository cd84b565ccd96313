"""The attention rule: which kernel serves a problem on a CPU, chosen at run time where sizes are symbolic."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.parameters import Parameters
from lowering.attention.problem import ATTRIBUTE, AttentionProblem

from ..rejections import fits
from ..variant import Variant
from .attention_tiles import DecodeTiles, PrefillTiles
from .decode import decode
from .prefill import prefill
from .vector import Machine, machine, of_vectors

_LARGEST_HEAD = 1024


def attention(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """A function that holds an AttentionProblem; None for one with a qk output, or with heads of no size or a size
    that nobody has: code is written out along them."""
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
    cpu = machine(target)
    tiles = {"prefill": PrefillTiles.default(problem, cpu), "decode": DecodeTiles.default(problem, cpu)}
    return [Variant("tiled", problem, cpu, tiles, lambda t: attention_kernel(problem, cpu, t["prefill"], t["decode"]))]


def attention_kernel(
    problem: AttentionProblem, cpu: Machine, prefill_tiles: PrefillTiles, decode_tiles: DecodeTiles
) -> tirx.PrimFunc:
    """The PrimFunc with the parameters of `plain(problem)`: `decode` for up to decode_tiles.q_len query rows, `prefill`
    for more, batch by batch where rows are packed.
    """
    with IRBuilder() as builder, T.prim_func():
        T.func_name("attention")
        bound = Bound(problem, parameters=Parameters(problem, of_vectors=of_vectors))
        if problem.packed:
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
