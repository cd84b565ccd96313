"""com.microsoft MoE and QMoE: a mixture of experts, each a feed-forward layer, of which every token goes through k.

They become nodes over rows sorted by expert (graph/expert_rows.py), as a mixture that is written out does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...fusion.matching import Rewrite
from ...graph.expert_rows import ExpertRows
from ...importing.compute import number
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from . import DOMAIN
from .matmul_n_bits import unpacked

_OPSET = 24  # of Swish
_GATED = ("swiglu", "geglu")
_CHOSEN, _ALL, _GIVEN = "chosen", "all", "given"  # over which experts the weights are a softmax, or that they are given


@dataclass(frozen=True)
class _Layer:
    """A matmul of each expert: arrays [E, N, ...] as GroupedMatMul takes them, a bias [E, N], and its attributes."""

    matrices: tuple[np.ndarray | None, ...]
    bias: np.ndarray | None
    attributes: dict[str, int]

    def columns(self, part: slice) -> _Layer:
        """Return some of the columns N."""
        matrices = tuple(None if array is None else array[:, part] for array in self.matrices)
        attributes = dict(self.attributes)
        if "N" in attributes:
            attributes["N"] = len(range(attributes["N"])[part])
        return _Layer(matrices, None if self.bias is None else self.bias[:, part], attributes)


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
    """Y like x [T, H] or [B, S, H]; router_probs [T, E] are logits; weights are [E, N, K]."""
    given = (
        (fc1_experts_weights, fc1_experts_bias),
        (fc2_experts_weights, fc2_experts_bias),
        (fc3_experts_weights, fc3_experts_bias),
    )
    layers = [None if w is None else _Layer((_array(node, w),), _array(node, b), {"transB": 1}) for w, b in given]
    return _mixture(node, x, router_probs, None, layers, _ALL)


@op("QMoE", since=1, domain=DOMAIN)
def q_moe(node: Node, x: Value, router_probs: Value, *inputs: Value | None) -> Value:
    """The same with weights of 2, 4 or 8 bits, packed as those of MatMulNBits. router_weights [T, E] are what chosen
    experts are weighted by, where they are given."""
    if node.attr("quant_type", b"int") not in ("int", b"int"):
        raise node.error("attribute quant_type is not int.", "Quantize to integers.")
    if node.attr("weights_prepacked", -1) == 1:
        raise node.error("attribute weights_prepacked is 1.", "Export weights in the operator's own layout.")
    given = [*inputs, *(None,) * (13 - len(inputs))]
    layers = [_q_layer(node, k, *given[3 * k : 3 * k + 3], given[9 + k]) for k in range(3)]
    weights = given[12]
    return _mixture(node, x, router_probs, weights, layers, _CHOSEN if weights is None else _GIVEN)


def _array(node: Node, value: Value | None) -> np.ndarray | None:
    if value is not None and value.constant is None:
        raise node.error(f"{node.name_of(value, full=False)} is computed at run time.", "Make it an initializer.")
    return None if value is None else value.constant


def _q_layer(
    node: Node, k: int, weights: Value | None, scales: Value | None, bias: Value | None, zeros: Value | None
) -> _Layer | None:
    packed, scale, zero = (_array(node, value) for value in (weights, scales, zeros))
    if packed is None:
        return None
    if scale is None:
        raise node.error(f"input fc{k + 1}_scales is missing.", "Add it; integers mean nothing without.")
    bits = node.attr(f"fc{k + 1}_expert_weight_bits", node.attr("expert_weight_bits", 4))
    columns, depth = packed.shape[1], packed.shape[2] * 8 // max(bits, 1)
    if zero is not None and zero.ndim == 2:  # packed along the columns
        zero = unpacked(zero, bits)[:, :columns, None]
    attributes = {"K": depth, "N": columns, "bits": bits, "block_size": node.attr("block_size", 0) or depth}
    return _Layer((packed, scale, zero), _array(node, bias), attributes)


def _mixture(
    node: Node, x: Value, router: Value, weights: Value | None, layers: Sequence[_Layer | None], over: str
) -> Value:
    if node.attr("use_sparse_mixer", 0):
        raise node.error("attribute use_sparse_mixer is 1.", "Write the routing out, and set it to 0.")
    experts = number(node, "dimension 1 of router_probs", router.shape[1])
    per_token = node.attr("k", 1)
    if not 0 < per_token <= experts:
        raise node.error(f"attribute k is {per_token}, and there are {experts} experts.", "Choose 1 to all of them.")
    given = [value for value in (x, router, weights) if value is not None]
    inputs = [ir.Value(name=f"input_{n}", type=_type(v), shape=_shape(v)) for n, v in enumerate(given)]
    new = Rewrite(ir.node("MoE", [], name=node.name or node.outputs[0]))
    factors, chosen = _route(node, new, inputs[1:], per_token, over)
    rows = ExpertRows(new, chosen, per_token, experts)
    width = number(node, "the last dimension of the input", x.shape[-1])
    hidden = _feed_forward(node, rows, rows.rows_of(inputs[0], width), layers)
    y = rows.sum_per_token(hidden, new.cast(factors, hidden.dtype or ir.DataType.FLOAT), inputs[0])
    y = new.emit("Reshape", [y, new.emit("Shape", [inputs[0]], dtype=ir.DataType.INT64)])
    opsets = {"": _OPSET}
    graph = ir.Graph(inputs, [y], nodes=new.nodes, opset_imports=opsets, name=node.name)
    return node.importer.body(graph, given, f" in {node.where}")[0]


def _type(value: Value) -> ir.TensorType:
    return ir.TensorType(ir.DataType.from_numpy(np.dtype(value.dtype)))


def _shape(value: Value) -> ir.Shape:
    return ir.Shape([size if isinstance(size, int) else ir.SymbolicDim(str(size)) for size in value.shape])


def _route(
    node: Node, new: Rewrite, inputs: Sequence[ir.Value], per_token: int, over: str
) -> tuple[ir.Value, ir.Value]:
    """Return the weights [T, k] of the experts that each token chooses, and which they are."""
    logits = inputs[0]
    tokens = logits.shape[0] if logits.shape is not None else None
    sizes = [tokens, per_token]
    best = ir.node("TopK", [logits, new.integers(per_token)], {"axis": -1}, num_outputs=2, name=f"{new.origin}/TopK")
    new.nodes.append(best)
    values, chosen = best.outputs
    values.type, chosen.type = logits.type, ir.TensorType(ir.DataType.INT64)
    values.shape = chosen.shape = ir.Shape(sizes)
    if over == _CHOSEN:
        return new.emit("Softmax", [values], {"axis": -1}, shape=sizes), chosen
    shares = inputs[1] if over == _GIVEN else new.emit("Softmax", [logits], {"axis": -1}, shape=logits.shape)
    weights = new.emit("GatherElements", [shares, chosen], {"axis": -1}, shape=sizes)
    if node.attr("normalize_routing_weights", 0):
        weights = new.emit("Div", [weights, new.emit("ReduceSum", [weights, new.integers(-1)])], shape=sizes)
    return weights, chosen


def _feed_forward(node: Node, rows: ExpertRows, x: ir.Value, layers: Sequence[_Layer | None]) -> ir.Value:
    """Return what each row's expert makes of it."""
    first, second, third = layers
    activation = _text(node.attr("activation_type", "relu"))
    fusion = node.attr("swiglu_fusion", 0)
    if first is None or second is None:
        raise node.error("input fc1_experts_weights or fc2_experts_weights is missing.", "Add it.")
    if activation in _GATED and fusion in (1, 2):
        half = first.matrices[0].shape[1] // 2 if first.matrices[0] is not None else 0
        gate, up = ((slice(0, None, 2), slice(1, None, 2)), (slice(0, half), slice(half, None)))[fusion - 1]
        first, third = first.columns(gate), first.columns(up)
    elif activation in _GATED and third is None:
        raise node.error("swiglu_fusion is 0, and input fc3_experts_weights is missing.", "Add it, or fuse it in fc1.")
    gated = _matmul(rows, x, first)
    linear = None if third is None else _matmul(rows, x, third)
    return _matmul(rows, _activate(node, rows.new, activation, gated, linear), second)


