"""ai.onnx Attention 23, 24 and 25 (https://onnx.ai/onnx/operators/onnx__Attention.html), with errata of onnx 1.23.

It also registers the compiler's own operator, which is version 25 with sinks. The node becomes one call of the kernel
that an `AttentionProblem` describes. This file contains only the operator's own rules: legal attributes, mask
broadcasting, and the position of query rows among the keys. Dimensions that must be equal, and are not provably so, are
asserted at run time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import relax, tirx

from ...attention.record.problem import Mask, Window, WindowOffset
from ...graph.loading.legality import OWN_DOMAIN
from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_shape, require
from ..helpers.compute import unify_sizes
from ..helpers.requirements import read_choice, require_choice, require_range, require_rank, require_tensor
from ..tensor.reshape import reshape_to
from .attend import concatenate_cache, describe_mask, lower_attention, move_heads_first
from .attention_inputs import check_attention_inputs, read_attention_sizes

_SOFTMAX_PRECISIONS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}  # TensorProto.DataType
_UNBOUNDED = 2**62  # a wider window sees every key; adding to it stays below 2**63


@op("Attention", since=25, domain=OWN_DOMAIN)
@op("Attention", since=23)
def attention(
    node: Node,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    past_key: Value | None = None,
    past_value: Value | None = None,
    nonpad: Value | None = None,
    sink: Value | None = None,
) -> tuple[Value | None, ...]:
    """Emit Y, present_key, present_value and qk_matmul_output; None for unused outputs.

    sink is [Hq], of Q's type.
    """
    attributes = _read_attributes(node)
    check_attention_inputs(node, q, k, v, past_key, past_value, nonpad)
    sizes = read_attention_sizes(node, q, k, v, past_key, past_value)

    def require_shape(value: Value, heads: int, length: Size, dim: int) -> Value:
        full_shape = (sizes.batch, heads, length, dim)
        return assert_shape(node, value, full_shape if value.rank == 4 else (sizes.batch, length, heads * dim))

    q = require_shape(q, sizes.q_heads, sizes.q_len, sizes.head_dim)
    k = require_shape(k, sizes.kv_heads, sizes.new_len, sizes.head_dim)
    v = require_shape(v, sizes.kv_heads, sizes.new_len, sizes.v_head_dim)
    present_key, present_value = None, None
    if past_key is not None and past_value is not None:
        past_key = require_shape(past_key, sizes.kv_heads, sizes.past, sizes.head_dim)
        past_value = require_shape(past_value, sizes.kv_heads, sizes.past, sizes.v_head_dim)
        k = present_key = concatenate_cache(node, past_key, move_heads_first(node, k, sizes.kv_heads))
        v = present_value = concatenate_cache(node, past_value, move_heads_first(node, v, sizes.kv_heads))
    elif node.has_output(1) or node.has_output(2):
        present_key, present_value = (
            move_heads_first(node, k, sizes.kv_heads),
            move_heads_first(node, v, sizes.kv_heads),
        )

    scores = (sizes.batch, sizes.q_heads, sizes.q_len, node.simplify(sizes.past + sizes.new_len))
    mask_record: Mask | None = None
    if mask is not None:
        mask, mask_record = _read_mask(node, mask, q.dtype, scores)
    if nonpad is not None:
        nonpad = assert_shape(node, nonpad, (sizes.batch,))
    if sink is not None:
        sink = _read_sink(node, sink, q, sizes.q_heads)
    offset: WindowOffset = "past" if past_key is not None else "lengths" if nonpad is not None else "zero"
    results = lower_attention(
        node,
        {"q": q, "k": k, "v": v, "mask": mask, "lengths": nonpad, "past": sizes.past, "sink": sink},
        heads=(sizes.q_heads, sizes.kv_heads),
        acc_dtype="float64" if "float64" in (q.dtype, v.dtype, attributes.softmax) else "float32",
        scale=1 / math.sqrt(sizes.head_dim) if attributes.scale is None else attributes.scale,
        softcap=attributes.softcap,
        window=_build_window(attributes, offset),
        mask=mask_record,
        qk_mode=attributes.qk_mode if node.has_output(3) else None,
    )
    return results["y"], present_key, present_value, results.get("qk")


@dataclass(frozen=True)
class _Attributes:
    """The attributes of a node.

    left and right are the numbers of keys before and after its own position that a row sees. None is unbounded.
    """

    left: int | None
    right: int | None
    scale: float | None
    softcap: float
    softmax: str | None
    qk_mode: int


def _read_attributes(node: Node) -> _Attributes:
    causal = read_choice(node, "is_causal", 0, (0, 1), code="attention.is_causal_unsupported")
    left, right = _read_window_side(node, "left_window_size"), _read_window_side(node, "right_window_size")
    if causal:
        right = 0
    scale = node.attr("scale", None)
    if scale is not None:
        require_range(node, "scale", scale, 0, code="attention.scale_negative")
    softcap = require_range(node, "softcap", node.attr("softcap", 0.0), 0, code="attention.softcap_negative")
    precision = node.attr("softmax_precision", None)
    if precision is not None and precision not in _SOFTMAX_PRECISIONS:
        legal = ", ".join(f"{number} ({name})" for number, name in _SOFTMAX_PRECISIONS.items())
        raise node.error(
            "attention.softmax_precision_unsupported",
            f"attribute softmax_precision is {precision}, which is not a floating-point type.",
            f"Use one of {legal}.",
        )
    qk_mode = node.attr("qk_matmul_output_mode", 0)
    require_choice(node, "qk_matmul_output_mode", qk_mode, range(4), code="attention.qk_matmul_output_mode_unsupported")
    softmax = _SOFTMAX_PRECISIONS.get(precision)
    return _Attributes(left, right, scale, softcap, softmax, qk_mode)


def _read_window_side(node: Node, name: str) -> int | None:
    size = node.attr(name, -1)
    if size != -1 and node.version < 25:
        raise node.error(
            "attention.window_needs_newer_opset",
            f"attribute {name} does not exist before opset 25.",
            "Import opset 25 or later.",
        )
    require_range(node, name, size, -1, code="attention.window_out_of_range")
    return None if size == -1 or size > _UNBOUNDED else size


def _build_window(attributes: _Attributes, offset: WindowOffset) -> Window | None:
    """Return the window of the attributes, or None if it is unbounded."""
    if attributes.left is None and attributes.right is None:
        return None
    return Window(attributes.left, attributes.right, offset)


def _read_sink(node: Node, sink: Value, q: Value, q_heads: int) -> Value:
    """Return the sinks [Hq], of Q's type."""
    require_tensor(node, "sink", sink, q.dtype, "[query heads]", code="attention.sink_unsupported")
    return assert_shape(node, sink, (q_heads,))


