"""Several small kernels as one launch, in which each has blocks of its own.

A launch costs a microsecond or two, which is more than a kernel of a decode step has to do that rotates a few heads or
moves a row into a cache. What is joined runs side by side: nothing may depend on anything else in the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .host import on_host

_LAUNCH = "thread_extent"


@dataclass(frozen=True)
class Launch:
    """A function of one launch, by the first axis of blocks and threads alone.

    host is what comes before it; there are `blocks` blocks (int64, none where the launch is left out) of `threads`.
    """

    host: list[tirx.Stmt]
    blocks: Expr
    threads: int
    block: tirx.Var
    thread: tirx.Var
    body: tirx.Stmt


def read_launch(func: tirx.PrimFunc) -> Launch | None:
    """None for functions of several launches, or of another form."""
    *host, nest = tirx.stmt_list(func.body)
    condition: Expr | None = None
    if isinstance(nest, tirx.IfThenElse) and nest.else_case is None:
        condition, nest = nest.condition, nest.then_case
    axes: list[tirx.AttrStmt] = []
    while isinstance(nest, tirx.AttrStmt) and nest.attr_key == _LAUNCH:
        axes.append(nest)
        nest = nest.body
    if [axis.node.thread_tag for axis in axes] != ["blockIdx.x", "threadIdx.x"] or any(map(_launches, (*host, nest))):
        return None
    blocks, threads = (axis.value for axis in axes)
    if not isinstance(threads, tirx.IntImm):
        return None
    blocks = blocks.astype("int64")
    if condition is not None:
        blocks = tirx.Select(condition, blocks, T.int64(0))
    return Launch(host, blocks, int(threads.value), axes[0].node.var, axes[1].node.var, nest)


def _launches(stmt: tirx.Stmt) -> bool:
    found: list[str] = []
    tvm_ffi.structural_walk(stmt, (tirx.AttrStmt, lambda attribute: found.append(str(attribute.attr_key))))
    return _LAUNCH in found


def fuse(launches: Sequence[Launch]) -> tirx.Stmt:
    """The body of a function that does what all of them do.

    They have blocks of one size, and no variables in common.
    """
    threads, *others = {launch.threads for launch in launches}
    if others:
        raise ValueError("Launches with blocks of different sizes cannot be one.")
    with IRBuilder() as builder, T.prim_func():
        first: Expr = T.int64(0)
        begins = [first]
        for launch in launches:
            first = on_host(first + launch.blocks)
            begins.append(first)
    counted = tirx.stmt_list(builder.get().body)
    block, thread = tirx.Var("block", "int64"), tirx.Var("thread", "int32")
    body = _part(launches[-1], block - begins[-2], thread)
    for launch, begin, end in reversed(list(zip(launches[:-1], begins, begins[1:]))):
        body = tirx.IfThenElse(block < end, _part(launch, block - begin, thread), body)
    for var, tag, count in ((thread, "threadIdx.x", tirx.const(threads, "int32")), (block, "blockIdx.x", begins[-1])):
        axis = tirx.IterVar(ir.Range(tirx.const(0, str(var.ty)), count), var, tirx.IterVar.ThreadIndex, tag)
        body = tirx.AttrStmt(axis, _LAUNCH, count, body)
    # The driver refuses a launch of no blocks.
    body = tirx.IfThenElse(begins[-1] > 0, body, None)
    return tirx.stmt_seq(*(stmt for launch in launches for stmt in launch.host), *counted, body)


def _part(launch: Launch, block: Expr, thread: Expr) -> tirx.Stmt:
    """The code of a launch for its own block of that number."""
    places = {launch.block: block.astype(str(launch.block.ty)), launch.thread: thread.astype(str(launch.thread.ty))}
    return tvm_ffi.structural_map(launch.body, (tirx.Var, lambda var: places.get(var, var)))
