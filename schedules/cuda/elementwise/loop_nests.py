"""Statements of any form on GPUs, for functions that no rule recognizes and TVM's schedules reject.

Before: loops, conditions and stores in blocks, with arrays allocated anywhere. After: a launch for each outermost loop
whose iterations are independent, with a thread for each iteration, and launches of one thread for the statements
between such loops. Small arrays of constant size become local memory of the thread that allocates them. All others
become workspaces: the host allocates them before the launch, with a share for each thread.

Assertions are left out: a GPU cannot raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import tvm_ffi
from tvm import DataType, ir, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.blocks import BLOCK_ATTRIBUTE, lower_blocks
from lowering.tensorir.expressions import is_int
from lowering.tensorir.independent_loops import is_independent, read_independent_nest

from ..primitives.threads import ThreadTiles, launch_threads

LOCAL_BYTES = 1024
"""The largest array that becomes local memory of a thread."""

_TILES = ThreadTiles(threads=64)


@dataclass
class _Segment:
    """Successive statements that become one launch; `loops` are its independent loops, if any."""

    statements: list[tirx.Stmt]
    loops: Sequence[tirx.For] = ()


@dataclass
class _Body:
    """The statements of a function outside of any loop, and the arrays that it allocates there."""

    segments: list[_Segment] = field(default_factory=list)
    allocated: list[tirx.AllocBuffer] = field(default_factory=list)


def lower_to_threads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function as launches of threads. Right for any function.

    Raises:
        ValueError: The size of an array depends on values that are computed inside a loop.
    """
    loops = lower_blocks(func)
    body = _read(loops)
    with IRBuilder() as builder, T.prim_func():
        for allocation in body.allocated:
            T.add_to_parent(allocation)
        for segment in body.segments:
            _launch(segment, loops.params)
    return loops.with_body(builder.get().body).with_attr(BLOCK_ATTRIBUTE, True)


def _read(func: tirx.PrimFunc) -> _Body:
    """Divide the body of a function into launches."""
    statements = [s for s in tirx.stmt_list(_without_empty(func.body)) if not _is_nothing(s)]
    body = _Body()
    for statement in statements:
        if isinstance(statement, tirx.AllocBuffer):
            body.allocated.append(statement)
        elif is_independent(statement) and not _loads(statement.extent):
            loops, inside = read_independent_nest(statement)
            body.segments.append(_Segment([inside], loops))
        elif body.segments and not body.segments[-1].loops:
            body.segments[-1].statements.append(statement)
        else:
            body.segments.append(_Segment([statement]))
    if len(body.segments) == 1 and not body.segments[0].loops:
        return _Body([_Segment([*body.allocated, *body.segments[0].statements])])
    return body if _are_separate(body, func) else _Body([_Segment(statements)])


def _are_separate(body: _Body, func: tirx.PrimFunc) -> bool:
    """Return whether no launch reads a variable that another one binds."""
    bound_variables = [*_variables(func.params), *(a.buffer for a in body.allocated)]
    return not any(
        tirx.analysis.undefined_vars(
            tirx.stmt_seq(*segment.statements), [*bound_variables, *(x.loop_var for x in segment.loops)]
        )
        for segment in body.segments
    )


def _launch(segment: _Segment, params: Sequence[tirx.Var]) -> None:
    """Emit a segment with its workspaces."""
    count: Expr = T.int64(1)
    for loop in segment.loops:
        count = count * loop.extent.astype("int64")
    number = tirx.Var("number", "int64")
    body, workspaces = _place_arrays(tirx.stmt_seq(*segment.statements), count, number if segment.loops else None)
    for workspace in workspaces:
        _check_size(workspace, params)
        T.add_to_parent(tirx.AllocBuffer(workspace))
    if not segment.loops:
        with T.launch_thread("threadIdx.x", 1):  # without blocks: other kernels cannot be fused into such a launch
            T.add_to_parent(body)
        return
    with launch_threads(count, _TILES) as thread:
        T.add_to_parent(tirx.Bind(number, thread))
        rest: Expr = number
        for loop in reversed(segment.loops):
            extent = loop.extent.astype("int64")
            index = rest if loop is segment.loops[0] else tirx.truncmod(rest, extent)
            T.add_to_parent(tirx.Bind(loop.loop_var, (index + loop.min).astype(str(loop.loop_var.ty))))
            rest = tirx.truncdiv(rest, extent)
        T.add_to_parent(body)


