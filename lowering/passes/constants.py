"""Which weight an expression is made from, and parameters in its place."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

import numpy as np
import tvm
from tvm import relax

from ..importing.quantized import Quantized
from .compression import plain

Weights = dict[str, np.ndarray]

FLOATS = ("float32", "float16", "bfloat16")


class Constants:
    """Weights by name, which are `parameters` of a function; lookup gives what a variable is bound to, or None."""

    def __init__(
        self,
        weights: Mapping[str, np.ndarray | Quantized],
        parameters: set[relax.Var],
        lookup: Callable[[relax.Var], relax.Expr | None],
    ) -> None:
        self.weights, self.parameters, self.lookup = weights, parameters, lookup

    def of(self, expr: relax.Expr) -> tuple[tuple[str, ...], np.ndarray | Quantized | None]:
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


def parameters_for(
    steps: tuple[str, ...], parts: Mapping[str, np.ndarray], taken: Container[str]
) -> list[tuple[relax.Var, np.ndarray]]:
    """New parameters for what a weight is stored as, by what it is of the weight that `steps` names."""
    made = []
    for part, array in parts.items():
        name = "_".join((*steps, part))
        while name in taken:
            name += "_"
        made.append((relax.Var(name, relax.TensorType(array.shape, array.dtype.name)), array))
    return made


def with_parameters(
    mod: tvm.IRModule,
    main: relax.Function,
    body: relax.Expr,
    made: Iterable[tuple[relax.Var, np.ndarray]],
    weights: Mapping[str, np.ndarray | Quantized],
) -> tuple[tvm.IRModule, Weights]:
    """The module with that body of `main`, and its weights in the order of its parameters: those behind the first
    `num_input`, then the new ones, without any that nobody reads. Quantized ones that are still read become floats."""
    new = list(made)
    inputs = list(main.params[: int(main.attrs["num_input"])])
    candidates = [*main.params[len(inputs) :], *(var for var, _ in new)]
    mod["main"] = relax.Function([*inputs, *candidates], body, main.ret_ty, main.is_pure, main.attrs)
    mod = relax.transform.DeadCodeElimination()(mod)
    main = mod["main"]
    used = set(relax.analysis.free_vars(main.body))
    kept = [var for var in main.params[len(inputs) :] if var in used]
    mod["main"] = relax.Function([*main.params[: len(inputs)], *kept], main.body, main.ret_ty, main.is_pure, main.attrs)
    arrays = {**weights, **{var.name: array for var, array in new}}
    return mod, {var.name: plain(arrays[var.name]) for var in kept}
