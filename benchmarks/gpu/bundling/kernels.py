"""The functions of a bundle: each kernel of `schedules.cuda` by itself, for symbolic batch and lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.record.problem import AttentionProblem
from lowering.target import Target
from lowering.tensorir.scatter import CacheUpdate, make_copying_update, make_in_place_update
from schedules.cuda.attention.attention_tiles import MmaTiles, WgmmaTiles
from schedules.cuda.attention.decode import decode
from schedules.cuda.attention.decode_rows import decode_rows
from schedules.cuda.attention.decode_tiles import DecodeTiles, RowTiles
from schedules.cuda.attention.plain import plain
from schedules.cuda.attention.prefill_mma import prefill_mma
from schedules.cuda.attention.prefill_wgmma import prefill_wgmma
from schedules.cuda.cache.scatter import cache_update
from schedules.cuda.matmul.matmul import matmul
from schedules.cuda.primitives.device import Device, device
from schedules.tiles import Tiles

from ..plan import Kernel
from .matmuls import Matmul
from .reading import Read

_ATTENTION: dict[str, tuple[type[Tiles], Callable[[BoundAttention, Any, Device], None]]] = {
    "wgmma": (WgmmaTiles, prefill_wgmma),
    "mma": (MmaTiles, prefill_mma),
    "decode": (DecodeTiles, decode),
    "rows": (RowTiles, lambda bound, tiles, gpu: decode_rows(bound, tiles)),
    "plain": (RowTiles, lambda bound, tiles, gpu: plain(bound, tiles)),
}


def function(kernel: Kernel, target: Target) -> tirx.PrimFunc:
    """The PrimFunc `kernel`, for a CUDA target. Raises ValueError for tiles that it cannot have."""
    return _OPERATIONS[kernel.operation](kernel, target).with_attr("global_symbol", "kernel")


def _attention(kernel: Kernel, target: Target) -> tirx.PrimFunc:
    problem, gpu = AttentionProblem.from_json(kernel.problem), device(target.tvm)
    kind, emit = _ATTENTION[kernel.variant]
    tiles = replace(kind.default(problem, gpu), **kernel.tiles.get("tiles", {}))
    tiles.check(problem, gpu)
    with IRBuilder() as builder, T.prim_func():
        emit(BoundAttention(problem, scope="local"), tiles, gpu)
    return builder.get()


def _matmul(kernel: Kernel, target: Target) -> tirx.PrimFunc:
    unscheduled = Matmul.from_json(kernel.problem).function()
    variant = {variant.name: variant for variant in matmul(unscheduled, target.tvm) or ()}[kernel.variant]
    tiles = {name: replace(variant.tiles[name], **fields) for name, fields in kernel.tiles.items()}
    return variant.make(**tiles)


def _update(kernel: Kernel, target: Target) -> tirx.PrimFunc:
    update = CacheUpdate.from_json(kernel.problem)
    unscheduled = make_copying_update(update) if kernel.result == "present" else make_in_place_update(update)
    (variant,) = cache_update(unscheduled, target.tvm) or ()
    return variant.make()


def _read(kernel: Kernel, target: Target) -> tirx.PrimFunc:
    return Read.from_json(kernel.problem).function(**kernel.tiles.get("tiles", {}))


_OPERATIONS = {"attention": _attention, "matmul": _matmul, "update": _update, "read": _read}
