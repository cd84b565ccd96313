"""com.microsoft CausalConvWithState: the operator of ai.onnx over one axis, with dilation; channels may come last."""

from __future__ import annotations

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.channels import channels_last, channels_second
from ..helpers.requirements import reject_attribute, require_range
from ..nn.causal_conv import convolve_causally, read_causal_window, require_state_rank
from . import DOMAIN

_NEUTRAL_VALUES = {
    "ndim": 1, "state_window": 0, "state_update_capacity": 0, "state_length": 0, "state_channels_last": -1,
    "input_channels": 0, "input_channel_offset": 0,
}  # fmt: skip
"""Other attributes, with their neutral values."""


@op("CausalConvWithState", since=1, domain=DOMAIN)
def causal_conv_with_state(
    node: Node, x: Value, weight: Value, bias: Value | None = None, past_state: Value | None = None
) -> tuple[Value, Value]:
    dilation, has_channels_last = read_attributes(node)
    window = read_causal_window(node, x, weight, dilation)
    past = None if past_state is None else require_state_rank(node, past_state)
    if has_channels_last:
        return convolve_causally(node, x, weight, bias, past, window)
    past = None if past is None else channels_last(node, past)
    y, present = convolve_causally(node, channels_last(node, x), weight, bias, past, window)
    return channels_second(node, y), channels_second(node, present)


def read_attributes(node: Node) -> tuple[int, bool]:
    """Return the dilation, and whether channels come last.

    Raises:
        NodeError: an attribute is unsupported.
    """
    for name, neutral in _NEUTRAL_VALUES.items():
        reject_attribute(node, name, neutral, f"Leave it at {neutral}.")
    dilation = require_range(node, "dilation", node.attr("dilation", 1), 1)
    return dilation, bool(node.attr("channels_last", 0))
