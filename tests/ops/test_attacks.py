"""Indices and sizes from data: an error that names the node, or the result of the reference; never foreign memory.
Each operator is attacked in a process of its own, its inputs between unreadable pages."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import lowering
from tests.support.error_codes import raises

from .attacks import ATTACKS

ROOT = Path(__file__).parents[2]

# Several operators share a child process: its start takes as long as its cases.
GROUPS = [list(ATTACKS)[k::6] for k in range(6)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: "-".join(names))
def test_attacks(names: list[str]) -> None:
    runs = f"for name in {names}: [run_attack(attack) for attack in ATTACKS[name]]"
    code = f"from tests.ops.attacks import ATTACKS\nfrom tests.ops.operator_attack import run_attack\n{runs}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize(
    "body, text",
    [
        ("s = Constant<value_ints=[4294967296, 4294967296, 4]>() y = Expand(x, s)", "larger than any memory"),
        ("s = Constant<value_ints=[2305843009213693952, 2]>() y = ConstantOfShape(s)", "larger than any memory"),
        ("s = Constant<value_ints=[-2, 3]>() y = ConstantOfShape(s)", "one of which is negative"),
        ("s = Constant<value_ints=[4611686018427387905, 4, 1]>() y = Reshape(x, s)", "cannot be reshaped to"),
        ("a = Constant<value_int=0>() d = Constant<value_float=0.0>() f = Cast<to=1>(a) y = Range(f, f, d)", "is 0"),
        ("i = Constant<value_ints=[4]>() y = Gather(x, i)", "holds 4, and dimension 0 of input 'x' allows -4 to 3"),
        ("s = Constant<value_ints=[5]>() e = Constant<value_ints=[9]>() y = Slice(x, s, e, s)", "axes entry 5"),
        ("c = Constant<value_int=5>() y = CumSum(x, c)", "axis 5 does not exist"),
        (
            "i = Constant<value = int64[1, 9] {0, 0, 0, 0, 0, 0, 0, 0, 0}>() y = ScatterElements(t, i, u)",
            "is 9, and that",
        ),
    ],
)
def test_provably_illegal_models_are_rejected_at_once(body: str, text: str) -> None:
    kind = (
        "float[A, B, C]"
        if "Reshape" in body or "Expand" in body
        else "float[A, B]"
        if "[5]" not in body
        else "float[A]"
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[4] x, float[3, 2] t, float[1, 9] u) => ({kind} y) {{ {body} }}"""
    )
    begin = time.perf_counter()
    findings = lowering.check(model).findings
    assert any(text in f"{f.what} {f.remedy}" for f in findings), findings
    assert time.perf_counter() - begin < 5


def test_a_large_recipe_takes_no_memory_before_the_run() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[1] x) => (float[M, N] y) { s = Constant<value_ints=[1048576, 1048576]>() y = ConstantOfShape(s) }"""
    )
    begin = time.perf_counter()
    compiled = lowering.compile(model)
    assert time.perf_counter() - begin < 20
    with raises("run.out_of_memory"):
        compiled.run({"x": np.zeros(1, np.float32)})


def test_matmuls_of_sizes_of_empty_inputs_do_not_wrap() -> None:
    """[n, 0] times [0, m] is [n, m] for any n and m."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, K] a, float[K, M] b) => (float[N, M] y) { y = MatMul(a, b) }"""
    )
    compiled = lowering.compile(model)
    for n, m in [(2**32, 2**32), (2**31, 2**32 + 1)]:
        with raises("run.out_of_memory"):
            compiled.run({"a": np.zeros((n, 0), np.float32), "b": np.zeros((0, m), np.float32)})


def test_indices_made_of_positions_are_not_checked() -> None:
    """Indices with provable bounds are not checked; indices from data are scanned once."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N] x, int64[N] i) => (float[N] reversed, float[N] clipped, float[N] free) {
            zero = Constant<value_int=0>() one = Constant<value_int=1>() s = Shape(x) n = Squeeze(s)
            p = Range(zero, n, one) last = Sub(n, one) q = Sub(last, p) reversed = Gather(x, q)
            low = Max(i, zero) c = Min(low, last) clipped = Gather(x, c)
            free = Gather(x, i)
        }"""
    )
    modules: dict[str, object] = {}
    compiled = lowering.compile(model, dump=modules.__setitem__)
    assert str(modules["legalize"]).count("lowering_check_indices") == 3
    assert str(modules["prove_indices"]).count("lowering_check_indices") == 1
    x = np.arange(5, dtype=np.float32)
    results = compiled.run({"x": x, "i": np.array([0, 4, -1, -5, 2])})
    np.testing.assert_array_equal(results["reversed"], x[::-1])
    np.testing.assert_array_equal(results["clipped"], x[[0, 4, 0, 0, 2]])
    np.testing.assert_array_equal(results["free"], x[[0, 4, -1, -5, 2]])


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 4] x, int64[M] i) => (float[M, 4] y) { y = Gather(x, i) }"""
    )
    compiled = lowering.compile(model)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for _ in range(20):
        with raises("run.index_out_of_range"):
            compiled.run({"x": x, "i": np.array([0, 7])})
        np.testing.assert_array_equal(compiled.run({"x": x, "i": np.array([1])})["y"], x[[1]])


_THREE = "v = Constant<value_floats=[1.0, 2.0, 3.0]>()"


@pytest.mark.parametrize(
    "body, text",
    [
        (f"{_THREE} y = InstanceNormalization(x, v, v)", "is 3, and must be 2"),
        (f"{_THREE} y = BatchNormalization(x, v, v, v, v)", "is 3, and must be 2"),
        (f"{_THREE} y = GroupNormalization<num_groups=2>(x, v, v)", "is 3, and must be 2"),
        ("w = Constant<value = float[3, 2, 2] {1,2,3,4,5,6,7,8,9,10,11,12}>() b = Constant<value_floats=[1.0]>()"
         "y = Conv(x, w, b)", "is 1, and must be 3"),
        ("w = Constant<value = float[3, 2, 1] {1,2,3,4,5,6}>() y = Conv<kernel_shape=[2]>(x, w)",
         "kernel_shape is [2]"),
        ("y = MaxPool<kernel_shape=[9]>(x)", "the window covers 9 elements along axis 2"),
        ("y = MaxPool<kernel_shape=[2], strides=[0]>(x)", "attribute strides is [0]"),
        ("s = Constant<value = float[2, 2, 4] {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}>() y = PRelu(x, s)",
         "does not broadcast to"),
    ],
)  # fmt: skip
def test_splits_that_do_not_fit_the_data_are_rejected(body: str, text: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[1, 2, 4] x) => (float[A, B, C] y) {{ {body} }}"""
    )
    findings = lowering.check(model).findings
    assert any(text in f"{f.what} {f.remedy}" for f in findings), findings
