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

from schedules.reading.quantized_weights import NIBBLES, dequantize_element, pack_nibbles

from ...importing.quantized_matrix import QuantizedMatrix


def pack(matrix: np.ndarray, nr: int) -> np.ndarray:
    """Pack [K, N] into panels [ceil(N / nr), K, nr], with zeros after column N."""
    rows, columns = matrix.shape
    panels = -(-columns // nr)
    padded = np.zeros((rows, panels * nr), matrix.dtype)
    padded[:, :columns] = matrix
    return np.ascontiguousarray(padded.reshape(rows, panels, nr).transpose(1, 0, 2))


def pack_pairs(matrix: np.ndarray, nr: int) -> np.ndarray:
    """Pack [K, N] into panels [ceil(N / nr), ceil(K / 2), nr, 2], with zeros after column N and row K."""
    even = np.zeros((-(-len(matrix) // 2) * 2, matrix.shape[1]), matrix.dtype)
    even[: len(matrix)] = matrix
    return np.stack([pack(even[half::2], nr) for half in (0, 1)], axis=-1)


def pack_quads(matrix: np.ndarray, nr: int) -> np.ndarray:
    """Pack [K, N] into panels [ceil(N / nr), ceil(K / 4), nr, 4], with zeros after column N and row K."""
    even = np.zeros((-(-len(matrix) // 4) * 4, matrix.shape[1]), matrix.dtype)
    even[: len(matrix)] = matrix
    return np.stack([pack(even[n::4], nr) for n in range(4)], axis=-1)


# A function of components in panels, k and j, which returns B[k, j] in float32.
ElementReader: TypeAlias = Callable[..., tvm.ir.Expr]


def read_plain_element(components: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
    (panels,) = components
    nr = panels.shape[-1]
    return panels(j // nr, k, j % nr).astype("float32")


def read_pair_element(components: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
    (panels,) = components
    nr = panels.shape[-2]
    return panels(j // nr, k // 2, j % nr, k % 2).astype("float32")


def read_quad_element(components: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
    (panels,) = components
    nr = panels.shape[-2]
    return panels(j // nr, k // 4, j % nr, k % 4).astype("int32")


def pack_quantized_matrix(matrix: QuantizedMatrix, nr: int) -> tuple[dict[str, np.ndarray], ElementReader]:
    """Return the components of a quantized matrix [K, N], and the function that reads an element of them."""
    depth, columns = matrix.shape
    block = matrix.block[0] if matrix.block[0] < depth else 0
    nibbles = matrix.bits == 4 and block % NIBBLES == 0
    components = {
        "codes": pack(pack_nibbles(matrix.values) if nibbles else matrix.values, nr),
        "scales": pack(matrix.scales.repeat(matrix.block[1], axis=1)[:, :columns], nr),
    }
    if matrix.zero_points is not None:
        components["zeros"] = pack(matrix.zero_points.repeat(matrix.block[1], axis=1)[:, :columns], nr)

    def read_element(components: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
        values, scales, *zero_points = components
        return dequantize_element(values, scales, zero_points[0] if zero_points else None, k, j, nr, block, nibbles)

    return components, read_element


def packed_matmul(
    x: te.Tensor, components: list[te.Tensor], columns: int, dtype: str, read_element: ElementReader
) -> te.Tensor:
    """Return x [..., K] times a matrix [K, columns] in panels, in `dtype`.

    Accumulators are float32, or int32 for int8 values.
    """
    acc = "int32" if dtype == "int32" else "float32"
    k = te.reduce_axis((0, x.shape[-1]), name="k")

    def compute(*index: tvm.ir.Expr) -> tvm.ir.Expr:
        *row, j = index
        return te.sum(x(*row, k).astype(acc) * read_element(components, k, j), axis=k)

    total = te.compute((*x.shape[:-1], columns), compute, name="matmul")
    return total if dtype == acc else topi.cast(total, dtype)
