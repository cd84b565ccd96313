"""RotaryEmbedding: layouts, partial and interleaved rotation, sources of angles, batches of 1, errors."""

from __future__ import annotations

import numpy as np
import pytest

import lowering
from tests.ops.expectations import Dims, Expectations, import_node
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)
B, H, S, D, P = 2, 3, 5, 8, 9


def rotate_expected(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: int, dim: int) -> np.ndarray:
    """Rotate x [B, H, S, D] by angles [B, S, dim / 2], as complex numbers times e^(i angle)."""
    wide, out = x.astype("float64"), x.astype("float64")
    turn = (cos.astype("float64") + 1j * sin.astype("float64"))[:, None]
    half = dim // 2
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, half), slice(half, dim))
    z = (wide[..., first] + 1j * wide[..., second]) * turn
    out[..., first], out[..., second] = z.real, z.imag
    return out.astype(x.dtype)


def add_nodes(
    case: Expectations, dtype: str, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray | None, **how: int
) -> None:
    """Add a node for X [B, H, S, D] and one for [B, S, H * D]. All sizes except those of heads are symbolic.

    The angles are cos and sin, or, with positions, cos[positions] and sin[positions].
    """
    x = RNG.standard_normal((B, H, S, D)).astype(dtype)
    angles = [c if positions is None else c[positions] for c in (cos, sin)]
    y = rotate_expected(x, *angles, how.get("interleaved", 0), how.get("rotary_embedding_dim", D))
    flat_x, flat_y = (np.ascontiguousarray(a.transpose(0, 2, 1, 3)).reshape(B, S, H * D) for a in (x, y))
    half, batch = cos.shape[-1], 1 if angles[0].shape[0] == 1 else "b"
    if positions is None:
        inputs, dims = [cos, sin], [(batch, "s", half), (batch, "t", half)]
    else:
        inputs, dims = [cos, sin, positions], [("p", half), ("q", "h"), (batch, "s")]
    case.expect("RotaryEmbedding", [x, *inputs], y, dims=[("b", H, "s", D), *dims], **how)
    case.expect("RotaryEmbedding", [flat_x, *inputs], flat_y, dims=[("b", "s", H * D), *dims], num_heads=H, **how)


PLAIN: dict[str, int] = {}
PARTIAL = {"rotary_embedding_dim": 4}
INTERLEAVED = {"interleaved": 1}


@pytest.mark.parametrize(
    "dtype, ways", [("float32", [PLAIN, PARTIAL, INTERLEAVED, {**PARTIAL, **INTERLEAVED}]), ("bfloat16", [PLAIN])]
)
def test_rotation(dtype: str, ways: list[dict[str, int]]) -> None:
    case = Expectations()
    for how in ways:
        half = how.get("rotary_embedding_dim", D) // 2
        cos, sin = (RNG.standard_normal((P, half)).astype(dtype) for _ in range(2))
        positions = RNG.integers(0, P, (B, S))
        for p in (positions, positions[:1]):
            add_nodes(case, dtype, cos, sin, p, **how)
            add_nodes(case, dtype, cos[p], sin[p], None, **how)
    case.check()


def test_negative_positions_count_from_the_end_of_the_cache() -> None:
    x, cos = RNG.standard_normal((1, 1, 3, 4)).astype("float32"), RNG.standard_normal((2, 2)).astype("float32")
    positions = np.array([[-2, 1, -1]])
    case = Expectations()
    case.expect("RotaryEmbedding", [x, cos, cos, positions], rotate_expected(x, cos[positions], cos[positions], 0, 4))
    case.check()


def test_positions_outside_the_cache_are_an_error() -> None:
    x, cos = RNG.standard_normal((1, 1, 3, 4)).astype("float32"), RNG.standard_normal((2, 2)).astype("float32")
    case = Expectations()
    case.expect("RotaryEmbedding", [x, cos, cos, np.array([[0, 1, 10**12]])], x)
    with raises("run.index_out_of_range"):
        case.check()


@pytest.mark.parametrize(
    "shapes, attributes, message",
    [
        ([(1, 2, 3, 5), (1, 3, 2), (1, 3, 2)], {}, "5 of 5 dimensions"),
        ([(1, 2, 3, 4), (1, 3, 4), (1, 3, 4)], {"rotary_embedding_dim": 8}, "8 of 4 dimensions"),
        ([(1, 2, 3, 4), (3, 2), (3, 2)], {}, "cos_cache has rank 2"),
        ([(1, 2, 3, 4), (1, 3, 3), (1, 3, 3)], {}, "number of angles differs between the inputs: 2 and 3"),
        ([(1, 2, 3, 4), (1, 4, 2), (1, 4, 2)], {}, "sequence length differs between the inputs: 3 and 4"),
        ([(3, 2, 3, 4), (2, 3, 2), (2, 3, 2)], {}, "batch size differs between the inputs: 2 and 3"),
        ([(1, 3, 8), (1, 3, 2), (1, 3, 2)], {}, "num_heads is 0"),
        ([(1, 3, 8), (1, 3, 2), (1, 3, 2)], {"num_heads": 3}, "num_heads is 3"),
        ([(1, 2, 3, "d"), (1, 3, 2), (1, 3, 2)], {}, "symbolic"),
    ],
)
def test_refusals(shapes: list[Dims], attributes: dict[str, int], message: str) -> None:
    with pytest.raises(lowering.NodeError, match=message):
        import_node("RotaryEmbedding", [("float32", shape) for shape in shapes], **attributes)
