"""FlexAttentionGradient: what backpropagation through a FlexAttention gives (lowering/attention/gradient.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm import relax, tirx

from ...attention.flex_node import DOMAIN, Settings
from ...attention.gradient import GradientProblem
from ...attention.plain_gradient import plain_gradient
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..asserted import asserted
from ..kernels import compute
from .attention import Attention


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
    """dq, dk and dv, of the shapes and types of q, k and v, then the gradients by each captured floating-point array.

    y and lse are what FlexAttention of the same inputs gave, dy [B, Hq, S, Dv] is the gradient by y. k and v of one
    batch for all get the sum over batches.
    """
    settings = Settings.from_json(node.attr("settings"))
    attention = Attention(node, settings, q, k, v, states, captured)
    try:
        gradient = GradientProblem(dataclasses.replace(attention.problem, lse=True))
    except ValueError as error:
        raise node.error(f"score_mod cannot be differentiated: {error}.") from error
    batch, heads, rows = attention.q.shape[:3]
    shape = (batch, heads, rows, attention.v.shape[3])
    given: dict[str, Any] = {
        **attention.given,
        "y": asserted(node, y, shape),
        "dy": asserted(node, dy, shape),
        "lse": asserted(node, lse, shape[:3]),
    }
    scalars = gradient.forward.scalars()
    arguments = [
        node.shape_expr([given[name]]).values[0] if name in scalars else node.tensor(given[name])
        for name in gradient.inputs()
    ]
    acc, tables = gradient.forward.acc_dtype, gradient.tables
    shapes = [(x.shape, acc) for x in (attention.q, attention.k, attention.v, *(given[name] for name in tables))]
    function = plain_gradient(gradient).without_attr("global_symbol")
    dq, dk, dv, *by_table = node.call_tir(function, arguments, shapes, "attention_gradient")
    found = {id(given[name]): value for name, value in zip(tables, by_table)}
    results = [_like(node, dq, q), _like(node, dk, k), _like(node, dv, v)]
    for name, array in zip(settings.captures, captured):
        if "float" in array.dtype:
            made = found.get(id(attention.reads.arrays[name]))
            results.append(_zeros(node, array) if made is None else _like(node, made, array))
    return tuple(results)


def _like(node: Node, value: Value, array: Value) -> Value:
    """The gradient in the shape and type of what it is by: of what served all batches their sum."""
    if array.rank == 4 and array.shape[0] == 1 and not node.symbols.equal(value.shape[0], 1):
        value = node.emit(relax.op.sum(node.tensor(value), axis=[0], keepdims=True))
    if array.rank == 0:
        value = node.reshaped(value, ())
    return value if value.dtype == array.dtype else node.emit(relax.op.astype(node.tensor(value), array.dtype))


def _zeros(node: Node, array: Value) -> Value:
    return compute(node, "zeros", lambda *_: tirx.const(0, array.dtype), [], array.shape, dtype=array.dtype)
