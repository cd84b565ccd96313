"""Gemm between two Reshapes becomes MatMul, where rows are provably unchanged."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.fusion.graphs import check_fused, check_untouched, parse_graph

RNG = np.random.default_rng(0)
WEIGHTS = {
    "w": RNG.standard_normal((6, 4)).astype("float32"),
    "wt": RNG.standard_normal((4, 6)).astype("float32"),
    "bias": RNG.standard_normal(4).astype("float32"),
    "row": RNG.standard_normal((1, 4)).astype("float32"),
    "one": np.float32(0.5),
    "rows": RNG.standard_normal((6, 4)).astype("float32"),
    "flat": np.array([-1, 6]),
    "apart": np.array([2, 3, 4]),
    "swapped": np.array([3, 2, 4]),
    "halves": np.array([-1, 3]),
    "heads": np.array([12, 3]),
    "heads3": np.array([2, 3, 2, 2]),
    "w3": RNG.standard_normal((3, 2)).astype("float32"),
}


def make_model(nodes: str, outputs: str = "float[2, 3, 4] y", inputs: str = "float[2, 3, 6] x") -> onnx.ModelProto:
    return parse_graph(f"({inputs}) => ({outputs}) {{ {nodes} }}", 23, WEIGHTS)


@pytest.mark.parametrize(
    ("gemm", "transposes"),
    [
        ("Gemm (f, w, bias)", 0),
        ("Gemm (f, w)", 0),
        ("Gemm <transB = 1> (f, wt, row)", 1),
        ("Gemm (f, w, one)", 0),
    ],
)
def test_gemm_between_reshapes(gemm: str, transposes: int) -> None:
    nodes = f"f = Reshape (x, flat) g = {gemm} y = Reshape (g, apart)"
    adds = int(gemm.count(",") == 2)
    check_fused(make_model(nodes), {"MatMul": 1, "Gemm": 0, "Reshape": 0, "Add": adds, "Transpose": transposes})


def test_symbolic_rows() -> None:
    """The shape is a Concat of Shape's results, as exporters write it; a residual follows."""
    nodes = """
    f = Reshape (x, flat)
    g = Gemm (f, w, bias)
    lead = Shape <start = 0, end = 2> (x)
    n = Constant <value_ints = [4]> ()
    shape = Concat <axis = 0> (lead, n)
    h = Reshape (g, shape)
    y = Add (h, z)
    """
    inputs = "float[B, S, 6] x, float[B, S, 4] z"
    check_fused(make_model(nodes, "float[B, S, 4] y", inputs), {"MatMul": 1, "Gemm": 0, "Reshape": 0, "Add": 2})


@pytest.mark.parametrize("batch", ["B", "2"])
def test_rows_of_heads(batch: str) -> None:
    nodes = """
    t = Transpose <perm = [0, 2, 1, 3]> (x)
    f = Reshape (t, flat)
    g = Gemm (f, w, bias)
    lead = Shape <start = 0, end = 2> (t)
    n = Constant <value_ints = [4]> ()
    shape = Concat <axis = 0> (lead, n)
    y = Reshape <allowzero = 1> (g, shape)
    """
    inputs = f"float[{batch}, 3, S, 2] x"
    check_fused(make_model(nodes, f"float[{batch}, S, 4] y", inputs), {"MatMul": 1, "Gemm": 0, "Reshape": 1, "Add": 1})


def test_several_read_the_rows() -> None:
    nodes = """
    f = Reshape (x, flat)
    g = Gemm (f, w)
    y = Reshape (g, apart)
    h = Gemm <transB = 1> (f, wt, bias)
    z = Reshape (h, apart)
    """
    check_fused(
        make_model(nodes, "float[2, 3, 4] y, float[2, 3, 4] z"), {"MatMul": 2, "Gemm": 0, "Reshape": 0, "Add": 1}
    )


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ("f = Reshape (x, flat) g = Gemm <alpha = 2.0> (f, w) y = Reshape (g, apart)", "float[2, 3, 4] y"),
        ("f = Reshape (x, flat) g = Gemm <beta = 2.0> (f, w, bias) y = Reshape (g, apart)", "float[2, 3, 4] y"),
        ("f = Reshape (x, flat) g = Gemm (f, w, rows) y = Reshape (g, apart)", "float[2, 3, 4] y"),
        ("f = Reshape (x, flat) g = Gemm (f, w) y = Reshape (g, swapped)", "float[3, 2, 4] y"),
        ("f = Reshape (x, flat) g = Gemm (f, w) y = Reshape (g, apart)", "float[2, 3, 4] y, float[6, 4] g"),
        ("f = Reshape (x, heads) g = Gemm (f, w3) y = Reshape (g, heads3)", "float[2, 3, 2, 2] y"),
        ("f = Reshape (x, halves) g = Gemm (f, w3) y = Reshape (g, apart)", "float[2, 3, 4] y"),
    ],
)
def test_refused(nodes: str, outputs: str) -> None:
    check_untouched(make_model(nodes, outputs))
