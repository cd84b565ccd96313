"""Constant matrices in panels, and matmuls with them: the operands of matrix kernels
(schedules/reading/quantized_weights.py).

Panel p of a matrix [K, N] has columns p * nr to p * nr + nr - 1, and the nr elements of each row are consecutive.
Columns after the last are zeros. Panels of one column are the matrix by columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import tvm
from tvm import te, topi

from schedules.reading.quantized_weights import NIBBLES, QUAD, PanelFormat, dequantize_element

from ... import scratch
from ...chunks import map_columns
from ...importing.quantized_matrix import QuantizedMatrix

# A function of components in panels, k and j, which returns B[k, j] in the type of the accumulator.
ElementReader: TypeAlias = Callable[..., tvm.ir.Expr]


def pack(matrix: np.ndarray, nr: int, lanes: int = 1) -> np.ndarray:
    """Pack [K, N] into panels [ceil(N / nr), ceil(K / lanes), nr, lanes], with zeros after column N and row K.

    The last axis is omitted for one lane.
    """
    rows, columns = matrix.shape
    return _pack_chunks(lambda chunk: matrix[:, chunk], rows, columns, matrix.dtype, nr, lanes)


def _pack_chunks(
    read: Callable[[slice], np.ndarray], rows: int, columns: int, dtype: np.dtype, nr: int, lanes: int
) -> np.ndarray:
    """Pack a matrix [rows, columns] as `pack` does, whose columns `read` returns."""
    steps, panels = -(-rows // lanes), -(-columns // nr)
    packed = scratch.empty((panels, steps, nr, lanes), dtype)

    def pack_chunk(chunk: slice) -> None:
        first, last = chunk.start // nr, -(-chunk.stop // nr)
        padded = np.zeros((steps * lanes, (last - first) * nr), dtype)
        padded[:rows, : chunk.stop - chunk.start] = read(chunk)
        packed[first:last] = padded.reshape(steps, lanes, last - first, nr).transpose(2, 0, 3, 1)

    map_columns(pack_chunk, rows, columns, nr)
    return packed[..., 0] if lanes == 1 else packed


def read_element(components: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return an element of plain panels, in int32 for int8 values and else in float32."""
    (panels,) = components
    nr, lanes = panels.shape[2], int(panels.shape[3]) if len(panels.shape) > 3 else 1
    index = (k, j % nr) if lanes == 1 else (k // lanes, j % nr, k % lanes)
    return panels(j // nr, *index).astype("int32" if panels.dtype == "int8" else "float32")


def read_group_element(components: list[te.Tensor], group: tvm.ir.Expr, k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return an element of one of several matrices, each in plain panels, in float32."""
    (panels,) = components
    return panels(group, j // panels.shape[-1], k, j % panels.shape[-1]).astype("float32")


def pack_matrix(
    matrix: np.ndarray | QuantizedMatrix, nr: int, lanes: int = 1
) -> tuple[dict[str, np.ndarray], ElementReader]:
    """Return the components of a matrix [K, N] in panels, and the function that reads an element of them.

    lanes are the successive rows that are stored together.
    """
    if isinstance(matrix, np.ndarray):
        return {"columns" if nr == 1 else "packed": pack(matrix, nr, lanes)}, read_element
    columns, block = matrix.shape[1], matrix.scale_block
    form = PanelFormat(nr, block, matrix.bits == 4 and block % NIBBLES == 0, quads=lanes == QUAD)
    components = {
        "quantized": _pack_nibbles(matrix.values, form) if form.nibbles else pack(matrix.values, nr, lanes),
        "scales": pack(matrix.scales.repeat(matrix.block[1], axis=1)[:, :columns], nr),
    }
    if matrix.zero_points is not None:
        components["zeros"] = pack(matrix.zero_points.repeat(matrix.block[1], axis=1)[:, :columns], nr)

    def read_quantized_element(components: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
        values, scales, *zero_points = components
        return dequantize_element(form, values, scales, zero_points[0] if zero_points else None, k, j)

    return components, read_quantized_element


def _pack_nibbles(values: np.ndarray, form: PanelFormat) -> np.ndarray:
    """Pack values [K, N] of 4 bits into panels [ceil(N / nr), ceil(K / 8), nr] of int32, lowest bits first.

    Those of quads are counted from 0, and a value of the first quad is before one of the second.
    """
    rows, columns = values.shape
    groups = -(-rows // NIBBLES)

    def pack_nibbles(chunk: slice) -> np.ndarray:
        padded = np.zeros((groups * NIBBLES, chunk.stop - chunk.start), np.int8)
        padded[:rows] = values[:, chunk]
        nibbles = padded.view(np.uint8) + np.uint8(8 * form.quads) & 15
        if form.quads:
            nibbles = nibbles.reshape(groups, NIBBLES // QUAD, QUAD, -1).swapaxes(1, 2)
        low, high = nibbles.reshape(groups, NIBBLES // 2, 2, -1).swapaxes(0, 2)
        octets = low | high << np.uint8(4)  # [4, groups, columns]
        return np.ascontiguousarray(octets.transpose(1, 2, 0)).view("<i4")[..., 0]

    return _pack_chunks(pack_nibbles, groups, columns, np.dtype(np.int32), form.nr, 1)


def packed_matmul(
    x: te.Tensor, element: Callable[[tvm.ir.Expr, tvm.ir.Expr], tvm.ir.Expr], columns: int, dtype: str
) -> te.Tensor:
    """Return x [..., K] times a matrix [K, columns] of elements element(k, j), in `dtype`.

    Accumulators are float32, or int32 for int8 values.
    """
    acc = "int32" if dtype == "int32" else "float32"
    k = te.reduce_axis((0, x.shape[-1]), name="k")

    def compute(*index: tvm.ir.Expr) -> tvm.ir.Expr:
        *row, j = index
        return te.sum(x(*row, k).astype(acc) * element(k, j), axis=k)

    total = te.compute((*x.shape[:-1], columns), compute, name="matmul")
    return total if dtype == acc else topi.cast(total, dtype)
