"""com.microsoft activations: Gelu, FastGelu, BiasGelu, BiasSplitGelu and QuickGelu."""

from __future__ import annotations

from tvm import tirx

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.compute import Element, pointwise, require_numbers, widen_dtype
from ..helpers.kernels import ElementReader, compute
from ..helpers.requirements import require_rank
from ..math.activation import gelu, swish
from . import DOMAIN


@op("Gelu", since=1, domain=DOMAIN)
def gelu_exact(node: Node, x: Value) -> Value:
    return pointwise(node, lambda x: gelu(x, "none"), x, name="gelu")


@op("FastGelu", since=1, domain=DOMAIN)
def fast_gelu(node: Node, x: Value, bias: Value | None = None) -> Value:
    """Return the tanh form of Gelu for x + bias [last dimension of x]."""
    return _emit_biased_gelu(node, "tanh", x, bias)


@op("BiasGelu", since=1, domain=DOMAIN)
def bias_gelu(node: Node, x: Value, bias: Value) -> Value:
    """Return the erf form of Gelu for x + bias [last dimension of x]."""
    return _emit_biased_gelu(node, "none", x, bias)


def _emit_biased_gelu(node: Node, form: str, x: Value, bias: Value | None) -> Value:
    if bias is None:
        return pointwise(node, lambda x: gelu(x, form), x, name="gelu")
    require_rank(node, "bias", bias, "[last dimension of the input]")
    bias = assert_shape(node, bias, x.shape[-1:])
    return pointwise(node, lambda x, bias: gelu(x + bias, form), x, bias, name="bias_gelu")


@op("QuickGelu", since=1, domain=DOMAIN)
def quick_gelu(node: Node, x: Value) -> Value:
    """Return x sigmoid(alpha x)."""
    alpha = node.attr("alpha", 1.702)
    return pointwise(node, lambda x: swish(x, alpha), x, name="quick_gelu")


@op("BiasSplitGelu", since=1, domain=DOMAIN)
def bias_split_gelu(node: Node, x: Value, bias: Value) -> Value:
    """Return a gelu(b), erf form, for the halves a, b of x + bias in the last axis.

    x is [..., D], bias [D] and Y [..., D / 2].
    """
    require_numbers(node, x, bias)
    width = x.shape[-1]
    if not isinstance(width, int) or width % 2:
        raise node.error(
            "bias_split_gelu.size_not_even", f"the last dimension of X is {width}.", "Give it an even number."
        )
    require_rank(node, "bias", bias, f"[{width}]")
    bias = assert_shape(node, bias, (width,))

    dtype = x.dtype

    def element(index: tuple[Element, ...], x: ElementReader, bias: ElementReader) -> Element:
        *outer, d = index
        halves = (d, d + tirx.const(width // 2, "int64"))
        a, b = (x(*outer, k).astype(widen_dtype(dtype)) + bias(k).astype(widen_dtype(dtype)) for k in halves)
        return (a * gelu(b, "none")).astype(dtype)

    return compute(node, "bias_split_gelu", element, [x, bias], (*x.shape[:-1], width // 2))
