"""The page of `inspect --html` shows the tiles that an attention kernel visits, the elements that a mask shows whatever
its tables are, and why kernels rejected."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

import schedules
from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.key_tiles import KeyTiles
from lowering.attention.codegen.plain import build_plain_attention
from lowering.attention.expr.evaluate import evaluate
from lowering.attention.expr.node import Expr
from lowering.attention.record.formula import Formula
from lowering.attention.record.problem import AttentionProblem, Window
from lowering.reporting.block_map import TileGeometry, find_visited_tiles
from lowering.reporting.formula_text import format_formula
from lowering.reporting.visibility import ALWAYS, BY_DATA, CHANGED, NEVER, compute_visibility
from schedules import CONSIDERED


def problem(**fields: object) -> AttentionProblem:
    """Four heads that share two, of float32."""
    sizes = {"batch": 1, "q_len": None, "kv_len": None, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8}
    types = {"dtype": "float32", "v_dtype": "float32", "acc_dtype": "float32", "scale": 1.0}
    return AttentionProblem(**{**sizes, **types, **fields})  # type: ignore[arg-type]


def looped_over(
    p: AttentionProblem, tiles: TileGeometry, rows: int, keys: int, past: int
) -> set[tuple[int, int, int, bool]]:
    """Return the tiles that a kernel's loops visit, as (packed row, first key, end of keys, is full)."""
    count, limit = -(-rows * tiles.group // tiles.rows), -(-keys // tiles.keys) + 1
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        bound = BoundAttention(p)
        out = T.arg("out", T.Buffer((count, limit, 3), "int64"))
        with T.serial(T.int64(count)) as n:
            first = n * tiles.rows
            i0 = T.bind(first // tiles.group)
            i1 = T.bind((tirx.min(first + tiles.rows, bound.S * tiles.group) - 1) // tiles.group + 1)
            b = T.int64(0)
            key_tiles = KeyTiles(
                bound.keys.compute_tile_ranges(b, i0, i1),
                bound.keys.compute_common_ranges(b, i0, i1),
                tiles.keys,
                T.bind,
            )
            with T.serial(key_tiles.count) as u:
                for k, value in enumerate((key_tiles.first(u), key_tiles.end(u), key_tiles.full(u))):
                    T.buffer_store(out, tirx.Cast("int64", value), [n, u, k])
    run = tvm.compile(builder.get(), target="llvm")["main"]
    shapes = {"q": (1, 4, rows, 8), "k": (1, 2, keys, 8), "v": (1, 2, keys, 8), "y": (1, 4, rows, 8)}
    inputs = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()} | {"lengths": np.array([keys])}
    out = np.full((count, limit, 3), -1)
    arguments = [past if name == "past" else tvm.runtime.tensor(inputs[name]) for name in p.parameters()]
    result = tvm.runtime.tensor(out)
    run(*arguments, result)
    return {
        (n * tiles.rows, int(a), int(b), bool(c)) for n, row in enumerate(result.numpy()) for a, b, c in row if a >= 0
    }


@pytest.mark.parametrize(
    "window, lengths",
    [
        (None, False),
        (Window(right=0, offset="past"), False),
        (Window(left=37, right=0, offset="past"), False),
        (Window(left=37, right=5, offset="lengths", sinks=3), True),
    ],
)
def test_the_picture_shows_what_kernels_visit(window: Window | None, lengths: bool) -> None:
    p, tiles = problem(window=window, lengths=lengths), TileGeometry("prefill", 48, 32, 2)
    rows, keys = 150, 205
    states = find_visited_tiles(p, tiles, rows, keys, {"past": 55})
    drawn = {(round(i0 * 2), j0, j1, state == "full") for state, ranges in states.items() for i0, _, j0, j1 in ranges}
    assert drawn == looped_over(p, tiles, rows, keys, 55)


def test_masks_that_depend_on_data() -> None:
    """A causal mask and the padding of keys: the bounds are right for every table, and some table reaches each."""
    i, j = Expr("index", "int64", value="i"), Expr("index", "int64", value="j")
    past = Expr("sum", "int64", (i, Expr("scalar", "int64", value="size_0")))
    padding = Expr("load", "bool", (j,), "table_0")
    zero, lowest = Expr("number", "float32", value="0.0"), Expr("number", "float32", value="-3.4028234663852886e+38")
    seen = Expr("and", "bool", (Expr("le", "bool", (j, past)), padding))
    value = Expr("select", "float32", (seen, zero, lowest))
    visibility = compute_visibility(problem(mask=Formula(value)), 20, 30, {"size_0": 10})
    rows, keys = np.ogrid[:20, :30]
    shown = []
    for table in (np.zeros(30, bool), np.ones(30, bool), np.arange(30) % 3 == 0):
        shown.append(evaluate(value, {"i": rows, "j": keys}, {"size_0": 10, "table_0": table}) == 0)
    assert np.array_equal(visibility == NEVER, ~shown[1]) and not (visibility == ALWAYS).any() and not shown[0].any()
    assert np.array_equal(visibility == BY_DATA, shown[1]) and (shown[2] <= shown[1]).all()
    assert format_formula(value) == "0.0 if (j <= (i + size_0)) and table_0[j] else -3.4028234663852886e+38"
    two, less = (Expr("number", "int64", value=n) for n in (2, -1))
    terms = (Expr("mul", "int64", (less, j)), Expr("mul", "int64", (two, i)), less)
    assert format_formula(Expr("sum", "int64", terms)) == "2 * i - j - 1"
    added = Formula(Expr("select", "float32", (Expr("le", "bool", (j, past)), Expr("cast", "float32", (j,)), lowest)))
    biased = compute_visibility(problem(mask=added), 20, 30, {"size_0": 10})
    assert np.array_equal(biased == CHANGED, shown[1] & (keys > 0)) and (biased[:, 0] == ALWAYS).all()
    unpadded = Formula(Expr("le", "bool", (j, past)))
    assert np.array_equal(compute_visibility(problem(mask=unpadded), 20, 30, {"size_0": 10}) == ALWAYS, shown[1])


def test_why_kernels_reject() -> None:
    """It is noted with the function: on a GPU for heads of 6 elements, on a CPU for scores as an output."""

    def noted(p: AttentionProblem, target: dict[str, object] | str) -> dict[str, object]:
        mod = schedules.apply_schedules(tvm.IRModule({"main": build_plain_attention(p)}), tvm.target.Target(target))
        return json.loads(mod["main"].attrs[CONSIDERED])

    half = {"dtype": "float16", "v_dtype": "float16"}
    gpu = noted(problem(**half, head_dim=6), {"kind": "cuda", "arch": "sm_90a"})
    assert gpu["rejected"] == {"mma": ["sizes of heads are multiples of 8"]} and gpu["variants"] == ["rows"]
    older = noted(problem(**half), {"kind": "cuda", "arch": "sm_80"})
    assert older["rejected"] == {"wgmma": ["the GPU is a Hopper"]} and older["chosen"]["variant"] == "mma"
    cpu = noted(problem(qk_mode=0), {"kind": "llvm", "mcpu": "x86-64-v3"})
    assert cpu == {"rejected": {"tiled": ["the scores themselves are no output"]}}
