"""Stages: a PrimFunc in the form of te.create_prim_func and FuseTIR, read as a sequence of blocks.

A stage is one leaf block: `output[axes] = value` at every point of a rectangle, or a reduction into that output. The
rules of this folder read stages, and write a new body for the function from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from tvm import ir, s_tir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from lowering.tensorir.blocks import read_block
from lowering.tensorir.expressions import Expr, is_int, rewrite, substitute, walk


@dataclass(frozen=True, eq=False)
class Axis:
    """One loop of a stage: 0 <= var < extent."""

    var: tirx.Var
    extent: Expr


@dataclass(frozen=True, eq=False)
class Stage:
    """output[axes] = value; with reduce axes, first output[axes] = init and then output[axes] = value at each of them.

    axes has one entry per dimension of the output. The value of a reduction reads output[axes].
    """

    output: tirx.Buffer
    axes: tuple[Axis, ...]
    reduce: tuple[Axis, ...]
    init: Expr | None
    value: Expr

    @property
    def indices(self) -> list[Expr]:
        """The indices to which the stage writes: its axes."""
        return [axis.var for axis in self.axes]

    def at(self, point: list[Expr]) -> Expr:
        """Return the value at a point of the output."""
        return substitute(self.value, dict(zip(self.indices, point)))


def count_points(axes: Sequence[Axis]) -> Expr:
    """Return the number of points of a rectangle."""
    size: Expr = tirx.const(1, "int64")
    for axis in axes:
        size = size * axis.extent
    return Analyzer().simplify(size)


def unravel(index: Expr, axes: Sequence[Axis], let: Callable[[Expr], Expr] = lambda x: x) -> list[Expr]:
    """Return the point of a row-major rectangle with this linear index.

    let binds each quotient and remainder to a variable: TVM simplifies quotients of quotients for minutes.
    """
    point: list[Expr] = []
    for axis in reversed(axes[1:]):
        point.append(let(index % axis.extent))
        index = let(index // axis.extent)
    return [index, *reversed(point)] if axes else []


def has_same_axes(a: Stage, b: Stage) -> bool:
    """Return whether two stages have the same rectangle."""
    return len(a.axes) == len(b.axes) and all(prim.expr_deep_equal(x.extent, y.extent) for x, y in zip(a.axes, b.axes))


def read_stages(func: tirx.PrimFunc) -> list[Stage] | None:
    """Return the stages of `func` in order, or None if it contains anything else.

    That is: several stores in a block, predicates, opaque code, strided or empty buffers, or indices that are not int64
    (Relax's always are).
    """
    root = func.body
    if not isinstance(root, s_tir.SBlockRealize) or root.block.match_buffers:
        return None
    buffers = [p for p in func.params if tirx.is_buffer_var(p)] + list(root.block.alloc_buffers)
    if not all(map(_is_compact, buffers)):
        return None
    if any(is_int(extent, 0) for buffer in buffers for extent in buffer.shape):
        return None  # nothing to optimize, and blocks of an empty axis would divide by zero
    stages = []
    for nest in tirx.stmt_list(root.block.body):
        stage = _read_stage(nest)
        if stage is None:
            return None
        stages.append(stage)
    return stages


def _is_compact(buffer: tirx.Buffer) -> bool:
    """Return whether a buffer is row-major without gaps."""
    return not buffer.strides and (buffer.elem_offset is None or is_int(buffer.elem_offset, 0))


def _read_stage(nest: tirx.Stmt) -> Stage | None:
    block = read_block(nest)
    if block is None:
        return None
    spatial = {var: Axis(var, extent) for var, extent in block.spatial.items()}
    axes = []
    for index, extent in zip(block.indices, block.buffer.shape):
        if index in spatial:
            axes.append(spatial.pop(index))
        elif is_int(extent, 1) and is_int(index, 0):
            axes.append(Axis(tirx.Var("unit", "int64"), extent))
        else:
            return None
    if spatial:
        return None
    reduce = tuple(Axis(var, extent) for var, extent in block.reduce.items())
    return Stage(block.buffer, tuple(axes), reduce, block.init, block.value)


def replace_symbols(expr: Expr, tensors: Mapping[tirx.Buffer, tirx.Buffer], symbols: Mapping[tirx.Var, Expr]) -> Expr:
    """Return `expr` with other tensors and variables."""

    def replacement(node: Expr) -> Expr | None:
        if isinstance(node, ir.TensorLoad):
            indices = [rewrite(index, replacement) for index in node.indices]
            return tirx.BufferLoad(tensors.get(node.source, node.source), indices)
        return symbols.get(node) if isinstance(node, tirx.Var) else None

    return rewrite(expr, replacement)


EmitTrailing = Callable[[Callable[[tirx.Var], tirx.Var]], None]
"""Emits blocks; its argument returns the function's tensor or integer for each of the stages."""


def write_stages(
    stages: Sequence[Stage], params: Sequence[tirx.Var], emit_trailing: EmitTrailing = lambda replace: None
) -> tirx.PrimFunc:
    """Build a function of these parameters, tensors and integers, that computes the stages in order: inverse of
    `read_stages`.

    emit_trailing emits the code after them. The function has its own variables. A tensor that is not a parameter is
    allocated inside the function.
    """
    symbols: dict[tirx.Var, Expr] = {}
    tensors: dict[tirx.Buffer, tirx.Buffer] = {}

    def replace(expr: Expr) -> Expr:
        return replace_symbols(expr, tensors, symbols)

    def shape(buffer: tirx.Buffer) -> list[Expr]:
        for node in (n for extent in buffer.shape for n in walk(extent)):
            if isinstance(node, tirx.Var):
                symbols.setdefault(node, tirx.Var(node.name, node.ty))
        return [replace(extent) for extent in buffer.shape]

    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_attr({"tirx.noalias": True})
        for param in params:
            if tirx.is_buffer_var(param):
                tensors[param] = T.arg(param.name, T.Buffer(shape(param), param.dtype))
            else:
                symbols[param] = T.arg(param.name, symbols.get(param, tirx.Var(param.name, param.ty)))
        for stage in stages:
            if stage.output not in tensors:
                tensors[stage.output] = T.sblock_alloc_buffer(shape(stage.output), stage.output.dtype)
        for stage in stages:
            axes, output = (*stage.axes, *stage.reduce), tensors[stage.output]
            grid = T.grid(*(replace(axis.extent) for axis in axes)) if axes else nullcontext(())
            with grid as loops, T.sblock(stage.output.name):
                for axis, loop in zip(axes, (loops,) if len(axes) == 1 else loops):
                    kind = T.axis.reduce if axis in stage.reduce else T.axis.spatial
                    symbols[axis.var] = kind(replace(axis.extent), loop)
                indices = [symbols[axis.var] for axis in stage.axes]
                if stage.init is not None:
                    with T.init():
                        T.buffer_store(output, replace(stage.init), indices)
                T.buffer_store(output, replace(stage.value), indices)
        emit_trailing(lambda var: (tensors if tirx.is_buffer_var(var) else symbols)[var])
    return builder.get()
