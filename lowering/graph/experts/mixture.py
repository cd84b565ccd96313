"""A mixture of experts as nodes over rows sorted by expert: MoE and QMoE of com.microsoft, with matmuls as experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..rewriting.matching import Rewrite, dims
from .expert_rows import ExpertRows

ACTIVATIONS = ("relu", "relu2", "gelu", "silu", "identity", "swiglu", "geglu")
WEIGHTS_OVER_CHOSEN, WEIGHTS_OVER_ALL, WEIGHTS_GIVEN = "chosen", "all", "given"
"""Sources of the weights of a token: a softmax of the logits over these experts, or an input."""
_OPSET = 24  # for Swish


@dataclass(frozen=True)
class ExpertLayer:
    """A matmul of each expert: arrays [E, N, ...] as GroupedMatMul takes them, a bias [E, N], and its attributes."""

    weights: np.ndarray
    scales: np.ndarray | None
    zero_points: np.ndarray | None
    bias: np.ndarray | None
    attributes: dict[str, int]

    @property
    def sizes(self) -> tuple[int, int]:
        """Return N and K."""
        columns, depth = self.weights.shape[1:]
        return int(columns), self.attributes.get("K", int(depth))

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        return self.weights, self.scales, self.zero_points, self.bias

    def select_columns(self, selection: slice) -> ExpertLayer:
        """Return some of the columns N."""
        scales, zero_points, bias = (None if array is None else array[:, selection] for array in self.arrays[1:])
        weights = self.weights[:, selection]
        count = {"N": weights.shape[1]} if "N" in self.attributes else {}
        return ExpertLayer(weights, scales, zero_points, bias, self.attributes | count)


@dataclass(frozen=True)
class ExpertMixture:
    """The layers and the routing of a mixture of experts.

    layers compute the gate, the output, and the factor of the gate's activation, if there is one. For the activation
    swiglu: alpha, the summand of the linear half, and the limit of both halves, infinity for none.
    """

    layers: tuple[ExpertLayer, ExpertLayer, ExpertLayer | None]
    experts: int
    per_token: int
    weights: str
    normalizes: bool
    activation: str
    alpha: float
    beta: float
    limit: float


def build_mixture_graph(mixture: ExpertMixture, inputs: Sequence[ir.Value], name: str) -> ir.Graph:
    """Return a graph of the tokens [..., H], the logits [T, E] and, if weights are an input, those [T, E]."""
    new = Rewrite(ir.node("MoE", [], name=name))
    factors, chosen = _emit_routing(mixture, new, inputs[1:])
    rows = ExpertRows(new, chosen, mixture.per_token, mixture.experts)
    gate, output, linear = mixture.layers
    x = rows.gather_rows(inputs[0], gate.sizes[1])
    up = None if linear is None else _emit_matmul(rows, x, linear)
    hidden = _emit_matmul(rows, _emit_activation(mixture, new, _emit_matmul(rows, x, gate), up), output)
    y = rows.sum_per_token(hidden, new.emit_cast(factors, hidden.dtype or ir.DataType.FLOAT), inputs[0])
    y = new.emit("Reshape", [y, new.emit("Shape", [inputs[0]], dtype=ir.DataType.INT64)])
    return ir.Graph(inputs, [y], nodes=new.nodes, opset_imports={"": _OPSET}, name=name)


def _emit_routing(mixture: ExpertMixture, new: Rewrite, inputs: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Return the weights [T, k] of the experts that each token chooses, and their indices."""
    logits, count = inputs[0], mixture.per_token
    sizes = [dims(logits)[0], count]
    values, chosen = new.emit_node(
        "TopK", [logits, new.emit_integers(count)], {"axis": -1}, [logits.dtype, ir.DataType.INT64]
    )
    values.shape = chosen.shape = ir.Shape(sizes)
    if mixture.weights == WEIGHTS_OVER_CHOSEN:
        return new.emit("Softmax", [values], {"axis": -1}, shape=sizes), chosen
    shares = inputs[1] if mixture.weights == WEIGHTS_GIVEN else new.emit("Softmax", [logits], {"axis": -1})
    weights = new.emit("GatherElements", [shares, chosen], {"axis": -1}, shape=sizes)
    if mixture.normalizes:
        weights = new.emit("Div", [weights, new.emit("ReduceSum", [weights, new.emit_integers(-1)])], shape=sizes)
    return weights, chosen


def _emit_matmul(rows: ExpertRows, x: ir.Value, layer: ExpertLayer) -> ir.Value:
    *matrices, bias = (
        None if a is None else rows.new.emit_constant(a, ir.DataType.from_numpy(a.dtype)) for a in layer.arrays
    )
    return rows.matmul(x, matrices, bias, layer.attributes)


def _emit_activation(mixture: ExpertMixture, new: Rewrite, gate: ir.Value, linear: ir.Value | None) -> ir.Value:
    """Return the activation of the gate, times the linear half."""
    kind, limit = mixture.activation, mixture.limit
    if kind == "swiglu" and linear is not None:
        if np.isfinite(limit):
            low, high = (_emit_scalar(new, gate, value) for value in (-limit, limit))
            gate, linear = new.emit("Min", [gate, high]), new.emit("Clip", [linear, low, high])
        if mixture.beta:
            linear = new.emit("Add", [linear, _emit_scalar(new, gate, mixture.beta)])
        active = new.emit("Swish", [gate], {"alpha": mixture.alpha})
    elif kind == "silu":
        active = new.emit("Swish", [gate])
    elif kind in ("gelu", "geglu"):
        active = new.emit("Gelu", [gate], {"approximate": "tanh"})
    else:
        active = gate if kind == "identity" else new.emit("Relu", [gate])
        active = new.emit("Mul", [active, active]) if kind == "relu2" else active
    return active if linear is None else new.emit("Mul", [active, linear])


def _emit_scalar(new: Rewrite, like: ir.Value, value: float) -> ir.Value:
    assert like.dtype is not None
    return new.emit_constant(np.array(value), like.dtype)
