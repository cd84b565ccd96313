"""LabelEncoder: every type of keys and values, compared with ONNX Runtime and the standard."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import lowering
from lowering.errors import NodeError

DOMAIN = "ai.onnx.ml"
STRING = onnx.TensorProto.STRING


def find_tensor_type(array: np.ndarray) -> int:
    return STRING if array.dtype == object else helper.np_dtype_to_tensor_dtype(array.dtype)


def make_encoder(
    x: np.ndarray, y_type: int, version: int = 4, constant: bool = False, **attributes: Any
) -> onnx.ModelProto:
    for name, value in attributes.items():
        attributes[name] = numpy_helper.from_array(value, name) if isinstance(value, np.ndarray) else value
    node = helper.make_node("LabelEncoder", ["x"], ["y"], domain=DOMAIN, **attributes)
    dims = [f"d{k}" for k in range(x.ndim)]
    inputs = [] if constant else [helper.make_tensor_value_info("x", find_tensor_type(x), dims)]
    constants = [numpy_helper.from_array(x, "x")] if constant else []
    graph = helper.make_graph(
        [node],
        "g",
        inputs,
        [helper.make_tensor_value_info("y", y_type, [*dims] if not constant else x.shape)],
        constants,
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, version)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def make_texts(*values: str) -> np.ndarray:
    return np.array(values, object)


# Elements, keys and values in lists or tensors, and a default.
FORMS: dict[str, tuple[np.ndarray, int, dict[str, Any]]] = {
    "int64 to float": (
        np.array([[3, 7], [8, -(2**62)]]), onnx.TensorProto.FLOAT,
        {"keys_int64s": [7, -(2**62), 3], "values_floats": [0.5, math.inf, -1.5], "default_float": 9.0},
    ),
    "float to int64": (
        np.array([1.5, -0.0, np.nan, np.inf, 2.0], np.float32), onnx.TensorProto.INT64,
        {"keys_floats": [math.inf, 0.0, math.nan, 1.5], "values_int64s": [5, 6, 7, 8]},
    ),
    "float without NaN to float": (
        np.array([[np.nan, 1.0, -np.inf]], np.float32), onnx.TensorProto.FLOAT,
        {"keys_floats": [1.0], "values_floats": [2.0]},
    ),
    "int64 to string": (
        np.array([2, 5, 2, 6]), STRING,
        {"keys_int64s": [5, 2], "values_strings": ["five", "zwölf"], "default_string": "none"},
    ),
    "int64 to string without default": (np.array([2, 5]), STRING, {"keys_int64s": [5], "values_strings": ["a"]}),
    "string to int64": (
        make_texts("b", "", "é", "other"), onnx.TensorProto.INT64,
        {"keys_strings": ["é", "b", ""], "values_int64s": [1, 2, 3], "default_int64": 40},
    ),
    "string to string": (
        make_texts("b", "x"), STRING, {"keys_strings": ["b"], "values_strings": ["x"], "default_string": "b"},
    ),
    "string to float": (make_texts("a", "c"), onnx.TensorProto.FLOAT, {"keys_strings": ["a"], "values_floats": [2.5]}),
    "float to string": (
        np.array([1.0, np.nan], np.float32), STRING, {"keys_floats": [math.nan, 1.0], "values_strings": ["nan", "one"]},
    ),
}  # fmt: skip

TENSORS: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, Any]] = {
    "int16": (np.array([4, 5, 4], np.int16), np.array([5], np.int16), np.array([1], np.int16), np.int16(-7)),
    "float64": (np.array([0.1, np.nan]), np.array([np.nan, 0.1]), np.array([1.0, 2.0]), np.float64(3)),
    "int32": (
        np.arange(9, dtype=np.int32), np.arange(9, 2, -1, dtype=np.int32), np.arange(7, dtype=np.int32), np.int32(3),
    ),
    "string": (make_texts("a", "b"), make_texts("b"), make_texts("z"), None),
    "one key": (np.array([1, 2]), np.array([2]), np.array([3]), None),
}  # fmt: skip


def check_encoder(x: np.ndarray, proto: onnx.ModelProto, want: np.ndarray) -> None:
    feeds = {"x": x} if proto.graph.input else {}
    actual = lowering.compile(proto).run(feeds)["y"]
    assert np.asarray(actual).dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(actual), want)


@pytest.mark.parametrize("constant", [False, True], ids=["of run", "constant"])
@pytest.mark.parametrize("form", FORMS)
def test_lists(form: str, constant: bool) -> None:
    """Version 2 treats NaN as version 4 does, although ONNX Runtime finds it in version 4 only."""
    x, y_type, attributes = FORMS[form]
    run = onnxruntime.InferenceSession(make_encoder(x, y_type, **attributes).SerializeToString()).run
    check_encoder(x, make_encoder(x, y_type, 2, constant, **attributes), np.asarray(run(None, {"x": x})[0]))


@pytest.mark.parametrize("form", TENSORS)
def test_tensors(form: str) -> None:
    x, keys, values, default = TENSORS[form]
    attributes = {"keys_tensor": keys, "values_tensor": values}
    if default is not None:
        attributes["default_tensor"] = np.asarray([default], values.dtype)
    table = list(zip(keys.tolist(), values.tolist()))
    fallback = (default if default is not None else -1) if values.dtype != object else "_Unused"
    want = [next((v for k, v in table if k == e or (k != k and e != e)), fallback) for e in x.tolist()]
    check_encoder(x, make_encoder(x, find_tensor_type(values), **attributes), np.array(want, values.dtype))


@pytest.mark.parametrize("x", [make_texts("b", "q", "a"), np.array([1, 2, -1])], ids=["string", "int64"])
def test_classes(x: np.ndarray) -> None:
    proto = make_encoder(x, onnx.TensorProto.INT64 if x.dtype == object else STRING, 1, classes_strings=["a", "b"])
    check_encoder(x, proto, np.array([1, -1, 0]) if x.dtype == object else make_texts("b", "_Unused", "_Unused"))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 64, 1001])
def test_many_keys(size: int) -> None:
    rng = np.random.default_rng(size)
    keys = rng.choice(2 * size + 1, size, replace=False)
    x = rng.integers(-2, 2 * size + 2, (3, 50))
    attributes = {"keys_tensor": keys, "values_tensor": np.arange(size, dtype=np.float32)}
    table = dict(zip(keys.tolist(), range(size)))
    want = np.array([table.get(e, 0) for e in x.ravel().tolist()], np.float32).reshape(x.shape)
    check_encoder(x, make_encoder(x, onnx.TensorProto.FLOAT, **attributes), want)


def test_scalar_and_repeated_key() -> None:
    """The last of equal keys counts."""
    x = np.array(4)
    check_encoder(x, make_encoder(x, onnx.TensorProto.INT64, keys_int64s=[4, 4], values_int64s=[1, 2]), np.array(2))


@pytest.mark.parametrize(
    "attributes, words",
    [
        ({"keys_int64s": [1, 2], "values_int64s": [1]}, "it has 2 keys and 1 values"),
        ({"keys_floats": [1.0], "values_int64s": [1]}, "input X is int64, and the keys are float32"),
        ({"values_int64s": [1]}, "it has 0 of the attributes keys_int64s"),
        ({"keys_int64s": [1], "values_int64s": [1], "values_floats": [1.0]}, "it has 2 of the attributes values"),
        (
            {"keys_int64s": [1], "values_tensor": np.array([1]), "default_tensor": np.array([1, 2])},
            r"attribute default_tensor is int64\[2\]",
        ),
        ({"keys_tensor": np.array([1], np.uint8), "values_int64s": [1]}, "attribute keys_tensor is uint8"),
    ],
)
def test_refusals(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(NodeError, match=words):
        lowering.compile(make_encoder(np.array([1]), onnx.TensorProto.INT64, **attributes))
