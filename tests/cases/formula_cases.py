"""Random formulas, and values for their parameters."""

from __future__ import annotations

import random

import numpy as np

from lowering.attention.expr.node import Expr, canonicalize, make_number, rename_parameters
from lowering.attention.record.formula import SCORE_MOD_PREFIX, Formula

_TABLE = 8  # elements; positions are remainders
_LOWEST = float(np.finfo(np.float32).min)


def formula(rng: random.Random) -> Formula:
    """Draw a formula of bool or float32 over some of the indices, with a few sizes and tables."""
    draw = _Draw(rng)
    value, _ = rename_parameters(canonicalize(draw.condition(2) if rng.random() < 0.5 else draw.bias(2)))
    return Formula(value, rng.random() < 0.2)


def change(rng: random.Random, dtype: str) -> Formula:
    """Draw a change of a score s, in that type."""
    draw, s = _Draw(rng), Expr("index", dtype, value="s")
    kind = rng.choice(["add", "scale", "select"])
    if kind == "scale":
        value = Expr("mul", dtype, (s, make_number(rng.choice([0.5, -1.0]), dtype)))
    elif kind == "add":
        value = Expr("add", dtype, (s, Expr("cast", dtype, (draw.bias(1),))))
    else:
        value = Expr("select", dtype, (draw.condition(1), s, make_number(rng.choice([0.25, -3.0]), dtype)))
    return Formula(rename_parameters(canonicalize(value), SCORE_MOD_PREFIX)[0])


def parameters(formula: Formula, kv_len: int, rng: np.random.Generator) -> dict[str, np.ndarray | int]:
    """Draw values by parameter name."""
    values: dict[str, np.ndarray | int] = {name: int(rng.integers(0, kv_len + 2)) for name in formula.scalars()}
    for name, (rank, dtype) in formula.tables().items():
        shape = (_TABLE,) * rank
        is_integer = dtype.startswith("int")
        values[name] = (rng.integers(0, 3, shape) if is_integer else rng.standard_normal(shape)).astype(dtype)
    return values


class _Draw:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def condition(self, depth: int) -> Expr:
        kind = self.rng.choice(["and", "or", "not", "compare"] if depth else ["compare"])
        if kind == "not":
            return Expr("not", "bool", (self.condition(depth - 1),))
        if kind != "compare":
            return Expr(kind, "bool", (self.condition(depth - 1), self.condition(depth - 1)))
        op = self.rng.choice(["lt", "le", "gt", "ge", "eq", "ne"])
        return Expr(op, "bool", (self.integer(2), self.integer(2)))

    def integer(self, depth: int) -> Expr:
        kind = self.rng.choice(
            ["add", "sub", "scaled", "min", "rest", "load", "block"] if depth else ["index", "scalar", "number"]
        )
        if kind == "index":
            return Expr("index", "int64", value=self.rng.choice("bhiijj"))
        if kind == "scalar":
            return Expr("scalar", "int64", value=self.rng.choice("mn"))
        if kind == "number":
            return make_number(self.rng.randint(-3, 5), "int64")
        if kind == "scaled":
            return Expr("mul", "int64", (make_number(self.rng.choice([-1, 2, 3]), "int64"), self.integer(depth - 1)))
        if kind == "rest":
            return self.rest(self.integer(depth - 1), self.rng.choice([2, 3, 16]))
        if kind == "load":
            return Expr("load", "int64", (self.rest(self.integer(depth - 1), _TABLE),), self.rng.choice(["s", "t"]))
        if kind == "block":
            indices = (self.rest(Expr("index", "int64", value=name), _TABLE) for name in "ij")
            return Expr("load", "int64", tuple(indices), "w")
        return Expr(kind, "int64", (self.integer(depth - 1), self.integer(depth - 1)))

    def rest(self, value: Expr, divisor: int) -> Expr:
        return Expr("floormod", "int64", (value, make_number(divisor, "int64")))

    def bias(self, depth: int) -> Expr:
        kind = self.rng.choice(["select", "add", "load", "slope", "number"] if depth else ["load", "number"])
        if kind == "select":
            return Expr("select", "float32", (self.condition(1), self.bias(depth - 1), self.bias(depth - 1)))
        if kind == "load":
            return Expr("load", "float32", (self.rest(self.integer(1), _TABLE),), self.rng.choice(["u", "v"]))
        if kind == "slope":
            distance = Expr("cast", "float32", (self.integer(1),))
            return Expr("mul", "float32", (make_number(0.125, "float32"), distance))
        if kind == "number":
            return make_number(self.rng.choice([0.0, 0.0, float("-inf"), _LOWEST, 0.5]), "float32")
        return Expr(kind, "float32", (self.bias(depth - 1), self.bias(depth - 1)))
