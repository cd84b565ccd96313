"""Concatenations, as the importer writes them: tensors one behind the other along an axis, copied into one.

A row is everything behind one index of the axes in front of the joined one: in it the tensors follow each other, each
without gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import ir, s_tir, tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from lowering.tensorir.blocks import LeafBlock, read_block
from lowering.tensorir.expressions import Expr, is_int

_ONE = tirx.const(1, "int64")


@dataclass(frozen=True)
class Concatenation:
    """The output's rows, elements of a row, and of each tensor where in a row it begins and how many it has there."""

    output: tirx.Buffer
    rows: Expr
    row: Expr
    sources: tuple[tuple[tirx.Buffer, Expr, Expr], ...]


def read_concatenation(func: tirx.PrimFunc) -> Concatenation | None:
    """The concatenation that a function is, or None."""
    root = func.body
    if not isinstance(root, s_tir.SBlockRealize) or root.block.match_buffers or root.block.alloc_buffers:
        return None
    blocks = [read_block(nest) for nest in tirx.stmt_list(root.block.body)]
    found = [_read_copy(block, func) for block in blocks]
    if len(found) < 2 or blocks[0] is None or any(copy is None for copy in found):
        return None
    output = blocks[0].buffer
    copies = [copy for copy in found if copy is not None]
    moved = [axis for axis in range(len(output.shape)) if any(not is_int(starts[axis], 0) for _, starts in copies)]
    if len(moved) != 1 or any(not block.buffer.same_as(output) for block in blocks if block is not None):
        return None
    (axis,) = moved
    others = [k for k in range(len(output.shape)) if k != axis]
    if not all(Analyzer().can_prove_equal(source.shape[k], output.shape[k]) for source, _ in copies for k in others):
        return None
    behind = math.prod(output.shape[axis + 1 :], start=_ONE)
    parts = tuple((source, starts[axis] * behind, source.shape[axis] * behind) for source, starts in copies)
    return Concatenation(output, math.prod(output.shape[:axis], start=_ONE), output.shape[axis] * behind, parts)


def _read_copy(block: LeafBlock | None, func: tirx.PrimFunc) -> tuple[tirx.Buffer, list[Expr]] | None:
    """The parameter that a block copies to a place of its output, and where that begins along each axis."""
    if block is None or block.reduce or not isinstance(block.value, ir.TensorLoad):
        return None
    source, axes = block.value.source, list(block.spatial)
    if not all(any(buffer.same_as(p) for p in func.params) for buffer in (source, block.buffer)):
        return None
    if source.dtype != block.buffer.dtype or len(source.shape) != len(block.indices):
        return None
    starts = []
    for index, own, extent in zip(block.indices, block.value.indices, source.shape):
        variable = own if own in axes else None
        if not (is_int(own, 0) and is_int(extent, 1)) and (
            variable is None or not prim.expr_deep_equal(block.spatial[variable], extent)
        ):
            return None
        start = Analyzer().simplify(index - own)
        if any(isinstance(node, tirx.Var) and node in axes for node in tirx.analysis.undefined_vars(start)):
            return None
        starts.append(start)
    return source, starts
