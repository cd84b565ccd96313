"""Matmuls of dequantized bytes become integer matmuls; other matmuls, and those that may overflow int32, stay."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fusion.graphs import check_fused, check_untouched, count_operators, fuse_model, parse_graph

RNG = np.random.default_rng(0)
SCALES = {"s": np.array(0.03, np.float32), "z": np.array(113, np.uint8), "t": np.array([0.02], np.float32)}
SCALES |= {"zt": np.array([-7], np.int8), "rows": np.full(5, 0.02, np.float32), "half": np.array(0.03, np.float16)}
SCALES |= {"columns": RNG.uniform(0.01, 0.03, 6).astype(np.float32), "zeros": RNG.integers(-9, 9, 6).astype(np.int8)}
WEIGHTS = {
    **SCALES,
    "w": RNG.integers(-128, 128, (5, 6)).astype(np.int8),
    "turned": RNG.integers(-128, 128, (6, 5)).astype(np.int8),
    "c": RNG.standard_normal(6).astype(np.float32),
    "kernel": RNG.integers(-128, 128, (6, 2, 3, 3)).astype(np.int8),
    "deep": np.ones((40_000, 2), np.int8),
}
A = "a = DequantizeLinear (x, s, z)"
INPUT = "(uint8[B, 3, 5] x)"


@pytest.mark.parametrize(
    "b",
    [
        "b = DequantizeLinear (w, s)",
        "b = DequantizeLinear (w, t, zt)",
        "b = DequantizeLinear <axis = 1> (w, columns, zeros)",
        "b = DequantizeLinear <axis = -1> (w, columns)",
    ],
)
def test_matmul(b: str) -> None:
    result = check_fused(
        parse_graph(f"{INPUT} => (float[B, 3, 6] y) {{ {A} {b} y = MatMul (a, b) }}", 21, WEIGHTS),
        {"MatMulInteger": 1, "MatMul": 0, "DequantizeLinear": 0},
    )
    assert all("fused_from" in node.metadata_props for node in result.graph if node.op_type == "MatMulInteger")


def test_matmul_of_two_that_are_computed() -> None:
    nodes = f"{A} b = DequantizeLinear (v, t, zt) y = MatMul (a, b)"
    check_fused(parse_graph(f"(uint8[B, 3, 5] x, int8[B, 5, N] v) => (float[B, 3, N] y) {{ {nodes} }}", 21, WEIGHTS),
                {"MatMulInteger": 1, "MatMul": 0})  # fmt: skip


@pytest.mark.parametrize(
    ("b", "attributes"),
    [("w, columns", ""), ("turned, s", "<transB = 1>"), ("turned, t, zt", "<transB = 1>")],
)
@pytest.mark.parametrize("c", ["", ", c"])
def test_gemm(b: str, attributes: str, c: str) -> None:
    nodes = f"{A} b = DequantizeLinear <axis = 1> ({b}) y = Gemm {attributes} (a, b{c})"
    check_fused(
        parse_graph(f"(uint8[N, 5] x) => (float[N, 6] y) {{ {nodes} }}", 21, WEIGHTS), {"MatMulInteger": 1, "Gemm": 0}
    )


def test_gemm_with_a_scale_for_each_row_of_what_it_turns() -> None:
    nodes = f"{A} b = DequantizeLinear <axis = 0> (turned, columns, zeros) y = Gemm <transB = 1> (a, b, c)"
    check_fused(
        parse_graph(f"(uint8[N, 5] x) => (float[N, 6] y) {{ {nodes} }}", 21, WEIGHTS), {"MatMulInteger": 1, "Gemm": 0}
    )


@pytest.mark.parametrize("w", ["kernel, s", "kernel, columns", "kernel, columns, zeros"])
@pytest.mark.parametrize("c", ["", ", c"])
def test_conv(w: str, c: str) -> None:
    nodes = f"{A} b = DequantizeLinear <axis = 0> ({w}) y = Conv <pads = [1, 0, 1, 1], strides = [2, 1]> (a, b{c})"
    check_fused(parse_graph(f"(uint8[B, 2, 7, 8] x) => (float[B, 6, 4, 7] y) {{ {nodes} }}", 21, WEIGHTS),
                {"ConvInteger": 1, "Conv": 0})  # fmt: skip


@pytest.mark.parametrize(
    "nodes",
    [
        f"{A} b = Cast <to = 1> (w) y = MatMul (a, b)",
        f"{A} b = DequantizeLinear <axis = 0> (w, rows) y = MatMul (a, b)",
        "a = Cast <to = 1> (x) b = DequantizeLinear (w, s) y = MatMul (a, b)",
        f"{A} b = DequantizeLinear (w, s) y = Gemm <alpha = 2.0> (a, b)",
    ],
)
def test_other_matmuls_stay(nodes: str) -> None:
    shape = "(uint8[N, 5] x) => (float[N, 6] y)"
    check_untouched(parse_graph(f"{shape} {{ {nodes} }}", 21, WEIGHTS))


def test_accumulators_that_may_overflow_int32_stay() -> None:
    nodes = f"{A} b = DequantizeLinear (deep, s) y = MatMul (a, b)"
    check_untouched(parse_graph(f"(uint8[N, 40000] x) => (float[N, 2] y) {{ {nodes} }}", 21, WEIGHTS))
    nodes = f"{A} b = DequantizeLinear (v, t) y = MatMul (a, b)"
    check_untouched(parse_graph(f"(uint8[N, T] x, int8[T, 2] v) => (float[N, 2] y) {{ {nodes} }}", 21, WEIGHTS))


PROBABILITIES = {"ps": np.array(1 / 255, np.float32), "pz": np.array(0, np.uint8), "qs": np.array(0.003, np.float32)}
PROBABILITIES |= {"tiny": np.array(1e-7, np.float32), "other": np.array(0, np.uint8), "zero": np.array(0, np.float32)}
P, V = "p = Softmax <axis = -1> (s)", "w = DequantizeLinear (v, t, zt)"
CODES = "q = QuantizeLinear (p, ps, pz) d = DequantizeLinear (q, ps, pz)"
GUARD = "n = IsNaN (d) g = Where (n, zero, d) h = QuantizeLinear (g, qs, pz) a = DequantizeLinear (h, qs, pz)"
WEIGHTED = "(float[B, S, T] s, int8[B, T, 4] v) => (float[B, S, 4] y)"


@pytest.mark.parametrize("nodes", [f"{P} {CODES} {V} y = MatMul (d, w)", f"{P} {CODES} {GUARD} {V} y = MatMul (a, w)"])
def test_quantized_probabilities_do_not_overflow_int32(nodes: str) -> None:
    weights = {name: SCALES[name] for name in ("t", "zt")} | PROBABILITIES
    check_fused(parse_graph(f"{WEIGHTED} {{ {nodes} }}", 21, weights), {"MatMulInteger": 1, "MatMul": 0})


@pytest.mark.parametrize(
    "nodes",
    [
        f"p = Softmax <axis = 1> (s) {CODES} {V} y = MatMul (d, w)",
        f"p = Sigmoid (s) {CODES} {V} y = MatMul (d, w)",
        f"{P} q = QuantizeLinear (p, tiny, pz) d = DequantizeLinear (q, tiny, pz) {V} y = MatMul (d, w)",
        f"{P} q = QuantizeLinear (p, ps, pz) d = DequantizeLinear (q, ps, other) {V} y = MatMul (d, w)",
        f"{P} {CODES} n = IsNaN (d) g = Where (n, ps, d) h = QuantizeLinear (g, qs, pz) "
        f"a = DequantizeLinear (h, qs, pz) {V} y = MatMul (a, w)",
    ],
)
def test_accumulators_of_unknown_length_that_may_overflow_stay(nodes: str) -> None:
    weights = {name: SCALES[name] for name in ("t", "zt")} | PROBABILITIES
    assert not count_operators(fuse_model(parse_graph(f"{WEIGHTED} {{ {nodes} }}", 21, weights)))["MatMulInteger"]
