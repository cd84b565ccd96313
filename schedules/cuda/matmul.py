"""The rule for matmuls on tensor cores, with sums in float32: in half precision, and of float32 as TF32
where a function asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import Expr, is_int

from ..half_precision import HALF
from ..variant import Variant
from .device import Device, device
from .epilogue import Ends
from .matmul_mma import matmul_mma
from .matmul_reader import Matmuls, Order, Shape, matmuls_of_runs, read_matmuls
from .matmul_runs import BATCHED, matmul_runs
from .matmul_tiles import MatmulTiles, WgmmaMatmulTiles
from .matmul_wgmma import matmul_wgmma
from .reach import Reach, reach
from .small_m_matmul import Group, small_m_matmul, takes
from .small_m_tiles import SmallMTiles

MOST = 3
"""Groups of one function: queries, keys and values."""

SMALL_M = ("rows", "sixteen", "several")
"""Small-M kernels: up to 8, 16 and 32 by default. On Hopper "low" tiles of wgmma are in place of the last, where
one group is multiplied alone."""


def matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Matmuls of one matrix with others, in groups of one matmul or two; None for anything else."""
    found = plan(func)
    if found is None:
        return None

    def emit(tiles: dict[str, Any]) -> tirx.PrimFunc:
        with IRBuilder() as builder, T.prim_func():
            emit_matmuls(found, tiles, gpu, Ends())
        return func.with_body(builder.get().body).without_attr(FORM)

    gpu = device(target)
    return [Variant(name, widest(found), gpu, tiles, emit) for name, tiles in tiles_of(found, gpu).items()]


def widest(found: list[Group]) -> Shape:
    """The shape of the matmuls with most columns."""
    return max((matmuls.shape for matmuls, *_ in found), key=lambda shape: shape.columns or 0)


def together(found: list[Group]) -> Shape:
    """That of all matmuls side by side."""
    columns = [matmuls.shape.columns for matmuls, *_ in found]
    known = [n for n in columns if n is not None]
    return dataclasses.replace(widest(found), columns=sum(known) if len(known) == len(columns) else None)


def tiles_of(found: list[Group], gpu: Device) -> dict[str, dict[str, Any]]:
    """By variant, the tiles of its kernels; the default first."""
    shape = widest(found)
    few: dict[str, Any] = {}
    if takes(found) and found[0][0].is_selected:
        few = {"rows": SmallMTiles.default(shape, gpu)}
        runs = runs_of(found)
        if gpu.generation == 90 and runs and all(map(_reaches, runs)):
            wide, narrow = WgmmaMatmulTiles.for_runs()
            return {"wgmma": {"tiles": wide, "narrow": narrow, **few}}
        few["several"] = SmallMTiles.several(shape, gpu, 32)
    elif takes(found):
        few = {"rows": SmallMTiles.default(together(found), gpu)}
        for name, rows in (("sixteen", 16), ("several", 32)):
            if shape.rows is None or shape.rows > list(few.values())[-1].rows:
                few[name] = SmallMTiles.several(together(found), gpu, rows)
    # By a name of its own in TF32: what was tuned for one way to multiply says nothing of the others.
    kinds: dict[str, Any] = {"mma" if shape.dtype in HALF else shape.dtype: MatmulTiles}
    if gpu.generation == 90 and shape.dtype in HALF and all(_reaches(group) for group in found):
        kinds = {"wgmma": WgmmaMatmulTiles, **kinds}

    def tiles(kind: Any) -> dict[str, Any]:
        own = {"tiles": kind.default(shape, gpu), **few}
        if kind is WgmmaMatmulTiles and len(found) == 1 and own.pop("several", None) is not None:
            own["low"] = WgmmaMatmulTiles.low(shape)
        if kind is WgmmaMatmulTiles and own["tiles"].cluster > 1 and shape.rows is None:
            own["narrow"] = WgmmaMatmulTiles.narrow()
        return own

    return {name: tiles(kind) for name, kind in kinds.items()}


