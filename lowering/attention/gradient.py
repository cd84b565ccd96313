"""GradientProblem: what backpropagation through an attention computes, and its parameters as a kernel sees them.

P_ij = exp(s_ij - lse_i)    recomputed from Q and K (FlashAttention-2, arXiv:2307.08691, section 3.1.2)
dz_ij = P_ij (dY_i . V_j - delta_i)    the gradient of the score that counts; delta_i = dY_i . Y_i
ds_ij = dz_ij ds'/ds        the change of scores is differentiated as an expression
dQ_i = scale sum_j ds_ij K_j,  dK_j = scale sum_i ds_ij Q_i,  dV_j = sum_i P_ij dY_i
d table[at] = sum over the pairs that read table[at] of dz_ij ds'/dtable
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr

from .bound import Bound
from .expr.bound import BoundExpr
from .expr.derivative import Derivatives, derivatives
from .expr.emit import OfVectors
from .expr.node import over
from .parameters import Parameters, Tensor
from .problem import AttentionProblem, Mask

ATTRIBUTE = "lowering.attention_gradient"


@dataclass(frozen=True)
class GradientProblem:
    """The gradients of `forward`, a dense problem [B, H, rows, size] that gives lse, by its Q, K and V and by the
    floating-point tables of its change of scores.

    Inputs are those of forward, then y, lse and dy, in the type of y. Outputs dq, dk, dv and d_<table> have the shapes
    of what they are gradients by, and the type acc_dtype.

    Raises ValueError for a problem that is not of this kind, or whose change of scores has no derivative.
    """

    forward: AttentionProblem

    def __post_init__(self) -> None:
        p = self.forward
        plain = p.dense and p.row_axes == p.layout.axes == "bhtd" and p.qk_mode is None and not p.max
        if not plain or not p.lse or p.sink or p.softcap or p.window or p.lengths or p.scale is None:
            raise ValueError(
                "gradients are of dense attentions that give lse, without windows, lengths, caps and sinks"
            )
        if isinstance(p.mask, Mask) or (p.mask is not None and p.mask.dtype != "bool"):
            raise ValueError("gradients are of attentions whose mask is a formula that selects")
        _ = self.derivatives

    @property
    def derivatives(self) -> Derivatives | None:
        """Of the change of scores, where there is one."""
        return None if self.forward.score is None else derivatives(self.forward.score.value)

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables that there are gradients by."""
        found = self.derivatives
        return () if found is None else found.tables()

    def outputs(self) -> tuple[str, ...]:
        """Those of the parameters that are written."""
        return ("dq", "dk", "dv", *(f"d_{name}" for name in self.tables))

    def inputs(self) -> tuple[str, ...]:
        """Those of the parameters that are read; int64 numbers stand last."""
        scalars = self.forward.scalars()
        tensors = [name for name in self.forward.inputs() if name not in scalars]
        return (*tensors, *self.forward.outputs(), "dy", *scalars)

    def parameters(self) -> tuple[str, ...]:
        """Names of the PrimFunc's parameters in order."""
        return (*self.inputs(), *self.outputs())

    def separates(self, index: str) -> bool:
        """Whether no two batches ("b"), or heads ("h"), add to the same element of a table."""
        found = self.derivatives
        loads = () if found is None else [load for load, _ in found.by_load]
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


class GradientParameters(Parameters):
    """Those of a GradientProblem."""

    def __init__(self, gradient: GradientProblem, scope: str = "global", of_vectors: OfVectors | None = None) -> None:
        self.gradient = gradient
        super().__init__(gradient.forward, scope, of_vectors)

    def names(self) -> tuple[str, ...]:
        return self.gradient.parameters()

    def attributes(self) -> dict[str, str]:
        return {ATTRIBUTE: self.gradient.to_json()}

    def tensors(self) -> dict[str, Tensor]:
        found, acc = super().tensors(), self.problem.acc_dtype
        found["dy"] = found["y"]
        for name in self.gradient.outputs():
            shape, _ = found[name.removeprefix("d_") if name.startswith("d_") else name[1:]]
            found[name] = shape, acc
        return found


@dataclass(frozen=True, eq=False)
class Read:
    """A place where the change of scores reads a table: the table's name, its indices, and the derivative by what is
    read there."""

    table: str
    at: list[BoundExpr]
    part: BoundExpr

    @property
    def over(self) -> set[str]:
        """Names of the indices that decide which element is read."""
        return {name for index in self.at for name in over(index.value)}


class BoundGradient:
    """A GradientProblem bound to the buffers of the function under construction.

    `bound` answers what scores and masks are; here is what is made of them.
    """

    def __init__(self, parameters: GradientParameters) -> None:
        self.gradient, self.problem = parameters.gradient, parameters.problem
        self.bound, self.buffers = Bound(parameters.problem, parameters=parameters), parameters.buffers
        self.derivatives = found = parameters.gradient.derivatives
        self._slope = None if found is None or found.by_score is None else parameters.bind(found.by_score)
        self.reads = [
            Read(load.name, [parameters.bind(index) for index in load.args], parameters.bind(part))
            for load, part in (() if found is None else found.by_load)
        ]

    @property
    def changes(self) -> bool:
        """Whether the score that counts is not the scaled product itself."""
        return self.derivatives is not None

    def slope(self, b: Expr, h: Expr, i: Expr, j: Expr, s: Expr) -> Expr:
        """How the score that counts changes with the scaled product s of a pair, of which it is a function."""
        return tirx.const(0, self.problem.acc_dtype) if self._slope is None else self._slope(b, h, i, j, s)
