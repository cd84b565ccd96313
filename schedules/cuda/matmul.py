"""The rule for products of matrices on tensor cores, with sums in float32: in half precision, and of float32 as TF32
where a function asks for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import is_int

from ..half_precision import HALF
from ..variant import Variant
from .device import Device, device
from .matmul_mma import matmul_mma
from .matmul_rows import Group, matmul_rows, takes
from .matmul_tiles import FewRowsTiles, MatmulTiles, WgmmaMatmulTiles
from .matmul_wgmma import Reach, matmul_wgmma, reach
from .products import Order, read_products

MOST = 3
"""Groups of one function: queries, keys and values."""


def matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Products of one matrix with others, in groups of one product or two; None for anything else."""
    found = plan(func)
    if found is None:
        return None
    gpu, shapes = device(target), [products.shape for products, *_ in found]
    shape = max(shapes, key=lambda shape: shape.columns or 0)
    few: dict[str, Any] = {}
    if takes(found):
        together = None if None in (each.columns for each in shapes) else sum(each.columns or 0 for each in shapes)
        few = {"rows": FewRowsTiles.default(dataclasses.replace(shape, columns=together), gpu)}
        if shape.rows is None or shape.rows > few["rows"].rows:
            few["several"] = FewRowsTiles.several(shape, gpu)
    # By a name of its own in TF32: what was tuned for one way to multiply says nothing of the others.
    kinds: dict[str, Any] = {"mma" if shape.dtype in HALF else shape.dtype: MatmulTiles}
    if gpu.generation == 90 and shape.dtype in HALF and all(_reaches(group) for group in found):
        kinds = {"wgmma": WgmmaMatmulTiles, **kinds}

    def variant(name: str, kind: Any) -> Variant:
        tiles = {"tiles": kind.default(shape, gpu), **few}
        if kind is WgmmaMatmulTiles and tiles["tiles"].cluster > 1 and shape.rows is None:
            tiles["narrow"] = WgmmaMatmulTiles.narrow()
        return Variant(name, shape, gpu, tiles, lambda tiles: _kernel(func, found, tiles, gpu))

    return [variant(name, kind) for name, kind in kinds.items()]


def _reaches(group: Group) -> tuple[Reach, list[Reach]] | None:
    """The operands as TMA reaches them, A along k; None where one is out of reach."""
    products, a, bs = group
    parts = [reach(products, operand) for operand in (a, *bs)]
    there = [part for part in parts if part is not None]
    return (there[0], there[1:]) if len(there) == len(parts) and a.order is Order.K else None


def plan(func: tirx.PrimFunc) -> list[Group] | None:
    """How `matmul` reads a function, or None where it does not take it. Several groups multiply one A, one by one."""
    found: list[Group] = []
    for products in read_products(func) or ():
        operands = products.operands()
        if operands is None or len(products.group.products) > 2:
            return None
        found.append((products, *operands))
    if len(found) > 1:
        first, a, _ = found[0]
        alone = all(len(bs) == 1 and not products.batch_axes for products, _, bs in found)
        same = all(first.same_a(a, products, other) for products, other, _ in found[1:])
        if len(found) > MOST or not alone or not same:
            return None
    return found or None


def joins(func: tirx.PrimFunc, target: tvm.target.Target) -> bool | None:
    """Whether one more product by another matrix may join a function that `matmul` takes; None where it does not."""
    found = plan(func)
    if found is None:
        return None
    return len(found) < MOST and all(len(bs) == 1 and not products.batch_axes for products, _, bs in found)


def _kernel(func: tirx.PrimFunc, found: list[Group], tiles: dict[str, Any], gpu: Device) -> tirx.PrimFunc:
    """The function: few rows by one kernel for all groups, more by one for each, that the tiles are for."""

    def many() -> None:
        for group in found:
            if isinstance(tiles["tiles"], MatmulTiles):
                matmul_mma(*group, tiles["tiles"])
                continue
            reaches = _reaches(group)
            assert reaches is not None
            matmul_wgmma(group[0], *reaches, tiles["tiles"], tiles.get("narrow"))

    def by_rows(few: list[FewRowsTiles]) -> None:
        """The first of these tiles that is for so many rows."""
        first = found[0][0]
        fits = first.facts.simplify(first.rows <= few[0].rows) if few else T.bool(False)
        if is_int(fits, 1):
            matmul_rows(found, few[0], gpu)
        elif is_int(fits, 0):
            by_rows(few[1:]) if few else many()
        else:
            with T.If(fits):
                with T.Then():
                    matmul_rows(found, few[0], gpu)
                with T.Else():
                    by_rows(few[1:])

    with IRBuilder() as builder, T.prim_func():
        by_rows([tiles[name] for name in ("rows", "several") if name in tiles])
    return func.with_body(builder.get().body).without_attr(FORM)
