"""The attention rule: which kernel serves a problem on a GPU, chosen by the host where sizes are symbolic."""

from __future__ import annotations

import dataclasses

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.problem import ATTRIBUTE, AttentionProblem, Mask

from ..rejections import fits
from ..variant import Variant
from .attention_tiles import MmaTiles, WgmmaTiles
from .decode import decode
from .decode_rows import decode_rows
from .decode_tiles import DecodeTiles, RowTiles
from .device import Device, device
from .plain import plain
from .prefill_mma import prefill_mma, takes
from .prefill_wgmma import prefill_wgmma


def attention(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """A function that holds an AttentionProblem: by wgmma, by mma.sync, by warps for a row each."""
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
        for name, prefill in _on_tensor_cores(problem, gpu).items()
    ]
    rows = {"rows": RowTiles.default(problem, gpu)}
    return [*variants, Variant("rows", problem, gpu, rows, lambda tiles: rows_kernel(problem, tiles["rows"]))]


def _on_tensor_cores(problem: AttentionProblem, gpu: Device) -> dict[str, type[MmaTiles | WgmmaTiles]]:
    """The prefill kernels that take the problem, the best first."""
    if not takes(problem):
        return {}
    needs = {
        "the GPU is a Hopper": gpu.generation == 90,
        # TMA would write whole tiles of Y over the rows of the next batch, and knows nothing of tables.
        "neither rows nor keys are packed, looked up or codes": problem.dense,
    }
    return ({"wgmma": WgmmaTiles} if fits("wgmma", needs) else {}) | {"mma": MmaTiles}


def rows_kernel(problem: AttentionProblem, tiles: RowTiles) -> tirx.PrimFunc:
    """The PrimFunc with the parameters of the plain lowering, for any problem: it launches `plain` for the qk output,
    else `decode_rows`.
    """
    with IRBuilder() as builder, T.prim_func():
        bound = _bound(problem)
        if problem.qk_mode is None:
            decode_rows(bound, tiles)
        else:
            plain(bound, tiles)
    return builder.get()


def attention_kernel(
    problem: AttentionProblem, gpu: Device, prefill_tiles: MmaTiles | WgmmaTiles, decode_tiles: DecodeTiles
) -> tirx.PrimFunc:
    """The PrimFunc with the parameters of the plain lowering, for a problem that tensor cores take: it launches
    `decode` for up to decode_tiles.rows packed query rows, and for more the prefill kernel that the tiles are for.
    """
    with IRBuilder() as builder, T.prim_func():
        bound = _bound(problem)
        most = decode_tiles.rows // problem.group
        if problem.packed:
            if most:
                decode(bound, decode_tiles, gpu)
            with T.If(T.int64(1) * bound.S > most), T.Then():
                _prefill(bound, prefill_tiles, gpu, more_than=most)
        elif bound.problem.q_len is None and most:
            with T.If(tirx.LE(bound.S, T.int64(most))):
                with T.Then():
                    decode(bound, decode_tiles, gpu)
                with T.Else():
                    _prefill(bound, prefill_tiles, gpu)
        elif bound.problem.q_len is not None and bound.problem.q_len <= most:
            decode(bound, decode_tiles, gpu)
        else:
            _prefill(bound, prefill_tiles, gpu)
    return builder.get()


def _prefill(bound: Bound, tiles: MmaTiles | WgmmaTiles, gpu: Device, more_than: int = 0) -> None:
    if isinstance(tiles, WgmmaTiles):
        prefill_wgmma(bound, tiles, gpu)
    else:
        prefill_mma(bound, tiles, gpu, more_than)


def _bound(problem: AttentionProblem) -> Bound:
    """The problem bound to the function that is open. A size of 0 becomes symbolic: TVM divides by those it knows."""
    T.func_name("attention")
    mask, p = problem.mask, problem
    if isinstance(mask, Mask):
        mb, mh, ms, mt = (n or None for n in mask.dims)
        mask = dataclasses.replace(mask, dims=(mb, mh, ms, mt))
    batch, q_len, kv_len = (size or None for size in (p.batch, p.q_len, p.kv_len))
    return Bound(dataclasses.replace(p, batch=batch, q_len=q_len, kv_len=kv_len, mask=mask), scope="local")
