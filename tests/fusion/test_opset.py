"""Models of opset 6 are upgraded to a newer opset without changing results: operators of opset 6 have no lowering."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import lowering
from lowering.graph.loading.model import load_model
from lowering.graph.rewriting.opset import UpgradeOpsetPass, opset
from tests.fusion.graphs import parse_graph

RNG = np.random.default_rng(0)
X, SQUARE = RNG.standard_normal((2, 3, 4, 4)).astype(np.float32), RNG.standard_normal((2, 3)).astype(np.float32)
C, M = RNG.standard_normal(3).astype(np.float32), RNG.standard_normal((3, 3)).astype(np.float32)


def broadcast_along(axis: int, a: np.ndarray, rank: int = 4) -> np.ndarray:
    return a.reshape([-1 if k == axis else 1 for k in range(rank)])


CASES: dict[str, tuple[str, dict[str, np.ndarray], Any]] = {
    "Add": ("y = Add <broadcast = 1, axis = 1> (x, c)", {"x": X, "c": C}, lambda x, c: x + broadcast_along(1, c)),
    "Add at the first axis": (
        "y = Add <broadcast = 1, axis = 0> (x, c)",
        {"x": X, "c": SQUARE},
        lambda x, c: x + c[:, :, None, None],
    ),
    "Div at the last axis": ("y = Div <broadcast = 1, axis = 3> (x, c)", {"x": X, "c": X[0, 0, 0]}, np.divide),
    "Mul": ("y = Mul <broadcast = 1> (x, c)", {"x": SQUARE, "c": C}, lambda x, c: x * c),
    "Sub": ("y = Sub (x, c)", {"x": SQUARE, "c": SQUARE[::-1].copy()}, lambda x, c: x - c),
    "Gemm": (
        "y = Gemm <broadcast = 1, transB = 1> (x, c, d)",
        {"x": SQUARE, "c": M, "d": C},
        lambda x, c, d: x @ c.T + d,
    ),
    "PRelu of channels": (
        "y = PRelu (x, c)",
        {"x": X, "c": C},
        lambda x, c: np.where(x < 0, x * broadcast_along(1, c), x),
    ),
    "PRelu of three axes": (
        "y = PRelu (x, c)",
        {"x": X[0], "c": C[:1]},
        lambda x, c: np.where(x < 0, x * c[0], x),
    ),
    "PRelu of two axes": ("y = PRelu (x, c)", {"x": SQUARE, "c": C}, lambda x, c: np.where(x < 0, x * c, x)),
    "PRelu of what is computed": (
        "n = Neg (x) y = PRelu (n, c)",
        {"x": X, "c": C},
        lambda x, c: np.where(x > 0, -x * broadcast_along(1, c), -x),
    ),
    "AveragePool": (
        "y = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x)",
        {"x": X},
        lambda x: x.reshape(2, 3, 2, 2, 2, 2).mean((3, 5)),
    ),
    "Max": ("y = Max (x, c)", {"x": SQUARE, "c": SQUARE[::-1].copy()}, np.maximum),
}


@pytest.mark.parametrize("case", CASES)
def test_opset_6(case: str) -> None:
    nodes, inputs, compute_expected = CASES[case]
    declared = ", ".join(f"float{list(a.shape)} {name}" for name, a in inputs.items())
    model = parse_graph(
        f"({declared}) => (float[{', '.join('ABDE'[: compute_expected(*inputs.values()).ndim])}] y) {{ {nodes} }}", 6
    )
    (actual,) = lowering.compile(model).run(inputs).values()
    np.testing.assert_allclose(
        actual, compute_expected(*(a.astype(np.float64) for a in inputs.values())), rtol=1e-5, atol=1e-6
    )
    assert lowering.check(model).ok


@pytest.mark.parametrize("node", ["y = PRelu (r, c)", "y = Mul <broadcast = 1, axis = 1> (r, c)"])
def test_operands_of_unknown_rank(node: str) -> None:
    """The axis of the second operand is unknown: the model stays, and is rejected instead of compiled wrongly."""
    model = parse_graph(f"(float[2, 3] x, float[3] c) => (float y) {{ r = some.where.Unheard (x) {node} }}", 6)
    model.opset_import.append(onnx.helper.make_opsetid("some.where", 1))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    loaded = load_model(model)
    assert not UpgradeOpsetPass()(loaded).modified and opset(loaded) == 6
