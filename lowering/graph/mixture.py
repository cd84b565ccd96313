"""A mixture of experts as nodes over rows sorted by expert: com.microsoft MoE and QMoE, whose experts are matmuls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..fusion.matching import Rewrite, dims
from .expert_rows import ExpertRows

ACTIVATIONS = ("relu", "relu2", "gelu", "silu", "identity", "swiglu", "geglu")
CHOSEN, ALL, GIVEN = "chosen", "all", "given"
"""Over which experts the weights of a token are a softmax of the logits, or that they are an input."""
_OPSET = 24  # of Swish


@dataclass(frozen=True)
class Layer:
    """A matmul of each expert: arrays [E, N, ...] as GroupedMatMul takes them, a bias [E, N], and its attributes."""

    weights: np.ndarray
    scales: np.ndarray | None
    zero_points: np.ndarray | None
    bias: np.ndarray | None
    attributes: dict[str, int]

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K."""
        columns, depth = self.weights.shape[1:]
        return int(columns), self.attributes.get("K", int(depth))

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        return self.weights, self.scales, self.zero_points, self.bias

    def columns(self, part: slice) -> Layer:
        """Return some of the columns N."""
        scales, zero_points, bias = (None if array is None else array[:, part] for array in self.arrays[1:])
        weights = self.weights[:, part]
        count = {"N": weights.shape[1]} if "N" in self.attributes else {}
        return Layer(weights, scales, zero_points, bias, self.attributes | count)


@dataclass(frozen=True)
class Mixture:
    """layers give the gate, the output, and what the activation of the gate is multiplied by, if there is such a one.

    Of the activation swiglu: alpha, what is added to the linear part, and the limit of both parts, infinity for none.
    """

    layers: tuple[Layer, Layer, Layer | None]
    experts: int
    per_token: int
    weights: str
    normalizes: bool
    activation: str
    alpha: float
    beta: float
    limit: float


def mixture_graph(mixture: Mixture, inputs: Sequence[ir.Value], name: str) -> ir.Graph:
    """Return a graph of the tokens [..., H], the logits [T, E] and, where weights are given, those [T, E]."""
    new = Rewrite(ir.node("MoE", [], name=name))
    factors, chosen = _route(mixture, new, inputs[1:])
    rows = ExpertRows(new, chosen, mixture.per_token, mixture.experts)
    gate, output, linear = mixture.layers
    x = rows.rows_of(inputs[0], gate.sizes[1])
    up = None if linear is None else _matmul(rows, x, linear)
    hidden = _matmul(rows, _activate(mixture, new, _matmul(rows, x, gate), up), output)
    y = rows.sum_per_token(hidden, new.cast(factors, hidden.dtype or ir.DataType.FLOAT), inputs[0])
    y = new.emit("Reshape", [y, new.emit("Shape", [inputs[0]], dtype=ir.DataType.INT64)])
    return ir.Graph(inputs, [y], nodes=new.nodes, opset_imports={"": _OPSET}, name=name)


def _route(mixture: Mixture, new: Rewrite, inputs: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Return the weights [T, k] of the experts that each token chooses, and which they are."""
    logits, count = inputs[0], mixture.per_token
    sizes = [dims(logits)[0], count]
    best = ir.node("TopK", [logits, new.integers(count)], {"axis": -1}, num_outputs=2, name=f"{new.origin}/TopK")
    new.nodes.append(best)
    values, chosen = best.outputs
    values.type, chosen.type = logits.type, ir.TensorType(ir.DataType.INT64)
    values.shape = chosen.shape = ir.Shape(sizes)
    if mixture.weights == CHOSEN:
        return new.emit("Softmax", [values], {"axis": -1}, shape=sizes), chosen
    shares = inputs[1] if mixture.weights == GIVEN else new.emit("Softmax", [logits], {"axis": -1})
    weights = new.emit("GatherElements", [shares, chosen], {"axis": -1}, shape=sizes)
    if mixture.normalizes:
        weights = new.emit("Div", [weights, new.emit("ReduceSum", [weights, new.integers(-1)])], shape=sizes)
    return weights, chosen


def _matmul(rows: ExpertRows, x: ir.Value, layer: Layer) -> ir.Value:
    *matrices, bias = (
        None if a is None else rows.new.constant(a, ir.DataType.from_numpy(a.dtype)) for a in layer.arrays
    )
    return rows.matmul(x, matrices, bias, layer.attributes)


def _activate(mixture: Mixture, new: Rewrite, gate: ir.Value, linear: ir.Value | None) -> ir.Value:
    """Return the activation of the gate, times what is linear."""
    kind, limit = mixture.activation, mixture.limit
    if kind == "swiglu" and linear is not None:
        if np.isfinite(limit):
            low, high = (_scalar(new, gate, value) for value in (-limit, limit))
            gate, linear = new.emit("Min", [gate, high]), new.emit("Clip", [linear, low, high])
        if mixture.beta:
            linear = new.emit("Add", [linear, _scalar(new, gate, mixture.beta)])
        active = new.emit("Swish", [gate], {"alpha": mixture.alpha})
    elif kind == "silu":
        active = new.emit("Swish", [gate])
    elif kind in ("gelu", "geglu"):
        active = new.emit("Gelu", [gate], {"approximate": "tanh"})
    else:
        active = gate if kind == "identity" else new.emit("Relu", [gate])
        active = new.emit("Mul", [active, active]) if kind == "relu2" else active
    return active if linear is None else new.emit("Mul", [active, linear])


def _scalar(new: Rewrite, like: ir.Value, value: float) -> ir.Value:
    assert like.dtype is not None
    return new.constant(np.array(value), like.dtype)
