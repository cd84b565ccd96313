"""The list of passes as a whole: opsets, weights, legality, sizes, and models without patterns."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import lowering
from lowering.commands.cli import main
from lowering.fusion import fuse
from lowering.graph.loading.model import load_model
from lowering.graph.rewriting.sizes import InferSizesPass
from tests.fusion.graphs import (
    check_fused,
    check_untouched,
    count_operators,
    draw_feeds,
    fuse_model,
    parse_graph,
    run_model,
)

ATTENTION = """
    (float[B, 2, S, 8] q, float[B, 2, T, 8] k, float[B, 2, T, 8] v) => (float[B, 2, S, 8] y) {
        kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v) }
"""


@pytest.mark.parametrize("opset, after", [(11, 24), (13, 24), (22, 24), (23, 23), (24, 24), (25, 25)])
def test_only_older_opsets_are_upgraded(opset: int, after: int) -> None:
    result = check_fused(parse_graph(ATTENTION.replace("axis = -1", "axis = 3"), opset), {"Attention": 1})
    assert result.opset_imports[""] == after


def test_a_model_without_patterns_comes_back_untouched() -> None:
    check_untouched(parse_graph("(float[B, S] x) => (float[B, S] y) { s = Softmax <axis = -1> (x) y = Relu (s) }", 13))
    check_untouched(
        parse_graph(
            "(float[B, 4, 4] x) => (float[B, 4, 4] y) { a = Dropout (x) s = Softmax (a) y = MatMul (s, a) }", 13
        )
    )


def test_the_passed_model_is_never_changed() -> None:
    model = load_model(parse_graph(ATTENTION))
    before = ir.to_proto(model).SerializeToString()
    assert fuse(model) is not model
    assert ir.to_proto(model).SerializeToString() == before


def test_fusing_twice_changes_nothing() -> None:
    once = fuse_model(parse_graph(ATTENTION))
    assert fuse(once) is once


def test_an_operator_that_cannot_be_upgraded_keeps_its_model() -> None:
    """BatchNormalization lost its attribute spatial in opset 9. The converter refuses: no newer opset can be used."""
    text = ATTENTION.replace("float[B, 2, T, 8] v)", "float[B, 2, T, 8] v, float[2, T, 8] a)")
    text = text.replace("y = MatMul", "y0 = BatchNormalization <spatial = 0> (v, a, a, a, a) y = MatMul")
    check_untouched(parse_graph(text.replace("axis = -1", "axis = 3"), 7))


def test_nodes_of_other_domains_stay() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]> m '
        + ATTENTION.replace("y = MatMul (p, v)", "g = MatMul (p, v) y = com.microsoft.QuickGelu <alpha = 1.5> (g)")
    )
    result = fuse(load_model(model))
    assert count_operators(result)["Attention"] == count_operators(result)["QuickGelu"] == 1
    inputs = draw_feeds(model)
    np.testing.assert_allclose(
        run_model(ir.to_proto(result), inputs)[0], run_model(model, inputs)[0], rtol=1e-5, atol=1e-6
    )


def test_patterns_in_the_branches_of_an_if() -> None:
    branch = "kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, kt) p = Softmax <axis = -1> (s) "
    model = parse_graph(f"""
        (float[B, 2, S, 8] q, float[B, 2, T, 8] k, float[B, 2, T, 8] v, bool c) => (float[B, 2, S, 8] y) {{
            y = If (c) <then_branch = a () => (float[B, 2, S, 8] u) {{ {branch} u = MatMul (p, v) }},
                        else_branch = b () => (float[B, 2, S, 8] w) {{ w = Neg (q) }}> }}
    """)
    result = fuse_model(model)
    assert [n.op_type for n in result.graph.all_nodes()].count("Attention") == 1
    inputs = draw_feeds(model) | {"c": np.array(True)}
    expected, actual = run_model(model, inputs)[0], run_model(ir.to_proto(result), inputs)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_weights_are_neither_copied_nor_read(tmp_path: Path) -> None:
    """64 MiB of external data: fusing allocates far less, and the initializer is the one that was loaded."""
    rows = 2**14
    text = f"(float[N, {rows}] x) => (float[N, 1024] y) {{ a = MatMul (x, w) s = Sigmoid (a) y = Mul (a, s) }}"
    path = tmp_path / "model.onnx"
    model = parse_graph(text, 13, {"w": np.ones((rows, 1024), np.float32)})
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    loaded = load_model(path)
    tracemalloc.start()
    result = fuse(loaded)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count_operators(result)["Swish"] == 1 and peak < 16 * 2**20
    assert result.graph.initializers["w"].const_value is loaded.graph.initializers["w"].const_value


def test_small_external_data_is_found(tmp_path: Path) -> None:
    """Exporters write scalars into the file of the weights, too."""
    model = parse_graph("(float[N, 8] x) => (float[N, 8] y) { a = Mul (x, w) s = Sigmoid (a) y = Mul (a, s) }", 13)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(8, dtype=np.float32), "w"))
    inputs = draw_feeds(model)
    expected = run_model(model, inputs)[0]
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    result = fuse(load_model(path))
    assert count_operators(result)["Swish"] == 1
    w = result.graph.initializers["w"].const_value
    assert w is not None
    np.testing.assert_array_equal(w.numpy(), np.arange(8))
    np.testing.assert_allclose(lowering.compile(path).run(inputs)["y"], expected, rtol=1e-5, atol=1e-6)


def test_an_initializer_that_is_an_input_stays_one() -> None:
    model = parse_graph(
        "(float[N, 70] x, float[70] w) => (float[N, 70] y) { a = Mul (x, w) s = Sigmoid (a) y = Mul (a, s) }", 13
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(70, dtype=np.float32), "w"))
    result = fuse_model(model)
    assert [v.name for v in result.graph.inputs] == ["x", "w"] and "w" in result.graph.initializers


def test_dump_dir_contains_the_fused_model(tmp_path: Path) -> None:
    text = "(float[N, 70] x) => (float[N, 70] y) { a = Mul (x, w) s = Sigmoid (a) y = Mul (a, s) }"
    model = parse_graph(text, 13, {"w": np.arange(70, dtype=np.float32)})
    onnx.save(model, tmp_path / "model.onnx")
    arguments = [
        "compile",
        str(tmp_path / "model.onnx"),
        "-o",
        str(tmp_path / "out"),
        "--dump-dir",
        str(tmp_path / "dump"),
    ]
    assert main(arguments) == 0
    dumped = onnx.load(tmp_path / "dump" / "fused.onnx")
    onnx.checker.check_model(dumped, full_check=True)
    assert [n.op_type for n in dumped.graph.node] == ["Mul", "Swish"]
    inputs = draw_feeds(model)
    np.testing.assert_allclose(
        run_model(dumped, inputs, reference=True)[0], run_model(model, inputs)[0], rtol=1e-5, atol=1e-5
    )


def test_check_counts_the_nodes_that_were_written() -> None:
    report = lowering.check(parse_graph(ATTENTION))
    assert report.ok and report.nodes == 4


# The tracing exporter writes this for expand, where -1 keeps a size.
FILLED = "n = Mul (e, m1) q = Equal (s, n) w = Where (q, e, s) y = Expand (x, w)"


@pytest.mark.parametrize(
    "nodes, shape",
    [
        ("s = Shape (x) y = Reshape (x, s)", "[B, S, 6]"),
        ("y = Reshape (x, split)", "[B, S, 2, 3]"),
        ("s = Shape <end = 1> (x) f = Concat <axis = 0> (s, m1) y = Reshape (x, f)", "[B, 6*S]"),
        ("y = Reshape (x, flat)", "[B*S, 6]"),
        ("s = Shape (x) i = Gather (s, i1) j = Mul (i, i2) k = Unsqueeze (j, zero) y = ConstantOfShape (k)", "[2*S]"),
        ("y = Concat <axis = 1> (x, x)", "[B, 2*S, 6]"),
        ("e = ConstantOfShape <value = int64[1] {1}> (one3) s = Shape (x) " + FILLED, "[B, S, 6]"),
        ("y = Slice (x, zero, b4, m1)", "[B, S, 4]"),
        ("s = Shape (x) i = Gather (s, i1) t = Range (i0, i, i1) y = Unsqueeze (t, zero)", "[1, S]"),
        ("t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (x, t)", "[B, S, S]"),
    ],
)  # fmt: skip
def test_sizes_are_followed_through_arithmetic(nodes: str, shape: str) -> None:
    arrays = {"split": [0, 0, 2, 3], "flat": [-1, 6], "m1": [-1], "one3": [3], "zero": [0], "b4": [4]}
    weights = {name: np.array(v) for name, v in arrays.items()} | {f"i{k}": np.array(k) for k in (0, 1, 2)}
    rank = shape.count(",") + 1
    model = ir.from_proto(
        parse_graph(
            f"(float[B, S, 6] x) => (float[{', '.join(f'z{k}' for k in range(rank))}] z) {{ {nodes} z = Neg (y) }}",
            18,
            weights,
        )
    )
    InferSizesPass()(model)
    value = next(v for n in model.graph for v in n.outputs if v.name == "y")
    assert str(value.shape) == shape.replace(" ", "")
