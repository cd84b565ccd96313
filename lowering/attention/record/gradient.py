"""GradientProblem: backpropagation through an attention, and its parameters as a kernel sees them.

P_ij = exp(s_ij - lse_i)    recomputed from Q and K (FlashAttention-2, arXiv:2307.08691, section 3.1.2)
dz_ij = P_ij (dY_i . V_j - delta_i)    the gradient of the modified score; delta_i = dY_i . Y_i
ds_ij = dz_ij ds'/ds        the score modification is differentiated as an expression
dQ_i = scale sum_j ds_ij K_j,  dK_j = scale sum_i ds_ij Q_i,  dV_j = sum_i P_ij dY_i
d table[at] = sum over the pairs that read table[at] of dz_ij ds'/dtable
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr

from ..codegen.bound import BoundAttention
from ..codegen.parameters import AttentionParameters, TensorSpec
from ..expr.bound import BoundExpr
from ..expr.derivative import Derivatives, differentiate
from ..expr.emit import EmitVectorCall
from ..expr.node import find_indices
from .problem import AttentionProblem, Mask

ATTRIBUTE = "lowering.attention_gradient"


@dataclass(frozen=True)
class GradientProblem:
    """The gradients of `forward` by its Q, K and V and by the floating-point tables of its score modification.

    forward is a dense problem [B, H, rows, size] with output lse. Inputs are those of forward, then y, lse and dy, in
    the type of y. Outputs dq, dk, dv and d_<table> have the shapes of the tensors they are gradients by, and the type
    acc_dtype.

    Raises ValueError for a problem that is not of this kind, or whose score modification has no derivative.
    """

    forward: AttentionProblem

    def __post_init__(self) -> None:
        p = self.forward
        is_supported = p.is_dense and p.row_axes == p.layout.axes == "bhtd" and p.qk_mode is None and not p.max
        if not is_supported or not p.lse or p.sink or p.softcap or p.window or p.lengths or p.scale is None:
            raise ValueError("gradients need dense attention with output lse, without windows, lengths, caps and sinks")
        if isinstance(p.mask, Mask) or (p.mask is not None and p.mask.dtype != "bool"):
            raise ValueError("gradients need attention whose mask is a boolean formula")
        _ = self.derivatives

    @property
    def derivatives(self) -> Derivatives | None:
        """The derivatives of the score modification, if there is one."""
        return None if self.forward.score is None else differentiate(self.forward.score.value)

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables for which there are gradients."""
        derivatives = self.derivatives
        return () if derivatives is None else derivatives.tables()

    def outputs(self) -> tuple[str, ...]:
        """Return the names of the parameters that are written."""
        return ("dq", "dk", "dv", *(f"d_{name}" for name in self.tables))

    def inputs(self) -> tuple[str, ...]:
        """Return the names of the parameters that are read; int64 scalars come last."""
        scalars = self.forward.scalars()
        tensors = [name for name in self.forward.inputs() if name not in scalars]
        return (*tensors, *self.forward.outputs(), "dy", *scalars)

    def parameters(self) -> tuple[str, ...]:
        """Return the names of the PrimFunc's parameters in order."""
        return (*self.inputs(), *self.outputs())

    def separates(self, index: str) -> bool:
        """Return whether no two batches ("b"), or heads ("h"), add to the same element of a table."""
        derivatives = self.derivatives
        loads = () if derivatives is None else [load for load, _ in derivatives.by_load]
        return all(any(_is_index(arg, index) for arg in load.args) for load in loads)

    def to_json(self) -> str:
        return json.dumps({"forward": self.forward.to_json()})

    @staticmethod
    def from_json(text: str) -> GradientProblem:
        return GradientProblem(AttentionProblem.from_json(json.loads(text)["forward"]))


def _is_index(expr: object, name: str) -> bool:
    while getattr(expr, "op", "") == "cast":
        expr = expr.args[0]  # type: ignore[attr-defined]
    return getattr(expr, "op", "") == "index" and expr.value == name  # type: ignore[attr-defined]


class GradientParameters(AttentionParameters):
    """The parameters of the function of a GradientProblem."""

    def __init__(
        self, gradient: GradientProblem, scope: str = "global", emit_vector_call: EmitVectorCall | None = None
    ) -> None:
        self.gradient = gradient
        super().__init__(gradient.forward, scope, emit_vector_call)

    def names(self) -> tuple[str, ...]:
        return self.gradient.parameters()

    def attributes(self) -> dict[str, str]:
        return {ATTRIBUTE: self.gradient.to_json()}

    def tensors(self) -> dict[str, TensorSpec]:
        tensors, acc = super().tensors(), self.problem.acc_dtype
        tensors["dy"] = tensors["y"]
        for name in self.gradient.outputs():
            shape, _ = tensors[name.removeprefix("d_") if name.startswith("d_") else name[1:]]
            tensors[name] = shape, acc
        return tensors


@dataclass(frozen=True, eq=False)
class TableRead:
    """A read of a table by the score modification.

    table is the table's name, at its indices, and derivative that of the modified score by the element that is read.
    """

    table: str
    at: list[BoundExpr]
    derivative: BoundExpr

    @property
    def index_names(self) -> set[str]:
        """Names of the indices that select the element that is read."""
        return {name for index in self.at for name in find_indices(index.value)}


class BoundGradient:
    """A GradientProblem bound to the buffers of the function under construction.

    `bound` gives scores and masks; this class adds the derivatives.
    """

    def __init__(self, parameters: GradientParameters) -> None:
        self.gradient, self.problem = parameters.gradient, parameters.problem
        self.bound, self.buffers = BoundAttention(parameters.problem, parameters=parameters), parameters.buffers
        self.derivatives = derivatives = parameters.gradient.derivatives
        self._slope = (
            None if derivatives is None or derivatives.by_score is None else parameters.bind(derivatives.by_score)
        )
        self.reads = [
            TableRead(load.name, [parameters.bind(index) for index in load.args], parameters.bind(derivative))
            for load, derivative in (() if derivatives is None else derivatives.by_load)
        ]

    @property
    def has_score_mod(self) -> bool:
        """Whether the modified score differs from the scaled dot product."""
        return self.derivatives is not None

    def slope(self, b: Expr, h: Expr, i: Expr, j: Expr, s: Expr) -> Expr:
        """Return the derivative of the modified score by the scaled dot product s of a pair."""
        return tirx.const(0, self.problem.acc_dtype) if self._slope is None else self._slope(b, h, i, j, s)
