"""Nodes of com.microsoft in one model that onnxruntime and the compiler both run: equal results on random inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

import lowering
from lowering.graph.loading.model import load_model
from lowering.importing.imported_model import ImportedModel
from lowering.importing.importer import import_model
from lowering.ops import lookup

from ..expectations import Dims, value_info

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3}  # of the largest element of the result

Select = Callable[[list[np.ndarray]], list[np.ndarray]]


def draw_factors(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Draw bytes that uint8 is multiplied by, such that onnxruntime is exact on every machine.
    Without dot products of bytes it adds two matmuls in 16 bits, which saturate where int8 has more than 7 bits."""
    low, high = (0, 255) if dtype == "uint8" else (-64, 63)
    return rng.integers(low, high, shape, dtype=dtype, endpoint=True)


def opsets(opset: int) -> list[onnx.OperatorSetIdProto]:
    return [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]


class Comparison:
    """Nodes with their inputs. One compilation of all nodes saves time."""

    def __init__(self, opset: int = 21) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.types: dict[str, tuple[str, Dims | None]] = {}
        self.feeds: dict[str, np.ndarray] = {}
        self.cases: list[tuple[str, list[str], Select, float]] = []

    def add(
        self,
        operator: str,
        inputs: Sequence[np.ndarray | None],
        outputs: Sequence[str | None] = ("",),
        dims: dict[int, Dims] | None = None,
        constant: Collection[int] = (),
        select: Select = lambda results: results,
        tolerance: float = 1.0,
        domain: str = "com.microsoft",
        output_dims: dict[int, Dims] | None = None,
        **attributes: Any,
    ) -> None:
        """Add a node of the operator.

        outputs are types, "" for the type of the first input, None for a hole. dims gives symbolic dimensions of
        inputs, whose names belong to this node. Inputs at the positions `constant` are initializers. select picks the
        defined results. tolerance is a factor.
        """
        k = len(self.nodes)
        names = [f"x{k}_{j}" if array is not None else "" for j, array in enumerate(inputs)]
        while not names[-1]:
            names.pop()
        for j, (name, array) in enumerate(zip(names, inputs)):
            if array is None:
                continue
            if j in constant:
                self.constants.append(onnx.numpy_helper.from_array(array, name))
                continue
            self.inputs.append(value_info(name, array.dtype.name, self._own((dims or {}).get(j, array.shape))))
            self.feeds[name] = array
        results = ["" if kind is None else f"y{k}_{j}" for j, kind in enumerate(outputs)]
        for j, (name, kind) in enumerate(zip(results, outputs)):
            if kind is not None:
                dtype = kind or next(a for a in inputs if a is not None).dtype.name
                self.types[name] = dtype, self._own(output_dims[j]) if output_dims and j in output_dims else None
        shapes = [None if a is None else (a.dtype.name, a.shape) for a in inputs]
        self.cases.append((f"{operator} {attributes} {shapes}", [n for n in results if n], select, tolerance))
        self.nodes.append(helper.make_node(operator, names, results, domain=domain, **attributes))

    def _own(self, dims: Dims) -> list[int | str]:
        return [d if isinstance(d, int) else f"{d}{len(self.nodes)}" for d in dims]

    def _model(self, dims: Mapping[str, Dims | None]) -> onnx.ModelProto:
        outputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims[name])
            for name, (dtype, _) in self.types.items()
        ]
        graph = helper.make_graph(self.nodes, "g", self.inputs, outputs, self.constants)
        return helper.make_model(graph, opset_imports=opsets(self.opset), ir_version=10)

    def check(self) -> None:
        """Run the model both ways, and compare."""
        names = list(self.types)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        shapeless = self._model(dict.fromkeys(names)).SerializeToString()
        session = onnxruntime.InferenceSession(shapeless, options, ["CPUExecutionProvider"])
        expected_by_name = dict(zip(names, session.run(names, self.feeds)))
        dims = {n: self.types[n][1] or [f"{n}_{axis}" for axis in range(a.ndim)] for n, a in expected_by_name.items()}
        results_by_name = lowering.compile(self._model(dims)).run(self.feeds)
        for label, results, select, tolerance in self.cases:
            pairs = zip(select([results_by_name[n] for n in results]), select([expected_by_name[n] for n in results]))
            for j, (actual, reference) in enumerate(pairs):
                assert_close(actual, reference, f"result {j} of {label}", tolerance)


def assert_close(got: np.ndarray, expected: np.ndarray, label: str, tolerance: float = 1.0) -> None:
    """Check that type and shape are equal, and floats as close as their type allows."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (label, got.shape, expected.shape)
    if expected.dtype.name not in TOLERANCE:
        np.testing.assert_array_equal(got, expected, err_msg=label)
        return
    wide = expected.astype(np.float64)
    atol = tolerance * TOLERANCE[expected.dtype.name] * float(np.abs(wide).max(initial=0))
    np.testing.assert_allclose(got.astype(np.float64), wide, rtol=0, atol=atol, err_msg=label)


def import_node(
    operator: str, inputs: Sequence[tuple[str, Dims] | None], results: int = 1, **attributes: Any
) -> ImportedModel:
    """Import one node without compiling it, for errors of the import."""
    names = ["" if declared is None else f"x{k}" for k, declared in enumerate(inputs)]
    outputs = [f"y{k}" for k in range(results)]
    node = helper.make_node(operator, names, outputs, name="the_node", domain="com.microsoft", **attributes)
    values = [value_info(n, *declared) for n, declared in zip(names, inputs) if declared is not None]
    output_infos = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["a", "b", "c"]) for n in outputs]
    graph = helper.make_graph([node], "g", values, output_infos)
    return import_model(load_model(helper.make_model(graph, opset_imports=opsets(21), ir_version=10)), lookup)
