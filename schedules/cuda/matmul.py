"""The rule for products of matrices on tensor cores, with sums in float32: in half precision, and of float32 as TF32
where a function asks for it."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import is_int

from ..half_precision import HALF
from ..variant import Variant
from .device import device
from .matmul_mma import matmul_mma
from .matmul_rows import matmul_rows, takes
from .matmul_tiles import FewRowsTiles, MatmulTiles, WgmmaMatmulTiles
from .matmul_wgmma import Reach, matmul_wgmma, reach
from .products import Operand, Order, Products, read_products

Plan = tuple[Products, Operand, list[Operand]]


def matmul(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Products of one matrix with others, whose sums are read together; None for anything else."""
    found = plan(func)
    if found is None:
        return None
    products, a, bs = found
    shape, gpu = products.shape, device(target)
    few = {"rows": FewRowsTiles.default(shape, gpu)} if takes(a, bs) else {}
    # By a name of its own in TF32: what was tuned for one way to multiply says nothing of the others.
    kinds: dict[str, Any] = {"mma" if shape.dtype in HALF else shape.dtype: MatmulTiles}
    if gpu.generation == 90 and shape.dtype in HALF and _reaches(found) is not None:
        kinds = {"wgmma": WgmmaMatmulTiles, **kinds}
    return [
        Variant(name, shape, gpu, {"tiles": kind.default(shape, gpu), **few}, lambda tiles: _kernel(func, found, tiles))
        for name, kind in kinds.items()
    ]


def _reaches(found: Plan) -> tuple[Reach, list[Reach]] | None:
    """The operands as TMA reaches them, A along k; None where one is out of reach."""
    products, a, bs = found
    parts = [reach(products, operand) for operand in (a, *bs)]
    there = [part for part in parts if part is not None]
    return (there[0], there[1:]) if len(there) == len(parts) and a.order is Order.K else None


def plan(func: tirx.PrimFunc) -> Plan | None:
    """How `matmul` reads a function, or None where it does not take it."""
    products = read_products(func)
    operands = products.operands() if products is not None else None
    if products is None or operands is None or len(products.group.products) > 2:
        return None
    return products, *operands


def joins(func: tirx.PrimFunc, target: tvm.target.Target) -> bool | None:
    """Whether one more product by another matrix may join a function that `matmul` takes; None where it does not."""
    found = plan(func)
    return None if found is None else len(found[2]) == 1 and not found[0].batch_axes


def _kernel(func: tirx.PrimFunc, found: Plan, tiles: dict[str, Any]) -> tirx.PrimFunc:
    """The function: few rows by one kernel, all others by the one that the tiles are for."""
    products, a, bs = found

    def many() -> None:
        if isinstance(tiles["tiles"], MatmulTiles):
            matmul_mma(products, a, bs, tiles["tiles"])
            return
        reaches = _reaches(found)
        assert reaches is not None
        matmul_wgmma(products, *reaches, tiles["tiles"])

    with IRBuilder() as builder, T.prim_func():
        few = products.facts.simplify(products.rows <= tiles["rows"].rows) if "rows" in tiles else T.bool(False)
        if is_int(few, 1):
            matmul_rows(products, a, bs, tiles["rows"])
        elif is_int(few, 0):
            many()
        else:
            with T.If(few):
                with T.Then():
                    matmul_rows(products, a, bs, tiles["rows"])
                with T.Else():
                    many()
    return func.with_body(builder.get().body).without_attr(FORM)
