"""TVM's blocks: functions of them as te.create_prim_func and FuseTIR write them, loops around one leaf block of one
store."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx

from .expressions import Expr, is_int, substitute

FORM = "s_tir"
"""The attribute of functions of blocks, as TVM's own operators are; kernels of ours are loops and threads."""


def in_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A CPU's function without blocks, which TVM takes away as it does when it generates code."""
    if FORM not in func.attrs:
        return func
    transform = s_tir.transform
    passes = [
        transform.LowerInitBlock(),
        transform.PlanAndUpdateBufferAllocationLocation(),
        transform.ConvertBlocksToOpaque(),
        transform.CompactBufferAllocation(),
        transform.LowerMatchBuffer(),
        transform.LowerOpaqueBlock(),
    ]
    return tvm.ir.transform.Sequential(passes)(tvm.IRModule({"main": func}))["main"].without_attr(FORM)


def is_reduction(axis: tirx.IterVar) -> bool:
    """Whether values along the axis are summed up, or combined in another way."""
    return axis.iter_type == 2  # kCommReduce: TVM has no name for it in Python


@dataclass(frozen=True, eq=False)
class Block:
    """buffer[indices] = value for all 0 <= variables < extents; where there are reduce axes, = init first.

    Each variable of spatial and reduce, which map it to its extent, is a loop of its own.
    """

    buffer: tirx.Buffer
    indices: list[Expr]
    value: Expr
    init: Expr | None
    spatial: dict[tirx.Var, Expr]
    reduce: dict[tirx.Var, Expr]


def read_block(nest: tirx.Stmt) -> Block | None:
    """None for anything else: predicates, several stores, buffers of the block's own, indices that are not int64."""
    loops: set[tirx.Var] = set()
    while isinstance(nest, tirx.For):
        if nest.kind != tirx.ForKind.SERIAL or not is_int(nest.min, 0) or nest.loop_var.ty != "int64":
            return None
        loops.add(nest.loop_var)
        nest = nest.body
    if not isinstance(nest, s_tir.SBlockRealize) or not is_int(nest.predicate, 1):
        return None
    block, store = nest.block, nest.block.body
    if block.match_buffers or block.alloc_buffers or not isinstance(store, tirx.BufferStore):
        return None
    spatial: dict[tirx.Var, Expr] = {}
    reduce: dict[tirx.Var, Expr] = {}
    fixed: dict[tirx.Var, Expr] = {}
    for iter_var, value in zip(block.iter_vars, nest.iter_values):
        if value in loops:
            loops.remove(value)
            axes = reduce if is_reduction(iter_var) else spatial
            axes[iter_var.var] = iter_var.dom.extent
        elif isinstance(value, tirx.IntImm):
            fixed[iter_var.var] = value
        else:
            return None
    if loops or (block.init is not None) != bool(reduce):
        return None
    init = None
    if block.init is not None:
        if not isinstance(block.init, tirx.BufferStore) or not block.init.buffer.same_as(store.buffer):
            return None
        init = substitute(block.init.value, fixed)
    indices = [substitute(index, fixed) for index in store.indices]
    return Block(store.buffer, indices, substitute(store.value, fixed), init, spatial, reduce)
