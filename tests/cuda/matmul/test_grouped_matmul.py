"""Grouped matmuls on wgmma: rows choose their matrix by a table, in runs of any length, on a persistent grid."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from lowering.tensorir.grouped_matmul import grouped_matmul
from schedules.cuda.matmul.matmul import matmul
from schedules.cuda.matmul.matmul_tiles import WgmmaMatmulTiles
from tests import cuda_emulation as emulated

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
GROUPS, COLUMNS, DEPTH, BLOCKS = 5, 80, 7 * 64, 3
TILES = {
    "ping-pong": WgmmaMatmulTiles(2, 64, 3, 160, 24, ping_pong=True, blocks=BLOCKS),
    "cooperative": WgmmaMatmulTiles(2, 64, 3, 160, 24, blocks=BLOCKS),
    "one consumer": WgmmaMatmulTiles(1, 64, 2, 200, 24, blocks=BLOCKS),
}


def function() -> tirx.PrimFunc:
    rows = te.var("rows", "int64")
    depth, columns, all_columns = (tirx.const(n, "int64") for n in (DEPTH, COLUMNS, GROUPS * COLUMNS))
    x = te.placeholder((rows, depth), "float16", "x")
    table = te.placeholder((rows,), "int64", "table")
    matrices = te.placeholder((all_columns, depth), "float16", "matrices")
    y = grouped_matmul(x, table, GROUPS, columns, columns, lambda k, j: matrices(j, k).astype("float32"))
    return te.create_prim_func([x, table, matrices, y])


@functools.cache
def kernels() -> emulated.Module:
    variant = matmul(function(), TARGET)[0]
    assert variant.name == "wgmma"
    functions = {name.replace(" ", "_").replace("-", "_"): variant.make(tiles=t, narrow=t) for name, t in TILES.items()}
    return emulated.module(functions, arch="sm_90a")


def tables(rows: int) -> dict[str, np.ndarray]:
    """Draw tables. Numbers that are not a matrix count as the nearest one."""
    rng = np.random.default_rng(rows)
    return {
        "sorted": np.sort(rng.integers(0, GROUPS, rows)),
        "one run": np.full(rows, 3),
        "all runs short": np.arange(rows) % GROUPS,
        "any": rng.choice([-5, 0, 1, 4, 10**12], rows),
    }


CASES = [("ping-pong", 70), *((name, rows) for name in TILES for rows in (9, 70, 200))]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "rows"), dict.fromkeys(CASES))
def test_each_row_times_its_matrix(name: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, matrices = (rng.standard_normal((n, DEPTH)).astype(np.float16) for n in (rows, GROUPS * COLUMNS))
    of_group = matrices.reshape(GROUPS, COLUMNS, DEPTH).astype(np.float64)
    for kind, table in tables(rows).items():
        got = kernels().call(
            name.replace(" ", "_").replace("-", "_"), [x, table, matrices, np.full((rows, COLUMNS), np.nan, np.float32)]
        )[-1]
        want = np.einsum("rk,rjk->rj", x.astype(np.float64), of_group[table.clip(0, GROUPS - 1)])
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3, err_msg=kind)


def test_no_rows() -> None:
    arrays = [np.zeros((0, DEPTH), np.float16), np.zeros(0, np.int64), np.zeros((GROUPS * COLUMNS, DEPTH), np.float16)]
    assert kernels().call("cooperative", [*arrays, np.zeros((0, COLUMNS), np.float32)])[-1].shape == (0, COLUMNS)
