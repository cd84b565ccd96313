"""Transpositions on emulated GPUs, by tiles: any size, with casts, padding and additions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

import schedules
from tests import cuda_emulation as emulated
from tests.cuda.attention.prefill_cases import TURNS


def function(kind: str, sizes: tuple[int | str, ...]) -> tuple[tirx.PrimFunc, str]:
    """Return a function of x [sizes] in float32, and the rule that takes it."""
    symbols: dict[str, tirx.Var] = {}

    def size(n: int | str) -> Any:
        return tirx.IntImm("int64", n) if isinstance(n, int) else symbols.setdefault(n, tirx.Var(n, "int64"))

    x = te.placeholder([size(n) for n in sizes], "float32", "x")
    operands = [x]
    if kind == "padded":
        result = topi.nn.pad(topi.transpose(topi.cast(x, "float16"), [0, 2, 1]), [0, 1, 0], [0, 1, 0])
    elif kind == "heads":
        result = topi.transpose(x, [0, 2, 1])
    elif kind == "sum":
        operands.append(te.placeholder([x.shape[2], x.shape[1]], "float32", "y"))
        result = topi.add(topi.transpose(x, [0, 2, 1]), operands[-1])
    else:
        result = topi.transpose(x, [2, 0, 1])
    func = te.create_prim_func([*operands, result])
    rule, variants = schedules.find_variants(
        func, tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    ) or (
        "",
        [],
    )
    return variants[0].make(), rule


def expected(kind: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    turned = x.transpose(2, 0, 1) if kind == "first" else x.transpose(0, 2, 1)
    if kind == "padded":
        return np.pad(turned.astype("float16"), [(0, 0), (1, 1), (0, 0)])
    return turned + y if kind == "sum" else turned


@pytest.mark.parametrize("kind", ["padded", "heads", "sum", "first"])
def test_against_numpy(kind: str) -> None:
    rng = np.random.default_rng(0)
    for sizes, shapes in ((("b", "m", "n"), [(2, 40, 33), (1, 1, 70), (0, 4, 4)]), ((2, 16, 100), [(2, 16, 100)])):
        func, rule = function(kind, sizes)
        assert rule == "transposition"
        module = emulated.module({"main": func}, arch="sm_80")
        for shape in shapes:
            x = rng.standard_normal(shape).astype("float32")
            y = rng.standard_normal((shape[2], shape[1])).astype("float32")
            want = expected(kind, x, y)
            operands = [x, y] if kind == "sum" else [x]
            for order, arrivals in TURNS[:2]:
                got = module.call("main", [*operands, np.full_like(want, np.nan)], order=order, arrivals=arrivals)[-1]
                np.testing.assert_array_equal(got, want, err_msg=f"{kind} {shape}")


@pytest.mark.no_gpu
def test_what_is_written_as_it_is_read_is_left() -> None:
    """Heads that move as a whole, and axes too short for a tile."""
    n = [tirx.IntImm("int64", k) for k in (4, 40, 12, 64)]
    x = te.placeholder(n, "float16", "x")
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    for axes in ([0, 2, 1, 3], [0, 1, 3, 2]):
        candidate = schedules.find_variants(te.create_prim_func([x, topi.transpose(x, axes)]), target)
        assert candidate is not None and candidate[0] == "elementwise"
