"""ai.onnx CausalConvWithState-27 (https://onnx.ai/onnx/operators/onnx__CausalConvWithState.html), and com.microsoft's.

A convolution of single channels over what came before and what comes, channels last (conv.py):

    joined = [past_state, x]                   k - 1 and L places
    y_t = bias + sum over j of w_j joined_(t + j),    present_state = the last k - 1 places of joined
"""

from __future__ import annotations

from typing import Any

from tvm import relax

from ..importing.channels import channels_last, channels_second
from ..importing.compute import number, pointwise, relax_call
from ..importing.node import Node
from ..importing.values import Size, Value
from . import op
from .activation import swish
from .asserted import asserted
from .conv import kernel_of, summed_over_windows, transposed, vector_of
from .kernels import compute
from .matmul import rounded
from .movement import join
from .window import Window

_ACTIVATIONS = ("none", "silu", "swish")


@op("CausalConvWithState", since=27)
def causal_conv_with_state(
    node: Node, x: Value, weight: Value, bias: Value | None = None, past_state: Value | None = None
) -> tuple[Value, Value]:
    """output [B, C, L] and present_state [B, C, k - 1] of x [B, C, L] and weight [C, 1, k]."""
    window = window_of(node, x, weight)
    past = None if past_state is None else channels_last(node, of_rank(node, past_state))
    y, present = convolved_behind(node, channels_last(node, x), weight, bias, past, window)
    return channels_second(node, y), channels_second(node, present)


def window_of(node: Node, x: Value, weight: Value, dilation: int = 1) -> Window:
    """What an output sees. Raises NodeError for operands of another form."""
    if x.rank != 3:
        raise node.error(f"input input has rank {x.rank}.", "Make it 3: batch, channels and length.")
    kernel = kernel_of(node, x, weight, "[channels, 1, k]")
    return Window(tuple(kernel), (1,), (dilation,), (0, 0), "NOTSET")


def of_rank(node: Node, past: Value) -> Value:
    if past.rank != 3:
        raise node.error(f"input past_state has rank {past.rank}.", "Make it 3: batch, channels and k - 1 places.")
    return past


def convolved_behind(
    node: Node, x: Value, weight: Value, bias: Value | None, past: Value | None, window: Window
) -> tuple[Value, Value]:
    """y [B, L, C] and the places [B, reach - 1, C] behind which it would go on, of x [B, L, C] and past, alike."""
    channels = number(node, "the number of channels", weight.shape[0])
    batch, length = x.shape[:2]
    x = asserted(node, x, (batch, length, channels))
    kept = window.reach(0) - 1
    before = (batch, kept, channels)
    if past is None:
        past = node.emit(relax.op.zeros(node.shape_expr(before), x.dtype))
    if past.dtype != x.dtype:
        raise node.error(f"input past_state is {past.dtype}, and input is {x.dtype}.", "Give both one type.")
    past = asserted(node, past, before)
    places = join(node, [past, x], 1) if kept else x
    weight = asserted(node, weight, (channels, 1, *window.kernel))
    y = summed_over_windows(node, places, transposed(node, weight), window, channels)
    return finished(node, y, bias, x), _last(node, places, length, before) if kept else past


def finished(node: Node, sums: Value, bias: Value | None, x: Value) -> Value:
    """The output [B, L, C] of sums, in the type of x: with the bias, and what attribute activation says."""
    activation = node.attr("activation", "none")
    if activation not in _ACTIVATIONS:
        raise node.error(f"attribute activation is '{activation}'.", f"Use one of {', '.join(_ACTIVATIONS)}.")
    if bias is not None:
        vector = rounded(node, vector_of(node, bias, x.shape[2]), sums.dtype)
        sums = relax_call(node, relax.op.add, sums, vector)
    y = rounded(node, sums, x.dtype)
    return y if activation == "none" else pointwise(node, lambda x: swish(x, 1.0), y, name="silu")


def _last(node: Node, places: Value, first: Size, shape: tuple[Size, ...]) -> Value:
    def element(index: tuple[Any, ...], x: Any, first: Any) -> Any:
        return x(index[0], index[1] + first, index[2])

    return compute(node, "state", element, [places], shape, sizes=[first])
