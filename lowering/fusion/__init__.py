"""From an ONNX model to an ONNX model in which operators that were written out are nodes again.

One flat, named list of passes over onnx_ir graphs, one per file, each with its cases numbered. What they make are
standard ai.onnx operators, and of com.microsoft CausalConvWithState and LinearAttention, so the result is a legal model
that other tools open and run; but for attention with sinks, which ai.onnx does not have (attention_node.py). A pattern
that does not match keeps its meaning.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ..graph.legality import import_own_domain
from .attention import FuseAttentionPass
from .common_subexpressions import EliminateCommonSubexpressionsPass
from .flattened_matmuls import UnflattenMatmulsPass
from .gelu import FuseGeluPass
from .grouped_heads import GroupHeadsPass
from .integer_matmuls import FuseIntegerMatmulsPass
from .layer_norm import FuseLayerNormPass
from .linear_attention import FuseLinearAttentionPass
from .moved_codes import MoveCodesPass
from .no_ops import RemoveNoOpsPass
from .opset import FIRST_LOWERED, UpgradeOpsetPass, opset
from .rms_norm import FuseRmsNormPass
from .rotary import FuseRotaryPass
from .sizes import InferSizesPass
from .stateful_conv import FuseStatefulConvPass
from .swish import FuseSwishPass

# What makes the graph ready, what fuses, what tidies up.
PREPARE: list[tuple[str, ir.passes.InPlacePass]] = [
    ("upgrade_opset", UpgradeOpsetPass()),
    ("infer_sizes", InferSizesPass()),
    ("remove_no_ops", RemoveNoOpsPass()),
    ("eliminate_common_subexpressions", EliminateCommonSubexpressionsPass()),
]
PASSES: list[tuple[str, ir.passes.InPlacePass]] = [
    ("fuse_stateful_conv", FuseStatefulConvPass()),
    ("fuse_linear_attention", FuseLinearAttentionPass()),  # first: it tells the sizes of what comes after
    ("move_codes", MoveCodesPass()),
    ("fuse_integer_matmuls", FuseIntegerMatmulsPass()),
    ("unflatten_matmuls", UnflattenMatmulsPass()),
    ("fuse_layer_norm", FuseLayerNormPass()),
    ("fuse_rms_norm", FuseRmsNormPass()),
    ("fuse_gelu", FuseGeluPass()),
    ("fuse_swish", FuseSwishPass()),
    ("fuse_rotary", FuseRotaryPass()),
    ("fuse_attention", FuseAttentionPass()),
    ("group_heads", GroupHeadsPass()),  # behind fuse_attention: in front of what it made, too
]
TIDY: list[tuple[str, ir.passes.InPlacePass]] = [
    ("share_what_was_added", EliminateCommonSubexpressionsPass()),
    ("remove_unused_nodes", common.RemoveUnusedNodesPass()),
]


def fuse(model: ir.Model) -> ir.Model:
    """The model with its patterns fused; the model itself, untouched, where none is found.

    A model of an opset in which operators have no lowering is brought to a newer one in any case. Weights are shared
    with the given model, not copied.
    """
    fused, modified = model.clone(), False
    for _, run in PREPARE:
        run(fused)
    for _, run in PASSES:
        modified |= run(fused).modified
    if not modified and opset(model) not in range(1, FIRST_LOWERED):
        return model
    for _, run in TIDY:
        run(fused)
    import_own_domain(fused)
    keep_declared_outputs(model, fused)
    return fused


def keep_declared_outputs(model: ir.Model, changed: ir.Model) -> None:
    """Gives the outputs of a changed copy the types and shapes that the model declares: inference took better ones."""
    for declared, value in zip(model.graph.outputs, changed.graph.outputs):
        if declared.type is not None and declared.shape is not None:
            value.type, value.shape = declared.type, declared.shape.copy()
