"""Evaluation of expressions in NumPy, element by element: their semantics. No kernel shares code with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy's names for half precision)
import numpy as np

from .node import Expr

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "floormod": np.mod,
    "mod": np.fmod, "min": np.minimum, "max": np.maximum, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
    "bit_and": np.bitwise_and, "bit_or": np.bitwise_or, "bit_xor": np.bitwise_xor, "shift_left": np.left_shift,
    "shift_right": np.right_shift, "le": np.less_equal, "and": np.logical_and, "or": np.logical_or,
    "not": np.logical_not, "select": np.where, "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2,
    "tanh": np.tanh, "sqrt": np.sqrt, "fabs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc,
    "nearbyint": np.rint, "round": np.round, "pow": np.power, "isnan": np.isnan, "sin": np.sin, "cos": np.cos,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}  # fmt: skip


def evaluate(
    expr: Expr, point: Mapping[str, np.ndarray], arguments: Mapping[str, Any], float_dtype: str | None = None
) -> np.ndarray:
    """Evaluate the expression at arrays of indices by name ("b", "h", "i", "j"), which broadcast.

    arguments are scalars and tables by name. Positions outside a table are clamped, as kernels do. Floating-point
    arithmetic is in the type float_dtype, if given. Raises NotImplementedError for an unknown function.
    """

    def value(node: Expr) -> np.ndarray:
        dtype = np.dtype(float_dtype if float_dtype is not None and "float" in node.dtype else node.dtype)
        if node.op == "number":
            return np.asarray(node.number, dtype)
        if node.op == "index":
            return np.asarray(point[node.name], dtype)
        if node.op == "scalar":
            return np.asarray(arguments[node.name], dtype)
        args = [value(arg) for arg in node.args]
        if node.op == "load":
            table = np.asarray(arguments[node.name])
            return table[tuple(np.clip(x, 0, n - 1) for x, n in zip(args, table.shape, strict=True))].astype(dtype)
        if node.op == "cast":
            return args[0].astype(dtype)
        if node.op == "sum":
            return np.asarray(sum(args), dtype)
        if node.op == "div":
            floating = "float" in node.dtype
            return np.asarray(args[0] / args[1] if floating else np.trunc(args[0] / args[1]), dtype)
        function = FUNCTIONS.get(node.op.rpartition(".")[2])
        if function is None:
            raise NotImplementedError(f"{node.op} has no NumPy counterpart")
        return np.asarray(function(*args), dtype)

    with np.errstate(all="ignore"):
        return value(expr)
