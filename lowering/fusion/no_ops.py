"""Removal of nodes that compute nothing, so that patterns need not match them."""

from __future__ import annotations

import onnx_ir as ir

from ..graph.rewriting.matching import can_drop, dims, is_op, operand


class RemoveNoOpsPass(ir.passes.InPlacePass):
    """Pass that lets the readers of a node without effect read its input.

    1. Identity.
    2. Dropout outside training: no training_mode, a training_mode that is False, or a ratio of 0.
    3. Cast to the type that the input has.
    4. Reshape to the sizes that the input has.
    5. CastLike, which becomes a Cast, or nothing if both inputs have the same type.

    A node that computes an output of the graph stays, and so does a Dropout whose mask is used.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph.all_nodes()):
            if is_op(node, "CastLike"):
                _convert_cast_like(node)
            if not node.outputs or node.outputs[0].is_graph_output() or not _is_no_op(node):
                continue
            output = node.outputs[0]
            output.replace_all_uses_with(operand(node, 0))
            assert node.graph is not None
            node.graph.remove(node, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified)


def _convert_cast_like(node: ir.Node) -> None:
    """Turn a CastLike whose target type is static into a Cast."""
    like = operand(node, 1)
    if like.dtype is None or "saturate" in node.attributes:
        return
    node.op_type = "Cast"
    node.attributes["to"] = ir.AttrInt64("to", int(like.dtype))
    node.replace_input_with(1, None)
    node.resize_inputs(1)


def _is_no_op(node: ir.Node) -> bool:
    if is_op(node, "Identity"):
        return True
    if is_op(node, "Dropout"):
        masked = any(v.uses() or v.is_graph_output() for v in node.outputs[1:])
        return not can_drop(node) and not masked
    data, output = node.inputs[0] if node.inputs else None, node.outputs[0]
    if is_op(node, "Cast"):
        return data is not None and data.dtype is not None and data.dtype == output.dtype
    return is_op(node, "Reshape") and data is not None and dims(data) == dims(output) != ()
