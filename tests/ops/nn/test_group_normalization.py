"""GroupNormalization of opset 18, whose scale and bias have an element for each group."""

from __future__ import annotations

import numpy as np
import pytest

import lowering
from tests.ops.expectations import Expectations, import_node

RNG = np.random.default_rng(0)


def normalize_groups(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, groups: int, epsilon: float) -> np.ndarray:
    grouped = x.astype(np.float64).reshape(x.shape[0], groups, -1)
    centered = grouped - grouped.mean(axis=2, keepdims=True)
    y = centered / np.sqrt((centered**2).mean(axis=2, keepdims=True) + epsilon)
    return (y * scale[:, None].astype(np.float64) + bias[:, None]).reshape(x.shape).astype(x.dtype)


def test_scale_and_bias_of_groups() -> None:
    """Several types, ranks and numbers of groups, with symbolic sizes, compared with opset 21's form."""
    case = Expectations(opset=18)
    for dtype, shape, groups, epsilon in (
        ("float32", (2, 6, 4, 3), 3, 1e-5),
        ("float32", (1, 4, 5), 1, 1e-2),
        ("float32", (3, 4, 5), 4, 1e-5),
        ("float64", (2, 4, 3), 2, 1e-5),
        ("float16", (2, 8, 3, 3), 2, 1e-5),
        ("float32", (2, 6), 2, 1e-5),
    ):
        x, scale, bias = (RNG.standard_normal(s).astype(dtype) for s in (shape, (groups,), (groups,)))
        dims = [["n", *shape[1:2], *(f"d{k}" for k in range(len(shape) - 2))], None, None]
        expected = normalize_groups(x, scale, bias, groups, epsilon)
        case.expect("GroupNormalization", [x, scale, bias], expected, dims=dims, num_groups=groups, epsilon=epsilon)
    case.check()


@pytest.mark.parametrize(
    ("shape", "vector", "groups", "message"),
    [
        ((2, 6, 3), (6,), 3, "6"),
        ((2, 6, 3), (3, 1), 3, "rank 2"),
        ((2, 7, 3), (4,), 4, "Reshape"),
        ((6,), (3,), 3, "Reshape"),
    ],
)
def test_refusals(shape: tuple[int, ...], vector: tuple[int, ...], groups: int, message: str) -> None:
    with pytest.raises(lowering.LoweringError, match=message):
        import_node(
            "GroupNormalization", [("float32", s) for s in (shape, vector, vector)], opset=18, num_groups=groups
        )
