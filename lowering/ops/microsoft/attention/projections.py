"""Input projections of com.microsoft attention operators: slices of packed tensors, with their bias added."""

from __future__ import annotations

from tvm import tirx

from ....importing.node import Node
from ....importing.values import Size, Value
from ...helpers.assertions import assert_shape
from ...helpers.compute import Element, number, unify_sizes, widen_dtype
from ...helpers.kernels import ElementReader, compute
from ...helpers.requirements import require_rank
from ...math.matmul import round_to
from ...nn.normalization import normalize_last_axes

FLOATS = ("float32", "float16", "bfloat16", "float64")


def divide_heads(node: Node, name: str, width: Size, heads: int) -> int:
    """Return the size of one of `heads` heads of this total width."""
    width = number(node, f"last dimension of {name}", width)
    if heads < 1 or width % heads:
        raise node.error(
            "node.hidden_size_not_divisible",
            f"{heads} heads do not divide the last dimension of {name}, {width}.",
            "Choose the dimension as a multiple of the number of heads.",
        )
    return width // heads


def slice_projection(node: Node, packed: Value, start: int, width: int, bias: Value | None = None) -> Value:
    """Return elements [start, start + width) of the last axis of packed [B, S, *], plus the bias [width]."""
    if start == 0 and packed.shape[2] == width and bias is None:
        return packed
    dtype = packed.dtype

    def element(index: tuple[Element, ...], x: ElementReader, *bias: ElementReader) -> Element:
        b, s, e = index
        return _add_bias(x(b, s, e + tirx.const(start, "int64")), bias, e, dtype)

    inputs = [packed] if bias is None else [packed, bias]
    return compute(node, "projection", element, inputs, (*packed.shape[:2], width))


def slice_interleaved(node: Node, packed: Value, k: int, bias: Value | None = None) -> Value:
    """Return index k of the fourth axis of packed [B, S, H, n, D], as [B, S, H * D], plus the bias [H * D]."""
    batch, length, heads, _, size = packed.shape
    dtype, width = packed.dtype, tirx.const(size, "int64")

    def element(index: tuple[Element, ...], x: ElementReader, *bias: ElementReader) -> Element:
        b, s, e = index
        h, d = tirx.floordiv(e, width), tirx.floormod(e, width)
        return _add_bias(x(b, s, h, tirx.const(k, "int64"), d), bias, e, dtype)

    inputs = [packed] if bias is None else [packed, bias]
    return compute(node, "projection", element, inputs, (batch, length, heads * size))


def split_bias(node: Node, bias: Value | None, widths: tuple[int, ...]) -> list[Value | None]:
    """Split the biases of several projections, which are concatenated in bias."""
    if bias is None:
        return [None] * len(widths)
    bias = check_packed_bias(node, bias, sum(widths))
    starts = [sum(widths[:k]) for k in range(len(widths))]

    def slice_bias(start: int, width: int) -> Value:
        offset = tirx.const(start, "int64")
        return compute(node, "bias", lambda i, x: x(i[0] + offset), [bias], (width,))

    return [slice_bias(start, width) for start, width in zip(starts, widths)]


def check_packed_bias(node: Node, bias: Value, total: int) -> Value:
    """Return the bias, whose shape is [total], statically or asserted at run time."""
    require_rank(node, "bias", bias, f"[{total}]")
    if isinstance(bias.shape[0], int) and bias.shape[0] != total:
        raise node.error(
            "node.shape_mismatch",
            f"input bias has {bias.shape[0]} elements, for {total} columns of Q, K and V.",
            "Correct one of them.",
        )
    return assert_shape(node, bias, (total,))


def normalize_heads(node: Node, x: Value, heads: int, weight: Value | None, epsilon: str = "qk_norm_epsilon") -> Value:
    """Return RMS-normalized heads of x [B, S, H * D], times weight [D]; x without a weight.

    Each head is divided by the root of its mean square. epsilon names the attribute with its epsilon; without that
    attribute, qk_norm_epsilon is used.
    """
    if weight is None:
        return x
    split = (*x.shape[:2], heads, x.shape[2] // heads)
    require_rank(node, "q_norm_weight or k_norm_weight", weight, f"[{split[3]}]")
    unify_sizes(node, "the size of a weight of the norms of heads", weight.shape[0], split[3])
    y = node.reshape_to(x, split)
    weight = assert_shape(node, weight, split[3:])
    y = normalize_last_axes(
        node, y, [weight], centered=False, epsilon=node.attr(epsilon, node.attr("qk_norm_epsilon", 1e-6))
    )
    return round_to(node, node.reshape_to(y, x.shape), x.dtype)


def read_head_sink(node: Node, heads: int, head_sink: Value | None, dtype: str) -> Value | None:
    """Return the input head_sink [Hq], in the type of the rows."""
    if head_sink is None:
        return None
    require_rank(node, "head_sink", head_sink, f"[{heads}]")
    unify_sizes(node, "the size of head_sink", head_sink.shape[0], heads)
    return round_to(node, assert_shape(node, head_sink, (heads,)), dtype)


def check_ints(node: Node, name: str, value: Value, rank: int) -> None:
    """Raise NodeError if the input is not a table of int32 or int64 of this rank."""
    if value.dtype not in ("int32", "int64") or value.rank != rank:
        raise node.error(
            "node.tensor_type_unsupported",
            f"input {name} is {value.dtype} of rank {value.rank}.",
            f"Make it int32 of rank {rank}.",
        )


def check_pair(node: Node, **inputs: Value | None) -> None:
    """Raise NodeError if one of two inputs is given, and the other is missing."""
    if len({value is None for value in inputs.values()}) > 1:
        raise node.error(
            "node.inputs_incomplete", f"only one of {' and '.join(inputs)} is given.", "Give both or none."
        )


def check_cache_ranks(node: Node, past_key: Value | None, past_value: Value | None) -> None:
    """Raise NodeError for a cache that is not of rank 4."""
    for name, cache in (("past_key", past_key), ("past_value", past_value)):
        require_rank(node, name, cache, "[batch, heads, length, head size]")


def check_floats(node: Node, **inputs: Value | None) -> None:
    """Raise NodeError for an input that is not a float, or not of the type of the first input."""
    dtypes = {name: value.dtype for name, value in inputs.items() if value is not None}
    first, dtype = next(iter(dtypes.items()))
    for name, input_dtype in dtypes.items():
        if input_dtype not in FLOATS:
            raise node.error(
                "node.dtype_unsupported", f"input {name} is {input_dtype}.", f"Use one of {', '.join(FLOATS)}."
            )
        if input_dtype != dtype:
            raise node.error(
                "node.dtype_mismatch",
                f"input {name} is {input_dtype} and {first} is {dtype}.",
                "Give them the same type.",
            )


def _add_bias(x: Element, bias: tuple[ElementReader, ...], e: Element, dtype: str) -> Element:
    if not bias:
        return x
    wide = widen_dtype(dtype)
    return (x.astype(wide) + bias[0](e).astype(wide)).astype(dtype)
