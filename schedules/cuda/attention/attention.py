"""Select the attention kernels that serve a problem on a GPU.

Where sizes are symbolic, the host selects the kernel at run time.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.record.problem import ATTRIBUTE, AttentionProblem

from ...rejections import fits
from ...variant import Variant
from ..primitives.device import Device, device
from .attention_tiles import MmaTiles, WgmmaTiles
from .decode import decode
from .decode_rows import decode_rows
from .decode_tiles import DecodeTiles, RowTiles
from .plain import plain
from .prefill_mma import can_prefill, prefill_mma
from .prefill_wgmma import prefill_wgmma


def attention(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return the variants for a function that carries an AttentionProblem.

    They are wgmma, mma.sync, and warps with one query row each.
    """
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    problem, gpu = AttentionProblem.from_json(func.attrs[ATTRIBUTE]), device(target)
    variants = [
        Variant(
            name,
            problem,
            gpu,
            {"prefill": prefill.default(problem, gpu), "decode": DecodeTiles.default(problem, gpu)},
            lambda tiles: attention_kernel(problem, gpu, tiles["prefill"], tiles["decode"]),
        )
        for name, prefill in _list_prefill_tiles(problem, gpu).items()
    ]
    rows = {"rows": RowTiles.default(problem, gpu)}
    return [*variants, Variant("rows", problem, gpu, rows, lambda tiles: rows_kernel(problem, tiles["rows"]))]


def _list_prefill_tiles(problem: AttentionProblem, gpu: Device) -> dict[str, type[MmaTiles | WgmmaTiles]]:
    """Return the prefill kernels that accept the problem, the best first."""
    if not can_prefill(problem):
        return {}
    needs = {
        "the GPU is a Hopper": gpu.generation == 90,
        # TMA would write whole tiles of Y over the rows of the next batch, and cannot follow tables.
        "neither rows nor keys are packed, looked up or codes": problem.is_dense,
    }
    return ({"wgmma": WgmmaTiles} if fits("wgmma", needs) else {}) | {"mma": MmaTiles}


def rows_kernel(problem: AttentionProblem, tiles: RowTiles) -> tirx.PrimFunc:
    """Return the kernel that serves any problem, with the parameters of the plain lowering.

    It launches `plain` for the qk output, `decode_rows` otherwise.
    """
    with IRBuilder() as builder, T.prim_func():
        bound = _bind_problem(problem)
        if problem.qk_mode is None:
            decode_rows(bound, tiles)
        else:
            plain(bound, tiles)
    return builder.get()


def attention_kernel(
    problem: AttentionProblem, gpu: Device, prefill_tiles: MmaTiles | WgmmaTiles, decode_tiles: DecodeTiles
) -> tirx.PrimFunc:
    """Return the kernel for a problem that tensor cores accept.

    It has the parameters of the plain lowering. It launches `decode` for up to decode_tiles.rows packed query rows, and
    the prefill kernel of the given tiles for more.
    """
    with IRBuilder() as builder, T.prim_func():
        bound = _bind_problem(problem)
        max_rows = decode_tiles.rows // problem.group
        if problem.is_ragged:
            if max_rows:
                decode(bound, decode_tiles, gpu)
            with T.If(T.int64(1) * bound.S > max_rows), T.Then():
                _prefill(bound, prefill_tiles, gpu, more_than=max_rows)
        elif bound.problem.q_len is None and max_rows:
            with T.If(tirx.LE(bound.S, T.int64(max_rows))):
                with T.Then():
                    decode(bound, decode_tiles, gpu)
                with T.Else():
                    _prefill(bound, prefill_tiles, gpu)
        elif bound.problem.q_len is not None and bound.problem.q_len <= max_rows:
            decode(bound, decode_tiles, gpu)
        else:
            _prefill(bound, prefill_tiles, gpu)
    return builder.get()


def _prefill(bound: BoundAttention, tiles: MmaTiles | WgmmaTiles, gpu: Device, more_than: int = 0) -> None:
    if isinstance(tiles, WgmmaTiles):
        prefill_wgmma(bound, tiles, gpu)
    else:
        prefill_mma(bound, tiles, gpu, more_than)


def _bind_problem(problem: AttentionProblem) -> BoundAttention:
    """Bind the problem to the function being built."""
    T.func_name("attention")
    return BoundAttention(problem.make_empty_sizes_symbolic(), scope="local")
