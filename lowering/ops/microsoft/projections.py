"""What com.microsoft attention operators do before attention: packed projections taken apart, their bias added."""

from __future__ import annotations

from tvm import tirx

from ...importing.compute import Element, agreed, number, widened
from ...importing.node import Node
from ...importing.values import Size, Value
from ..asserted import asserted
from ..kernels import Read, compute
from ..matmul import rounded
from ..normalization import over_last_axes

FLOATS = ("float32", "float16", "bfloat16", "float64")


def head_size(node: Node, name: str, width: Size, heads: int) -> int:
    """The width of one of so many heads."""
    width = number(node, f"last dimension of {name}", width)
    if heads < 1 or width % heads:
        raise node.error(f"{heads} heads do not divide the last dimension of {name}, {width}.", "Make them divide.")
    return width // heads


def part(node: Node, packed: Value, start: int, width: int, bias: Value | None = None) -> Value:
    """Elements [start, start + width) of the last axis of packed [B, S, *], plus the bias [width]."""
    if start == 0 and packed.shape[2] == width and bias is None:
        return packed
    dtype = packed.dtype

    def element(index: tuple[Element, ...], x: Read, *bias: Read) -> Element:
        b, s, e = index
        return _plus(x(b, s, e + tirx.const(start, "int64")), bias, e, dtype)

    given = [packed] if bias is None else [packed, bias]
    return compute(node, "projection", element, given, (*packed.shape[:2], width))


def interleaved_part(node: Node, packed: Value, k: int, bias: Value | None = None) -> Value:
    """packed [B, S, H, n, D] at k of its fourth axis, as [B, S, H * D], plus the bias [H * D]."""
    batch, length, heads, _, size = packed.shape
    dtype, width = packed.dtype, tirx.const(size, "int64")

    def element(index: tuple[Element, ...], x: Read, *bias: Read) -> Element:
        b, s, e = index
        h, d = tirx.floordiv(e, width), tirx.floormod(e, width)
        return _plus(x(b, s, h, tirx.const(k, "int64"), d), bias, e, dtype)

    given = [packed] if bias is None else [packed, bias]
    return compute(node, "projection", element, given, (batch, length, heads * size))


def bias_parts(node: Node, bias: Value | None, widths: tuple[int, ...]) -> list[Value | None]:
    """The biases of several projections, which lie one behind the other in bias."""
    if bias is None:
        return [None] * len(widths)
    bias = packed_bias(node, bias, sum(widths))
    starts = [sum(widths[:k]) for k in range(len(widths))]

    def cut(start: int, width: int) -> Value:
        shifted = tirx.const(start, "int64")
        return compute(node, "bias", lambda i, x: x(i[0] + shifted), [bias], (width,))

    return [cut(start, width) for start, width in zip(starts, widths)]


def packed_bias(node: Node, bias: Value, total: int) -> Value:
    """The bias, which is known or asserted at run time to be [total]."""
    if bias.rank != 1:
        raise node.error(f"input bias has rank {bias.rank}.", "It is one vector for Q, K and V.")
    if isinstance(bias.shape[0], int) and bias.shape[0] != total:
        raise node.error(f"input bias has {bias.shape[0]} elements, for {total} of Q, K and V.", "Correct one of them.")
    return asserted(node, bias, (total,))


def normalized(node: Node, x: Value, heads: int, weight: Value | None, epsilon: str = "qk_norm_epsilon") -> Value:
    """Every head of x [B, S, H * D] over the root of its mean square, times weight [D]; x without a weight. epsilon is
    the attribute that says so, if it is there, else qk_norm_epsilon."""
    if weight is None:
        return x
    split = (*x.shape[:2], heads, x.shape[2] // heads)
    if weight.rank != 1:
        raise node.error(f"a weight of the norms of heads has rank {weight.rank}.", f"Make it [{split[3]}].")
    agreed(node, "the size of a weight of the norms of heads", weight.shape[0], split[3])
    y = node.reshaped(x, split)
    weight = asserted(node, weight, split[3:])
    y = over_last_axes(
        node, y, [weight], centered=False, epsilon=node.attr(epsilon, node.attr("qk_norm_epsilon", 1e-6))
    )
    return rounded(node, node.reshaped(y, x.shape), x.dtype)


def head_sink_of(node: Node, heads: int, head_sink: Value | None, dtype: str) -> Value | None:
    """The input head_sink [Hq], in the type of the rows."""
    if head_sink is None:
        return None
    if head_sink.rank != 1:
        raise node.error(f"head_sink has rank {head_sink.rank}.", f"Make it [{heads}].")
    agreed(node, "the size of head_sink", head_sink.shape[0], heads)
    return rounded(node, asserted(node, head_sink, (heads,)), dtype)


def check_floats(node: Node, **inputs: Value | None) -> None:
    """Raises NodeError for an input that is no float, or not of the type of the first."""
    dtypes = {name: value.dtype for name, value in inputs.items() if value is not None}
    first, dtype = next(iter(dtypes.items()))
    for name, found in dtypes.items():
        if found not in FLOATS:
            raise node.error(f"input {name} is {found}.", f"Use one of {', '.join(FLOATS)}.")
        if found != dtype:
            raise node.error(f"input {name} is {found} and {first} is {dtype}.", "Give them one type.")


def _plus(x: Element, bias: tuple[Read, ...], e: Element, dtype: str) -> Element:
    if not bias:
        return x
    wide = widened(dtype)
    return (x.astype(wide) + bias[0](e).astype(wide)).astype(dtype)
