"""com.microsoft FusedConv and FusedGemm: Conv and Gemm with an activation before the only rounding."""

from __future__ import annotations

from tvm import relax

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.channels import channels_last, channels_second
from ..helpers.compute import relax_call
from ..helpers.requirements import read_choice, require_choice
from ..math.activation import emit_activation
from ..math.matmul import emit_gemm_accumulator, round_to
from ..nn.conv import convolve
from . import DOMAIN

# The meaning of activation_params, by activation of FusedConv; Silu is Swish.
_PARAMETERS = {
    "Relu": (), "Silu": (), "Tanh": (), "Sigmoid": (), "LeakyRelu": ("alpha",), "Clip": ("min", "max"),
    "HardSigmoid": ("alpha", "beta"),
}  # fmt: skip
_GEMM_ACTIVATIONS = (
    "Elu", "HardSigmoid", "LeakyRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Tanh", "ThresholdedRelu",
)  # fmt: skip


@op("FusedConv", since=1, domain=DOMAIN)
def fused_conv(node: Node, x: Value, w: Value, bias: Value | None = None, z: Value | None = None) -> Value:
    """Return activation(Conv(X, W, B) + Z); Z has the shape of Y."""
    y = convolve(node, x, w, bias)
    if z is not None:
        if z.rank != x.rank:
            raise node.error(
                "node.rank_mismatch", f"Z has rank {z.rank}, and X has rank {x.rank}.", "Give Z the shape of Y."
            )
        z = assert_shape(node, channels_last(node, z), y.shape, "input Z with channels last")
        y = relax_call(node, relax.op.add, y, round_to(node, z, y.dtype))
    return channels_second(node, round_to(node, _activate_conv(node, y), x.dtype))


def _activate_conv(node: Node, y: Value) -> Value:
    name, numbers = node.attr("activation", None), node.attr("activation_params", [])
    if name is None:
        return y
    require_choice(node, "activation", name, _PARAMETERS)
    names = _PARAMETERS[name]
    if len(numbers) != len(names):
        raise node.error(
            "fused_conv.activation_params_mismatch",
            f"attribute activation_params has {len(numbers)} numbers, and {name} takes {len(names)}.",
            f"Give it {' and '.join(names) or 'none'}.",
        )
    return emit_activation(node, y, "Swish" if name == "Silu" else name, dict(zip(names, numbers)))


@op("FusedGemm", since=1, domain=DOMAIN)
def fused_gemm(node: Node, a: Value, b: Value, c: Value | None = None) -> Value:
    """Return activation(alpha A' B' + beta C).

    activation_alpha, _beta and _gamma are the activation's attributes.
    """
    y = emit_gemm_accumulator(node, a, b, c)
    name = read_choice(node, "activation", None, (None, *_GEMM_ACTIVATIONS))
    if name is not None:
        attributes = {key: node.attr(f"activation_{key}", None) for key in ("alpha", "beta", "gamma")}
        y = emit_activation(node, y, name, {key: number for key, number in attributes.items() if number is not None})
    return round_to(node, y, a.dtype)
