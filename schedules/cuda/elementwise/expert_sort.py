"""Stable counting sort of rows by group on GPUs: a block for each group, which reads the groups of all rows.

Count, among the warp's rows, those of earlier groups and those of this one. Compute the first position of each warp:
after all rows of earlier groups, and after this group's rows of earlier warps. Then, 32 rows at a time, store those of
this group to the next positions in the order of lanes (ballot).
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.along_rows import Grouped, read_along_rows
from lowering.tensorir.blocks import BLOCK_ATTRIBUTE
from lowering.tensorir.expressions import Expr

from ...reading.values import flat_view
from ...variant import Variant
from ..primitives.device import device
from ..primitives.ptx import WARP, alloc_registers, ballot, let, reduce_warp, store_element, synchronize
from ..primitives.threads import ThreadTiles


def expert_sort(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return a variant that sorts by group (lowering/tensorir/along_rows.py); None for anything else."""
    sort = read_along_rows(func)
    if not isinstance(sort, Grouped):
        return None
    tiles = {"threads": ThreadTiles(512)}
    return [Variant("groups", None, device(target), tiles, lambda tiles: _kernel(func, sort, tiles["threads"]))]


def _kernel(func: tirx.PrimFunc, sort: Grouped, tiles: ThreadTiles) -> tirx.PrimFunc:
    buffers = [param for param in func.params if tirx.is_buffer_var(param)]
    rows, warps = buffers[0].shape[0], tiles.threads // WARP
    with IRBuilder() as builder, T.prim_func():
        chosen, ordered, order, positions = map(flat_view, buffers)
        with (
            T.launch_thread("blockIdx.x", sort.groups) as group,
            T.launch_thread("threadIdx.x", tiles.threads) as thread,
        ):
            warp, lane = let(tirx.truncdiv(thread, WARP)), let(tirx.truncmod(thread, WARP))
            iterations = let(tirx.ceildiv(rows, T.int64(WARP * warps)))
            first = let(warp.astype("int64") * iterations * WARP + lane.astype("int64"))

            def group_of(row: Expr) -> Expr:
                """Return the group of a row; rows after the last one get a group after all others."""
                table_group = let(chosen[tirx.min(row, rows - 1)].astype("int64"))
                clamped = tirx.max(tirx.min(table_group, T.int64(sort.groups - 1)), T.int64(0))
                return let(tirx.Select(row < rows, clamped, T.int64(sort.groups)).astype("int32"))

            counts = alloc_registers(2, "int32")  # rows of earlier groups, and of this one
            for n in range(2):
                store_element(counts, n, T.int32(0))
            with T.serial(iterations) as iteration:
                own = group_of(first + iteration * WARP)
                store_element(counts, 0, counts[0] + (own < group).astype("int32"))
                store_element(counts, 1, counts[1] + tirx.EQ(own, group).astype("int32"))
            position = _find_first_position(counts, warps, (warp, lane))
            with T.serial(iterations) as iteration:
                row = let(first + iteration * WARP)
                is_own = let(tirx.EQ(group_of(row), group))
                lanes = ballot(is_own)
                before = let(tirx.bitwise_and(lanes, T.shift_left(T.uint32(1), lane.astype("uint32")) - T.uint32(1)))
                at = let(position[0] + tirx.popcount(before).astype("int64"))
                with T.If(is_own), T.Then():
                    store_element(ordered, at, group.astype("int64"))
                    store_element(order, at, row)
                    store_element(positions, row, at)
                store_element(position, 0, position[0] + tirx.popcount(lanes).astype("int64"))
    return func.with_body(builder.get().body).without_attr(BLOCK_ATTRIBUTE)


def _find_first_position(counts: tirx.Buffer, warps: int, thread: tuple[Expr, Expr]) -> tirx.Buffer:
    """Return the position of the warp's first row of the block's group. `thread` is its warp and its lane."""
    shared, (warp, lane) = T.alloc_buffer((2 * warps,), "int32", scope="shared"), thread
    for n in range(2):
        total = let(reduce_warp(counts[n], lambda a, b: a + b))
        with T.If(tirx.EQ(lane, 0)), T.Then():
            store_element(shared, n * warps + warp, total)
    synchronize()
    position = alloc_registers(1, "int64")
    store_element(position, 0, T.int64(0))
    with T.serial(warps) as other:
        earlier = tirx.Select(other < warp, shared[warps + other], T.int32(0))
        store_element(position, 0, position[0] + (shared[other] + earlier).astype("int64"))
    return position
