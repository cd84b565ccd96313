"""Changes of scores are split: the result makes the same scores, with a mask and a soft cap where possible."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import tirx

from lowering.attention.expr.evaluate import evaluate
from lowering.attention.expr.node import INDICES, Expr
from lowering.attention.expr.read import read_expr
from lowering.attention.record.score_mod_split import ScoreModSplit, split_score_mod

B, H, I, J = (tirx.Var(name, "int64") for name in "bhij")
S = tirx.Var("s", "float32")
BY_KEY, BY_DISTANCE, BY_PAIR = (tirx.decl_buffer(shape, "float32") for shape in ((6,), (9,), (4, 6)))
HIDDEN = tirx.const(-math.inf, "float32")


def number(value: float) -> tvm.ir.Expr:
    return tirx.const(value, "float32")


def cap(x: tvm.ir.Expr, value: float) -> tvm.ir.Expr:
    return number(value) * tirx.tanh(x / number(value))


def where(condition: tvm.ir.Expr, yes: tvm.ir.Expr, no: tvm.ir.Expr) -> tvm.ir.Expr:
    return tirx.Select(condition, yes, no)


def padding() -> tvm.ir.Expr:
    return BY_KEY[J]


def distance() -> tvm.ir.Expr:
    return BY_DISTANCE[J - I + 3]


# The change, and its split: the cap, whether a change is left, and the type of the mask.
CASES: dict[str, tuple[Callable[[], tvm.ir.Expr], tuple[float, bool, str]]] = {
    "the score": (lambda: S, (0.0, False, "")),
    "soft cap": (lambda: cap(S, 5.0), (5.0, False, "")),
    "soft cap by a factor": (lambda: number(3.0) * tirx.tanh(S * number(1 / 3)), (3.0, False, "")),
    "another factor": (lambda: number(3.0) * tirx.tanh(S * number(0.3)), (0.0, True, "")),
    "soft cap of more than the score": (lambda: cap(S + padding(), 5.0), (0.0, True, "")),
    "soft cap and the score": (lambda: cap(S, 5.0) + S, (0.0, True, "")),
    "two soft caps": (lambda: cap(S, 5.0) + cap(S, 2.0), (0.0, True, "")),
    "causal": (lambda: where(J <= I, S, HIDDEN), (0.0, False, "bool")),
    "causal, turned": (lambda: where(J > I, HIDDEN, S), (0.0, False, "bool")),
    "two conditions": (lambda: where(J <= I, where(J > I - 3, cap(S, 5.0), HIDDEN), HIDDEN), (5.0, False, "bool")),
    "an added mask": (lambda: S + where(J <= I, number(0.0), HIDDEN), (0.0, False, "bool")),
    "padding": (lambda: S + padding(), (0.0, False, "float32")),
    "causal and padding": (lambda: where(J <= I, padding() + cap(S, 5.0), HIDDEN), (5.0, False, "float32")),
    "the lowest number": (lambda: S + where(J <= I, number(0.0), number(-3e38)), (0.0, False, "float32")),
    "a bias by distance": (lambda: S + distance(), (0.0, True, "")),
    "a bias and causal": (lambda: where(J <= I, cap(S, 5.0) + distance(), HIDDEN), (5.0, True, "bool")),
    "a bias by pair": (lambda: S + BY_PAIR[I, J], (0.0, True, "")),
    "by the score itself": (lambda: where(tirx.isnan(S), S, HIDDEN), (0.0, True, "")),
    "other numbers": (lambda: where(J <= I, S, number(-1e9)), (0.0, True, "")),
    "a matmul": (lambda: S * where(J <= I, number(1.0), number(2.0)), (0.0, True, "")),
    "a mask inside a function": (lambda: tirx.exp(where(J <= I, S, HIDDEN)), (0.0, True, "")),
}


def whole(split: ScoreModSplit, s: np.ndarray, at: Callable[[Expr, np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the new scores of a split."""
    s = split.softcap * np.tanh(s / split.softcap) if split.softcap else s
    s = s if split.score_mod is None else at(split.score_mod, s)
    mask = np.float32(0) if split.mask is None else at(split.mask, s)
    return np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask


@pytest.mark.parametrize("name", CASES)
def test_a_split_makes_the_same_scores(name: str) -> None:
    make, expected = CASES[name]
    value = read_expr(make(), [B, H, I, J, S], [], [BY_KEY, BY_DISTANCE, BY_PAIR])
    split = split_score_mod(value)
    assert (split.softcap, split.score_mod is not None, "" if split.mask is None else split.mask.dtype) == expected
    assert split.mask is None or all(node.value != "s" for node in split.mask.walk())
    rng = np.random.default_rng(0)
    tables = {"table_0": np.array([0, -np.inf, 0, 1, -1e5, 0], "f")}
    tables |= {"table_1": rng.standard_normal(9).astype("f"), "table_2": rng.standard_normal((4, 6)).astype("f")}
    point = dict(zip(INDICES, np.meshgrid([0], [0], np.arange(4), np.arange(6), indexing="ij")))

    def at(expr: Expr, s: np.ndarray) -> np.ndarray:
        return evaluate(expr, {**point, "s": s}, tables)

    s = (rng.standard_normal(point["i"].shape) * 4).astype("f")
    np.testing.assert_allclose(whole(split, s, at), at(value, s), rtol=1e-5, atol=1e-6)
