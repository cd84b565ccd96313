"""Models as text, compiled and run next to onnx's reference, and the kernels that their import emits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from tvm import tirx

import lowering
from lowering.graph.loading.model import load_model
from lowering.importing.importer import import_model
from lowering.ops import lookup


def model(body: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\ng {body}')


def agree(proto: onnx.ModelProto, runs: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Compare one compiled module with the reference evaluator, for every set of inputs."""
    module, reference = lowering.compile(proto), ReferenceEvaluator(proto)
    for inputs in runs:
        for spec, expected in zip(module.outputs, reference.run(None, dict(inputs))):
            actual, expected = module.run(inputs)[spec.name], np.asarray(expected)
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=spec.name)


def kernels(proto: onnx.ModelProto) -> set[str]:
    """Return the names of the kernels that the import emits itself, without numbers."""
    module = import_model(load_model(proto), lookup).module
    return {
        g.name_hint.rstrip("0123456789").rstrip("_")
        for g, f in module.functions_items()
        if isinstance(f, tirx.PrimFunc)
    }
