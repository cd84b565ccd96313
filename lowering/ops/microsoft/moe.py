"""com.microsoft MoE and QMoE: a mixture of experts, each a feed-forward layer; each token is processed by k of them.

They are rewritten to nodes over rows sorted by expert (graph/experts/mixture.py), as a mixture of primitive operators
is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ...graph.experts.mixture import (
    ACTIVATIONS,
    WEIGHTS_GIVEN,
    WEIGHTS_OVER_ALL,
    WEIGHTS_OVER_CHOSEN,
    ExpertLayer,
    ExpertMixture,
    build_mixture_graph,
)
from ...importing.node import Node
from ...importing.quantized_matrix import unpack_bits
from ...importing.values import Value, prod
from .. import op
from ..helpers.compute import number
from ..helpers.requirements import (
    read_choice,
    reject_attribute,
    require_choice,
    require_input,
    require_range,
    require_rank,
)
from . import DOMAIN

_GATED = ("swiglu", "geglu")
_LAYERS = ("the gate of fc1", "fc2", "fc3, or the linear part of fc1,")
_Layers = tuple[ExpertLayer, ExpertLayer, ExpertLayer | None]


@op("MoE", since=1, domain=DOMAIN)
def moe(
    node: Node,
    x: Value,
    router_probs: Value,
    fc1_experts_weights: Value,
    fc1_experts_bias: Value | None,
    fc2_experts_weights: Value,
    fc2_experts_bias: Value | None = None,
    fc3_experts_weights: Value | None = None,
    fc3_experts_bias: Value | None = None,
) -> Value:
    """Return Y like x [T, H] or [B, S, H]; router_probs [T, E] are logits, weights are [E, N, K]."""
    layer_inputs = (
        (fc1_experts_weights, fc1_experts_bias),
        (fc2_experts_weights, fc2_experts_bias),
        (fc3_experts_weights, fc3_experts_bias),
    )
    return _emit_mixture(
        node, x, router_probs, None, [_read_layer(node, *pair) for pair in layer_inputs], WEIGHTS_OVER_ALL
    )


@op("QMoE", since=1, domain=DOMAIN)
def q_moe(node: Node, x: Value, router_probs: Value, *inputs: Value | None) -> Value:
    """Return MoE with weights of 2, 4 or 8 bits, packed as those of MatMulNBits.

    router_weights [T, E], if present, are the weights of the chosen experts.
    """
    if _as_text(node.attr("quant_type", "int")) != "int":
        raise node.error("node.attribute_unsupported", "attribute quant_type is not int.", "Quantize to integers.")
    read_choice(node, "weights_prepacked", -1, (-1, 0))
    padded_inputs = [*inputs, *(None,) * (13 - len(inputs))]
    if any(value is not None for value in padded_inputs[13:]):
        raise node.error(
            "node.input_unsupported",
            "inputs after input 14, scales of whole matrices or of activations, are given.",
            "Remove them.",
        )
    layers = [
        _read_quantized_layer(node, k, [*padded_inputs[3 * k : 3 * k + 3], padded_inputs[9 + k]]) for k in range(3)
    ]
    weights = padded_inputs[12]
    return _emit_mixture(
        node, x, router_probs, weights, layers, WEIGHTS_OVER_CHOSEN if weights is None else WEIGHTS_GIVEN
    )


def _read_array(node: Node, value: Value | None) -> np.ndarray | None:
    if value is not None and value.constant is None:
        raise node.error(
            "node.constant_required",
            f"{node.describe(value, full=False)} is computed at run time.",
            "Make it an initializer.",
        )
    return None if value is None else value.constant


def _read_layer(node: Node, weights: Value | None, bias: Value | None) -> ExpertLayer | None:
    matrices = _read_array(node, weights)
    if weights is not None and matrices is not None and matrices.ndim != 3:
        name = node.describe(weights, full=False)
        raise node.error(
            "node.rank_unsupported", f"{name} has rank {matrices.ndim}.", "Make weights [experts, columns, depth]."
        )
    return None if matrices is None else ExpertLayer(matrices, None, None, _read_array(node, bias), {"transB": 1})


def _read_quantized_layer(node: Node, k: int, inputs: Sequence[Value | None]) -> ExpertLayer | None:
    """Return a quantized layer; inputs are the weights, scales, bias and zero points."""
    packed, scales, bias, zeros = (_read_array(node, value) for value in inputs)
    if packed is None:
        return None
    scales = require_input(node, f"fc{k + 1}_scales", scales, "Add it: quantized weights need scales.")
    bits = read_choice(node, f"fc{k + 1}_expert_weight_bits", node.attr("expert_weight_bits", 4), (2, 4, 8))
    if packed.ndim != 3:
        raise node.error(
            "node.rank_unsupported",
            f"fc{k + 1}_experts_weights has rank {packed.ndim}.",
            "Make it [experts, columns, bytes].",
        )
    columns, depth = packed.shape[1], packed.shape[2] * 8 // bits
    if zeros is not None and zeros.ndim == 2:  # packed along the columns
        zeros = unpack_bits(zeros, bits)[:, :columns, None]
    block = node.attr("block_size", 0) or depth
    if block < 0 or scales.size != packed.shape[0] * columns * -(-depth // max(block, 1)):
        raise node.error(
            "node.shape_mismatch",
            f"fc{k + 1}_scales has shape {list(scales.shape)}, for {columns} columns of {depth} in blocks of {block}.",
            "Give one scale for each expert, column and block.",
        )
    # MatMulNBits, whose layout is used, has whole blocks.
    missing = -(-depth // block) * block * bits // 8 - packed.shape[2] if block else 0
    packed = np.pad(packed, ((0, 0), (0, 0), (0, missing)))
    return ExpertLayer(packed, scales, zeros, bias, {"K": depth, "N": columns, "bits": bits, "block_size": block})


def _emit_mixture(
    node: Node, x: Value, router: Value, weights: Value | None, layers: Sequence[ExpertLayer | None], routing: str
) -> Value:
    require_rank(node, "input", x, "[tokens, hidden] or [batch, sequence, hidden]")
    require_rank(node, "router_probs", router, "[tokens, experts]")
    width = number(node, "the last dimension of the input", x.shape[-1])
    experts = number(node, "dimension 1 of router_probs", router.shape[1])
    per_token = require_range(node, "k", node.attr("k", 1), 1, experts, code="moe.k_out_of_range")
    gate_layers = _split_gate(node, layers)
    _check_layers(node, gate_layers, experts, width)
    rows = node.simplify(prod(x.shape[:-1]))
    arguments = [x, *(node.cast_shape(v, (rows, experts)) for v in (router, weights) if v is not None)]
    inputs = [_make_input(f"input_{n}", value) for n, value in enumerate(arguments)]
    normalizes = bool(node.attr("normalize_routing_weights", 0))
    mixture = ExpertMixture(gate_layers, experts, per_token, routing, normalizes, *_read_activation(node))
    graph = build_mixture_graph(mixture, inputs, node.name or node.outputs[0])
    return node.importer.lower_body(graph, arguments, f" in {node.where}")[0]


def _make_input(name: str, value: Value) -> ir.Value:
    sizes = [size if isinstance(size, int) else ir.SymbolicDim(None) for size in value.shape]
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(np.dtype(value.dtype))), shape=ir.Shape(sizes))


def _read_activation(node: Node) -> tuple[str, float, float, float]:
    """Return the activation, its alpha, beta and limit."""
    kind = _as_text(node.attr("activation_type", "relu"))
    require_choice(node, "activation_type", kind, ACTIVATIONS)
    for name in ("use_sparse_mixer", "swiglu_limit_after_activation"):
        reject_attribute(node, name, 0, "Write that part of the model as separate nodes, and set it to 0.")
    alpha, beta = node.attr("activation_alpha", 1.0), node.attr("activation_beta", 0.0)
    return kind, alpha, beta, node.attr("swiglu_limit", math.inf)


def _split_gate(node: Node, layers: Sequence[ExpertLayer | None]) -> _Layers:
    """Return the layers of the gate, of the output, and of the linear part if there is one."""
    first, second, third = layers
    if first is None or second is None:
        raise node.error("node.input_missing", "fc1_experts_weights or fc2_experts_weights is missing.", "Add it.")
    if _as_text(node.attr("activation_type", "relu")) not in _GATED:
        return first, second, third
    fusion = node.attr("swiglu_fusion", 0)
    if fusion not in (0, 1, 2) or (fusion and third is not None):
        raise node.error(
            "moe.conflicting_fusion",
            f"attribute swiglu_fusion is {fusion}, {'with' if third else 'without'} fc3_experts_weights.",
            "Use 0 with fc3_experts_weights, or 1 or 2 without it.",
        )
    if fusion:
        half_width = first.sizes[0] // 2
        gate, linear = ((slice(0, None, 2), slice(1, None, 2)), (slice(0, half_width), slice(half_width, None)))[
            fusion - 1
        ]
        return first.select_columns(gate), second, first.select_columns(linear)
    if third is None:
        raise node.error(
            "node.input_missing",
            "swiglu_fusion is 0, and fc3_experts_weights is missing.",
            "Add it, or merge it into fc1_experts_weights.",
        )
    return first, second, third


def _check_layers(node: Node, layers: _Layers, experts: int, width: int) -> None:
    """Raise NodeError for weights and biases that do not fit together; the second layer computes the output."""
    inner = layers[1].sizes[1]
    for name, layer, expected in zip(_LAYERS, layers, ((inner, width), (width, inner), (inner, width))):
        if layer is None:
            continue
        counts = {array.shape[0] for array in layer.arrays if array is not None}
        if layer.sizes != expected or counts != {experts}:
            (columns, depth), count = layer.sizes, min(counts, key=lambda count: count == experts)
            raise node.error(
                "moe.experts_mismatch",
                f"{name} has {count} experts of {columns} x {depth}, where router_probs has {experts} and the other "
                f"matrices need {expected[0]} x {expected[1]}.",
                "Make fc1 and fc3 [experts, inner, hidden] and fc2 [experts, hidden, inner].",
            )
        if layer.bias is not None and layer.bias.shape != (experts, expected[0]):
            shape = list(layer.bias.shape)
            raise node.error(
                "node.shape_mismatch",
                f"the bias of {name} has shape {shape}, not {[experts, expected[0]]}.",
                "Correct its shape.",
            )


def _as_text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