def _read_mask(node: Node, mask: Value, dtype: str, full: Shape) -> tuple[Value, Mask | None]:
    """Return the mask as a tensor of rank 4, bool or of the type of Q, and its interpretation.

    full is [B, Hq, S, T].
    """
    form = "[T] or [S, T] or [H, S, T] or [B, H, S, T]"
    require_rank(node, "attn_mask", mask, form, code="attention.mask_rank_unsupported")
    if mask.dtype.startswith(("int", "uint")):
        node.warn(f"input attn_mask is {mask.dtype}: its numbers are added to the scores, they are no booleans.")
    if mask.dtype not in ("bool", dtype):
        mask = node.emit(relax.op.astype(node.tensor(mask), dtype))
    if mask.rank < 4:
        mask = reshape_to(node, mask, (1,) * (4 - mask.rank) + mask.shape)
    mask_shape: list[Size] = []
    broadcasts: list[int] = []
    for axis, (size, target) in enumerate(zip(mask.shape, full)):
        if axis == 3 and node.version >= 24:  # a shorter mask hides the keys after its end
            if isinstance(size, int) and isinstance(target, int) and size > target:
                raise node.error(
                    "attention.mask_too_long",
                    f"input attn_mask is for {size} keys, and there are {target}.",
                    "Shorten the mask to the number of keys.",
                )
            mask_shape.append(size)
        elif isinstance(size, int) and size == 1:
            mask_shape.append(1)
        elif isinstance(size, tirx.Var) and not node.symbols.equal(size, target):  # a computed one is full
            text = f"dimension {axis - 4} of attn_mask is {{}}, and must be 1 or {{}}."
            fits = symbolic.logical_or(symbolic.equal(size, 1), symbolic.equal(size, target))
            mask = require(node, mask, fits, "attention.mask_shape_mismatch", text, size, target)
            mask_shape.append(size)
            broadcasts.append(axis)
        else:
            unify_sizes(node, f"dimension {axis - 4} of attn_mask", **{"attn_mask": size, "the score matrix": target})
            mask_shape.append(target)
    pad = node.version >= 24 and not node.symbols.equal(mask_shape[3], full[3])
    if pad:
        text = "input attn_mask is for {} keys, and there are {}."
        node.importer.expect(symbolic.equal(mask_shape[3], full[3]))  # most masks cover all keys
        mask = require(
            node,
            mask,
            symbolic.less_or_equal(mask_shape[3], full[3]),
            "attention.mask_too_long",
            text,
            mask_shape[3],
            full[3],
        )
    mask = assert_shape(node, mask, tuple(mask_shape))
    return mask, describe_mask(mask, pad, tuple(broadcasts))
