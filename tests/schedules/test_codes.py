"""Quantized matrices of 4 and 8 bits in matmuls, against float64: any block, zeros, odd sizes, any number of rows."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from lowering.importing.quantized_matrix import QuantizedMatrix
from tests.schedules.test_matmul import RUNS, check, compile_main, draw


def draw_quantized_matrix(
    rng: np.random.Generator, shape: tuple[int, int], bits: int, block: tuple[int, int], zeros: str, scales: str
) -> QuantizedMatrix:
    rows, columns = (-(-size // length) for size, length in zip(shape, block))
    largest = 2 ** (bits - 1)
    quantized = rng.integers(-largest, largest, shape).astype(np.int8)
    z = {
        "none": None,
        "int8": rng.integers(-largest, largest, (rows, columns)).astype(np.int8),
        "float32": rng.standard_normal((rows, columns)).astype(np.float32),
    }[zeros]
    scale = rng.uniform(0.5, 2, (rows, columns)) / largest
    return QuantizedMatrix(quantized, scale.astype(scales), z, block, bits, np.dtype("float32"))


@pytest.mark.parametrize("target", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(
    ("shape", "bits", "block", "zeros", "scales"),
    [
        ((37, 71), 4, (16, 1), "int8", "float32"),  # the last block is short
        ((1101, 5), 4, (32, 1), "none", "float16"),  # deeper than the cache block, the last integer is incomplete
        ((77, 20), 4, (12, 1), "float32", "float16"),  # no whole integers in a block: stored in 8 bits
        ((77, 20), 4, (77, 20), "none", "float32"),  # one scale for all
        ((50, 33), 8, (50, 1), "int8", "float32"),  # a scale for each column
        ((4100, 48), 8, (4100, 1), "none", "float32"),  # a scale for each column, deeper than any block of k
        ((8200, 48), 4, (8200, 1), "none", "float32"),
        ((60, 18), 8, (20, 1), "none", "float16"),
        ((40, 30), 8, (1, 30), "int8", "float32"),  # a scale for each row: stored as floats
    ],
)
def test_quantized_matrices(
    target: tvm.target.Target, shape: tuple[int, int], bits: int, block: tuple[int, int], zeros: str, scales: str
) -> None:
    rng = np.random.default_rng(0)
    q = draw_quantized_matrix(rng, shape, bits, block, zeros, scales)
    m = tirx.Var("m", "int64")
    run = compile_main({"x": ((m, shape[0]), "float32")}, lambda b, x, w: relax.op.matmul(x, w), target, {"w": q})
    exact = q.array().astype("float64")
    for rows in (*range(1, 14), 25, 40, 150):
        x = draw(rng, (rows, shape[0]), "float32")
        check(run(x), x.astype("float64") @ exact, "float32", 4 * shape[0])
