"""Sparse initializers and Constants, of both forms of indices, in graphs and in bodies; and outputs listed twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering

DIMS = (3, 4, 2)


def sparse(seed: int, form: str, dtype: str = "float32", name: str = "w") -> tuple[onnx.SparseTensorProto, np.ndarray]:
    rng = np.random.default_rng(seed)
    flat = np.sort(rng.permutation(24)[: rng.integers(0, 12)])
    values = rng.integers(1, 50, len(flat)).astype(dtype)
    dense = np.zeros(24, dtype)
    dense[flat] = values
    indices = flat if form == "flat" else np.stack(np.unravel_index(flat, DIMS), 1)
    tensors = numpy_helper.from_array(values, name), numpy_helper.from_array(indices.astype(np.int64), "at")
    return helper.make_sparse_tensor(*tensors, DIMS), dense.reshape(DIMS)


def model_of(tensor: onnx.SparseTensorProto, where: str, dtype: str = "float32") -> onnx.ModelProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    value = helper.make_tensor_value_info
    inputs, outputs = [value("x", kind, DIMS)], [value("y", kind, DIMS)]
    node = helper.make_node
    if where == "initializer":
        graph = helper.make_graph([node("Add", ["x", "w"], ["y"])], "g", inputs, outputs, sparse_initializer=[tensor])
    elif where == "constant":
        nodes = [node("Constant", [], ["c"], sparse_value=tensor), node("Add", ["x", "c"], ["y"])]
        graph = helper.make_graph(nodes, "g", inputs, outputs)
    elif where == "function":
        body = [node("Constant", [], ["c"], sparse_value=tensor), node("Add", ["a", "c"], ["b"])]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
        function = helper.make_function("local", "AddSparse", ["a"], ["b"], body, opsets[:1])
        graph = helper.make_graph([node("AddSparse", ["x"], ["y"], domain="local")], "g", inputs, outputs)
        return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
    else:
        body = [node("Constant", [], ["c"], sparse_value=tensor), node("Add", ["x", "c"], ["z"])]
        branch = helper.make_graph(body, "then", [], [value("z", kind, DIMS)])
        other = helper.make_graph([node("Identity", ["x"], ["o"])], "else", [], [value("o", kind, DIMS)])
        inputs.append(value("if", TensorProto.BOOL, []))
        nodes = [node("If", ["if"], ["y"], then_branch=branch, else_branch=other)]
        graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("where", ["initializer", "constant", "body", "function"])
@pytest.mark.parametrize(("form", "dtype"), [("flat", "float32"), ("by axis", "int64"), ("by axis", "float32")])
@pytest.mark.parametrize("as_file", [False, True])
def test_sparse_tensors(where: str, form: str, dtype: str, as_file: bool, tmp_path: Path) -> None:
    for seed in range(2):
        tensor, dense = sparse(seed, form, dtype)
        proto = model_of(tensor, where, dtype)
        before = proto.SerializeToString()
        onnx.save(proto, tmp_path / "m.onnx")
        feeds = {"x": np.random.default_rng(9).integers(0, 9, DIMS).astype(dtype)}
        feeds |= {"if": np.array(True)} if where == "body" else {}
        results = lowering.compile(tmp_path / "m.onnx" if as_file else proto).run(feeds)
        np.testing.assert_array_equal(results["y"], feeds["x"] + dense)
        assert proto.SerializeToString() == before


@pytest.mark.parametrize(
    ("dims", "indices", "why"),
    [
        (DIMS, [24], "index"), (DIMS, [-1], "index"), (DIMS, [[3, 0, 0]], "index"), (DIMS, [[0, 0, -1]], "index"),
        (DIMS, [[0, 0]], "ind"), (DIMS, [0, 1], "ind"), ((2**20, 2**20), [0], "more than 2 GiB"),
    ],
)  # fmt: skip
def test_sparse_tensors_that_are_none(dims: tuple[int, ...], indices: list, why: str) -> None:
    tensors = numpy_helper.from_array(np.ones(1, np.float32), "w"), numpy_helper.from_array(np.array(indices), "at")
    with pytest.raises(lowering.ModelError, match=why):
        lowering.compile(model_of(helper.make_sparse_tensor(*tensors, dims), "constant"))


def test_an_output_that_is_listed_twice() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float[n] y, float[n] z) { y = Exp(x) z = Neg(x) }'
    )
    model.graph.output.extend([model.graph.output[0], model.graph.output[1]])
    x = np.arange(3, dtype=np.float32)
    results = lowering.compile(model).run({"x": x})
    assert list(results) == ["y", "z"] and (results["z"] == -x).all()
    np.testing.assert_allclose(results["y"], np.exp(x), rtol=1e-6)
