"""Decomposition of GroupNormalization of opsets 18 to 20, which onnx's checker rejects as deprecated.

The result has operators of every opset. Scale and bias have an element for each group, so the operator is
InstanceNormalization of x [N, groups, rest].
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

_VERSIONS = range(18, 21)


def decompose_group_norms(model: ir.Model) -> None:
    """Replace such nodes of the model and its functions, in place.

    A node without num_groups stays, and is rejected later.
    """
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for graph in graphs:
        if graph.opset_imports.get("", model.opset_imports.get("", 0)) in _VERSIONS:
            for node in list(ir.traversal.RecursiveGraphIterator(graph)):
                if node.op_type == "GroupNormalization" and node.domain == "" and "num_groups" in node.attributes:
                    _decompose(node)


def _decompose(node: ir.Node) -> None:
    assert node.graph is not None
    x, scale, bias = node.inputs
    groups = node.attributes["num_groups"].as_int()
    sizes = ir.node("Constant", [], {"value": ir.tensor(np.array([0, groups, -1], np.int64))})
    grouped = ir.node("Reshape", [x, sizes.outputs[0]])
    attributes = [node.attributes["epsilon"]] if "epsilon" in node.attributes else []
    normalized = ir.node("InstanceNormalization", [grouped.outputs[0], scale, bias])
    for attribute in attributes:
        normalized.attributes.add(attribute)
    shape = ir.node("Shape", [x])
    y = ir.node("Reshape", [normalized.outputs[0], shape.outputs[0]])
    ir.convenience.replace_nodes_and_values(
        node.graph, node, [node], [sizes, grouped, normalized, shape, y], node.outputs, y.outputs
    )
