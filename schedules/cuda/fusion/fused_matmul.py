"""The rules for matmuls with a norm prologue, which computes their rows first, and with epilogues (fused_epilogues.py).

With few rows, the blocks of the matmul compute the prologue (prologue_rows.py). With more, that would repeat too much
work: one launch computes it, and others multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import prim
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import BLOCK_ATTRIBUTE
from lowering.tensorir.expressions import is_int

from ...half_precision import HALF
from ...reading.epilogues import FusedEpilogue, read_epilogues
from ...reading.row_segments import split_segments
from ...reading.stages import Stage
from ...variant import Variant
from ..elementwise.reduction import emit_reduced_rows, read_reduced_rows
from ..matmul.epilogue import EpilogueFactory
from ..matmul.matmul import choose_tiles, combined_shape, emit_branches, emit_matmuls, plan_groups, widest_shape
from ..matmul.matmul_reader import read_stage_matmuls
from ..matmul.small_m_matmul import MatmulOperands, can_multiply_small_m, small_m_matmul
from ..primitives.device import Device, device
from ..primitives.threads import ThreadTiles
from .fused_epilogues import FusedEpilogues
from .prologue_rows import PrologueRows, max_rows
from .prologue_tiles import NormTiles, PrologueSmallMTiles


def prologue_matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return variants for a function of two parts, rows with reductions and matmuls of them.

    None for any other function, and where rows are too many or too long.
    """
    segments = split_segments(func)
    return _list_variants(func, target, segments, []) if segments is not None and len(segments) == 2 else None


def epilogue_matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return variants for matmuls that the small-M kernel accepts, with epilogues that it can compute.

    Their rows may be computed first. None for anything else.
    """
    split = read_epilogues(func)
    return None if split is None else _list_variants(func, target, *split)


def _list_variants(
    func: tirx.PrimFunc, target: tvm.target.Target, segments: list[list[Stage]], epilogues: Sequence[FusedEpilogue]
) -> list[Variant] | None:
    gpu, groups, prologue = device(target), None, None
    if len(segments) == 2:
        groups, prologue = read_prologue_matmul(func, *segments) or (None, None)
    elif len(segments) == 1:
        groups = plan_groups(read_stage_matmuls(func, segments[0]) or ())
    if groups is None or not can_multiply_small_m(groups) or not _can_fuse_epilogues(func, groups, epilogues):
        return None

    def emit(tiles: dict[str, Any]) -> tirx.PrimFunc:
        factory = FusedEpilogues(func, epilogues, tiles["epilogues"]) if epilogues else EpilogueFactory()
        with IRBuilder() as builder, T.prim_func():
            if prologue is None:
                emit_matmuls(groups, tiles, gpu, factory)
            else:
                emit_prologue_matmul(groups, prologue, tiles, gpu, factory)
        return func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)

    by_name = choose_tiles(groups, gpu) if prologue is None else prologue_tiles(groups, gpu)
    own_tiles = {"epilogues": ThreadTiles()} if epilogues else {}
    return [Variant(name, widest_shape(groups), gpu, {**tiles, **own_tiles}, emit) for name, tiles in by_name.items()]


def _can_fuse_epilogues(func: tirx.PrimFunc, groups: list[MatmulOperands], epilogues: Sequence[FusedEpilogue]) -> bool:
    """Return whether the small-M blocks can compute the epilogues."""
    factory = FusedEpilogues(func, epilogues, ThreadTiles())
    with IRBuilder(), T.prim_func():
        try:
            for matmuls, *_ in groups:
                factory.create_epilogue(matmuls)
        except ValueError:
            return False
    return True


def prologue_tiles(groups: list[MatmulOperands], gpu: Device) -> dict[str, dict[str, Any]]:
    """Return, by variant, the tiles of its kernels; the default first."""
    prologue_kernels = {
        "normed": PrologueSmallMTiles.default(combined_shape(groups), gpu),
        "norm": NormTiles.default(widest_shape(groups), gpu),
    }
    return {name: {**tiles, **prologue_kernels} for name, tiles in choose_tiles(groups, gpu).items()}


def emit_prologue_matmul(
    groups: list[MatmulOperands], prologue: PrologueRows, tiles: dict[str, Any], gpu: Device, factory: EpilogueFactory
) -> None:
    """Emit the kernels and their launches into the function being built."""

    def emit_separately() -> None:
        emit_reduced_rows(prologue.rows, tiles["norm"])
        emit_matmuls(groups, tiles, gpu, factory)

    fits = groups[0][0].facts.simplify(groups[0][0].rows <= prologue.max_rows)
    emit_branches(fits, lambda: small_m_matmul(groups, tiles["normed"], gpu, factory, prologue), emit_separately)


def read_prologue_matmul(
    func: tirx.PrimFunc, first: list[Stage], second: list[Stage]
) -> tuple[list[MatmulOperands], PrologueRows] | None:
    """Return the matmuls and the prologue of A, whose row m begins at m K. A block must be able to compute a row."""
    rows, groups = read_reduced_rows(func, first), plan_groups(read_stage_matmuls(func, second) or ())
    if rows is None or groups is None or not can_multiply_small_m(groups):
        return None
    matmuls, a, _ = groups[0]
    depth = matmuls.depth
    row_stages = [stage for stage in rows.materialized if not stage.reduce]
    if matmuls.dtype not in HALF or matmuls.batch_axes or not isinstance(depth, tirx.IntImm):
        return None
    if [stage.output for stage in row_stages] != [a.buffer] or len(row_stages[0].axes) != rows.rank + 1:
        return None
    in_rows = matmuls.facts.simplify(a.start - matmuls.m * depth)
    row_limit = max_rows(depth.value)
    has_too_many = isinstance(matmuls.rows, tirx.IntImm) and matmuls.rows.value > row_limit
    if not is_int(in_rows, 0) or not prim.expr_deep_equal(a.along, matmuls.k) or row_limit == 0 or has_too_many:
        return None
    return groups, PrologueRows(rows, depth.value)
