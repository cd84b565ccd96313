"""A stable counting sort of rows by group on GPUs: a block for each group, which reads the groups of all rows.

count, of the warp's rows, those of earlier groups and those of this one
the first place of each warp: all rows of earlier groups, and this group's of earlier warps
32 rows at a time: those of this group in the order of lanes (ballot) to the next places
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.along_rows import Grouped, read_along_rows
from lowering.tensorir.blocks import FORM
from lowering.tensorir.expressions import Expr

from ..reading.values import flat_view
from ..variant import Variant
from .device import device
from .ptx import WARP, ballot, let, put, reduce_warp, registers, synchronize
from .threads import ThreadTiles


def expert_sort(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Sorts by group (lowering/tensorir/along_rows.py); None for anything else."""
    what = read_along_rows(func)
    if not isinstance(what, Grouped):
        return None
    tiles = {"threads": ThreadTiles(512)}
    return [Variant("groups", None, device(target), tiles, lambda tiles: _kernel(func, what, tiles["threads"]))]


def _kernel(func: tirx.PrimFunc, what: Grouped, tiles: ThreadTiles) -> tirx.PrimFunc:
    buffers = [param for param in func.params if tirx.is_buffer_var(param)]
    rows, warps = buffers[0].shape[0], tiles.threads // WARP
    with IRBuilder() as builder, T.prim_func():
        chosen, ordered, order, positions = map(flat_view, buffers)
        with (
            T.launch_thread("blockIdx.x", what.groups) as group,
            T.launch_thread("threadIdx.x", tiles.threads) as thread,
        ):
            warp, lane = let(tirx.truncdiv(thread, WARP)), let(tirx.truncmod(thread, WARP))
            turns = let(tirx.ceildiv(rows, T.int64(WARP * warps)))
            first = let(warp.astype("int64") * turns * WARP + lane.astype("int64"))

            def group_of(row: Expr) -> Expr:
                """The group of a row, or one behind all for rows beyond the last."""
                known = let(chosen[tirx.min(row, rows - 1)].astype("int64"))
                nearest = tirx.max(tirx.min(known, T.int64(what.groups - 1)), T.int64(0))
                return let(tirx.Select(row < rows, nearest, T.int64(what.groups)).astype("int32"))

            counts = registers(2, "int32")  # rows of earlier groups, and of this one
            for n in range(2):
                put(counts, n, T.int32(0))
            with T.serial(turns) as turn:
                own = group_of(first + turn * WARP)
                put(counts, 0, counts[0] + (own < group).astype("int32"))
                put(counts, 1, counts[1] + tirx.EQ(own, group).astype("int32"))
            place = _first_place(counts, warps, (warp, lane))
            with T.serial(turns) as turn:
                row = let(first + turn * WARP)
                mine = let(tirx.EQ(group_of(row), group))
                lanes = ballot(mine)
                before = let(tirx.bitwise_and(lanes, T.shift_left(T.uint32(1), lane.astype("uint32")) - T.uint32(1)))
                at = let(place[0] + tirx.popcount(before).astype("int64"))
                with T.If(mine), T.Then():
                    put(ordered, at, group.astype("int64"))
                    put(order, at, row)
                    put(positions, row, at)
                put(place, 0, place[0] + tirx.popcount(lanes).astype("int64"))
    return func.with_body(builder.get().body).without_attr(FORM)


def _first_place(counts: tirx.Buffer, warps: int, thread: tuple[Expr, Expr]) -> tirx.Buffer:
    """Where the warp's first row of the block's group goes; thread: its warp, and its lane of that."""
    shared, (warp, lane) = T.alloc_buffer((2 * warps,), "int32", scope="shared"), thread
    for n in range(2):
        total = let(reduce_warp(counts[n], lambda a, b: a + b))
        with T.If(tirx.EQ(lane, 0)), T.Then():
            put(shared, n * warps + warp, total)
    synchronize()
    place = registers(1, "int64")
    put(place, 0, T.int64(0))
    with T.serial(warps) as other:
        earlier = tirx.Select(other < warp, shared[warps + other], T.int32(0))
        put(place, 0, place[0] + (shared[other] + earlier).astype("int64"))
    return place
