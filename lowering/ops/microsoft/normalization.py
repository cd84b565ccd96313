"""Normalization as fused by onnxruntime's optimizers: with the residual sum, and in older opsets."""

from __future__ import annotations

from collections.abc import Sequence

from ...importing.node import Node
from ...importing.values import Shape, Value
from .. import op
from ..helpers.assertions import assert_broadcastable, assert_shape
from ..helpers.compute import pointwise, widen_dtype
from ..helpers.requirements import require_rank
from ..math.matmul import round_to
from ..nn.normalization import layer_normalization, normalize_last_axes
from . import DOMAIN

FUSED_EPSILON = 1e-12  # the default of the fused operators

# onnxruntime's optimizers put LayerNormalization into models of opsets that did not have it yet.
op("LayerNormalization", since=1)(layer_normalization)


@op("SimplifiedLayerNormalization", since=1)
@op("SimplifiedLayerNormalization", since=1, domain=DOMAIN)
def simplified_layer_normalization(node: Node, x: Value, scale: Value) -> Value:
    """Apply RMSNormalization. onnxruntime has it in ai.onnx, too, unlike the standard."""
    _reject_statistics(node, 1)
    return normalize_last_axes(node, x, [scale], centered=False)


@op("SkipLayerNormalization", since=1, domain=DOMAIN)
def skip_layer_normalization(
    node: Node, x: Value, skip: Value, gamma: Value, beta: Value | None = None, bias: Value | None = None
) -> tuple[Value, None, None, Value]:
    """Return LayerNormalization of x + skip + bias, and that sum."""
    return _skip_normalization(node, [x, skip, bias], [gamma, beta], centered=True)


@op("SkipSimplifiedLayerNormalization", since=1, domain=DOMAIN)
def skip_simplified_layer_normalization(
    node: Node, x: Value, skip: Value, gamma: Value, bias: Value | None = None
) -> tuple[Value, None, None, Value]:
    """Return RMSNormalization of x + skip + bias, and that sum."""
    return _skip_normalization(node, [x, skip, bias], [gamma], centered=False)


def _skip_normalization(
    node: Node, terms: Sequence[Value | None], parameters: Sequence[Value | None], centered: bool
) -> tuple[Value, None, None, Value]:
    """Normalize the sum of the terms before it is rounded to half precision."""
    _reject_statistics(node, 1, 2)
    x, skip, bias = terms
    assert x is not None and skip is not None
    width = x.shape[-1:]
    if skip.rank > 1:  # batches may share a row of skip, rows may not
        skip = assert_shape(node, skip, (*skip.shape[:-2], *x.shape[-2:]))
    bias, *vectors = (None if v is None else _check_vector(node, v, width) for v in (bias, *parameters))
    summands = list(assert_broadcastable(node, *(term for term in (x, skip, bias) if term is not None)))
    dtype = summands[0].dtype
    total = pointwise(node, lambda *x: sum(x[1:], x[0]), *summands, dtype=widen_dtype(dtype), name="residual")
    y = normalize_last_axes(node, total, [v for v in vectors if v is not None], centered, FUSED_EPSILON)
    return y, None, None, round_to(node, total, dtype)


def _check_vector(node: Node, vector: Value, width: Shape) -> Value:
    """Return gamma, beta or a bias, checked to have an element for each of the last axis."""
    require_rank(node, "gamma, beta or bias", vector, "[last dimension of the input]")
    return assert_shape(node, vector, width)


def _reject_statistics(node: Node, *outputs: int) -> None:
    for k in outputs:
        if node.has_output(k):
            raise node.error(
                "node.output_unsupported",
                f"output {k} is a statistic that only training uses.",
                "Remove it: inference does not need it.",
            )
