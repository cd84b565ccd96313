"""ONNX-to-ONNX passes that recognize decomposed operators and fuse them into nodes.

One flat, named list of passes over onnx_ir graphs, one per file, each with its cases numbered. The results are standard
ai.onnx operators, and CausalConvWithState and LinearAttention of com.microsoft. The result is therefore a legal model
that other tools open and run. The exception is attention with sinks, which ai.onnx does not have (attention_node.py). A
pattern that does not match stays as it is.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ..graph.loading.legality import import_own_domain
from ..graph.rewriting.opset import MIN_LOWERED_OPSET, UpgradeOpsetPass, opset
from ..graph.rewriting.sizes import InferSizesPass
from .attention.attention import FuseAttentionPass
from .attention.grouped_heads import GroupHeadsPass
from .attention.linear_attention import FuseLinearAttentionPass
from .common_subexpressions import EliminateCommonSubexpressionsPass
from .flattened_matmuls import UnflattenMatmulsPass
from .gelu import FuseGeluPass
from .no_ops import RemoveNoOpsPass
from .norms.layer_norm import FuseLayerNormPass
from .norms.rms_norm import FuseRmsNormPass
from .quantized.integer_matmuls import FuseIntegerMatmulsPass
from .quantized.quantized_moves import MoveQuantizedValuesPass
from .rotary.rotary import FuseRotaryPass
from .stateful_conv import FuseStatefulConvPass
from .swish import FuseSwishPass

# Passes that prepare the graph, fuse patterns, and clean up.
PREPARE: list[tuple[str, ir.passes.InPlacePass]] = [
    ("upgrade_opset", UpgradeOpsetPass()),
    ("infer_sizes", InferSizesPass()),
    ("remove_no_ops", RemoveNoOpsPass()),
    ("eliminate_common_subexpressions", EliminateCommonSubexpressionsPass()),
]
PASSES: list[tuple[str, ir.passes.InPlacePass]] = [
    ("fuse_stateful_conv", FuseStatefulConvPass()),
    ("fuse_linear_attention", FuseLinearAttentionPass()),  # first: it makes the sizes of later nodes static
    ("move_quantized_values", MoveQuantizedValuesPass()),
    ("fuse_integer_matmuls", FuseIntegerMatmulsPass()),
    ("unflatten_matmuls", UnflattenMatmulsPass()),
    ("fuse_layer_norm", FuseLayerNormPass()),
    ("fuse_rms_norm", FuseRmsNormPass()),
    ("fuse_gelu", FuseGeluPass()),
    ("fuse_swish", FuseSwishPass()),
    ("fuse_rotary", FuseRotaryPass()),
    ("fuse_attention", FuseAttentionPass()),
    ("group_heads", GroupHeadsPass()),  # after fuse_attention: it also matches before fused nodes
]
TIDY: list[tuple[str, ir.passes.InPlacePass]] = [
    ("share_what_was_added", EliminateCommonSubexpressionsPass()),
    ("remove_unused_nodes", common.RemoveUnusedNodesPass()),
]


def fuse(model: ir.Model) -> ir.Model:
    """Return the model with its patterns fused, or the model itself if none matches.

    The argument is not modified. A model of an opset in which operators have no lowering is always converted to a newer
    one. Weights are shared with the argument, not copied.
    """
    fused, modified = model.clone(), False
    for _, run in PREPARE:
        run(fused)
    for _, run in PASSES:
        modified |= run(fused).modified
    if not modified and opset(model) not in range(1, MIN_LOWERED_OPSET):
        return model
    for _, run in TIDY:
        run(fused)
    import_own_domain(fused)
    keep_declared_outputs(model, fused)
    return fused


def keep_declared_outputs(model: ir.Model, rewritten: ir.Model) -> None:
    """Restore on outputs of a rewritten copy the types and shapes that the model declares.

    Inference replaced them by more precise ones.
    """
    for declared, value in zip(model.graph.outputs, rewritten.graph.outputs):
        if declared.type is not None and declared.shape is not None:
            value.type, value.shape = declared.type, declared.shape.copy()
