"""The rule for matmuls on tensor cores with accumulators in float32.

Operands are of half precision, or of float32 as TF32 where a function requests it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import BLOCK_ATTRIBUTE
from lowering.tensorir.expressions import Expr, is_int

from ...half_precision import HALF
from ...variant import Variant
from ..primitives.device import Device, device
from .epilogue import EpilogueFactory
from .matmul_mma import matmul_mma
from .matmul_reader import Matmuls, MatmulShape, Order, read_matmuls, read_run_matmuls
from .matmul_runs import MAX_BATCHED_ROWS, matmul_runs
from .matmul_tiles import MatmulTiles, WgmmaMatmulTiles
from .matmul_wgmma import matmul_wgmma
from .small_m_matmul import MatmulOperands, can_multiply_small_m, small_m_matmul
from .small_m_tiles import SmallMTiles
from .tma_operand import TmaOperand, read_tma_operand

MAX_GROUPS = 3
"""Maximum number of groups of one function: queries, keys and values."""

SMALL_M = ("rows", "sixteen", "several")
"""Small-M kernels: up to 8, 16 and 32 rows by default.

On Hopper, "low" tiles of wgmma replace the last one where there is only one group.
"""


def matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return variants for matmuls of one matrix with others, in groups of one or two matmuls.

    None for anything else.
    """
    groups = plan_function(func)
    if groups is None:
        return None

    def emit(tiles: dict[str, Any]) -> tirx.PrimFunc:
        with IRBuilder() as builder, T.prim_func():
            emit_matmuls(groups, tiles, gpu, EpilogueFactory())
        return func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)

    gpu = device(target)
    return [Variant(name, widest_shape(groups), gpu, tiles, emit) for name, tiles in choose_tiles(groups, gpu).items()]


def widest_shape(groups: list[MatmulOperands]) -> MatmulShape:
    """Return the shape of the matmuls with the most columns."""
    return max((matmuls.shape for matmuls, *_ in groups), key=lambda shape: shape.columns or 0)


def combined_shape(groups: list[MatmulOperands]) -> MatmulShape:
    """Return the shape of all matmuls next to each other."""
    columns = [matmuls.shape.columns for matmuls, *_ in groups]
    static = [n for n in columns if n is not None]
    return dataclasses.replace(widest_shape(groups), columns=sum(static) if len(static) == len(columns) else None)


def choose_tiles(groups: list[MatmulOperands], gpu: Device) -> dict[str, dict[str, Any]]:
    """Return, by variant, the tiles of its kernels; the default first."""
    shape = widest_shape(groups)
    small_m_tiles: dict[str, Any] = {}
    if can_multiply_small_m(groups) and groups[0][0].is_selected:
        small_m_tiles = {"rows": SmallMTiles.default(shape, gpu)}
        runs = plan_runs(groups)
        if gpu.generation == 90 and runs and all(map(_read_tma_operands, runs)):
            wide, narrow = WgmmaMatmulTiles.for_runs()
            return {"wgmma": {"tiles": wide, "narrow": narrow, **small_m_tiles}}
        small_m_tiles["several"] = SmallMTiles.several(shape, gpu, 32)
    elif can_multiply_small_m(groups):
        small_m_tiles = {"rows": SmallMTiles.default(combined_shape(groups), gpu)}
        for name, rows in (("sixteen", 16), ("several", 32)):
            if shape.rows is None or shape.rows > list(small_m_tiles.values())[-1].rows:
                small_m_tiles[name] = SmallMTiles.several(combined_shape(groups), gpu, rows)
    # TF32 has a name of its own: tuning for one data type says nothing about another.
    kinds: dict[str, Any] = {"mma" if shape.dtype in HALF else shape.dtype: MatmulTiles}
    if gpu.generation == 90 and shape.dtype in HALF and all(_read_tma_operands(group) for group in groups):
        kinds = {"wgmma": WgmmaMatmulTiles, **kinds}

    def tiles(kind: Any) -> dict[str, Any]:
        variant_tiles = {"tiles": kind.default(shape, gpu), **small_m_tiles}
        if kind is WgmmaMatmulTiles and len(groups) == 1 and variant_tiles.pop("several", None) is not None:
            variant_tiles["low"] = WgmmaMatmulTiles.low(shape)
        if kind is WgmmaMatmulTiles and variant_tiles["tiles"].cluster > 1 and shape.rows is None:
            variant_tiles["narrow"] = WgmmaMatmulTiles.narrow()
        return variant_tiles

    return {name: tiles(kind) for name, kind in kinds.items()}


def _read_tma_operands(group: MatmulOperands) -> tuple[TmaOperand, list[TmaOperand]] | None:
    """Return the operands as tensors of TMA, A along k; None where TMA cannot read one of them."""
    matmuls, a, bs = group
    operands = [read_tma_operand(matmuls, operand) for operand in (a, *bs)]
    readable = [operand for operand in operands if operand is not None]
    return (readable[0], readable[1:]) if len(readable) == len(operands) and a.order is Order.K else None


