"""Attention whose batch and heads are one dimension, or none, becomes Attention: case 9 of the pattern."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fusion.graphs import check_fused, check_untouched, parse_graph

FLAT = "(float[N, S, 8] q, float[N, T, 8] k, float[N, T, 6] v"


@pytest.mark.parametrize(
    "scores, more",
    [
        ("s = Mul (a, c)", ""),
        ("s = Add (a, m)", ", float[N, S, T] m"),
        ("s = Add (a, m)", ", float[1, S, T] m"),
        ("s = Add (a, m)", ", float[S, T] m"),
        ("s = Add (a, m)", ", float[N, 1, T] m"),
    ],
)
def test_case_9_three_dimensions_without_heads(scores: str, more: str) -> None:
    text = f"{FLAT}{more}) => (float[N, S, 6] y) <float c = {{0.3}}> {{ kt = Transpose <perm = [0, 2, 1]> (k) "
    check_fused(
        parse_graph(text + f"a = MatMul (q, kt) {scores} p = Softmax <axis = -1> (s) y = MatMul (p, v) }}"),
        {"Attention": 1},
    )


@pytest.mark.parametrize(
    "more, mask", [("float[B, 1, S, T] m", "B"), ("float[2, S, T] m", "heads"), ("float[1, S, T] m", "")]
)
def test_case_9_three_dimensions_with_heads(more: str, mask: str) -> None:
    """ALiBi is added in three dimensions, the mask in four, as in BLOOM."""
    nodes = """
        q4 = Transpose <perm = [0, 2, 1, 3]> (q) k4 = Transpose <perm = [0, 2, 3, 1]> (k)
        v4 = Transpose <perm = [0, 2, 1, 3]> (v) s2 = Shape <start = 1, end = 2> (q) t2 = Shape <start = 1, end = 2> (k)
        b2 = Shape <end = 1> (q) qs = Concat <axis = 0> (m1, s2, eight) ks = Concat <axis = 0> (m1, eight, t2)
        vs = Concat <axis = 0> (m1, t2, six) q3 = Reshape (q4, qs) kt = Reshape (k4, ks) v3 = Reshape (v4, vs)
        a0 = MatMul (q3, kt) a = Add (a0, alibi) full = Concat <axis = 0> (b2, two, s2, t2) a4 = Reshape (a, full)
        s = Add (a4, m) p = Softmax <axis = -1> (s) flat = Concat <axis = 0> (m1, s2, t2) p3 = Reshape (p, flat)
        y3 = MatMul (p3, v3) ys = Concat <axis = 0> (b2, two, s2, six) y = Reshape (y3, ys)
    """
    inputs = "(float[B, S, 2, 8] q, float[B, T, 2, 8] k, float[B, T, 2, 6] v, float[N, 1, T] alibi, "
    weights = {n: np.array([i]) for n, i in {"m1": -1, "eight": 8, "six": 6, "two": 2}.items()}
    check_fused(
        parse_graph(f"{inputs}{more}) => (float[B, 2, S, 6] y) {{ {nodes} }}", 18, weights),
        {"Attention": 1, "Softmax": 0},
    )


@pytest.mark.parametrize("v_heads, fuses", [(2, True), (1, False)])
def test_case_9_values_of_four_dimensions(v_heads: int, fuses: bool) -> None:
    """As BLOOM with every size static: probabilities are not reshaped back. Sizes that broadcast are rejected."""
    nodes = """
        kt = Transpose <perm = [0, 2, 1]> (k) a0 = MatMul (q, kt) a = Add (a0, alibi) a4 = Reshape (a, full)
        s = Add (a4, m) p = Softmax <axis = -1> (s) y = MatMul (p, v)
    """
    inputs = f"float[4, 3, 8] q, float[4, 5, 8] k, float[2, {v_heads}, 5, 6] v, float[4, 1, 5] alibi"
    text = f"({inputs}, float[2, 1, 3, 5] m) => (float[2, 2, 3, 6] y) {{ {nodes} }}"
    source = parse_graph(text, 18, {"full": np.array([2, 2, 3, 5])})
    if fuses:
        check_fused(source, {"Attention": 1, "Softmax": 0, "MatMul": 0})
    else:
        check_untouched(source)


def test_case_9_sizes_taken_from_the_scores() -> None:
    """The shape of the probabilities gives their flat shape: reading the shape does not count as a reader."""
    nodes = """
        kt = Transpose <perm = [0, 2, 1]> (k) a = MatMul (q, kt) sh = Shape (a) rest = Slice (sh, one, three)
        full = Concat <axis = 0> (m1, two, rest) s = Reshape (a, full) p = Softmax <axis = -1> (s)
        psh = Shape (p) prest = Slice (psh, two, four) flat = Concat <axis = 0> (m1, prest) p3 = Reshape (p, flat)
        y = MatMul (p3, v)
    """
    weights = {n: np.array([i]) for n, i in {"m1": -1, "one": 1, "two": 2, "three": 3, "four": 4}.items()}
    source = parse_graph(f"{FLAT}) => (float[N, S, 6] y) {{ {nodes} }}", 18, weights)
    check_fused(source, {"Attention": 1, "Softmax": 0, "MatMul": 0})
