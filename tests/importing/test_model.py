"""The importer's results: reading, external data, functions, domains, folding, control flow."""

from __future__ import annotations

import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import lowering
from lowering import ops
from lowering.graph.loading.model import load_model
from lowering.importing.importer import import_model
from lowering.ops import lookup
from tests.support.error_codes import raises

HEADER = '<ir_version: 10, opset_import: ["" : 24]>'


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEADER} {text}")


@pytest.mark.parametrize("model", [b"", b"not a model", b"\x00" * 64])
def test_bytes_that_are_no_model(model: bytes) -> None:
    with pytest.raises(lowering.ModelError):
        load_model(model)


def test_illegal_model_says_what_the_checker_says() -> None:
    model = parse("m (float[N] x) => (float[N] y) { y = Add (x, nowhere) }")
    with raises("model.invalid_onnx"):
        load_model(model)


@pytest.mark.parametrize("as_file", [False, True])
def test_nodes_in_any_order(as_file: bool, tmp_path: Path) -> None:
    """Bodies included; weights stay in their file."""
    model = parse("""m (float[N] x, bool yes) => (float[N] y) <float[4] w = {1, 2, 3, 4}> {
        a = Neg (x)
        b = Add (a, w)
        y = If (yes) <then_branch = t () => (float[N] u) { c = Abs (b) u = Neg (c) },
                      else_branch = e () => (float[N] v) { v = Identity (b) }>
    }""")
    branch = model.graph.node[2].attribute[0].g
    for graph in (model.graph, branch):
        nodes = list(graph.node)[::-1]
        del graph.node[:]
        graph.node.extend(nodes)
    source: onnx.ModelProto | Path = model
    if as_file:
        source = tmp_path / "model.onnx"
        onnx.save(model, source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    result = lowering.compile(source).run({"x": np.float32([1, -2, 3, -4]), "yes": np.array(True)})["y"]
    np.testing.assert_array_equal(result, [0, -4, 0, -8])


def test_nodes_in_a_circle() -> None:
    model = parse("m (float[N] x) => (float[N] y) { a = Neg (x) b = Add (a, c) c = Abs (b) y = Neg (c) }")
    with raises("model.invalid_onnx"):
        load_model(model)


@pytest.mark.parametrize(("declared", "says"), [("5", "declared 5 along axis 0"), ("N, 1", "declared with 2 dim")])
def test_a_wrong_declaration_is_a_warning(declared: str, says: str) -> None:
    model = lowering.compile(parse(f"m (float[4] x) => (float[{declared}] y) {{ y = Neg (x) }}"))
    assert any(says in note for note in model.manifest.notes)
    assert model.outputs[0].dims == (4,)
    np.testing.assert_array_equal(model.run({"x": np.float32([1, 2, 3, 4])})["y"], [-1, -2, -3, -4])


def test_functions_with_an_operator_are_not_inlined() -> None:
    """Exporters ship a body with com.microsoft operators for runtimes that do not know them."""
    path = Path(__file__).parents[1] / "exports" / "decoders" / "qwen3_5_text.onnx"
    assert {"LinearAttention", "CausalConvWithState"} <= {function.name for function in onnx.load(path).functions}
    operators = [node.op_type for node in load_model(path).graph]
    assert operators.count("LinearAttention") == 1 and "Scan" not in operators
    assert "SkipSimplifiedLayerNormalization" not in operators and "RMSNormalization" in operators


def test_input_without_a_shape() -> None:
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    with raises("model.input_shape_missing"):
        lowering.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10))


def test_external_data_stays_in_its_file(tmp_path: Path) -> None:
    """A 64 MiB weight is mapped: importing the model allocates far less."""
    rows = 2**14
    weight = np.zeros((rows, 1024), np.float32)
    weight[rows - 1] = 1
    model = parse(f"m (float[N, {rows}] x) => (float[N, 1024] y) <float[{rows}, 1024] w> {{ y = MatMul (x, w) }}")
    del model.graph.initializer[:]
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    tracemalloc.start()
    imported = import_model(load_model(path), lookup)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20
    (stored,) = imported.weights.values()
    np.testing.assert_array_equal(stored[-1], 1)


@pytest.mark.slow
def test_weights_of_more_than_2_gib(tmp_path: Path) -> None:
    """Compiled, saved, loaded and run; loading maps them."""
    rows = 600_000
    model = parse(f"m (int64[N] i) => (float[N, 1024] y) <float[{rows}, 1024] table> {{ y = Gather (table, i) }}")
    del model.graph.initializer[:]
    (table := model.graph.initializer.add()).name = "table"
    table.data_type, table.data_location = TensorProto.FLOAT, TensorProto.EXTERNAL
    table.dims.extend([rows, 1024])
    for key, value in {"location": "table.bin", "offset": "0", "length": str(rows * 4096)}.items():
        entry = table.external_data.add()
        entry.key, entry.value = key, value
    table_file = np.memmap(tmp_path / "table.bin", mode="w+", dtype=np.float32, shape=(rows, 1024))  # a file of holes
    table_file[rows - 1] = 7
    table_file.flush()
    onnx.save(model, tmp_path / "model.onnx")
    lowering.compile(tmp_path / "model.onnx").save(tmp_path / "out")
    result = lowering.load(tmp_path / "out").run({"i": np.array([rows - 1, 0])})["y"]
    assert (result == np.array([[7], [0]])).all()


