"""The rule for matmuls with epilogues (fused_epilogues.py), whose rows may be computed first (prologue_matmul.py)."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import BLOCK_ATTRIBUTE

from ...reading.epilogues import read_epilogues
from ...variant import Variant
from ..matmul.matmul import choose_tiles, emit_matmuls, plan_groups, widest_shape
from ..matmul.matmul_reader import read_stage_matmuls
from ..matmul.small_m_matmul import can_multiply_small_m
from ..primitives.device import device
from ..primitives.threads import ThreadTiles
from .fused_epilogues import FusedEpilogues
from .prologue_matmul import emit_prologue_matmul, prologue_tiles, read_prologue_matmul


def epilogue_matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return variants for matmuls that the small-M kernel accepts, with epilogues that it can compute.

    None for anything else.
    """
    split = read_epilogues(func)
    if split is None:
        return None
    stages, epilogues = split
    prologue = None
    if len(stages) == 2:
        matmuls = read_prologue_matmul(func, *stages)
        groups, prologue = matmuls if matmuls is not None else (None, None)
    else:
        groups = plan_groups(read_stage_matmuls(func, stages[0]) or ()) if len(stages) == 1 else None
    if (
        groups is None
        or not can_multiply_small_m(groups)
        or not _can_fuse_epilogues(func, groups, FusedEpilogues(func, epilogues, ThreadTiles()))
    ):
        return None
    gpu = device(target)

    def emit(tiles: dict[str, Any]) -> tirx.PrimFunc:
        factory = FusedEpilogues(func, epilogues, tiles["epilogues"])
        with IRBuilder() as builder, T.prim_func():
            if prologue is None:
                emit_matmuls(groups, tiles, gpu, factory)
            else:
                emit_prologue_matmul(groups, prologue, tiles, gpu, factory)
        return func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)

    by_name = choose_tiles(groups, gpu) if prologue is None else prologue_tiles(groups, gpu)
    return [
        Variant(name, widest_shape(groups), gpu, {**tiles, "epilogues": ThreadTiles()}, emit)
        for name, tiles in by_name.items()
    ]


def _can_fuse_epilogues(func: tirx.PrimFunc, groups: list[Any], factory: FusedEpilogues) -> bool:
    """Return whether the small-M blocks can compute the epilogues."""
    with IRBuilder(), T.prim_func():
        try:
            for matmuls, *_ in groups:
                factory.create_epilogue(matmuls)
        except ValueError:
            return False
    return True
