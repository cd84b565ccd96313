"""ai.onnx.preview FlexAttention 1: attention whose scores and probabilities graphs change
(https://onnx.ai/onnx/operators/onnx_aionnxpreview_FlexAttention.html).

Y = P V with P = prob_mod(softmax(score_mod(scale Q K^T))). Query head h reads key/value head h // (Hq / Hkv).
Arithmetic is in float32, or in float64 where an operand or the softmax is, and rounded once. A row whose scores are all
-inf has probabilities of 0, where the standard's reference gives NaN.

score_mod is lowered as it is written, as a graph over the tensor of all scores, which the attention reads in place of
its own. passes/fold_scores.py makes an expression of it where each score depends on no other one; then no tensor of
them is left. With prob_mod probabilities are a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...attention import given_scores
from ...importing.compute import agreed, number
from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from .. import op
from ..asserted import asserted
from ..attend import attend
from . import DOMAIN
from .mods import Mod
from .whole_scores import probabilities, scores, weighted

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_SOFTMAX_PRECISIONS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}  # TensorProto.DataType


@op("FlexAttention", since=1, domain=DOMAIN)
def flex_attention(node: Node, q: Value, k: Value, v: Value) -> Value:
    """Y [B, Hq, S, Dv] for Q [B, Hq, S, D], K [B, Hkv, T, D] and V [B, Hkv, T, Dv], all of one type."""
    sizes = _sizes(node, q, k, v)
    q, k, v = _operands(node, sizes, q, k, v)
    softmax = _softmax_type(node, q.dtype)
    scale = _scale(node, sizes.head_dim)
    score_mod, prob_mod = (Mod.of(node, name, softmax, sizes.scores) for name in ("score_mod", "prob_mod"))
    given, change = {"q": q, "k": k, "v": v}, None
    if score_mod is not None or prob_mod is not None:
        old = scores(node, q, k, scale, softmax)
        new = old if score_mod is None else score_mod(old)
        if prob_mod is not None:
            return weighted(node, prob_mod(probabilities(node, new)), v, q.dtype)
        marked = given_scores.changed(node.tensor(old), node.tensor(new))
        given[given_scores.TABLE] = Value(softmax, sizes.scores, node.importer.builder.emit(marked))
        change = given_scores.read_scores(softmax)
    results = attend(
        node,
        given,
        heads=(sizes.q_heads, sizes.kv_heads),
        acc_dtype="float64" if "float64" in (q.dtype, softmax) else "float32",
        scale=scale,
        score=change,
    )
    return results["y"]


@dataclass(frozen=True)
class _Sizes:
    """What the inputs agree on."""

    batch: Size
    q_heads: int
    kv_heads: int
    rows: Size
    keys: Size
    head_dim: int
    v_head_dim: int

    @property
    def scores(self) -> Shape:
        """The shape of the scores, [B, Hq, S, T]."""
        return self.batch, self.q_heads, self.rows, self.keys


def _sizes(node: Node, q: Value, k: Value, v: Value) -> _Sizes:
    for name, value in (("Q", q), ("K", k), ("V", v)):
        if value.rank != 4:
            raise node.error(f"input {name} has rank {value.rank}.", "Make it [batch, heads, length, head size].")
        if value.dtype not in _FLOATS:
            raise node.error(f"input {name} is {value.dtype}.", f"Use one of {', '.join(_FLOATS)}.")
        if value.dtype != q.dtype:
            raise node.error(f"input {name} is {value.dtype} and Q is {q.dtype}.", "Give them one type.")

    def same(what: str, axis: int, **values: Value) -> Size:
        return agreed(node, what, **{name: value.shape[axis] for name, value in values.items()})

    q_heads = number(node, "number of heads of Q", q.shape[1])
    kv_heads = number(node, "number of heads of K", same("number of heads", 1, K=k, V=v))
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise node.error(f"{q_heads} query heads do not divide into {kv_heads} key/value heads.", "Use a multiple.")
    return _Sizes(
        batch=same("batch size", 0, Q=q, K=k, V=v),
        q_heads=q_heads,
        kv_heads=kv_heads,
        rows=q.shape[2],
        keys=same("sequence length", 2, K=k, V=v),
        head_dim=number(node, "head size of Q and K", same("head size", 3, Q=q, K=k)),
        v_head_dim=number(node, "head size of V", v.shape[3]),
    )


def _operands(node: Node, sizes: _Sizes, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
    """The inputs, known or asserted at run time to have these sizes."""
    batch = sizes.batch
    return (
        asserted(node, q, (batch, sizes.q_heads, sizes.rows, sizes.head_dim)),
        asserted(node, k, (batch, sizes.kv_heads, sizes.keys, sizes.head_dim)),
        asserted(node, v, (batch, sizes.kv_heads, sizes.keys, sizes.v_head_dim)),
    )


def _softmax_type(node: Node, dtype: str) -> str:
    precision = node.attr("softmax_precision", None)
    if precision is None:
        return "float64" if dtype == "float64" else "float32"
    if precision not in _SOFTMAX_PRECISIONS:
        legal = ", ".join(f"{number} ({name})" for number, name in _SOFTMAX_PRECISIONS.items())
        raise node.error(f"attribute softmax_precision is {precision}, no floating-point type.", f"Use one of {legal}.")
    return _SOFTMAX_PRECISIONS[precision]


def _scale(node: Node, head_dim: int) -> float:
    scale = node.attr("scale", None)
    if scale is not None and not scale >= 0:
        raise node.error(f"attribute scale is {scale}; the operator takes its square root.", "Use a scale >= 0.")
    if scale is None and head_dim == 0:
        raise node.error("its default scale is 1 / sqrt(0), as heads have no size.", "Give it the attribute scale.")
    return 1 / math.sqrt(head_dim) if scale is None else scale
