"""Det of symbolic sizes, in every type, of matrices that need pivots, and of singular matrices."""

from __future__ import annotations

import numpy as np
import pytest

import lowering
from tests.ops.expectations import FLOATS, Expectations, import_node
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_determinants(dtype: str) -> None:
    case = Expectations()
    for shape in ((3, 3), (2, 1, 1), (2, 3, 5, 5), (4, 0, 0), (0, 2, 2)):
        x = RNG.standard_normal(shape).astype(dtype)
        want = np.asarray(np.linalg.det(x.astype(np.float64))).astype(dtype)
        case.expect("Det", [x], want, dims=[[*"abcd"[: len(shape) - 2], "m", "m"]])
        case.expect("Det", [x], want)
    case.check()


def test_pivots() -> None:
    """Zeros on the diagonal, an odd and an even permutation, tiny pivots next to large numbers, and rank 2 of 3."""
    tiny = np.asarray([[1e-20, 1, 0], [1, 1, 0], [0, 0, 1]], np.float32)
    twice = np.asarray([[1, 2, 3]] * 2 + [[0, 0, 1]])
    matrices = [np.eye(3)[[1, 0, 2]], np.eye(3)[[1, 2, 0]], tiny, np.ones((3, 3)), twice]
    case = Expectations()
    case.expect("Det", [np.asarray(matrices, np.float32)], np.asarray([-1, 1, -1, 0, 0], np.float32), dims=["nmm"])
    case.check()


def test_refusals() -> None:
    cases = (("n", "float32", "rank 1"), ((2, 3), "float32", "dimension 1"), ("nn", "int32", "int32"))
    for dims, dtype, message in cases:
        with pytest.raises(lowering.NodeError, match=message):
            import_node("Det", [(dtype, list(dims))])
    node = Expectations()
    node.expect("Det", [np.ones((2, 3), np.float32)], np.float32(0), dims=["ab"])
    with raises("run.size_mismatch"):
        node.check()
