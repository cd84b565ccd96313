"""Many nodes in one model, each with its expected result: one compilation of all nodes saves time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (makes "bfloat16" a NumPy type name)
import numpy as np
import onnx
from onnx import helper

import lowering
from lowering.graph.loading.model import load_model
from lowering.importing.imported_model import ImportedModel
from lowering.importing.importer import import_model
from lowering.ops import lookup

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

# Relative to the result, or to the largest result where results cancel: some units in the last position.
_TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6, "float64": 1e-12}

Dims = Sequence[int | str]


def value_info(name: str, dtype: str, dims: Dims) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(dims))


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    opset: int,
    constants: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


class Expectations:
    """Nodes of one model with their inputs and expected results."""

    def __init__(self, opset: int = 25) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.feeds: dict[str, np.ndarray] = {}
        self.expected: dict[str, tuple[str, np.ndarray]] = {}

    def expect(
        self,
        operator: str,
        inputs: Sequence[np.ndarray | None],
        *expected: np.ndarray,
        dims: Sequence[Dims | None] | None = None,
        constant: Collection[int] = (),
        **attributes: Any,
    ) -> None:
        """Add a node of that operator with its expected arrays.

        dims gives the declared dimensions of the inputs, by default the sizes of the arrays. Names are symbolic,
        and belong to this node. The inputs at the positions `constant` are initializers."""
        k = len(self.nodes)
        names = []
        for j, array in enumerate(inputs):
            if array is None:
                names.append("")
                continue
            names.append(f"x{k}_{j}")
            if j in constant:
                self.constants.append(onnx.numpy_helper.from_array(array, names[-1]))
                continue
            declared = dims[j] if dims is not None and dims[j] is not None else array.shape
            own = [d if isinstance(d, int) else f"{d}{k}" for d in declared]  # type: ignore[union-attr]
            self.inputs.append(value_info(names[-1], array.dtype.name, own))
            self.feeds[names[-1]] = array
        results = [f"y{k}_{j}" for j in range(len(expected))]
        for name, array in zip(results, expected):
            array = np.asarray(array)
            self.outputs.append(value_info(name, array.dtype.name, [f"{name}_{axis}" for axis in range(array.ndim)]))
            shapes = [None if a is None else (a.dtype.name, a.shape) for a in inputs]
            self.expected[name] = f"{operator} {attributes} {shapes}", array
        self.nodes.append(helper.make_node(operator, names, results, **attributes))

    def check(self) -> None:
        """Compile and run the model, and compare."""
        proto = make_model(self.nodes, self.inputs, self.outputs, self.opset, self.constants)
        results = lowering.compile(proto).run(self.feeds)
        for name, (label, expected) in self.expected.items():
            assert_close(results[name], expected, label)


def assert_close(actual: np.ndarray, expected: np.ndarray, label: str) -> None:
    """Check that type and shape are equal, and values, or for floats close values."""
    assert (actual.dtype.name, actual.shape) == (expected.dtype.name, expected.shape), label
    tolerance = _TOLERANCE.get(expected.dtype.name)
    if tolerance is None:
        if "float" in expected.dtype.name:  # NumPy does not detect the NaN of small floats
            actual, expected = actual.astype(np.float32), expected.astype(np.float32)
        np.testing.assert_array_equal(actual, expected, err_msg=label)
        return
    wide = expected.astype(np.float64)
    finite = np.abs(wide[np.isfinite(wide)])
    atol = tolerance * 0.1 * min(1.0, float(finite.max())) if finite.size else 0.0
    np.testing.assert_allclose(actual.astype(np.float64), wide, rtol=tolerance, atol=atol, err_msg=label)


def import_node(
    operator: str, inputs: Sequence[tuple[str, Dims]], results: int = 1, opset: int = 25, **attributes: Any
) -> ImportedModel:
    """Import one node without compiling it, for errors of the import and for its form in Relax."""
    names = [f"x{k}" for k in range(len(inputs))]
    node = helper.make_node(operator, names, [f"y{k}" for k in range(results)], name="the_node", **attributes)
    graph_inputs = [value_info(n, dtype, dims) for n, (dtype, dims) in zip(names, inputs)]
    outputs = [helper.make_empty_tensor_value_info(f"y{k}") for k in range(results)]
    for output, (dtype, dims) in zip(outputs, [inputs[0] if inputs else ("float32", (1,))] * results):
        output.CopyFrom(value_info(output.name, dtype, [f"d{k}" for k in range(len(dims))]))
    return import_model(load_model(make_model([node], graph_inputs, outputs, opset)), lookup)
