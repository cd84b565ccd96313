"""The functions of a bundle: each kernel of `schedules.cuda` by itself, for symbolic batch and lengths."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.problem import AttentionProblem
from lowering.target import Target
from lowering.tensorir.scatter import CacheUpdate, copy_and_update, update_in_place
from schedules.cuda.attention_tiles import MmaTiles, WgmmaTiles
from schedules.cuda.decode import decode
from schedules.cuda.decode_rows import decode_rows
from schedules.cuda.decode_tiles import DecodeTiles, RowTiles
from schedules.cuda.device import Device, device
from schedules.cuda.matmul import matmul
from schedules.cuda.plain import plain
from schedules.cuda.prefill_mma import prefill_mma
from schedules.cuda.prefill_wgmma import prefill_wgmma
from schedules.cuda.scatter import cache_update

from ..plan import Kernel
from .matmuls import Matmul

_ATTENTION: dict[str, Callable[[Bound, AttentionProblem, Device], None]] = {
    "wgmma": lambda bound, p, gpu: prefill_wgmma(bound, WgmmaTiles.default(p, gpu), gpu),
    "mma": lambda bound, p, gpu: prefill_mma(bound, MmaTiles.default(p, gpu), gpu),
    "decode": lambda bound, p, gpu: decode(bound, DecodeTiles.default(p, gpu), gpu),
    "rows": lambda bound, p, gpu: decode_rows(bound, RowTiles.default(p, gpu)),
    "plain": lambda bound, p, gpu: plain(bound, RowTiles.default(p, gpu)),
}


def function(kernel: Kernel, target: Target) -> tirx.PrimFunc:
    """The PrimFunc `kernel`, for a CUDA target."""
    if kernel.operation == "attention":
        problem = AttentionProblem.from_json(kernel.problem)
        with IRBuilder() as builder, T.prim_func():
            _ATTENTION[kernel.contender](Bound(problem, scope="local"), problem, device(target.tvm))
        made = builder.get()
    elif kernel.operation == "matmul":
        function = Matmul.from_json(kernel.problem).function()
        variants = {variant.name: variant for variant in matmul(function, target.tvm) or ()}
        made = variants[kernel.contender].make()
    else:
        update = CacheUpdate.from_json(kernel.problem)
        unscheduled = copy_and_update(update) if kernel.result == "present" else update_in_place(update)
        (variant,) = cache_update(unscheduled, target.tvm) or ()
        made = variant.make()
    return made.with_attr("global_symbol", "kernel")
