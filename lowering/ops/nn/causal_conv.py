"""ai.onnx CausalConvWithState-27 (https://onnx.ai/onnx/operators/onnx__CausalConvWithState.html), and com.microsoft's.

It is a depthwise convolution over the past state followed by the input, channels last (conv.py):

    joined = [past_state, x]                   k - 1 and L positions
    y_t = bias + sum over j of w_j joined_(t + j),    present_state = the last k - 1 positions of joined
"""

from __future__ import annotations

from typing import Any

from tvm import relax

from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.channels import channels_last, channels_second
from ..helpers.compute import number, pointwise, relax_call
from ..helpers.kernels import compute
from ..helpers.requirements import require_choice, require_rank, require_same_dtype
from ..math.activation import swish
from ..math.matmul import round_to
from ..tensor.concat import emit_concat
from .conv import accumulate_windows, assert_bias_vector, read_kernel_shape, transpose_weights
from .window import SpatialWindow

_ACTIVATIONS = ("none", "silu", "swish")


@op("CausalConvWithState", since=27)
def causal_conv_with_state(
    node: Node, x: Value, weight: Value, bias: Value | None = None, past_state: Value | None = None
) -> tuple[Value, Value]:
    """Emit output [B, C, L] and present_state [B, C, k - 1] of x [B, C, L] and weight [C, 1, k]."""
    window = read_causal_window(node, x, weight)
    past = None if past_state is None else channels_last(node, require_state_rank(node, past_state))
    y, present = convolve_causally(node, channels_last(node, x), weight, bias, past, window)
    return channels_second(node, y), channels_second(node, present)


def read_causal_window(node: Node, x: Value, weight: Value, dilation: int = 1) -> SpatialWindow:
    """Return the window of an output.

    Raises:
        NodeError: An operand has another form.
    """
    require_rank(node, "input", x, "[N, C, L]", code="causal_conv_with_state.rank_unsupported")
    kernel = read_kernel_shape(node, x, weight, "[channels, 1, k]")
    return SpatialWindow(tuple(kernel), (1,), (dilation,), (0, 0), "NOTSET")


def require_state_rank(node: Node, past: Value) -> Value:
    """Return past_state, which must have rank 3."""
    require_rank(node, "past_state", past, "[N, C, k - 1]", code="causal_conv_with_state.past_rank_unsupported")
    return past


def convolve_causally(
    node: Node, x: Value, weight: Value, bias: Value | None, past: Value | None, window: SpatialWindow
) -> tuple[Value, Value]:
    """Emit y [B, L, C] and the next state [B, reach - 1, C] of x [B, L, C] and a past of that form."""
    channels = number(node, "the number of channels", weight.shape[0])
    batch, length = x.shape[:2]
    x = assert_shape(node, x, (batch, length, channels))
    state_length = window.reach(0) - 1
    state_shape = (batch, state_length, channels)
    if past is None:
        past = node.emit(relax.op.zeros(node.shape_expr(state_shape), x.dtype))
    require_same_dtype(node, "past_state", past, "input", x, code="causal_conv_with_state.dtype_mismatch")
    past = assert_shape(node, past, state_shape)
    joined = emit_concat(node, [past, x], 1) if state_length else x
    weight = assert_shape(node, weight, (channels, 1, *window.kernel))
    y = accumulate_windows(node, joined, transpose_weights(node, weight), window, channels)
    return apply_activation(node, y, bias, x), _emit_state(node, joined, length, state_shape) if state_length else past


def apply_activation(node: Node, accumulator: Value, bias: Value | None, x: Value) -> Value:
    """Add the bias to an accumulator, apply attribute activation, and round to the type of x.

    The result is [B, L, C].
    """
    activation = node.attr("activation", "none")
    require_choice(node, "activation", activation, _ACTIVATIONS, code="causal_conv_with_state.activation_unsupported")
    if bias is not None:
        vector = round_to(node, assert_bias_vector(node, bias, x.shape[2]), accumulator.dtype)
        accumulator = relax_call(node, relax.op.add, accumulator, vector)
    y = round_to(node, accumulator, x.dtype)
    return y if activation == "none" else pointwise(node, lambda x: swish(x, 1.0), y, name="silu")


def _emit_state(node: Node, joined: Value, first: Size, shape: tuple[Size, ...]) -> Value:
    """Emit the positions of `joined` from `first` on, as many as `shape` has."""

    def element(index: tuple[Any, ...], x: Any, first: Any) -> Any:
        return x(index[0], index[1] + first, index[2])

    return compute(node, "state", element, [joined], shape, sizes=[first])