def test_missing_external_data_is_a_plain_error(tmp_path: Path) -> None:
    model = parse("m (float[N, 64] x) => (float[N, 64] y) <float[64, 64] w> { y = MatMul (x, w) }")
    del model.graph.initializer[:]
    model.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    with raises("model.invalid_onnx"):
        lowering.compile(path)


def test_initializer_that_is_also_an_input_is_its_default() -> None:
    model = parse("m (float[2] x, float[2] w) => (float[2] y) { y = Add (x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2], np.float32), "w"))
    module = lowering.compile(model)
    assert [t.name for t in module.inputs] == ["x"]
    np.testing.assert_array_equal(module.run({"x": np.zeros(2, np.float32)})["y"], [1, 2])


def test_model_local_functions_are_inlined() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 24, "local" : 1]>
        m (float[N] x) => (float[N] y) { y = local.twice_plus <by = 3.0> (x) }
        <domain: "local", opset_import: ["" : 24]>
        twice_plus <by> (x) => (y) { t = Add (x, x) c = Constant <value_float : float = @by> () y = Add (t, c) }
    """)
    y = lowering.compile(model).run({"x": np.arange(3, dtype=np.float32)})["y"]
    np.testing.assert_array_equal(y, [3, 5, 7])


def test_attention_of_another_domain_is_not_ours() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 24, "com.vendor" : 1]>
        m (float[1, 4, 16] x, float[16, 48] w, float[48] b) => (float[1, 4, 16] y) {
          [fused] y = com.vendor.Attention <num_heads = 2> (x, w, b)
        }
    """)
    with raises("node.operator_unsupported"):
        lowering.compile(model)
    assert ops.lookup("com.microsoft", "Attention", 1) is not ops.lookup("", "Attention", 23)
    assert ops.lookup("com.microsoft", "Reshape", 1) is None
    assert ops.lookup("ai.onnx", "Attention", 22) is None
    assert ops.lookup("", "Attention", 23) is ops.lookup("ai.onnx", "Attention", 23)


def test_lookup_takes_the_newest_version_not_above_the_opset() -> None:
    assert ops.lookup("", "Squeeze", 11) is not None
    assert ops.list_registered()["", "Slice"] == (1, 10)
    assert ops.lookup("", "Slice", 9) is ops.lookup("", "Slice", 1)
    assert ops.lookup("", "Slice", 9) is not ops.lookup("", "Slice", 10)
    assert ops.lookup("", "Slice", 24) is ops.lookup("", "Slice", 10)


def test_second_registration_names_both_locations() -> None:
    with pytest.raises(ValueError, match=r"Slice-10 is registered twice: .*slice\.py and .*test_model\.py"):
        ops.op("Slice", since=10)(lambda node: None)


def test_function_body_serves_an_operator_without_a_lowering() -> None:
    model = parse("m (float[N, 4] x) => (float[N, 4] y) { y = MeanVarianceNormalization <axes = [1]> (x) }")
    assert ops.lookup("", "MeanVarianceNormalization", 24) is None
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    np.testing.assert_allclose(lowering.compile(model).run({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)


# An operator without a lowering.
UNKNOWN = """
    m (float[3, 4, 5, 5] x, float[2, 5] rois) => (float[2, 4, 2, 2] y) {
        [odd] y = MaxRoiPool <pooled_shape = [2, 2]> (x, rois)
    }
"""


def test_no_compile_leaves_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = lowering.compile(parse("m (float[2] x) => (float[2] y) { y = Relu (x) }"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(lowering.NodeError):
        lowering.compile(parse(UNKNOWN))
    assert not list(tmp_path.iterdir())
    assert model.run({"x": np.ones(2, np.float32)})["y"].all()


def test_an_operator_without_lowering_is_named() -> None:
    with raises("node.operator_unsupported"):
        lowering.compile(parse(UNKNOWN))


def test_constant_subgraphs_become_one_weight() -> None:
    model = parse("""
        m (float[N, 16] x) => (float[N, 16] y) <float[16, 16] w> {
          t = Transpose <perm = [1, 0]> (w)
          s = Add (t, t)
          y = MatMul (x, s)
        }
    """)
    del model.graph.initializer[:]
    w = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    imported = import_model(load_model(model), lookup)
    (weight,) = imported.weights.values()
    np.testing.assert_array_equal(weight, 2 * w.T)


def test_an_onnx_ir_model_can_be_compiled() -> None:
    model = ir.from_proto(parse("m (float[N] x) => (float[N] y) { y = Neg (x) }"))
    np.testing.assert_array_equal(lowering.compile(model).run({"x": np.ones(2, np.float32)})["y"], [-1, -1])