def _reaches(group: Group) -> tuple[Reach, list[Reach]] | None:
    """The operands as TMA reaches them, A along k; None where one is out of reach."""
    matmuls, a, bs = group
    parts = [reach(matmuls, operand) for operand in (a, *bs)]
    there = [part for part in parts if part is not None]
    return (there[0], there[1:]) if len(there) == len(parts) and a.order is Order.K else None


def plan(func: tirx.PrimFunc) -> list[Group] | None:
    """How `matmul` reads a function, or None where it does not take it. Several groups multiply one A, one by one."""
    return planned(read_matmuls(func) or ())


def planned(of_matmuls: Sequence[Matmuls]) -> list[Group] | None:
    """The groups with their operands, if the kernels take them."""
    found: list[Group] = []
    for matmuls in of_matmuls:
        operands = matmuls.operands()
        if operands is None or len(matmuls.group.matmuls) > 2:
            return None
        found.append((matmuls, *operands))
    if len(found) > 1:
        first, a, _ = found[0]
        alone = all(len(bs) == 1 and not matmuls.batch_axes for matmuls, _, bs in found)
        same = all(first.same_a(a, matmuls, other) for matmuls, other, _ in found[1:])
        if len(found) > MOST or not alone or not same:
            return None
    return found or None


def runs_of(found: list[Group]) -> list[Group]:
    """Groups whose rows choose their matrices by a table, as matmuls of the rows of one matrix."""
    return planned(matmuls_of_runs(found[0][0].func) or ()) or []


def accepts_siblings(func: tirx.PrimFunc, target: tvm.target.Target) -> bool | None:
    """Whether one more matmul by another matrix may join a function that `matmul` takes; None where it does not."""
    found = plan(func)
    if found is None:
        return None
    return len(found) < MOST and all(len(bs) == 1 and not matmuls.batch_axes for matmuls, _, bs in found)


def emit_matmuls(found: list[Group], tiles: dict[str, Any], gpu: Device, ends: Ends) -> None:
    """Emits the kernels and their launches into the function that is open: few rows by one kernel for all groups, more
    by one for each, that the tiles are for."""

    def many() -> None:
        for group in found:
            if isinstance(tiles["tiles"], MatmulTiles):
                matmul_mma(*group, tiles["tiles"])
            else:
                _by_wgmma(group, tiles)
        ends.behind()

    def by_rows(few: list[SmallMTiles]) -> None:
        """The first of these tiles that is for so many rows."""
        if not few:
            many()
            return
        first = found[0][0]
        fits = first.facts.simplify(first.rows <= few[0].rows)
        either(fits, lambda: small_m_matmul(found, few[0], gpu, ends), lambda: by_rows(few[1:]))

    few = [tiles[name] for name in SMALL_M if name in tiles]
    runs = runs_of(found) if few and found[0][0].is_selected else []
    if not runs:
        by_rows(few)
        return

    is_wgmma = isinstance(tiles["tiles"], WgmmaMatmulTiles)

    def by_runs() -> None:
        for group in runs:
            if is_wgmma:
                _by_wgmma(group, tiles)
            else:
                matmul_runs(group, few[-1], gpu, ends)

    most = BATCHED["wgmma" if is_wgmma else "rows"]
    either(found[0][0].facts.simplify(found[0][0].batch <= most), lambda: by_rows(few), by_runs)


def _by_wgmma(group: Group, tiles: dict[str, Any]) -> None:
    """Rows that are no more than a tile of "low" ones has, by those."""
    reaches, matmuls = _reaches(group), group[0]
    assert reaches is not None

    def emit(*tiles: WgmmaMatmulTiles) -> None:
        matmul_wgmma(matmuls, *reaches, *tiles)

    low, wide = tiles.get("low"), [tiles[name] for name in ("tiles", "narrow") if name in tiles]
    if low is None:
        emit(*wide)
    else:
        either(matmuls.facts.simplify(matmuls.rows <= low.m), lambda: emit(low), lambda: emit(*wide))


def either(condition: Expr, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """The code of one, as far as that is known, or of both under a condition of the host."""
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
