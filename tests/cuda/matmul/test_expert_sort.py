"""The stable counting sort of rows by expert on GPUs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.along_rows import ATTRIBUTE, Grouped, to_json
from schedules.cuda.elementwise.expert_sort import expert_sort
from schedules.cuda.primitives.threads import ThreadTiles
from tests import cuda_emulation as emulated

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
GROUPS = {1: "int64", 5: "int32", 33: "int64"}


def function(groups: int, dtype: str) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func():
        rows = tirx.Var("rows", "int64")
        for name, kind in (("chosen", dtype), ("ordered", "int64"), ("order", "int64"), ("positions", "int64")):
            T.arg(name, T.buffer((rows,), kind))
        T.evaluate(0)
    return builder.get().with_attr(ATTRIBUTE, to_json(Grouped(groups)))


@functools.cache
def kernels() -> emulated.Module:
    def make_function(groups: int, dtype: str) -> Any:
        variant = expert_sort(function(groups, dtype), TARGET)[0]
        return variant.make() if groups == 1 else variant.make(threads=ThreadTiles(64))

    return emulated.module({f"sort_{g}": make_function(g, dtype) for g, dtype in GROUPS.items()}, arch="sm_90a")


@pytest.mark.parametrize("rows", (0, 1, 31, 64, 700))
@pytest.mark.parametrize("groups", GROUPS)
def test_is_a_stable_sort(groups: int, rows: int) -> None:
    """Numbers that are not a group count as the nearest one."""
    chosen = np.random.default_rng(rows).integers(-1, groups + 2, rows).astype(GROUPS[groups])
    empty = [np.full(rows, -7) for _ in range(3)]
    _, ordered, order, positions = kernels().call(f"sort_{groups}", [chosen, *empty])
    nearest = chosen.clip(0, groups - 1)
    want = np.argsort(nearest, kind="stable")
    np.testing.assert_array_equal(order, want)
    np.testing.assert_array_equal(ordered, nearest[want])
    np.testing.assert_array_equal(positions[want], np.arange(rows))
