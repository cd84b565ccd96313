"""Matmuls of rows and matrices gathered for them, grouped by matrix without a copy of a matrix for each row.

Transformers exports experts in this form: MatMul(GatherND(W, chosen) [R, N, K], column [R, K, 1]), or with a row [R, 1,
K] before the matrices. After: the rows sorted by their matrix, GroupedMatMul, and the result in the original order of
the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..rewriting.matching import Rewrite, attribute, dims, is_op, operand
from .expert_rows import SortedRows, read_constant


@dataclass(frozen=True)
class _GatheredMatrices:
    """Matrices [E, ...] of which `chosen` [R, ...] selects one for each row.

    is_transposed: whether their columns are those of a MatMul.
    """

    matrices: np.ndarray
    chosen: ir.Value
    is_transposed: bool


def group_gathered_matmuls(graph: ir.Graph) -> bool:
    """Rewrite all of them, and return whether there were any."""
    rewritten = [node for node in graph if is_op(node, "MatMul") and _rewrite(node)]
    return bool(rewritten)


def _rewrite(node: ir.Node) -> bool:
    for position in range(2):
        gathered, vector = _match_gathered(operand(node, position)), operand(node, 1 - position)
        sizes = dims(vector)
        # A column after the matrices, or a row before them.
        unit_axis = 2 if position == 0 else 1
        if (
            gathered is None
            or len(sizes) != 3
            or sizes[unit_axis] != 1
            or count_choices(gathered.chosen) != len(gathered.matrices)
        ):
            continue
        is_transposed = gathered.is_transposed != (position == 0)
        depth = gathered.matrices.shape[2 if is_transposed else 1]
        if sizes[3 - unit_axis] != depth:
            continue
        new = Rewrite(node)
        rows = SortedRows(new, gathered.chosen, len(gathered.matrices))
        flat = new.emit("Reshape", [vector, new.emit_integers(-1, depth)])
        dtype = vector.dtype
        assert dtype is not None
        attributes = {"transB": int(is_transposed)}
        y = rows.matmul(rows.sort(flat), [new.emit_constant(gathered.matrices, dtype)], None, attributes)
        y = new.emit("Unsqueeze", [rows.restore(y), new.emit_integers(unit_axis)], shape=dims(node.outputs[0]))
        new.replace([node], node.outputs[0], y)
        return True
    return False


def _match_gathered(value: ir.Value) -> _GatheredMatrices | None:
    node = value.producer()
    if node is None:
        return None
    if is_op(node, "Transpose") and list(attribute(node, "perm", ())) == [0, 2, 1]:
        inner = _match_gathered(operand(node, 0))
        return None if inner is None else _GatheredMatrices(inner.matrices, inner.chosen, not inner.is_transposed)
    is_whole = is_op(node, "Gather") and attribute(node, "axis", 0) == 0
    if is_op(node, "GatherND"):
        is_whole = attribute(node, "batch_dims", 0) == 0 and dims(operand(node, 1))[-1:] == (1,)
    matrices = read_constant(operand(node, 0)) if is_whole else None
    if matrices is None or matrices.ndim != 3 or len(dims(value)) != 3:
        return None
    return _GatheredMatrices(matrices, operand(node, 1), False)


def count_choices(chosen: ir.Value) -> int | None:
    """Return the number of integers from 0 on among which TopK selected `chosen`, None if it did not."""
    node = chosen.producer()
    if node is None:
        return None
    if is_op(node, "Cast") and chosen.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return None
    if is_op(node, "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Slice"):
        return count_choices(operand(node, 0))
    if is_op(node, "Concat"):
        counts = {count_choices(operand(node, k)) for k in range(len(node.inputs))}
        return counts.pop() if len(counts) == 1 else None
    if not is_op(node, "TopK") or chosen is not node.outputs[1]:
        return None
    sizes = dims(operand(node, 0))
    size = sizes[attribute(node, "axis", -1)] if sizes else None
    return size if isinstance(size, int) else None
