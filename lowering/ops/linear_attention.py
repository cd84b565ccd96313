"""ai.onnx LinearAttention-27 (https://onnx.ai/onnx/operators/onnx__LinearAttention.html), and com.microsoft's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tvm import relax

from ..attention.linear import LinearAttention, copying
from ..importing.node import Node
from ..importing.values import Size, Value, static
from . import op
from .asserted import asserted

_DECAY = ("gated", "gated_delta")
_DELTA = ("delta", "gated_delta")
_RULES = ("linear", "gated", "delta", "gated_delta")
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Rows:
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
    """output [B, T, heads Dv] and present_state [B, kv_num_heads, D, Dv]; attribute chunk_size is a hint."""
    q_heads, kv_heads = node.attr("q_num_heads"), node.attr("kv_num_heads")
    if q_heads < 1 or kv_heads < 1 or q_heads % kv_heads:
        raise node.error(
            f"attributes q_num_heads and kv_num_heads are {q_heads} and {kv_heads}.",
            "Make q_num_heads a positive multiple of kv_num_heads.",
        )
    rows = Rows(query, key, value, decay, beta)
    return state_and_output(node, rows, past_state, (q_heads, kv_heads), shared_keys=False)


def state_and_output(
    node: Node, given: Rows, past: Value | None, heads: tuple[int, int], shared_keys: bool
) -> tuple[Value, Value]:
    """The outputs, for numbers of heads of queries and of the state that fit; see read_problem for shared_keys."""
    record, rows = read_problem(node, given, *heads, shared_keys)
    batch, length = given.query.shape[:2]
    state_shape = (batch, record.v_heads, record.head_dim, record.v_head_dim)
    if past is None:
        past = node.emit(relax.op.zeros(node.shape_expr(state_shape), given.query.dtype))
    if past.rank != 4 or past.dtype not in FLOATS:
        raise node.error(
            f"input past_state is {past.dtype} of rank {past.rank}.", "Make it floats [batch, kv_num_heads, D, Dv]."
        )
    past = asserted(node, past, state_shape)
    record = replace(record, state_dtype=past.dtype)
    outputs = [(past.shape, past.dtype), ((batch, length, record.y_heads * record.v_head_dim), given.query.dtype)]
    arguments = [node.tensor(x) for x in (past, *rows)]
    present, y = node.call_tir(copying(record), arguments, outputs, "linear_attention")
    return y, present


def read_problem(
    node: Node, given: Rows, q_heads: int, kv_heads: int, shared_keys: bool
) -> tuple[LinearAttention, list[Value]]:
    """The record, for a state of the query's type, and the inputs that are there, in its order, of shapes that fit.

    With shared_keys there may be fewer heads of keys than of values. Raises NodeError.
    """
    query, decay, beta = given.query, given.decay, given.beta
    rule = node.attr("update_rule", "gated_delta")
    if rule not in _RULES:
        raise node.error(f"attribute update_rule is '{rule}'.", f"Use one of {', '.join(_RULES)}.")
    for name, there, rules in (("decay", decay, _DECAY), ("beta", beta, _DELTA)):
        if (there is not None) != (rule in rules):
            what = "missing" if there is None else "given"
            needed = "needs" if there is None else "has no use for"
            raise node.error(f"input {name} is {what}, and update_rule '{rule}' {needed} it.")
    rows = {name: x for name, x in vars(given).items() if x is not None}
    for name, x in rows.items():
        if x.rank != 3:
            raise node.error(f"input {name} has rank {x.rank}.", "Make it [batch, length, heads * size].")
        if x.dtype != query.dtype or x.dtype not in FLOATS:
            raise node.error(f"input {name} is {x.dtype}, for a query of {query.dtype}.", "Give both one float type.")
    size = _divided(node, "query", query, q_heads)
    k_heads = _divided(node, "key", given.key, size)
    if k_heads != kv_heads and not (shared_keys and kv_heads % k_heads == 0):
        raise node.error(
            f"input key has {k_heads} heads of {size} elements, as query has, for kv_num_heads = {kv_heads}."
        )
    batch, length = query.shape[:2]
    record = LinearAttention(
        batch=static(batch),
        length=static(length),
        q_heads=q_heads,
        k_heads=k_heads,
        v_heads=kv_heads,
        head_dim=size,
        v_head_dim=_divided(node, "value", given.value, kv_heads),
        dtype=query.dtype,
        state_dtype=query.dtype,
        scale=node.attr("scale", 0.0) or 1 / math.sqrt(size),
        decay=_per_head(node, decay, "decay", {kv_heads: 1, kv_heads * size: size}),
        betas=_per_head(node, beta, "beta", {1: 1, kv_heads: kv_heads}),
    )
    return record, [asserted(node, x, (batch, length, x.shape[2]), name) for name, x in rows.items()]


def _divided(node: Node, name: str, x: Value, parts: int) -> int:
    """The last dimension, a number, over `parts`."""
    width: Size = x.shape[2]
    if not isinstance(width, int) or width % parts or not width:
        raise node.error(
            f"the last dimension of input {name} is {width}.", f"Make it a number, a positive multiple of {parts}."
        )
    return width // parts


def _per_head(node: Node, x: Value | None, name: str, meanings: dict[int, int]) -> int:
    """What the last dimension of decay or beta means; 0 where the input is not there."""
    if x is None:
        return 0
    width = x.shape[2]
    if not isinstance(width, int) or width not in meanings:
        sizes = " or ".join(str(size) for size in meanings)
        raise node.error(f"the last dimension of input {name} is {width}.", f"Make it {sizes}.")
    return meanings[width]
