"""com.microsoft DynamicQuantizeLSTM: weights are bytes with scales. Its sums are those of floats: inputs and states are
not rounded to bytes, as onnxruntime does, so that answers are nearer to the model that was quantised."""

from __future__ import annotations

from tvm import relax

from ...importing.compute import relax_call
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..cast import cast_to
from ..matmul import permuted
from ..recurrent import recurrent
from ..reshape import reshape_to
from . import DOMAIN


@op("DynamicQuantizeLSTM", since=1, domain=DOMAIN)
def dynamic_quantize_lstm(
    node: Node,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None,
    lengths: Value | None,
    initial_h: Value | None,
    initial_c: Value | None,
    peepholes: Value | None,
    w_scale: Value,
    w_zero: Value,
    r_scale: Value,
    r_zero: Value,
) -> tuple[Value, ...]:
    """w [directions, I, 4 H], r [directions, H, 4 H]; scales and zero points [directions] or [directions, 4 H]."""
    w, r = _floats(node, w, w_scale, w_zero), _floats(node, r, r_scale, r_zero)
    return recurrent(node, "LSTM", x, w, r, bias, lengths, initial_h, initial_c, peepholes)


def _floats(node: Node, codes: Value, scale: Value, zero: Value) -> Value:
    """(codes - zero) scale as [directions, 4 H, inputs]."""
    if codes.rank != 3 or scale.rank not in (1, 2) or zero.rank != scale.rank:
        raise node.error(
            f"weights of rank {codes.rank} have scales and zero points of rank {scale.rank} and {zero.rank}.",
            "Weights are [directions, inputs, 4 H], and scales [directions] or [directions, 4 H].",
        )
    if codes.constant is not None and scale.constant is not None and zero.constant is not None:
        axes = (slice(None), None, slice(None)) if scale.rank == 2 else (slice(None), None, None)
        wide = codes.constant.astype("float32") - zero.constant.astype("float32")[axes]
        return node.constant((wide * scale.constant[axes]).transpose(0, 2, 1))
    shape = (scale.shape[0], 1, scale.shape[1] if scale.rank == 2 else 1)
    number = relax_call(
        node, relax.op.subtract, cast_to(node, codes, "float32"),
        cast_to(node, reshape_to(node, zero, shape), "float32"),
    )  # fmt: skip
    number = relax_call(node, relax.op.multiply, number, reshape_to(node, scale, shape))
    return permuted(node, number, [0, 2, 1])
