"""Several small kernels as one launch, in which each has blocks of its own (horizontal fusion).

A launch costs a microsecond or two. That is longer than a kernel of a decode step that rotates a few heads or moves a
row into a cache. Fused kernels run concurrently, so none may depend on another in the same launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..primitives.host import bind_on_host

_LAUNCH = "thread_extent"


@dataclass(frozen=True)
class KernelLaunch:
    """A function with one launch, along the first axis of blocks and threads only.

    `host` precedes it. There are `blocks` blocks (int64, 0 where the launch is left out) of `threads` threads.
    """

    host: list[tirx.Stmt]
    blocks: Expr
    threads: int
    block: tirx.Var
    thread: tirx.Var
    body: tirx.Stmt


def read_launch(func: tirx.PrimFunc) -> KernelLaunch | None:
    """Return the launch of a function; None for functions of several launches, or of another form."""
    *host, nest = tirx.stmt_list(func.body)
    condition: Expr | None = None
    if isinstance(nest, tirx.IfThenElse) and nest.else_case is None:
        condition, nest = nest.condition, nest.then_case
    axes: list[tirx.AttrStmt] = []
    while isinstance(nest, tirx.AttrStmt) and nest.attr_key == _LAUNCH:
        axes.append(nest)
        nest = nest.body
    if [axis.node.thread_tag for axis in axes] != ["blockIdx.x", "threadIdx.x"] or any(map(_has_launch, (*host, nest))):
        return None
    blocks, threads = (axis.value for axis in axes)
    if not isinstance(threads, tirx.IntImm):
        return None
    blocks = blocks.astype("int64")
    if condition is not None:
        blocks = tirx.Select(condition, blocks, T.int64(0))
    return KernelLaunch(host, blocks, int(threads.value), axes[0].node.var, axes[1].node.var, nest)


def _has_launch(stmt: tirx.Stmt) -> bool:
    keys: list[str] = []
    tvm_ffi.structural_walk(stmt, (tirx.AttrStmt, lambda attribute: keys.append(str(attribute.attr_key))))
    return _LAUNCH in keys


def merge_launches(launches: Sequence[KernelLaunch]) -> tirx.Stmt:
    """Return the body of a function that does the work of all launches.

    Their blocks have one size, and they share no variables.

    Raises:
        ValueError: Their blocks have different sizes.
    """
    threads, *other_sizes = {launch.threads for launch in launches}
    if other_sizes:
        raise ValueError("Launches with blocks of different sizes cannot be fused.")
    with IRBuilder() as builder, T.prim_func():
        first: Expr = T.int64(0)
        begins = [first]
        for launch in launches:
            first = bind_on_host(first + launch.blocks)
            begins.append(first)
    offsets = tirx.stmt_list(builder.get().body)
    block, thread = tirx.Var("block", "int64"), tirx.Var("thread", "int32")
    body = _emit_launch(launches[-1], block - begins[-2], thread)
    for launch, begin, end in reversed(list(zip(launches[:-1], begins, begins[1:]))):
        body = tirx.IfThenElse(block < end, _emit_launch(launch, block - begin, thread), body)
    for var, tag, count in ((thread, "threadIdx.x", tirx.const(threads, "int32")), (block, "blockIdx.x", begins[-1])):
        axis = tirx.IterVar(ir.Range(tirx.const(0, str(var.ty)), count), var, tirx.IterVar.ThreadIndex, tag)
        body = tirx.AttrStmt(axis, _LAUNCH, count, body)
    # The driver rejects a launch of no blocks.
    body = tirx.IfThenElse(begins[-1] > 0, body, None)
    return tirx.stmt_seq(*(stmt for launch in launches for stmt in launch.host), *offsets, body)


def _emit_launch(launch: KernelLaunch, block: Expr, thread: Expr) -> tirx.Stmt:
    """Return the code of a launch for its own block of that number."""
    replacements = {
        launch.block: block.astype(str(launch.block.ty)),
        launch.thread: thread.astype(str(launch.thread.ty)),
    }
    return tvm_ffi.structural_map(launch.body, (tirx.Var, lambda var: replacements.get(var, var)))
