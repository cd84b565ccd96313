"""Constant folding: a node whose inputs are all numbers is computed at import, by onnx's own reference evaluator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

# Folding must not turn a small recipe for a large tensor (Expand, Range, ConstantOfShape) into a large weight.
_GROWTH_BYTES = 2**20

# Never folded: random operators, those with bodies, those whose evaluator does not follow the standard, and the one
# that makes weights larger.
_NOT_FOLDED = {
    "Attention", "Bernoulli", "DequantizeLinear", "Dropout", "If", "Loop", "Multinomial", "RandomNormal",
    "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Scan", "SequenceMap",
}  # fmt: skip


def fold(node: ir.Node, version: int, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray | None] | None:
    """The node's outputs for known inputs (None for a hole), or None where the node must be lowered after all."""
    if node.domain not in ("", "ai.onnx") or node.op_type in _NOT_FOLDED:
        return None
    if any(a is not None and a.dtype == object for a in inputs):
        return None
    feeds = {f"x{k}": a for k, a in enumerate(inputs) if a is not None}
    proto = ir.to_proto(node)
    del proto.input[:]
    proto.input.extend("" if a is None else f"x{k}" for k, a in enumerate(inputs))
    graph = onnx.helper.make_graph(
        [proto],
        "fold",
        [
            onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feeds.items()
        ],
        [onnx.helper.make_value_info(n, onnx.TypeProto()) for n in proto.output if n],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)])
    try:
        results = ReferenceEvaluator(model).run(None, feeds)
    except Exception:
        return None  # what the evaluator cannot do is left to the lowering, which has the better error
    if any(not isinstance(r, (np.ndarray, np.generic)) for r in results):
        return None
    given, made = (sum(np.asarray(a).nbytes for a in arrays) for arrays in (feeds.values(), results))
    if made > given + _GROWTH_BYTES:
        return None
    computed = iter(results)
    return [np.asarray(next(computed)) if output.name else None for output in node.outputs]
