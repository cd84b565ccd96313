"""Running sums on GPUs: a warp for each row, 32 elements at a time, with prefix sums by shuffles."""

from __future__ import annotations

import tvm
from tvm import DataType, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.along_rows import RunningSum, read_along_rows
from lowering.tensorir.blocks import BLOCK_ATTRIBUTE
from lowering.tensorir.expressions import Expr

from ...half_precision import is_half
from ...reading.values import flat_view
from ...variant import Variant
from ..primitives.device import device
from ..primitives.host import bind_on_host
from ..primitives.ptx import WARP, alloc_registers, let, shuffle_up, store_element, uniform
from ..primitives.threads import ThreadTiles, launch_threads


def running_sum(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return a variant for running sums (lowering/tensorir/along_rows.py); None for anything else."""
    scan = read_along_rows(func)
    if not isinstance(scan, RunningSum):
        return None
    tiles = {"rows": ThreadTiles()}
    return [Variant("rows", None, device(target), tiles, lambda tiles: _kernel(func, scan, tiles["rows"]))]


def _kernel(func: tirx.PrimFunc, scan: RunningSum, tiles: ThreadTiles) -> tirx.PrimFunc:
    x, y = (param for param in func.params if tirx.is_buffer_var(param))
    outer, n, inner = x.shape
    dtype = _accumulator_type(str(x.dtype))
    with IRBuilder() as builder, T.prim_func():
        read, written = flat_view(x), flat_view(y)
        with launch_threads(bind_on_host(outer * inner * WARP), tiles) as number:
            row, lane = let(tirx.truncdiv(number, T.int64(WARP))), let(tirx.truncmod(number, T.int64(WARP)))
            start = let(tirx.truncdiv(row, inner) * n * inner + tirx.truncmod(row, inner))
            own, total = alloc_registers(1, dtype), alloc_registers(1, dtype)
            store_element(total, 0, tirx.const(0, dtype))
            with T.serial(tirx.ceildiv(n, WARP)) as iteration:
                step = let(iteration * WARP + lane)
                address = let(start + (n - 1 - step if scan.reverse else step) * inner)
                store_element(own, 0, tirx.const(0, dtype))
                with T.If(step < n), T.Then():
                    store_element(own, 0, read[address].astype(dtype))
                prefix = _scan_lanes(own[0], lane)
                before = let(tirx.Select(lane > 0, let(shuffle_up(prefix, 1)), tirx.const(0, dtype)))
                with T.If(step < n), T.Then():
                    store_element(
                        written, address, (total[0] + (before if scan.exclusive else prefix)).astype(str(y.dtype))
                    )
                store_element(total, 0, total[0] + let(uniform(prefix, WARP - 1)))
    return func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)


def _accumulator_type(dtype: str) -> str:
    """Return the type of the accumulator: shuffles move 32 or 64 bits."""
    if is_half(dtype):
        return "float32"
    return dtype if DataType(dtype).bits >= 32 else "int32"


def _scan_lanes(value: Expr, lane: Expr) -> Expr:
    """Return in each lane the sum of its value and those of the lanes before it."""
    for distance in (1, 2, 4, 8, 16):
        value = let(value)
        earlier = let(shuffle_up(value, distance))
        value = let(value + tirx.Select(lane >= distance, earlier, tirx.const(0, str(value.ty))))
    return value
