"""FlexAttentionGradient: backpropagation through a FlexAttention (lowering/attention/record/gradient.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm import relax, tirx

from ...attention.codegen.plain_gradient import build_plain_gradient
from ...attention.flex_node import DOMAIN, FlexAttentionSettings
from ...attention.record.gradient import GradientProblem
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.kernels import compute
from .attention import FlexOperands


@op("FlexAttentionGradient", since=1, domain=DOMAIN)
def flex_attention_gradient(
    node: Node,
    q: Value,
    k: Value,
    v: Value,
    states: Value | None,
    y: Value,
    lse: Value,
    dy: Value,
    *captured: Value,
) -> tuple[Value, ...]:
    """Return dq, dk and dv, then the gradient of each captured floating-point array.

    dq, dk and dv have the shapes and types of q, k and v. y and lse are the results of FlexAttention for the same
    inputs. dy [B, Hq, S, Dv] is the gradient with respect to y. If k and v have one batch for all batches, dk and dv
    are sums over batches.
    """
    settings = FlexAttentionSettings.from_json(node.attr("settings"))
    attention = FlexOperands(node, settings, q, k, v, states, captured)
    try:
        gradient = GradientProblem(dataclasses.replace(attention.problem, lse=True))
    except ValueError as error:
        raise node.error("flex.gradient_unsupported", f"score_mod cannot be differentiated: {error}.") from error
    batch, heads, rows = attention.q.shape[:3]
    shape = (batch, heads, rows, attention.v.shape[3])
    bindings: dict[str, Any] = {
        **attention.arguments,
        "y": assert_shape(node, y, shape),
        "dy": assert_shape(node, dy, shape),
        "lse": assert_shape(node, lse, shape[:3]),
    }
    scalars = gradient.forward.scalars()
    arguments = [
        node.shape_expr([bindings[name]]).values[0] if name in scalars else node.tensor(bindings[name])
        for name in gradient.inputs()
    ]
    acc, tables = gradient.forward.acc_dtype, gradient.tables
    shapes = [(x.shape, acc) for x in (attention.q, attention.k, attention.v, *(bindings[name] for name in tables))]
    function = build_plain_gradient(gradient).without_attr("global_symbol")
    dq, dk, dv, *by_table = node.call_tir(function, arguments, shapes, "attention_gradient")
    gradients = {id(bindings[name]): value for name, value in zip(tables, by_table)}
    results = [_match_array(node, dq, q), _match_array(node, dk, k), _match_array(node, dv, v)]
    for name, array in zip(settings.captures, captured):
        if "float" in array.dtype:
            value = gradients.get(id(attention.reads.arrays[name]))
            results.append(_emit_zeros(node, array) if value is None else _match_array(node, value, array))
    return tuple(results)


def _match_array(node: Node, value: Value, array: Value) -> Value:
    """Return the gradient in the shape and type of its array.

    The gradient of an array that all batches share is the sum over batches.
    """
    if array.rank == 4 and array.shape[0] == 1 and not node.symbols.equal(value.shape[0], 1):
        value = node.emit(relax.op.sum(node.tensor(value), axis=[0], keepdims=True))
    if array.rank == 0:
        value = node.reshape_to(value, ())
    return value if value.dtype == array.dtype else node.emit(relax.op.astype(node.tensor(value), array.dtype))


def _emit_zeros(node: Node, array: Value) -> Value:
    return compute(node, "zeros", lambda *_: tirx.const(0, array.dtype), [], array.shape, dtype=array.dtype)
