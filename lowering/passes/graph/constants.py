"""Tracing of expressions to weights, and replacement of weights by new parameters."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

import numpy as np
import tvm
from tvm import relax

from ...importing.quantized_matrix import QuantizedMatrix
from .compression import to_array

WeightArrays = dict[str, np.ndarray]

FLOATS = ("float32", "float16", "bfloat16")


class WeightTracer:
    """Weights by name, which are `parameters` of a function; lookup returns the binding of a variable, or None."""

    def __init__(
        self,
        weights: Mapping[str, np.ndarray | QuantizedMatrix],
        parameters: set[relax.Var],
        lookup: Callable[[relax.Var], relax.Expr | None],
    ) -> None:
        self.weights, self.parameters, self.lookup = weights, parameters, lookup

    def trace(self, expr: relax.Expr) -> tuple[tuple[str, ...], np.ndarray | QuantizedMatrix | None]:
        """Return the weight that `expr` is computed from, with its name and transformations; None if there is none."""
        if isinstance(expr, relax.Var) and expr in self.parameters:
            name = expr.name
            return (name,), self.weights.get(name)
        bound = self.lookup(expr) if isinstance(expr, relax.Var) else expr
        if isinstance(bound, relax.Var):
            return self.trace(bound)
        if isinstance(bound, relax.Call) and isinstance(bound.op, tvm.ir.Op):
            steps, array = self.trace(bound.args[0]) if bound.args else ((), None)
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


def make_parameters(
    steps: tuple[str, ...], components: Mapping[str, np.ndarray], used_names: Container[str]
) -> list[tuple[relax.Var, np.ndarray]]:
    """Return new parameters for the stored components of a weight, named by the weight's `steps` and the component."""
    parameters = []
    for component, array in components.items():
        name = "_".join((*steps, component))
        while name in used_names:
            name += "_"
        parameters.append((relax.Var(name, relax.TensorType(array.shape, array.dtype.name)), array))
    return parameters


def replace_main_body(
    mod: tvm.IRModule,
    main: relax.Function,
    body: relax.Expr,
    new_weights: Iterable[tuple[relax.Var, np.ndarray]],
    weights: Mapping[str, np.ndarray | QuantizedMatrix],
) -> tuple[tvm.IRModule, WeightArrays]:
    """Return the module with that body of `main`, and its weights in the order of its parameters.

    The weights are those after the first `num_input` parameters, then the new ones, without unused ones. Quantized
    weights that are still read become floats.
    """
    new = list(new_weights)
    inputs = list(main.params[: int(main.attrs["num_input"])])
    candidates = [*main.params[len(inputs) :], *(var for var, _ in new)]
    mod["main"] = relax.Function([*inputs, *candidates], body, main.ret_ty, main.is_pure, main.attrs)
    mod = relax.transform.DeadCodeElimination()(mod)
    main = mod["main"]
    used = set(relax.analysis.free_vars(main.body))
    remaining = [var for var in main.params[len(inputs) :] if var in used]
    mod["main"] = relax.Function(
        [*main.params[: len(inputs)], *remaining], main.body, main.ret_ty, main.is_pure, main.attrs
    )
    arrays = {**weights, **{var.name: array for var, array in new}}
    return mod, {var.name: to_array(arrays[var.name]) for var in remaining}
