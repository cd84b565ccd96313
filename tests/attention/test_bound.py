"""`Bound` tells kernels which keys count: for single elements, for vectors of either index, and for tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.record.problem import AttentionProblem, Mask, Window

LANES, TILE = 4, 3
BATCH, HEADS, ROWS, KEYS, PAST, FREE = 2, 4, 5, 7, 3, 1
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})

WINDOWS = (
    None,
    Window(None, 0, "zero"),
    Window(2, 1, "past"),
    Window(3, None, "lengths"),
    Window(0, 2, "lengths"),
    Window(1, 0, "past", sinks=1),
    Window(0, 0, "lengths", sinks=2, free=True),
)
MASKS = (
    None,
    Mask("bool", (1, 1, ROWS, KEYS)),
    Mask("bool", (None, HEADS, None, None)),
    Mask("bfloat16", (2, 1, 1, 3)),
    Mask("float32", (None, 1, None, None), pad=False),
    Mask("float32", (1, 1, None, 1), pad=False),
)


def problem(window: Window | None, mask: Mask | None, symbolic: bool) -> AttentionProblem:
    sizes = (None, None, None) if symbolic else (BATCH, ROWS, KEYS)
    types = {"dtype": "float32", "v_dtype": "float32", "acc_dtype": "float32"}
    heads = {"q_heads": HEADS, "kv_heads": 2, "head_dim": 2, "v_head_dim": 2}
    return AttentionProblem(*sizes, **heads, **types, scale=1.0, window=window, lengths=True, mask=mask)


def probe(p: AttentionProblem) -> tvm.runtime.Module:
    """Compile a function to store is_visible twice, for elements and vectors of keys, and the ranges of tiles."""
    ones, zeros = T.broadcast(T.int32(1), LANES), T.broadcast(T.int32(0), LANES)
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("probe")
        handles = [T.arg(name, T.handle()) for name in ("visible", "ranges")]
        bound = BoundAttention(p)
        visible = T.match_buffer(handles[0], [2, bound.B, HEADS, bound.S, bound.T], "int32", align=4)
        ranges = T.match_buffer(handles[1], [bound.B, bound.S, 2, 6], "int64", align=8)

        def store_lanes(way: int, b: Any, h: Any, i: Any, j: Any) -> None:
            seen = T.bind(T.Select(bound.is_visible(b, h, i, j), ones, zeros))
            for lane in range(LANES):
                at = [tirx.Shuffle([x], [lane]) if x.ty.dtype.lanes > 1 else x for x in (i, j)]
                with T.If(tirx.all(at[0] < bound.S, at[1] < bound.T)), T.Then():
                    T.buffer_store(visible, tirx.Shuffle([seen], [lane]), [way, b, h, *at])

        with T.serial(bound.B) as b:
            with T.serial(bound.S) as i:
                tile = (b, i, i + TILE)
                range_lists = (
                    bound.keys.compute_tile_ranges(*tile),
                    bound.keys.compute_common_ranges(*tile),
                    bound.keys.compute_row_ranges(b, i),
                )
                for n, ends in enumerate(zip(*range_lists)):
                    for k, end in enumerate(end for pair in ends for end in pair):
                        T.buffer_store(ranges, end, [b, i, n, k])
            with T.serial(HEADS) as h:
                with T.serial(bound.S) as i, T.serial(bound.T) as j:
                    T.buffer_store(visible, T.Select(bound.is_visible(b, h, i, j), 1, 0), [0, b, h, i, j])
                with T.serial(bound.S) as i, T.serial((bound.T + LANES - 1) // LANES) as j:
                    store_lanes(1, b, h, i, T.ramp(j * LANES, 1, LANES))
    return tvm.compile(tvm.IRModule({"probe": builder.get()}), target=TARGET)


def expected(p: AttentionProblem, lengths: np.ndarray, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return visibility before the mask tensor [B, S, T] and with it [B, Hq, S, T]."""
    i, j = np.arange(ROWS)[:, None], np.arange(KEYS)[None, :]
    before = np.zeros((BATCH, ROWS, KEYS), bool)
    for b in range(BATCH):
        before[b] = j < lengths[b]
        if p.window is not None:
            position = i + {"zero": 0, "past": PAST, "lengths": lengths[b] - ROWS}[p.window.offset]
            if not p.window.free or b >= FREE:
                before[b] &= p.window.left is None or (j >= position - p.window.left) | (j < p.window.sinks)
                before[b] &= p.window.right is None or j <= position + p.window.right
    seen = np.ones((BATCH, HEADS, ROWS, KEYS), bool)
    if mask is not None and p.mask is not None:
        unmasked = mask if mask.dtype == bool else mask.astype(np.float32) != -np.inf
        if p.mask.pad:
            before[:, :, mask.shape[3] :] = False
            unmasked = np.pad(unmasked, [(0, 0)] * 3 + [(0, KEYS - mask.shape[3])])
        seen &= unmasked
    return before, before[:, None] & seen


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_visible_and_ranges(mask: Mask | None, symbolic: bool) -> None:
    rng = np.random.default_rng(0)
    values = None
    if mask is not None:
        dims = [full if d is None else d for d, full in zip(mask.dims, (BATCH, HEADS, ROWS, KEYS))]
        values = rng.random(dims) < 0.7
        if mask.dtype != "bool":
            values = np.where(values, 1.5, -np.inf).astype(mask.dtype)
    for window in WINDOWS:
        p = problem(window, mask, symbolic)
        compiled = probe(p)["probe"]
        for lengths in (np.array([6, 3]), np.array([-2, 9])):
            visible, ranges = called(compiled, p, values, lengths)
            before, seen = expected(p, lengths, values)
            for way, got in zip(("elements", "vectors of keys"), visible):
                assert np.array_equal(got, seen), (way, p)
            for b, i in np.ndindex(BATCH, ROWS):
                rows = before[b, i : i + TILE]
                possible, certain, of_row = (keys_of(ranges[b, i, :, k : k + 2]) for k in (0, 2, 4))
                assert not rows[:, ~possible].any() and (certain <= possible).all(), p
                assert np.array_equal(certain, rows.all(axis=0)) and np.array_equal(of_row, before[b, i]), p


def keys_of(ranges: np.ndarray) -> np.ndarray:
    """Return which keys are in one of the ranges, which must be sorted and disjoint."""
    end = 0
    keys = np.zeros(KEYS, bool)
    for lo, hi in ranges:
        assert lo <= hi and (end <= lo or lo == hi)
        keys[lo:hi], end = True, hi
    return keys


def called(
    function: Any, p: AttentionProblem, mask: np.ndarray | None, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    shapes = {"q": (HEADS, ROWS), "k": (2, KEYS), "v": (2, KEYS), "y": (HEADS, ROWS)}
    arrays = {name: np.zeros((BATCH, *shape, 2), np.float32) for name, shape in shapes.items()}
    arrays |= {"lengths": lengths} | ({} if mask is None else {"mask": mask})
    visible = tvm.runtime.tensor(np.full((2, BATCH, HEADS, ROWS, KEYS), -1, np.int32))
    ranges = tvm.runtime.tensor(np.zeros((BATCH, ROWS, 2, 6), np.int64))
    numbers = {"past": PAST, "free_batches": FREE}
    arguments = [numbers.get(name) or tvm.runtime.tensor(arrays[name]) for name in p.parameters()]
    function(visible, ranges, *arguments)
    return visible.numpy(), ranges.numpy()
