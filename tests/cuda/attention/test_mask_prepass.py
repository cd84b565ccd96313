"""The block-mask pre-pass: which keys tiles of query rows visit under a causal formula, a window, or documents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.record.formula import Formula
from lowering.attention.record.problem import AttentionProblem
from schedules.cuda.attention.mask_prepass import MaskPrepass
from schedules.cuda.primitives.ptx import alloc_registers, let, store_element
from tests import cuda_emulation as emulated
from tests.cuda.attention.prefill_cases import problem

ROWS, KEYS = 32, 16
BATCH, Q_LEN, KV_LEN = 2, 75, 150
LOWEST = float(np.finfo(np.float32).min)
MINUS_INFINITY = float("-inf")

Shown = Callable[..., tirx.Expr]
"""Whether a pair counts, of (b, h, i, j, size, table); the table says how many keys a batch pads in front, and stands
for documents."""


def adding(lowest: float) -> Callable[[tirx.Expr], tirx.Expr]:
    return lambda shown: tirx.Select(shown, T.float32(0), T.float32(lowest))


CASES: dict[str, tuple[Shown, Callable[[tirx.Expr], tirx.Expr]]] = {
    "causal": (lambda b, h, i, j, n, t: j <= i + n, lambda shown: shown),
    "causal, -inf": (lambda b, h, i, j, n, t: j <= i + n, adding(MINUS_INFINITY)),
    "causal, the lowest number": (lambda b, h, i, j, n, t: j <= i + n, adding(LOWEST)),
    "window": (lambda b, h, i, j, n, t: tirx.all(j <= i + n, j > i + n - 20), adding(LOWEST)),
    "prefix": (lambda b, h, i, j, n, t: tirx.any(j <= i, j < n), adding(MINUS_INFINITY)),
    "padding in front": (lambda b, h, i, j, n, t: j >= t[b], adding(LOWEST)),
    "padding in front, causal": (lambda b, h, i, j, n, t: tirx.all(j >= t[b], j <= i), adding(LOWEST)),
    "of each head": (lambda b, h, i, j, n, t: j <= i + 10 * h, lambda shown: shown),
    "documents": (lambda b, h, i, j, n, t: t[i // 40 % 2].equal(t[j // 80 % 2]), lambda shown: shown),
    "stripes": (lambda b, h, i, j, n, t: j // 40 % 2 == 1, adding(LOWEST)),
    "stripes, -inf": (lambda b, h, i, j, n, t: j // 40 % 2 == 1, adding(MINUS_INFINITY)),
    "a hole for late rows": (lambda b, h, i, j, n, t: tirx.any(j < 20, j > 60, i < 40), adding(LOWEST)),
    "nothing": (lambda b, h, i, j, n, t: j < 0, adding(LOWEST)),
    "nothing at all": (lambda b, h, i, j, n, t: j < 0, lambda shown: shown),
}
SIZE, TABLE = 70, np.array([0, 37])


def masked(name: str) -> AttentionProblem:
    shown, change = CASES[name]
    b, h, i, j, size = (tirx.Var(letter, "int64") for letter in ("b", "h", "i", "j", "size"))
    table = tirx.decl_buffer((tirx.Var("n", "int64"),), "int64", "table")
    formula, _ = Formula.from_tir(change(shown(b, h, i, j, size, table)), (b, h, i, j), [size], [table])
    return problem(dtype="float32", mask=formula)


def prepassed(p: AttentionProblem) -> tirx.PrimFunc:
    """Return a function that writes Y[b, h, tile * ROWS] := the number of tiles, the number that need mask code, and of
    each the first key and the one after the last."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("attention")
        bound = BoundAttention(p, scope="local")
        prepass = MaskPrepass(bound, ROWS, KEYS, warps=3)
        tiles = tirx.ceildiv(T.int64(1) * bound.S, ROWS)
        with (
            T.launch_thread("blockIdx.x", (T.int64(1) * bound.B * p.q_heads * tiles).astype("int32")) as block,
            T.launch_thread("threadIdx.x", 32) as thread,
        ):
            b, rest = let(block // (p.q_heads * tiles)), let(block % (p.q_heads * tiles))
            h, i0 = let(rest // tiles), let(rest % tiles * ROWS)
            keys, masked = prepass.key_tiles(b, h, i0), alloc_registers(1, "int32")
            with T.If(thread == 0), T.Then():
                store_element(masked, 0, tirx.const(0, "int32"))
                with T.serial(keys.count) as u:
                    store_element(masked, 0, masked[0] + tirx.Not(keys.full(u)).astype("int32"))
                    for n, end in enumerate((keys.first(u), keys.end(u))):
                        bound.addressing.store_y(b, h, i0, 2 + 2 * u + n, end.astype("float32"))
                for n, number in enumerate((keys.count, masked[0])):
                    bound.addressing.store_y(b, h, i0, n, number.astype("float32"))
    return builder.get()


@pytest.fixture(scope="module")
def kernels() -> emulated.Module:
    functions = {f"prepass_{k}": prepassed(masked(name)) for k, name in enumerate(CASES)}
    return emulated.module(functions, arch="sm_80")


@pytest.mark.parametrize("name", CASES)
def test_finds_the_keys_that_count(name: str, kernels: emulated.Module) -> None:
    p = masked(name)
    y = np.full((BATCH, p.q_heads, Q_LEN, 64), np.nan, np.float32)
    empty = {letter: np.zeros((BATCH, 2, KV_LEN, 64), np.float32) for letter in "kv"}
    arguments = {"q": np.zeros_like(y), **empty, "y": y, "size_0": SIZE, "table_0": TABLE}
    names = p.parameters()
    after = kernels.call(f"prepass_{[*CASES].index(name)}", [arguments[n] for n in names])
    ranges = after[names.index("y")][:, :, ::ROWS]
    counts, hides = element(name, p)
    for b, h, tile in np.ndindex(ranges.shape[:3]):
        rows = counts[b, h, tile * ROWS : (tile + 1) * ROWS]
        visited = rows if rows.any(-1).all() or hides == MINUS_INFINITY else np.ones_like(rows)
        count, with_mask_code = ranges[b, h, tile, :2].astype(int)
        tiles = [(int(lo), int(hi)) for lo, hi in ranges[b, h, tile, 2 : 2 + 2 * count].reshape(-1, 2)]
        every = [(k, min(k + KEYS, KV_LEN)) for k in range(0, KV_LEN, KEYS)]
        assert sorted(tiles) == [(lo, hi) for lo, hi in every if visited[:, lo:hi].any()], (b, h, tile)
        whole = [(lo, hi) for lo, hi in every if hi - lo == KEYS and rows[:, lo:hi].all()]
        assert sorted(tiles[with_mask_code:]) == whole, (b, h, tile)


def element(name: str, p: AttentionProblem) -> tuple[np.ndarray, float]:
    """Return which pairs count, and the value that hides the others."""
    b, h, i, j = np.ogrid[:BATCH, : p.q_heads, :Q_LEN, :KV_LEN]
    counts = {
        "causal": j <= i + SIZE,
        "window": (j <= i + SIZE) & (j > i + SIZE - 20),
        "prefix": (j <= i) | (j < SIZE),
        "padding in front": j >= TABLE[b],
        "padding in front, causal": (j >= TABLE[b]) & (j <= i),
        "of each head": j <= i + 10 * h,
        "documents": TABLE[i // 40 % 2] == TABLE[j // 80 % 2],
        "stripes": j // 40 % 2 == 1,
        "a hole for late rows": (j < 20) | (j > 60) | (i < 40),
        "nothing": j < 0,
        "nothing at all": j < 0,
    }
    key = name if name in counts else name.split(",")[0]
    finite = CASES[name][1](tirx.const(False)).ty == "float32" and not name.endswith("-inf") and name != "prefix"
    return np.broadcast_to(counts[key], (BATCH, p.q_heads, Q_LEN, KV_LEN)), LOWEST if finite else MINUS_INFINITY
