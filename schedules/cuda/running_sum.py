"""Running sums on GPUs: a warp for each row, 32 elements at a time, each of which adds those before it by shuffles."""

from __future__ import annotations

import tvm
from tvm import DataType, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.along_rows import RunningSum, read_along_rows
from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import Expr

from ..half_precision import is_half
from ..reading.values import flat_view
from ..variant import Variant
from .device import device
from .host import on_host
from .ptx import WARP, let, put, registers, shuffle_up, uniform
from .threads import ThreadTiles, each


def running_sum(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Running sums (lowering/tensorir/along_rows.py); None for anything else."""
    what = read_along_rows(func)
    if not isinstance(what, RunningSum):
        return None
    tiles = {"rows": ThreadTiles()}
    return [Variant("rows", None, device(target), tiles, lambda tiles: _kernel(func, what, tiles["rows"]))]


def _kernel(func: tirx.PrimFunc, what: RunningSum, tiles: ThreadTiles) -> tirx.PrimFunc:
    x, y = (param for param in func.params if tirx.is_buffer_var(param))
    outer, n, inner = x.shape
    dtype = _summed(str(x.dtype))
    with IRBuilder() as builder, T.prim_func():
        read, written = flat_view(x), flat_view(y)
        with each(on_host(outer * inner * WARP), tiles) as number:
            row, lane = let(tirx.truncdiv(number, T.int64(WARP))), let(tirx.truncmod(number, T.int64(WARP)))
            start = let(tirx.truncdiv(row, inner) * n * inner + tirx.truncmod(row, inner))
            own, total = registers(1, dtype), registers(1, dtype)
            put(total, 0, tirx.const(0, dtype))
            with T.serial(tirx.ceildiv(n, WARP)) as turn:
                step = let(turn * WARP + lane)
                place = let(start + (n - 1 - step if what.reverse else step) * inner)
                put(own, 0, tirx.const(0, dtype))
                with T.If(step < n), T.Then():
                    put(own, 0, read[place].astype(dtype))
                sums = _sums_of_lanes(own[0], lane)
                before = let(tirx.Select(lane > 0, let(shuffle_up(sums, 1)), tirx.const(0, dtype)))
                with T.If(step < n), T.Then():
                    put(written, place, (total[0] + (before if what.exclusive else sums)).astype(str(y.dtype)))
                put(total, 0, total[0] + let(uniform(sums, WARP - 1)))
    return func.with_body(builder.get().body).without_attr(FORM)


def _summed(dtype: str) -> str:
    """The type of sums: shuffles move 32 or 64 bits."""
    if is_half(dtype):
        return "float32"
    return dtype if DataType(dtype).bits >= 32 else "int32"


def _sums_of_lanes(value: Expr, lane: Expr) -> Expr:
    """Of each lane the sum of its value and those of the lanes before it."""
    for distance in (1, 2, 4, 8, 16):
        value = let(value)
        other = let(shuffle_up(value, distance))
        value = let(value + tirx.Select(lane >= distance, other, tirx.const(0, str(value.ty))))
    return value
