"""Nodes that compute the same: one of them is left, in every model that can be read."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from onnx_ir.passes import common

from lowering.fusion.common_subexpressions import EliminateCommonSubexpressionsPass

TWICE = "a = Neg (x) b = Neg (x) y = Add (a, b)"


def model(with_type: bool) -> ir.Model:
    """With a node that has a type as an attribute, if asked for."""
    graph = f"g (float[N] x) => (float[N] y) {{ {TWICE} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {graph}')
    if with_type:
        kind = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
        proto.graph.node.append(onnx.helper.make_node("Optional", [], ["o"], type=kind))
    return ir.from_proto(proto)


def test_they_become_one() -> None:
    made = model(with_type=False)
    assert EliminateCommonSubexpressionsPass()(made).modified and len(made.graph) == 2


def test_models_with_types_as_attributes_stay() -> None:
    made = model(with_type=True)
    assert not EliminateCommonSubexpressionsPass()(made).modified and len(made.graph) == 4


def test_the_pass_of_onnx_ir_still_fails() -> None:
    """Once it does not, ours can go."""
    with pytest.raises(TypeError, match="unhashable"):
        common.CommonSubexpressionEliminationPass()(model(with_type=True))