def _matmul(rows: ExpertRows, x: ir.Value, layer: _Layer) -> ir.Value:
    matrices, bias = (
        [None if a is None else rows.new.constant(a, ir.DataType.from_numpy(a.dtype)) for a in arrays]
        for arrays in (layer.matrices, (layer.bias,))
    )
    return rows.matmul(x, matrices, bias[0], layer.attributes)


def _activate(node: Node, new: Rewrite, activation: str, gate: ir.Value, linear: ir.Value | None) -> ir.Value:
    """Return the activation of the gate, times what is linear."""
    if activation == "swiglu":
        limit, beta = node.attr("swiglu_limit", np.inf), node.attr("activation_beta", 0.0)
        if np.isfinite(limit) and node.attr("swiglu_limit_after_activation", 0):
            raise node.error("attribute swiglu_limit_after_activation is 1.", "Limit what is activated.")
        if np.isfinite(limit) and linear is not None:
            low, high = (_scalar(new, gate, value) for value in (-limit, limit))
            gate, linear = new.emit("Min", [gate, high]), new.emit("Clip", [linear, low, high])
        if beta and linear is not None:
            linear = new.emit("Add", [linear, _scalar(new, gate, beta)])
        active = new.emit("Swish", [gate], {"alpha": node.attr("activation_alpha", 1.0)})
    elif activation == "relu2":
        active = new.emit("Relu", [gate])
        active = new.emit("Mul", [active, active])
    elif activation in _ACTIVATIONS:
        active = new.emit(*_ACTIVATIONS[activation](gate))
    else:
        known = ", ".join(("swiglu", "relu2", *_ACTIVATIONS))
        raise node.error(f"attribute activation_type is {activation}.", f"Use one of {known}.")
    return active if linear is None else new.emit("Mul", [active, linear])


_ACTIVATIONS = {
    "relu": lambda x: ("Relu", [x]),
    "gelu": lambda x: ("Gelu", [x], {"approximate": "tanh"}),
    "geglu": lambda x: ("Gelu", [x], {"approximate": "tanh"}),
    "silu": lambda x: ("Swish", [x]),
    "identity": lambda x: ("Identity", [x]),
}


def _scalar(new: Rewrite, like: ir.Value, value: float) -> ir.Value:
    assert like.dtype is not None
    return new.constant(np.array(value), like.dtype)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
