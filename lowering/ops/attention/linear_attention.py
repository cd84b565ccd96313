"""ai.onnx LinearAttention-27 (https://onnx.ai/onnx/operators/onnx__LinearAttention.html), and com.microsoft's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tvm import relax

from ...attention.linear import LinearAttention, build_linear_attention
from ...importing.node import Node
from ...importing.values import Value, static
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.compute import number as require_static
from ..helpers.requirements import read_choice, require_head_groups, require_rank, require_tensor

_DECAY = ("gated", "gated_delta")
_DELTA = ("delta", "gated_delta")
_RULES = ("linear", "gated", "delta", "gated_delta")
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LinearAttentionInputs:
    """The inputs that have a row for each token."""

    query: Value
    key: Value
    value: Value
    decay: Value | None
    beta: Value | None


@op("LinearAttention", since=27)
def linear_attention(
    node: Node,
    query: Value,
    key: Value,
    value: Value,
    past_state: Value | None = None,
    decay: Value | None = None,
    beta: Value | None = None,
) -> tuple[Value, Value]:
    """Emit output [B, T, heads Dv] and present_state [B, kv_num_heads, D, Dv].

    Attribute chunk_size is a hint.
    """
    q_heads, kv_heads = node.attr("q_num_heads"), node.attr("kv_num_heads")
    require_head_groups(node, q_heads, kv_heads, code="linear_attention.heads_not_divisible")
    rows = LinearAttentionInputs(query, key, value, decay, beta)
    return emit_linear_attention(node, rows, past_state, (q_heads, kv_heads), shared_keys=False)


def emit_linear_attention(
    node: Node, inputs: LinearAttentionInputs, past: Value | None, heads: tuple[int, int], shared_keys: bool
) -> tuple[Value, Value]:
    """Emit the outputs for consistent numbers of heads of queries and of the state.

    See read_linear_attention for shared_keys.
    """
    record, rows = read_linear_attention(node, inputs, *heads, shared_keys)
    batch, length = inputs.query.shape[:2]
    state_shape = (batch, record.v_heads, record.head_dim, record.v_head_dim)
    if past is None:
        past = node.emit(relax.op.zeros(node.shape_expr(state_shape), inputs.query.dtype))
    form = "[batch, kv_num_heads, D, Dv]"
    require_tensor(node, "past_state", past, FLOATS, form, code="linear_attention.past_state_unsupported")
    past = assert_shape(node, past, state_shape)
    record = replace(record, state_dtype=past.dtype)
    outputs = [(past.shape, past.dtype), ((batch, length, record.y_heads * record.v_head_dim), inputs.query.dtype)]
    arguments = [node.tensor(x) for x in (past, *rows)]
    present, y = node.call_tir(build_linear_attention(record), arguments, outputs, "linear_attention")
    return y, present


def read_linear_attention(
    node: Node, inputs: LinearAttentionInputs, q_heads: int, kv_heads: int, shared_keys: bool
) -> tuple[LinearAttention, list[Value]]:
    """Return the record, for a state of the query's type, and the present inputs.

    The inputs are in the order of the record, with asserted shapes. With shared_keys there may be fewer heads of keys
    than of values.

    Raises:
        NodeError: The attributes and inputs are not consistent.
    """
    query, decay, beta = inputs.query, inputs.decay, inputs.beta
    rule = read_choice(node, "update_rule", "gated_delta", _RULES, code="linear_attention.update_rule_unsupported")
    for name, value, rules in (("decay", decay, _DECAY), ("beta", beta, _DELTA)):
        if (value is not None) != (rule in rules):
            state = "missing" if value is None else "given"
            needed = "needs" if value is None else "does not use"
            raise node.error(
                "linear_attention.rule_input_mismatch",
                f"input {name} is {state}, and update_rule '{rule}' {needed} it.",
                f"{'Add' if value is None else 'Remove'} the input.",
            )
    rows = {name: x for name, x in vars(inputs).items() if x is not None}
    _check_rows(node, rows, query.dtype)
    size = _read_head_count(node, "query", query, q_heads)
    k_heads = _read_head_count(node, "key", inputs.key, size)
    if k_heads != kv_heads and not (shared_keys and kv_heads % k_heads == 0):
        raise node.error(
            "linear_attention.key_heads_mismatch",
            f"input key has {k_heads} heads of {size} elements, the head size of query, and kv_num_heads is "
            f"{kv_heads}.",
        )
    batch, length = query.shape[:2]
    record = LinearAttention(
        batch=static(batch),
        length=static(length),
        q_heads=q_heads,
        k_heads=k_heads,
        v_heads=kv_heads,
        head_dim=size,
        v_head_dim=_read_head_count(node, "value", inputs.value, kv_heads),
        dtype=query.dtype,
        state_dtype=query.dtype,
        scale=node.attr("scale", 0.0) or 1 / math.sqrt(size),
        decay=_read_per_head(node, decay, "decay", {kv_heads: 1, kv_heads * size: size}),
        betas=_read_per_head(node, beta, "beta", {1: 1, kv_heads: kv_heads}),
    )
    return record, [assert_shape(node, x, (batch, length, x.shape[2]), name) for name, x in rows.items()]


def _check_rows(node: Node, rows: dict[str, Value], dtype: str) -> None:
    """Check the ranks of the present inputs, and that they have the type of the query."""
    for name, x in rows.items():
        require_rank(node, name, x, "[batch, length, heads * size]", code="linear_attention.rank_unsupported")
        if x.dtype != dtype or x.dtype not in FLOATS:
            raise node.error(
                "linear_attention.dtype_mismatch",
                f"input {name} is {x.dtype}, for a query of {dtype}.",
                "Give both the same float type.",
            )


def _read_head_count(node: Node, name: str, x: Value, divisor: int) -> int:
    """Return the last dimension, which must be static, divided by `divisor`."""
    width = require_static(node, f"the last dimension of input {name}", x.shape[2])
    if width % divisor or not width:
        raise node.error(
            "linear_attention.width_not_divisible",
            f"the last dimension of input {name} is {width}.",
            f"Use a positive multiple of {divisor}.",
        )
    return width // divisor


def _read_per_head(node: Node, x: Value | None, name: str, meanings: dict[int, int]) -> int:
    """Return the meaning of the last dimension of decay or beta; 0 where the input is absent."""
    if x is None:
        return 0
    width = require_static(node, f"the last dimension of input {name}", x.shape[2])
    if width not in meanings:
        sizes = " or ".join(str(size) for size in meanings)
        raise node.error(
            "linear_attention.width_unsupported", f"the last dimension of input {name} is {width}.", f"Use {sizes}."
        )
    return meanings[width]
