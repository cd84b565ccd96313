"""ONNX Dropout (https://onnx.ai/onnx/operators/onnx__Dropout.html), in inference and in training."""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.compute import Element, dtype_of, pointwise, widen_dtype
from ..tensor.reshape import reshape_to
from .random_numbers import emit_uniform_numbers


@op("Dropout", since=7)
def dropout(
    node: Node, x: Value, ratio: Value | None = None, training_mode: Value | None = None
) -> tuple[Value, Value | None]:
    """Emit the data and the mask.

    Outside training, or at a ratio of 0, the data is unchanged and the mask is ones. Otherwise the data is x / (1 -
    ratio) where the mask is true.
    """
    if training_mode is None or _is_number(training_mode, 0) or _is_number(ratio, 0):
        return x, _ones(node, x) if node.has_output(1) else None
    ratio = node.constant(np.asarray(0.5, "float32")) if ratio is None else reshape_to(node, ratio, ())
    accurate = widen_dtype(x.dtype)
    share = pointwise(
        node,
        lambda ratio, training: tirx.Select(training, ratio.astype(accurate), tirx.const(0.0, accurate)),
        ratio,
        reshape_to(node, training_mode, ()),
        dtype=accurate,
        name="dropped_share",
    )
    draws = emit_uniform_numbers(node, x.shape, accurate)
    keep = pointwise(node, lambda u, share: u >= share, draws, share, dtype="bool", name="dropout_mask")

    def element(x: Element, keep: Element, share: Element) -> Element:
        return tirx.Select(keep, x / (tirx.const(1.0, dtype_of(share)) - share), tirx.const(0.0, accurate))

    return pointwise(node, element, x, keep, share, name="dropout"), keep


def _ones(node: Node, x: Value) -> Value:
    dtype = "bool" if node.version >= 10 else x.dtype
    return node.emit(relax.op.full(node.shape_expr(x.shape), relax.const(1, dtype), dtype))


def _is_number(value: Value | None, number: float) -> bool:
    return value is not None and value.constant is not None and value.constant.item() == number
