"""Expressions: one form for any names of parameters, the same numbers as NumPy, and valid bounds."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.expr.bound import BoundExpr
from lowering.attention.expr.evaluate import evaluate
from lowering.attention.expr.evaluate_interval import evaluate_interval
from lowering.attention.record.formula import Formula
from lowering.attention.record.problem import AttentionProblem
from lowering.records import decode, encode
from schedules.cpu.primitives.vector import of_vectors
from tests.cases import formula_cases

SIZES = {"b": 2, "h": 3, "i": 9, "j": 16}
KEYS = SIZES["j"]


def to_formula(value: tirx.Expr, indices: list[tirx.Var], sizes: list[tirx.Var], tables: list[tirx.Buffer]) -> Formula:
    return Formula.from_tir(value, indices, sizes, tables, short=False)[0]


def test_names_and_order_of_parameters_make_no_difference() -> None:
    """Documents and a prefix, written twice with other names, other orders and other ways to compare."""
    records = []
    for names, swapped in (("bhijpqtu", False), ("wxyzmnkl", True)):
        b, h, i, j, p, q = (tirx.Var(name, "int64") for name in names[:6])
        t, u = (tirx.decl_buffer((tirx.Var("n", "int64"),), "int64", name) for name in names[6:])
        if swapped:
            value = tirx.any(p + 2 + i > j, tirx.all(u[j] * 2 < q, t[j].equal(t[i])))
            records.append(to_formula(value, [b, h, i, j], [q, p], [u, t]))
        else:
            value = tirx.any(tirx.all(t[i].equal(t[j]), q > u[j] + u[j]), j < i + p + 3 - 1)
            records.append(to_formula(value, [b, h, i, j], [p, q], [t, u]))
    assert records[0] == records[1] and hash(records[0]) == hash(records[1])
    assert records[0].index_names == ("i", "j") and records[0].scalars() == ("size_0", "size_1")
    assert records[0].tables() == {"table_0": (1, "int64"), "table_1": (1, "int64")}
    text = json.dumps(encode(records[0]))
    assert len(text) < 800 and decode(Formula, json.loads(text), "mask") == records[0]


def test_other_expressions_are_other_records() -> None:
    b, h, i, j = (tirx.Var(name, "int64") for name in "bhij")
    t, u = (tirx.decl_buffer((8,), "int64", name) for name in "tu")
    values = [j <= i, j < i, i <= j, t[j].equal(t[i]), t[j].equal(u[i]), (j - i).equal(2), (j - i).equal(-2)]
    assert len({to_formula(value, [b, h, i, j], [], [t, u]) for value in values}) == len(values)


def test_what_is_no_expression_is_refused() -> None:
    b, h, i, j = (tirx.Var(name, "int64") for name in "bhij")
    with pytest.raises(ValueError, match="Let is not part of an expression"):
        to_formula(tirx.Let(h, i, h < j), [b, h, i, j], [], [])


@pytest.mark.parametrize("seed", range(20))
def test_kernels_and_numpy_agree(seed: int) -> None:
    """Elements one by one and in vectors of keys or rows, and their bounds over tiles."""
    rng, data = random.Random(seed), np.random.default_rng(seed)
    formula = formula_cases.formula(rng)
    _check(formula, formula_cases.parameters(formula, KEYS, data))


INFINITE = ["inf", "-inf", 0, "nan", 3e9, -3e9, 1, 0]


@pytest.mark.parametrize(
    "make_value",
    [
        lambda t, u, i, j: t[i // 16 + 7] * u[j % 3] < 3,
        lambda t, u, i, j: tirx.min(t[i % 2] + u[j // 8], T.float32(5)).equal(T.float32(5)),
        lambda t, u, i, j: tirx.min(t[i % 2] - u[j // 8], T.float32(5)).equal(T.float32(5)),
        lambda t, u, i, j: tirx.Cast("int32", t[j % 8]) > 0,
        lambda t, u, i, j: tirx.Cast("int32", tirx.Cast("int64", t[j % 3 + 4])) > 0,
    ],
)
def test_bounds_are_valid_where_numbers_are_infinite_or_too_large(make_value: Any) -> None:
    b, h, i, j = (tirx.Var(name, "int64") for name in "bhij")
    tables = [tirx.decl_buffer((8,), "float32", name) for name in "tu"]
    formula = to_formula(make_value(*tables, i, j), [b, h, i, j], [], tables)
    _check(formula, {name: np.array(INFINITE, "f") for name in formula.tables()}, elements=False)


def _check(formula: Formula, parameters: dict[str, Any], elements: bool = True) -> None:
    point = dict(zip("bhij", np.ogrid[tuple(slice(n) for n in SIZES.values())]))
    expected = np.broadcast_to(evaluate(formula.value, point, parameters), tuple(SIZES.values()))

    dtype = "int8" if formula.dtype == "bool" else formula.dtype
    results = [np.zeros(expected.shape, dtype) for _ in range(3)]
    ends = [np.zeros((*expected.shape[:2], 2), dtype) for _ in range(2)]
    kernel = tvm.compile(tvm.IRModule({"evaluate": _kernel(formula, dtype)}), target="llvm")["evaluate"]
    arguments = [parameters[name] for name in formula.names()]
    outputs = [tvm.runtime.tensor(x) for x in (*results, *ends)]
    kernel(*(x if isinstance(x, int) else tvm.runtime.tensor(x) for x in arguments), *outputs)
    scalar, keys, rows, low, high = (x.numpy() for x in outputs)
    where = (..., slice(None)), (..., slice(4, 8)), (..., slice(2, 6), slice(None))
    for actual, here in zip((scalar, keys, rows), where if elements else ()):
        expected_here = expected[here].astype(dtype)
        np.testing.assert_allclose(actual[here], expected_here, rtol=1e-6, err_msg=str(formula.value.to_data()))
    for half in range(2):  # two tiles of keys, all rows
        tile = expected[..., half * KEYS // 2 : (half + 1) * KEYS // 2].astype(dtype)
        tile = np.where(np.isnan(tile.astype("f8")), 0, tile)
        with np.errstate(invalid="ignore"):
            assert (low[..., half] <= tile.min((2, 3))).all() and (high[..., half] >= tile.max((2, 3))).all()
    known = {name: value for name, value in parameters.items() if isinstance(value, int)}
    for scalars in (known, {}):
        evaluated_low, evaluated_high = evaluate_interval(formula.value, point, scalars)
        assert ((evaluated_low <= expected) & (expected <= evaluated_high) | np.isnan(expected.astype("f8"))).all()


def _kernel(formula: Formula, dtype: str) -> tirx.PrimFunc:
    """Return a kernel: elements, then vectors of keys, then vectors of rows, then the bounds of two tiles."""
    shape = tuple(SIZES.values())
    with IRBuilder() as builder, T.prim_func():
        T.func_name("evaluate")
        tables = {
            name: T.match_buffer(T.arg(name, T.handle()), (8,) * rank, dtype)
            for name, (rank, dtype) in formula.tables().items()
        }
        scalars = {name: T.arg(name, T.int64()) for name in formula.scalars()}
        scalar, keys, rows = (T.match_buffer(T.arg(f"out_{k}", T.handle()), shape, dtype) for k in range(3))
        low, high = (T.match_buffer(T.arg(f"end_{k}", T.handle()), (*shape[:2], 2), dtype) for k in range(2))
        bound = BoundExpr(formula.value, tables, scalars, emit_vector_call=of_vectors)
        with T.serial(T.int64(shape[0])) as b, T.serial(T.int64(shape[1])) as h:
            with T.serial(T.int64(shape[2])) as i:
                with T.serial(T.int64(shape[3])) as j:
                    T.buffer_store(scalar, bound(b, h, i, j).astype(dtype), [b, h, i, j])
                four = bound(b, h, i, T.ramp(T.int64(4), 1, 4))
                for lane in range(4):
                    half = four if four.ty.dtype.lanes == 1 else tirx.Shuffle([four], [lane])
                    T.buffer_store(keys, half.astype(dtype), [b, h, i, 4 + lane])
            with T.serial(T.int64(shape[3])) as j:
                four = bound(b, h, T.ramp(T.int64(2), 1, 4), j)
                for lane in range(4):
                    half = four if four.ty.dtype.lanes == 1 else tirx.Shuffle([four], [lane])
                    T.buffer_store(rows, half.astype(dtype), [b, h, 2 + lane, j])
            for half in range(2):
                first = half * shape[3] // 2
                tile = (T.int64(first), T.int64(first + shape[3] // 2 - 1))
                ends = bound.compute_interval(b, h, (T.int64(0), T.int64(shape[2] - 1)), tile)
                limits = (-128, 127) if dtype == "int8" else (float("-inf"), float("inf"))
                for buffer, k in ((low, 0), (high, 1)):
                    value = tirx.const(limits[k], dtype) if ends is None else ends[k].astype(dtype)
                    T.buffer_store(buffer, value, [b, h, half])
    return builder.get()


def test_a_mask_and_a_change_of_scores_have_names_of_their_own() -> None:
    b, h, i, j, s, size = (
        tirx.Var(name, "float32" if name == "s" else "int64") for name in ("b", "h", "i", "j", "s", "n")
    )
    mask, _ = Formula.from_tir(j < size, (b, h, i, j), [size], [])
    change, read = Formula.from_tir(tirx.Select(j < size, s, -s), (b, h, i, j, s), [size], [])
    assert mask.names() == ("size_0",) and change.names() == ("score_size_0",) and read == {"score_size_0": size}
    types = {"dtype": "float32", "v_dtype": "float32", "acc_dtype": "float32"}
    problem = AttentionProblem(1, 1, 1, 1, 1, 8, 8, **types, scale=1.0, mask=mask, score=change)
    assert AttentionProblem.from_json(problem.to_json()) == problem
    with pytest.raises(ValueError, match="of the same name"):
        dataclasses.replace(problem, score=mask)
