"""The rule for matmuls whose rows are computed first: norm prologue of them (lowering/passes/fuse_norm_prologues.py).

With few rows the blocks of the matmul compute them (prologue_rows.py). With more that would be done too often: a launch
computes them, and others multiply.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir import prim
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import is_int

from ..half_precision import HALF
from ..reading.row_parts import cut_parts
from ..reading.stages import Stage
from ..variant import Variant
from .device import Device, device
from .epilogue import Ends
from .matmul import either, emit_matmuls, planned, tiles_of, together, widest
from .matmul_reader import matmuls_of
from .prologue_rows import PrologueRows, most_rows
from .prologue_tiles import NormTiles, PrologueSmallMTiles
from .reduction import emit_rows, read_rows
from .small_m_matmul import Group, small_m_matmul, takes


def prologue_matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """A function of two parts, rows with reductions and matmuls of them; None for any other, and where rows are too
    many, or too long."""
    parts = cut_parts(func)
    found = read_prologue_matmul(func, *parts) if parts is not None and len(parts) == 2 else None
    if found is None:
        return None
    groups, normed = found
    gpu = device(target)

    def emit(tiles: dict[str, Any]) -> tirx.PrimFunc:
        with IRBuilder() as builder, T.prim_func():
            emit_prologue_matmul(groups, normed, tiles, gpu, Ends())
        return func.with_body(builder.get().body).without_attr(FORM)

    by_name = prologue_tiles(groups, gpu)
    return [Variant(name, widest(groups), gpu, tiles, emit) for name, tiles in by_name.items()]


def prologue_tiles(groups: list[Group], gpu: Device) -> dict[str, dict[str, Any]]:
    """By variant, the tiles of its kernels; the default first."""
    own = {"normed": PrologueSmallMTiles.default(together(groups), gpu), "norm": NormTiles.default(widest(groups), gpu)}
    return {name: {**tiles, **own} for name, tiles in tiles_of(groups, gpu).items()}


def emit_prologue_matmul(
    groups: list[Group], normed: PrologueRows, tiles: dict[str, Any], gpu: Device, ends: Ends
) -> None:
    """Emits the kernels and their launches into the function that is open."""

    def otherwise() -> None:
        emit_rows(normed.rows, tiles["norm"])
        emit_matmuls(groups, tiles, gpu, ends)

    fits = groups[0][0].facts.simplify(groups[0][0].rows <= normed.most)
    either(fits, lambda: small_m_matmul(groups, tiles["normed"], gpu, ends, normed), otherwise)


def read_prologue_matmul(
    func: tirx.PrimFunc, first: list[Stage], second: list[Stage]
) -> tuple[list[Group], PrologueRows] | None:
    """The matmuls, and A, of which row m begins at m K; at least one row may be computed by a block."""
    rows, groups = read_rows(func, first), planned(matmuls_of(func, second) or ())
    if rows is None or groups is None or not takes(groups):
        return None
    matmuls, a, _ = groups[0]
    depth = matmuls.depth
    whole = [stage for stage in rows.kept if not stage.reduce]
    if matmuls.dtype not in HALF or matmuls.batch_axes or not isinstance(depth, tirx.IntImm):
        return None
    if [stage.output for stage in whole] != [a.buffer] or len(whole[0].axes) != rows.rank + 1:
        return None
    in_rows = matmuls.facts.simplify(a.start - matmuls.m * depth)
    most = most_rows(depth.value)
    many = isinstance(matmuls.rows, tirx.IntImm) and matmuls.rows.value > most
    if not is_int(in_rows, 0) or not prim.expr_deep_equal(a.along, matmuls.k) or most == 0 or many:
        return None
    return groups, PrologueRows(rows, depth.value)
