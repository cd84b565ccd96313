"""Which weight an expression is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tvm
from tvm import relax

from ..importing.quantised import Quantised

FLOATS = ("float32", "float16", "bfloat16")


class Constants:
    """Weights by name, which are `parameters` of a function; lookup gives what a variable is bound to, or None."""

    def __init__(
        self,
        weights: Mapping[str, np.ndarray | Quantised],
        parameters: set[relax.Var],
        lookup: Callable[[relax.Var], relax.Expr | None],
    ) -> None:
        self.weights, self.parameters, self.lookup = weights, parameters, lookup

    def of(self, expr: relax.Expr) -> tuple[tuple[str, ...], np.ndarray | Quantised | None]:
        """The weight that `expr` is made from, with the name and what was done to it; None when there is more to it."""
        if isinstance(expr, relax.Var) and expr in self.parameters:
            name = expr.name
            return (name,), self.weights.get(name)
        bound = self.lookup(expr) if isinstance(expr, relax.Var) else expr
        if isinstance(bound, relax.Var):
            return self.of(bound)
        if isinstance(bound, relax.Call) and isinstance(bound.op, tvm.ir.Op):
            steps, array = self.of(bound.args[0]) if bound.args else ((), None)
            if array is not None and bound.op.name == "relax.permute_dims" and array.ndim == 2:
                axes = bound.attrs.axes
                axes = (1, 0) if axes is None else tuple(int(axis) for axis in axes)
                return (*steps, f"permuted_{axes[0]}{axes[1]}"), array.transpose(axes)
            if array is not None and bound.op.name == "relax.astype" and str(bound.attrs.dtype) in FLOATS:
                dtype = str(bound.attrs.dtype)
                if dtype == "float32" and array.dtype.name in FLOATS:
                    return steps, array  # the kernel widens elements
                return (*steps, dtype), array.astype(np.dtype(dtype))
        return (), None
