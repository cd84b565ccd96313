"""ai.onnx.preview FlexAttention 1: attention with graphs that modify scores and probabilities
(https://onnx.ai/onnx/operators/onnx_aionnxpreview_FlexAttention.html).

Y = P V with P = prob_mod(softmax(score_mod(scale Q K^T))). Query head h reads key/value head h // (Hq / Hkv).
Arithmetic is in float32, or in float64 if an operand or the softmax is in float64, and is rounded once. A row whose
scores are all -inf has probabilities of 0, where the standard's reference gives NaN.

score_mod is lowered as written, as a graph over the tensor of all scores, which the attention reads in place of its own
scores. passes/graph/fold_scores.py folds it to an expression if each score depends on no other score; then no tensor of
scores remains. With prob_mod, the probabilities are materialized as a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...attention.record import replaced_scores
from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from .. import op
from ..attention.attend import lower_attention
from ..helpers.assertions import assert_shape
from ..helpers.compute import number, unify_sizes
from ..helpers.requirements import require_dtype, require_head_groups, require_range, require_rank, require_same_dtype
from . import DOMAIN
from .materialized_scores import compute_probabilities, compute_scores, weight_values
from .mods import ModGraph

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_SOFTMAX_PRECISIONS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}  # TensorProto.DataType


@op("FlexAttention", since=1, domain=DOMAIN)
def flex_attention(node: Node, q: Value, k: Value, v: Value) -> Value:
    """Return Y [B, Hq, S, Dv] for Q [B, Hq, S, D], K [B, Hkv, T, D] and V [B, Hkv, T, Dv] of one type."""
    sizes = _read_sizes(node, q, k, v)
    q, k, v = _assert_operands(node, sizes, q, k, v)
    softmax = _read_softmax_type(node, q.dtype)
    scale = _read_scale(node, sizes.head_dim)
    score_mod, prob_mod = (
        ModGraph.from_attribute(node, name, softmax, sizes.scores) for name in ("score_mod", "prob_mod")
    )
    arguments, score = {"q": q, "k": k, "v": v}, None
    if score_mod is not None or prob_mod is not None:
        old = compute_scores(node, q, k, scale, softmax)
        new = old if score_mod is None else score_mod(old)
        if prob_mod is not None:
            return weight_values(node, prob_mod(compute_probabilities(node, new)), v, q.dtype)
        marked = replaced_scores.mark_replaced_scores(node.tensor(old), node.tensor(new))
        arguments[replaced_scores.SCORE_TABLE] = Value(softmax, sizes.scores, node.importer.builder.emit(marked))
        score = replaced_scores.read_scores(softmax)
    results = lower_attention(
        node,
        arguments,
        heads=(sizes.q_heads, sizes.kv_heads),
        acc_dtype="float64" if "float64" in (q.dtype, softmax) else "float32",
        scale=scale,
        score=score,
    )
    return results["y"]


@dataclass(frozen=True)
class _AttentionSizes:
    """The sizes that the inputs agree on."""

    batch: Size
    q_heads: int
    kv_heads: int
    rows: Size
    keys: Size
    head_dim: int
    v_head_dim: int

    @property
    def scores(self) -> Shape:
        """Return the shape of the scores, [B, Hq, S, T]."""
        return self.batch, self.q_heads, self.rows, self.keys


def _read_sizes(node: Node, q: Value, k: Value, v: Value) -> _AttentionSizes:
    for name, value in (("Q", q), ("K", k), ("V", v)):
        require_rank(node, name, value, "[batch, heads, length, head size]")
        require_dtype(node, name, value, _FLOATS)
        require_same_dtype(node, name, value, "Q", q)

    def require_same(what: str, axis: int, **values: Value) -> Size:
        return unify_sizes(node, what, **{name: value.shape[axis] for name, value in values.items()})

    q_heads = number(node, "number of heads of Q", q.shape[1])
    kv_heads = number(node, "number of heads of K", require_same("number of heads", 1, K=k, V=v))
    require_head_groups(node, q_heads, kv_heads, code="flex_attention.heads_not_divisible")
    return _AttentionSizes(
        batch=require_same("batch size", 0, Q=q, K=k, V=v),
        q_heads=q_heads,
        kv_heads=kv_heads,
        rows=q.shape[2],
        keys=require_same("sequence length", 2, K=k, V=v),
        head_dim=number(node, "head size of Q and K", require_same("head size", 3, Q=q, K=k)),
        v_head_dim=number(node, "head size of V", v.shape[3]),
    )


def _assert_operands(node: Node, sizes: _AttentionSizes, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
    """Return the inputs, whose sizes are static or asserted at run time."""
    batch = sizes.batch
    return (
        assert_shape(node, q, (batch, sizes.q_heads, sizes.rows, sizes.head_dim)),
        assert_shape(node, k, (batch, sizes.kv_heads, sizes.keys, sizes.head_dim)),
        assert_shape(node, v, (batch, sizes.kv_heads, sizes.keys, sizes.v_head_dim)),
    )


def _read_softmax_type(node: Node, dtype: str) -> str:
    precision = node.attr("softmax_precision", None)
    if precision is None:
        return "float64" if dtype == "float64" else "float32"
    if precision not in _SOFTMAX_PRECISIONS:
        legal = ", ".join(f"{number} ({name})" for number, name in _SOFTMAX_PRECISIONS.items())
        raise node.error(
            "node.attribute_unsupported",
            f"attribute softmax_precision is {precision}, which is not a floating-point type.",
            f"Use one of {legal}.",
        )
    return _SOFTMAX_PRECISIONS[precision]


def _read_scale(node: Node, head_dim: int) -> float:
    scale = node.attr("scale", None)
    if scale is not None:
        require_range(node, "scale", scale, 0)
    if scale is None and head_dim == 0:
        raise node.error(
            "flex_attention.scale_undefined",
            "the default scale is 1 / sqrt(0), since the head size is 0.",
            "Set the attribute scale.",
        )
    return 1 / math.sqrt(head_dim) if scale is None else scale