def plan_function(func: tirx.PrimFunc) -> list[MatmulOperands] | None:
    """Return how `matmul` reads a function; None where it does not accept it.

    Several groups multiply one A, one after another.
    """
    return plan_groups(read_matmuls(func) or ())


def plan_groups(matmul_groups: Sequence[Matmuls]) -> list[MatmulOperands] | None:
    """Return the groups with their operands, if the kernels accept them."""
    groups: list[MatmulOperands] = []
    for matmuls in matmul_groups:
        operands = matmuls.operands()
        if operands is None or len(matmuls.group.matmuls) > 2:
            return None
        groups.append((matmuls, *operands))
    if len(groups) > 1:
        first, a, _ = groups[0]
        is_single = all(len(bs) == 1 and not matmuls.batch_axes for matmuls, _, bs in groups)
        shares_a = all(first.shares_a(a, matmuls, other) for matmuls, other, _ in groups[1:])
        if len(groups) > MAX_GROUPS or not is_single or not shares_a:
            return None
    return groups or None


def plan_runs(groups: list[MatmulOperands]) -> list[MatmulOperands]:
    """Return groups whose rows choose their matrices by a table, as matmuls of the rows of one matrix."""
    return plan_groups(read_run_matmuls(groups[0][0].func) or ()) or []


def accepts_siblings(func: tirx.PrimFunc, target: tvm.target.Target) -> bool | None:
    """Return whether one more matmul by another matrix may be fused into a function that `matmul` accepts.

    None where it does not accept the function.
    """
    groups = plan_function(func)
    if groups is None:
        return None
    return len(groups) < MAX_GROUPS and all(len(bs) == 1 and not matmuls.batch_axes for matmuls, _, bs in groups)


def emit_matmuls(groups: list[MatmulOperands], tiles: dict[str, Any], gpu: Device, factory: EpilogueFactory) -> None:
    """Emit the kernels and their launches into the function being built.

    Few rows are served by one kernel for all groups, more rows by one kernel for each group.
    """

    def emit_large() -> None:
        for group in groups:
            if isinstance(tiles["tiles"], MatmulTiles):
                matmul_mma(*group, tiles["tiles"])
            else:
                _emit_by_wgmma(group, tiles)
        factory.launch_trailing()

    def emit_by_rows(small_m_tiles: list[SmallMTiles]) -> None:
        """Emit the first of these small-M kernels that serves so many rows."""
        if not small_m_tiles:
            emit_large()
            return
        first = groups[0][0]
        fits = first.facts.simplify(first.rows <= small_m_tiles[0].rows)
        emit_branches(
            fits,
            lambda: small_m_matmul(groups, small_m_tiles[0], gpu, factory),
            lambda: emit_by_rows(small_m_tiles[1:]),
        )

    small_m_tiles = [tiles[name] for name in SMALL_M if name in tiles]
    runs = plan_runs(groups) if small_m_tiles and groups[0][0].is_selected else []
    if not runs:
        emit_by_rows(small_m_tiles)
        return

    is_wgmma = isinstance(tiles["tiles"], WgmmaMatmulTiles)

    def emit_by_runs() -> None:
        for group in runs:
            if is_wgmma:
                _emit_by_wgmma(group, tiles)
            else:
                matmul_runs(group, small_m_tiles[-1], gpu, factory)

    max_batched = MAX_BATCHED_ROWS["wgmma" if is_wgmma else "rows"]
    emit_branches(
        groups[0][0].facts.simplify(groups[0][0].batch <= max_batched),
        lambda: emit_by_rows(small_m_tiles),
        emit_by_runs,
    )


def _emit_by_wgmma(group: MatmulOperands, tiles: dict[str, Any]) -> None:
    """Emit the wgmma kernels; at most as many rows as "low" tiles have are served by those."""
    operands, matmuls = _read_tma_operands(group), group[0]
    assert operands is not None

    def emit(*tiles: WgmmaMatmulTiles) -> None:
        matmul_wgmma(matmuls, *operands, *tiles)

    low, wide = tiles.get("low"), [tiles[name] for name in ("tiles", "narrow") if name in tiles]
    if low is None:
        emit(*wide)
    else:
        emit_branches(matmuls.facts.simplify(matmuls.rows <= low.m), lambda: emit(low), lambda: emit(*wide))


def emit_branches(condition: Expr, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Emit one branch if the condition is provable, or both under a condition on the host."""
    if is_int(condition, 1):
        then()
    elif is_int(condition, 0):
        otherwise()
    else:
        with T.If(condition):
            with T.Then():
                then()
            with T.Else():
                otherwise()
