"""Constant matrices in panels, and matmuls with them: what matrix kernels read (schedules/reading/codes.py).

Panel p of a matrix [K, N] holds columns p * nr to p * nr + nr - 1, and the nr elements of each row are consecutive.
Columns behind the last are zeros. Panels of one column are the matrix by columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import tvm
from tvm import te, topi

from schedules.reading.codes import NIBBLES, element, pack_nibbles

from ..importing.quantized import Quantized


def pack(matrix: np.ndarray, nr: int) -> np.ndarray:
    """[K, N] to panels [ceil(N / nr), K, nr], zeros behind column N."""
    rows, columns = matrix.shape
    panels = -(-columns // nr)
    padded = np.zeros((rows, panels * nr), matrix.dtype)
    padded[:, :columns] = matrix
    return np.ascontiguousarray(padded.reshape(rows, panels, nr).transpose(1, 0, 2))


def pack_pairs(matrix: np.ndarray, nr: int) -> np.ndarray:
    """[K, N] to panels [ceil(N / nr), ceil(K / 2), nr, 2], zeros behind column N and row K."""
    even = np.zeros((-(-len(matrix) // 2) * 2, matrix.shape[1]), matrix.dtype)
    even[: len(matrix)] = matrix
    return np.stack([pack(even[half::2], nr) for half in (0, 1)], axis=-1)


def pack_quads(matrix: np.ndarray, nr: int) -> np.ndarray:
    """[K, N] to panels [ceil(N / nr), ceil(K / 4), nr, 4], zeros behind column N and row K."""
    even = np.zeros((-(-len(matrix) // 4) * 4, matrix.shape[1]), matrix.dtype)
    even[: len(matrix)] = matrix
    return np.stack([pack(even[n::4], nr) for n in range(4)], axis=-1)


# B[k, j] in float32, of its parts in panels.
Element: TypeAlias = Callable[..., tvm.ir.Expr]


def plain_element(parts: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
    (panels,) = parts
    nr = panels.shape[-1]
    return panels(j // nr, k, j % nr).astype("float32")


def element_of_pair(parts: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
    (panels,) = parts
    nr = panels.shape[-2]
    return panels(j // nr, k // 2, j % nr, k % 2).astype("float32")


def element_of_quad(parts: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
    (panels,) = parts
    nr = panels.shape[-2]
    return panels(j // nr, k // 4, j % nr, k % 4).astype("int32")


def codes_in_panels(matrix: Quantized, nr: int) -> tuple[dict[str, np.ndarray], Element]:
    """The parts of a matrix [K, N], and its elements."""
    depth, columns = matrix.shape
    block = matrix.block[0] if matrix.block[0] < depth else 0
    nibbles = matrix.bits == 4 and block % NIBBLES == 0
    parts = {
        "codes": pack(pack_nibbles(matrix.codes) if nibbles else matrix.codes, nr),
        "scales": pack(matrix.scales.repeat(matrix.block[1], axis=1)[:, :columns], nr),
    }
    if matrix.zeros is not None:
        parts["zeros"] = pack(matrix.zeros.repeat(matrix.block[1], axis=1)[:, :columns], nr)

    def code(parts: list[te.Tensor], k: tvm.ir.Expr, j: tvm.ir.Expr) -> tvm.ir.Expr:
        codes, scales, *zeros = parts
        return element(codes, scales, zeros[0] if zeros else None, k, j, nr, block, nibbles)

    return parts, code


def packed_matmul(x: te.Tensor, parts: list[te.Tensor], columns: int, dtype: str, element: Element) -> te.Tensor:
    """x [..., K] times a matrix [K, columns] that is stored in panels, in `dtype`. Sums are in float32, of bytes in
    int32."""
    acc = "int32" if dtype == "int32" else "float32"
    k = te.reduce_axis((0, x.shape[-1]), name="k")

    def sum_of_products(*index: tvm.ir.Expr) -> tvm.ir.Expr:
        *row, j = index
        return te.sum(x(*row, k).astype(acc) * element(parts, k, j), axis=k)

    total = te.compute((*x.shape[:-1], columns), sum_of_products, name="matmul")
    return total if dtype == acc else topi.cast(total, dtype)