def _place_arrays(body: tirx.Stmt, threads: Expr, thread: tirx.Var | None) -> tuple[tirx.Stmt, list[tirx.Buffer]]:
    """Return the body whose arrays are local memory or workspaces, and the workspaces.

    Args:
        threads: How many threads run the body, each of which needs arrays of its own.
        thread: The number of the thread; None where there is one.
    """
    local: dict[tirx.Var, tirx.Buffer] = {}
    shared: dict[tirx.Var, tirx.Buffer] = {}

    def visit(allocation: tirx.AllocBuffer) -> None:
        buffer = allocation.buffer
        if buffer.scope() not in ("", "global"):
            return
        shape = list(buffer.shape)
        if _bytes(buffer) <= LOCAL_BYTES:
            shape = [_at_least_one(extent) for extent in shape]
            local[buffer] = tirx.decl_buffer(shape, buffer.dtype, buffer.name, scope="local", layout=None)
            return
        shape = [_at_least_one(extent) for extent in (shape if thread is None else [threads, *shape])]
        shared[buffer] = tirx.decl_buffer(shape, buffer.dtype, f"{buffer.name}_workspace", layout=None)

    tvm_ffi.structural_walk(body, (tirx.AllocBuffer, visit))
    own = [] if thread is None else [thread]

    def load(node: ir.TensorLoad) -> Expr:
        workspace = shared.get(node.source)
        return node if workspace is None else tirx.BufferLoad(workspace, [*own, *node.indices])

    def store(node: tirx.BufferStore) -> tirx.Stmt:
        workspace = shared.get(node.buffer)
        return node if workspace is None else tirx.BufferStore(workspace, node.value, [*own, *node.indices])

    def allocate(node: tirx.AllocBuffer) -> tirx.Stmt:
        return tirx.Evaluate(0) if node.buffer in shared else node

    body = tvm_ffi.structural_map(
        body, [(tirx.AllocBuffer, allocate), (ir.TensorLoad, load), (tirx.BufferStore, store)]
    )
    body = tvm_ffi.structural_map(body, (tirx.Var, lambda var: local.get(var, var)))
    return body, list(shared.values())


def _check_size(workspace: tirx.Buffer, params: Sequence[tirx.Var]) -> None:
    """Reject a workspace whose size the host cannot compute."""
    bound_variables = _variables(params)
    for extent in workspace.shape:
        used = [] if isinstance(extent, tirx.IntImm) else tirx.analysis.undefined_vars(extent)
        if _loads(extent) or not all(any(var.same_as(k) for k in bound_variables) for var in used):
            raise ValueError(f"The size {extent} of the array '{workspace.name}' is not known before the launch.")


def _variables(params: Sequence[tirx.Var]) -> list[tirx.Var]:
    """Return the parameters, and the symbols in their shapes."""
    extents = [extent for param in params if tirx.is_buffer_var(param) for extent in param.shape]
    return [*params, *(extent for extent in extents if isinstance(extent, tirx.Var))]


def _at_least_one(extent: Expr) -> Expr:
    """Return the extent with which an array is allocated: neither CUDA C++ nor the allocator takes 0 bytes."""
    return tirx.max(extent, tirx.const(1, str(extent.ty)))


def _bytes(buffer: tirx.Buffer) -> float:
    """Return the size of an array; infinity where it is not constant."""
    if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
        return math.inf
    return math.prod(int(extent) for extent in buffer.shape) * DataType(str(buffer.dtype)).itemsize


def _loads(extent: Expr) -> bool:
    loads: list[ir.TensorLoad] = []
    tvm_ffi.structural_walk(extent, (ir.TensorLoad, loads.append))
    return bool(loads)


def _without_empty(body: tirx.Stmt) -> tirx.Stmt:
    """Leave out assertions, and loops over nothing: TVM would shrink arrays to 0 bytes by them, and divide by 0."""

    def without(loop: tirx.For) -> tirx.Stmt:
        return tirx.Evaluate(0) if is_int(loop.extent, 0) else loop

    return tvm_ffi.structural_map(body, [(tirx.AssertStmt, lambda _: tirx.Evaluate(0)), (tirx.For, without)])


def _is_nothing(statement: tirx.Stmt) -> bool:
    return isinstance(statement, tirx.Evaluate) and isinstance(statement.value, tirx.IntImm)
