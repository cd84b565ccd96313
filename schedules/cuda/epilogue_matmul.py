"""The rule for matmuls with epilogues (fused_epilogues.py), whose rows may be computed first (prologue_matmul.py)."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import FORM

from ..reading.epilogues import cut_epilogues
from ..variant import Variant
from .device import device
from .fused_epilogues import FusedEpilogues
from .matmul import emit_matmuls, planned, tiles_of, widest
from .matmul_reader import matmuls_of
from .prologue_matmul import emit_prologue_matmul, prologue_tiles, read_prologue_matmul
from .small_m_matmul import takes
from .threads import ThreadTiles


def epilogue_matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Matmuls that the small-M kernel takes, with epilogues that it can compute; None for anything else."""
    cut = cut_epilogues(func)
    if cut is None:
        return None
    parts, epilogues = cut
    normed = None
    if len(parts) == 2:
        found = read_prologue_matmul(func, *parts)
        groups, normed = found if found is not None else (None, None)
    else:
        groups = planned(matmuls_of(func, parts[0]) or ()) if len(parts) == 1 else None
    if (
        groups is None
        or not takes(groups)
        or not _can_end(func, groups, FusedEpilogues(func, epilogues, ThreadTiles()))
    ):
        return None
    gpu = device(target)

    def emit(tiles: dict[str, Any]) -> tirx.PrimFunc:
        ends = FusedEpilogues(func, epilogues, tiles["epilogues"])
        with IRBuilder() as builder, T.prim_func():
            if normed is None:
                emit_matmuls(groups, tiles, gpu, ends)
            else:
                emit_prologue_matmul(groups, normed, tiles, gpu, ends)
        return func.with_body(builder.get().body).without_attr(FORM)

    by_name = tiles_of(groups, gpu) if normed is None else prologue_tiles(groups, gpu)
    return [
        Variant(name, widest(groups), gpu, {**tiles, "epilogues": ThreadTiles()}, emit)
        for name, tiles in by_name.items()
    ]


def _can_end(func: tirx.PrimFunc, groups: list[Any], ends: FusedEpilogues) -> bool:
    """Whether the small-M blocks can compute the epilogues."""
    with IRBuilder(), T.prim_func():
        try:
            for matmuls, *_ in groups:
                ends.epilogue(matmuls)
        except ValueError:
            return False
    return True
