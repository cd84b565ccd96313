"""Concatenations, as the importer writes them: tensors copied one after the other along an axis into one tensor.

A row is all elements at one index of the axes before the concatenated one. In it the tensors follow each other without
gaps.
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
    """The output's rows, the elements of a row, and the tensors that it is copied from.

    Each source is a tensor, its first element in a row and its number of elements there.
    """

    output: tirx.Buffer
    rows: Expr
    row: Expr
    sources: tuple[tuple[tirx.Buffer, Expr, Expr], ...]


def read_concatenation(func: tirx.PrimFunc) -> Concatenation | None:
    """Return the concatenation that a function computes, or None."""
    root = func.body
    if not isinstance(root, s_tir.SBlockRealize) or root.block.match_buffers or root.block.alloc_buffers:
        return None
    blocks = [read_block(nest) for nest in tirx.stmt_list(root.block.body)]
    candidates = [_read_copy(block, func) for block in blocks]
    if len(candidates) < 2 or blocks[0] is None or any(copy is None for copy in candidates):
        return None
    output = blocks[0].buffer
    copies = [copy for copy in candidates if copy is not None]
    shifted_axes = [
        axis for axis in range(len(output.shape)) if any(not is_int(starts[axis], 0) for _, starts in copies)
    ]
    if len(shifted_axes) != 1 or any(not block.buffer.same_as(output) for block in blocks if block is not None):
        return None
    (axis,) = shifted_axes
    other_axes = [k for k in range(len(output.shape)) if k != axis]
    if not all(
        Analyzer().can_prove_equal(source.shape[k], output.shape[k]) for source, _ in copies for k in other_axes
    ):
        return None
    inner_size = math.prod(output.shape[axis + 1 :], start=_ONE)
    sources = tuple((source, starts[axis] * inner_size, source.shape[axis] * inner_size) for source, starts in copies)
    return Concatenation(output, math.prod(output.shape[:axis], start=_ONE), output.shape[axis] * inner_size, sources)


def _read_copy(block: LeafBlock | None, func: tirx.PrimFunc) -> tuple[tirx.Buffer, list[Expr]] | None:
    """Return the parameter that a block copies to a rectangle of its output, and its start along each axis."""
    if block is None or block.reduce or not isinstance(block.value, ir.TensorLoad):
        return None
    source, axes = block.value.source, list(block.spatial)
    if not all(any(buffer.same_as(p) for p in func.params) for buffer in (source, block.buffer)):
        return None
    if source.dtype != block.buffer.dtype or len(source.shape) != len(block.indices):
        return None
    starts = []
    for index, source_index, extent in zip(block.indices, block.value.indices, source.shape):
        variable = source_index if source_index in axes else None
        if not (is_int(source_index, 0) and is_int(extent, 1)) and (
            variable is None or not prim.expr_deep_equal(block.spatial[variable], extent)
        ):
            return None
        start = Analyzer().simplify(index - source_index)
        if any(isinstance(node, tirx.Var) and node in axes for node in tirx.analysis.undefined_vars(start)):
            return None
        starts.append(start)
    return source, starts
