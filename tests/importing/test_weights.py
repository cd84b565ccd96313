"""compile(weights=...): constant matrices of matmuls in fewer bits, what it costs, and what is left alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import lowering
from lowering.checking.trial import VerificationTrial
from lowering.choices import Precision, Scheme
from lowering.commands.options import add_weights_option, parse_schemes
from lowering.compiling.options import CompileOptions
from lowering.importing.quantized_matrix import quantize_matrix
from tests.support.error_codes import raises


def perceptron(rng: np.random.Generator) -> onnx.ModelProto:
    """Table -> MatMul, Gelu -> Gemm with a transposed weight -> MatMul with too few columns to be packed."""
    shapes = {"table": (50, 96), "up": (96, 150), "down": (70, 150), "bias": (70,), "last": (70, 2)}
    arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "up"], ["a"]),
        helper.make_node("Gelu", ["a"], ["b"]),
        helper.make_node("Gemm", ["b", "down", "bias"], ["c"], transB=1, alpha=0.01),
        helper.make_node("MatMul", ["c", "last"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n"])],
        [
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size])
            for name, size in (("c", 70), ("y", 2))
        ],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def replaced(model: onnx.ModelProto, change: dict[str, Callable[[np.ndarray], np.ndarray]]) -> onnx.ModelProto:
    """The model with other initializers."""
    new = onnx.ModelProto()
    new.CopyFrom(model)
    for k, tensor in enumerate(new.graph.initializer):
        if tensor.name in change:
            array = change[tensor.name](numpy_helper.to_array(tensor))
            new.graph.initializer[k].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))
    return new


ROUNDED = {
    "f16": lambda w: w.astype(np.float16).astype(np.float32),
    "int8": lambda w: quantize_matrix(w, 8).array(),
    "int4": lambda w: quantize_matrix(w, 4).array(),
}


@pytest.mark.parametrize(("scheme", "limit"), [("f16", 0.7), ("int8", 0.5), ("int4", 0.4)])
def test_matmuls_of_compressed_weights(scheme: Scheme, limit: float, tmp_path: Path) -> None:
    """As with the rounded weights, up to rounding; smaller; said in a note."""
    rng = np.random.default_rng(0)
    model = perceptron(rng)
    module = lowering.compile(model, weights=scheme)
    module.save(tmp_path / "out")
    size = (tmp_path / "out" / "weights.bin").stat().st_size
    assert size < limit * sum(numpy_helper.to_array(tensor).nbytes for tensor in model.graph.initializer)
    (note,) = module.manifest.notes
    assert note.startswith(f"2 constant matrices of matmuls are {scheme}")

    rounded = ROUNDED[scheme]
    same = replaced(model, {"up": rounded, "down": lambda w: rounded(w.T).T})
    ids = {"ids": rng.integers(0, 50, 7)}
    for actual, expected in zip(module.run(ids).values(), ReferenceEvaluator(same).run(None, ids)):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("scheme", "name", "limit"), [("f16", "float16", 5e-4), ("int8", "int8", 4e-3), ("int4", "int8", 4e-3)]
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tables_are_quantized_by_rows(scheme: Scheme, name: str, limit: float, dtype: str, tmp_path: Path) -> None:
    """Also one that a matmul reads as well; wrong ids are errors as before, and zeros stay zeros."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        tied (int64[N] ids) => (T[N, 96] x, T[N, 500] y, T[500, 96] same) {
          x = Gather (table, ids)
          across = Transpose (table)
          y = MatMul (x, across)
          same = Identity (table)
        }"""
    model = onnx.parser.parse_model(text.replace("T[", {"float32": "float[", "float16": "float16["}[dtype]))
    table = np.random.default_rng(0).standard_normal((500, 96)).astype(dtype)
    table[3] = 0
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    before = onnx.ModelProto.FromString(model.SerializeToString())
    module = lowering.compile(model, weights=scheme)
    assert model == before
    smaller = scheme != "f16" or dtype == "float32"
    assert any(note.startswith(f"1 table of embeddings is {name}") for note in module.manifest.notes) is smaller
    ids = np.array([499, 3, -500, 0, -1])
    x, y, same = module.run({"ids": ids}).values()
    assert x.dtype == y.dtype == np.dtype(dtype) and (same == table).all() and not x[1].any()
    largest = np.abs(table[ids]).max(axis=1, keepdims=True)
    assert (np.abs(x.astype(np.float64) - table[ids]) <= (limit + 5e-4) * largest).all()
    with raises("run.index_out_of_range"):
        module.run({"ids": np.array([500])})


def test_angles_are_no_embeddings() -> None:
    """Cosines and sines of a rotary embedding, looked up by position."""
    text = """<ir_version: 10, opset_import: ["" : 23]>
        m (float[B, 2, T, 64] x, int64[B, T] at) => (float[B, 2, T, 64] y) {
          c = Gather (cos, at)
          cut = Slice (c, start, end, axis)
          s = Gather (sin, at)
          y = RotaryEmbedding (x, cut, s)
        }"""
    model = onnx.parser.parse_model(text)
    angles = np.arange(600)[:, None] / 100 ** (np.arange(32) / 32)
    arrays = {"cos": np.cos(angles).astype("f"), "sin": np.sin(angles).astype("f")}
    arrays |= {"start": np.array([0]), "end": np.array([32]), "axis": np.array([2])}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    module = lowering.compile(model, weights="int8")
    assert not any("embeddings" in note for note in module.manifest.notes)
    call = {"x": np.random.default_rng(0).standard_normal((1, 2, 3, 64), "f"), "at": np.array([[5, 599, 0]])}
    (want,) = ReferenceEvaluator(model).run(None, call)
    np.testing.assert_allclose(module.run(call)["y"], want, atol=1e-5)


def test_a_table_of_values_that_int8_cannot_represent_stays() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (int64[N] ids) => (float[N, 96] x) { x = Gather (table, ids) }'
    )
    table = np.full((500, 96), 1e6, np.float32)
    table[2, 2] = np.inf
    for scheme, stays in (("int8", True), ("f16", True)):
        del model.graph.initializer[:]
        model.graph.initializer.append(numpy_helper.from_array(table, "table"))
        module = lowering.compile(model, weights=scheme)
        np.testing.assert_array_equal(module.run({"ids": np.array([2, 7])})["x"], table[[2, 7]])
        assert stays is not any("tables" in note or "table of" in note for note in module.manifest.notes)


def test_verify_shows_what_it_costs() -> None:
    """Scales that float16 cannot represent are float32."""
    model = replaced(
        perceptron(np.random.default_rng(0)), {"down": lambda w: w * np.float32(1e-9), "bias": lambda w: w * 0}
    )
    comparisons = lowering.verify(model, weights="int4").comparisons
    assert all(0.01 < c.rms < 0.3 for c in comparisons)


def test_values_that_float16_cannot_represent_stay() -> None:
    rng = np.random.default_rng(0)
    model = replaced(perceptron(rng), {"up": lambda w: w * 1e6})
    module = lowering.compile(model, weights="f16")
    assert "1 constant matrices" in module.manifest.notes[0] and "1 could not be" in module.manifest.notes[0]
    ids = {"ids": rng.integers(0, 50, 5)}
    for actual, expected in zip(module.run(ids).values(), ReferenceEvaluator(model).run(None, ids)):
        np.testing.assert_allclose(actual, expected, rtol=0.02, atol=0.02 * np.abs(expected).max())


def test_unknown_scheme() -> None:
    unknown: Any = "int3"
    with raises("weights.scheme_unknown"):
        lowering.compile(perceptron(np.random.default_rng(0)), weights=unknown)


def test_schemes_by_names() -> None:
    """The first pattern that matches decides, by the name of an initializer or of a node; the table has one, too."""
    rng = np.random.default_rng(0)
    model = perceptron(rng)
    model.graph.node[3].name = "layers.1.down_proj"
    module = lowering.compile(model, weights={"*.down_proj": "int8", "ta*": None, "*": "int4"})
    assert module.manifest.scheme == "int4"
    int8, int4 = module.manifest.notes
    assert int4.startswith("1 constant matrices of matmuls are int4") and int8.startswith("1 constant matrices of")
    same = replaced(model, {"up": ROUNDED["int4"], "down": lambda w: ROUNDED["int8"](w.T).T})
    ids = {"ids": rng.integers(0, 50, 7)}
    for actual, expected in zip(module.run(ids).values(), ReferenceEvaluator(same).run(None, ids)):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_what_no_pattern_matches_stays() -> None:
    model = perceptron(np.random.default_rng(0))
    (note,) = lowering.compile(model, weights={"down": "int4"}).manifest.notes
    assert note.startswith("1 constant matrices of matmuls are int4")
    assert not lowering.compile(model, weights={"up": None}).manifest.notes


def test_one_matrix_in_two_schemes() -> None:
    """A matrix that two nodes multiply by is stored once for each scheme."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        m (float[N, 64] x) => (float[N, 96] y, float[N, 96] z) {
          [first] y = MatMul (x, w)
          double = Add (x, x)
          [second] z = MatMul (double, w)
        }"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 96), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    x = rng.standard_normal((5, 64), np.float32)
    y, z = lowering.compile(model, weights={"second": "int4", "first": "int8"}).run({"x": x}).values()
    np.testing.assert_allclose(y, x @ ROUNDED["int8"](w), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(z, 2 * x @ ROUNDED["int4"](w), rtol=1e-4, atol=1e-4)


def test_schemes_by_pytorch_modules() -> None:
    """Exporters of PyTorch state the paths of modules as a property of each node."""
    model = perceptron(np.random.default_rng(0))
    scopes = model.graph.node[1].metadata_props.add()
    scopes.key, scopes.value = "pkg.torch.onnx.name_scopes", "['', 'model', 'model.mlp', 'linear_3']"
    (note,) = lowering.compile(model, weights={"model.mlp": "int8"}).manifest.notes
    assert note.startswith("1 constant matrices of matmuls are int8")


def test_a_pattern_that_matches_nothing() -> None:
    with raises("weights.pattern_unmatched", "Similar names are .*down"):
        lowering.compile(perceptron(np.random.default_rng(0)), weights={"dwon": "int8", "*": "int4"})


def test_verify_writes_the_schemes_of_a_reproducer() -> None:
    options = CompileOptions(weights={"lm_head*": None, "*": "int8"})
    trial = VerificationTrial("reference", None, None, options)
    assert [*trial.list_options()] == ["--weights", "lm_head*=none", "--weights", "int8"]
    assert parse_schemes(["lm_head*=none", "int8"]) == options.weights
    assert parse_schemes([]) is None
    with raises("argument.weights_repeated"):
        parse_schemes(["*=int4", "int8"])
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_weights_option(parser)
    for text in ("int5", "lm_head*", "=int8", "a:int8"):
        with pytest.raises(argparse.ArgumentError, match="write SCHEME or NAME=SCHEME"):
            parser.parse_args(["--weights", text])


def test_a_pattern_after_that_of_all() -> None:
    with raises("weights.pattern_unreached"):
        CompileOptions(weights={"*": "int8", "lm_head": "int4"})


def two_matmuls(second: str) -> onnx.ModelProto:
    """Two matmuls, by a [64, 96] and b [64, 96], the second by the nodes of `second`."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        m (float[N, 64] x) => (float[N, 96] y, float[N, 96] z) {
          [mm] y = MatMul (x, a)
          double = Add (x, x)
          SECOND
        }"""
    model = onnx.parser.parse_model(text.replace("SECOND", second))
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((64, 96), np.float32) for name in "ab"}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def test_nodes_of_one_name() -> None:
    model = two_matmuls("[mm] z = MatMul (double, b)")
    for weights, large in (({"a": "int8", "b": None}, "a"), ({"a": None, "b": "int8"}, "b")):
        module = lowering.compile(model, weights=weights)
        x = np.random.default_rng(1).standard_normal((5, 64), np.float32)
        arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        arrays[large] = ROUNDED["int8"](arrays[large])
        y, z = module.run({"x": x}).values()
        np.testing.assert_allclose(y, x @ arrays["a"], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(z, 2 * x @ arrays["b"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "second",
    [
        "c = Mul (b, b) [last] z = MatMul (double, c)",
        "c = Transpose <perm = [1, 0]> (b) [last] z = Gemm <transB = 1> (double, c)",
        "c = Concat <axis = 0> (b, b) d = Concat <axis = 1> (double, double) [last] z = MatMul (d, c)",
    ],
)
@pytest.mark.parametrize("pattern", ["b", "last"])
def test_constants_that_nodes_compute(second: str, pattern: str) -> None:
    """They have the names of what they are computed from."""
    (note,) = lowering.compile(two_matmuls(second), weights={pattern: "int8"}).manifest.notes
    assert note.startswith("1 constant matrices of matmuls are int8")


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_names_stay_in_another_precision(precision: Precision) -> None:
    model = two_matmuls("[last] z = MatMul (double, b)")
    notes = lowering.compile(model, weights={"b": "int8", "*": "int4"}, precision=precision).manifest.notes
    assert any(note.startswith("1 constant matrices of matmuls are int8") for note in notes)
    assert any(note.startswith("1 constant matrices of matmuls are int4") for note in notes)


def test_names_of_experts() -> None:
    """Matrices that are stacked for a grouped matmul have the names of all experts."""
    path = Path(__file__).parents[1] / "exports" / "decoders" / "mixtral.onnx"
    rest = lowering.compile(path, weights={"*experts*": None, "*": "int8"}).manifest.weights
    assert not any("grouped" in spec.name and "int8" in spec.name for spec in rest)
    assert any("int8" in spec.name for spec in rest)
    experts = lowering.compile(path, weights={"*experts*": "int8"}).manifest.weights
    assert any("grouped_int8" in spec.name for spec in experts)


def test_names_of_rewritten_nodes() -> None:
    """A Gemm between reshapes becomes a matmul of all dimensions, with the name and the modules of the Gemm."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        m (float[B, T, 64] x) => (float[B, T, 96] y) {
          rows = Reshape (x, flat)
          [mm] wide = Gemm <transB = 1> (rows, w, bias)
          y = Reshape (wide, back)
        }"""
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    scopes = model.graph.node[1].metadata_props.add()
    scopes.key, scopes.value = "pkg.torch.onnx.name_scopes", "['', 'model.up', 'linear']"
    arrays = {"w": rng.standard_normal((96, 64), np.float32), "bias": rng.standard_normal(96, np.float32)}
    arrays |= {"flat": np.array([-1, 64]), "back": np.array([2, -1, 96])}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    for pattern in ("mm", "model.up", "w"):
        (note,) = lowering.compile(model, weights={pattern: "int8"}, dims={"B": 2}).manifest.notes
        assert note.startswith("1 constant matrices of matmuls are int8")


def test_a_scheme_that_compresses_nothing_is_noted() -> None:
    (note,) = lowering.compile(perceptron(np.random.default_rng(0)), weights={"last": "int8"}).manifest.notes
    assert note.startswith("0 constant matrices of matmuls are int8")
    with raises("weights.pattern_unmatched"):
        lowering.compile(perceptron(np.random.default_rng(0)), weights={"bias": "int8"})
