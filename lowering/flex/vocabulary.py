"""The functions of mods, for traced values, Python's numbers and NumPy's arrays.

One source text is thus traced for a kernel and evaluated on grids of indices. NumPy's and PyTorch's own functions of
the same meaning work on traced values, too: np.tanh, torch.where.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import InputError
from . import traced as t
from .traced import Traced


def _is_traced(*values: Any) -> bool:
    return any(isinstance(value, Traced) for value in values)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Return yes where the condition is true, else no: both are computed, and neither can fail."""
    return t.select(condition, yes, no) if _is_traced(condition, yes, no) else np.where(condition, yes, no)[()]


def minimum(a: Any, b: Any) -> Any:
    return t.apply_arithmetic("min", a, b) if _is_traced(a, b) else np.minimum(a, b)


def maximum(a: Any, b: Any) -> Any:
    return t.apply_arithmetic("max", a, b) if _is_traced(a, b) else np.maximum(a, b)


def clip(x: Any, low: Any = None, high: Any = None) -> Any:
    """Limit x to at least low and at most high, if given."""
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


def abs(x: Any) -> Any:
    return x.__abs__() if _is_traced(x) else np.abs(x)


def exp(x: Any) -> Any:
    return t.call_function("exp", x) if _is_traced(x) else np.exp(x)


def exp2(x: Any) -> Any:
    return t.call_function("exp2", x) if _is_traced(x) else np.exp2(x)


def log(x: Any) -> Any:
    """Return the natural logarithm."""
    return t.call_function("log", x) if _is_traced(x) else np.log(x)


def log2(x: Any) -> Any:
    return t.call_function("log", x) * (1 / math.log(2)) if _is_traced(x) else np.log2(x)


def tanh(x: Any) -> Any:
    return t.call_function("tanh", x) if _is_traced(x) else np.tanh(x)


def sqrt(x: Any) -> Any:
    return t.call_function("sqrt", x) if _is_traced(x) else np.sqrt(x)


def sin(x: Any) -> Any:
    return t.call_function("sin", x) if _is_traced(x) else np.sin(x)


def cos(x: Any) -> Any:
    return t.call_function("cos", x) if _is_traced(x) else np.cos(x)


def tan(x: Any) -> Any:
    return sin(x) / cos(x) if _is_traced(x) else np.tan(x)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + exp(-x))


def floor(x: Any) -> Any:
    if _is_traced(x):
        return t.call_function("floor", x) if "float" in x.dtype else x
    return np.floor(x)


def ceil(x: Any) -> Any:
    return -floor(-x)


def cast(x: Any, dtype: Any) -> Any:
    """Convert x to another type; integers are truncated toward 0, bools become 0 and 1."""
    return t.cast(x, dtype) if _is_traced(x) else np.asarray(x).astype(dtype)[()]


def logical_and(a: Any, b: Any) -> Any:
    return t.apply_bitwise("and", t.cast(a, "bool"), t.cast(b, "bool")) if _is_traced(a, b) else np.logical_and(a, b)


def logical_or(a: Any, b: Any) -> Any:
    return t.apply_bitwise("or", t.cast(a, "bool"), t.cast(b, "bool")) if _is_traced(a, b) else np.logical_or(a, b)


def logical_not(a: Any) -> Any:
    return ~t.cast(a, "bool") if _is_traced(a) else np.logical_not(a)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "where": where, "minimum": minimum, "maximum": maximum, "clip": clip, "clamp": clip, "absolute": abs, "abs": abs,
    "exp": exp, "exp2": exp2, "log": log, "log2": log2, "tanh": tanh, "sqrt": sqrt, "sin": sin, "cos": cos,
    "tan": tan, "sigmoid": sigmoid, "floor": floor, "ceil": ceil, "logical_and": logical_and, "logical_or": logical_or,
    "logical_not": logical_not, "square": lambda x: x * x, "negative": lambda x: -x, "neg": lambda x: -x,
    "positive": lambda x: x, "rsqrt": lambda x: 1 / sqrt(x), "reciprocal": lambda x: 1 / x,
    "zeros_like": lambda x: t.make_number_like(0, x), "ones_like": lambda x: t.make_number_like(1, x),
    "add": lambda a, b: t.apply_arithmetic("add", a, b), "sub": lambda a, b: t.apply_arithmetic("sub", a, b),
    "subtract": lambda a, b: t.apply_arithmetic("sub", a, b), "mul": lambda a, b: t.apply_arithmetic("mul", a, b),
    "multiply": lambda a, b: t.apply_arithmetic("mul", a, b), "divide": t.divide, "true_divide": t.divide,
    "div": t.divide, "floor_divide": t.floor_divide, "remainder": t.compute_remainder, "mod": t.compute_remainder,
    "power": t.raise_to_power, "pow": t.raise_to_power,
    "less": lambda a, b: t.compare("lt", a, b), "lt": lambda a, b: t.compare("lt", a, b),
    "less_equal": lambda a, b: t.compare("le", a, b), "le": lambda a, b: t.compare("le", a, b),
    "greater": lambda a, b: t.compare("lt", b, a), "gt": lambda a, b: t.compare("lt", b, a),
    "greater_equal": lambda a, b: t.compare("le", b, a), "ge": lambda a, b: t.compare("le", b, a),
    "equal": lambda a, b: t.compare("eq", a, b), "eq": lambda a, b: t.compare("eq", a, b),
    "not_equal": lambda a, b: t.compare("ne", a, b), "ne": lambda a, b: t.compare("ne", a, b),
    "bitwise_and": lambda a, b: t.apply_bitwise("and", a, b), "bitwise_or": lambda a, b: t.apply_bitwise("or", a, b),
    "bitwise_xor": lambda a, b: t.apply_bitwise("xor", a, b), "invert": lambda a: ~a, "bitwise_not": lambda a: ~a,
    "right_shift": lambda a, b: t.shift_bits("shift_right", a, b),
    "left_shift": lambda a, b: t.shift_bits("shift_left", a, b),
}  # fmt: skip
"""Functions by their names in NumPy and PyTorch."""


def call_numpy_function(function: Any, method: str, args: Any, options: Any) -> Any:
    """Call the counterpart of NumPy's function for traced values."""
    counterpart = _FUNCTIONS.get(function.__name__)
    if counterpart is None or method != "__call__" or options.keys() - {"a_min", "a_max", "min", "max"}:
        raise InputError(
            "flex.function_unsupported", f"mods do not support numpy.{function.__name__}{_list_functions()}"
        )
    # NumPy passes its own numbers as arrays without dimensions.
    args = [x[()] if isinstance(x, np.ndarray) and not x.ndim else x for x in args]
    return counterpart(*args, *options.values())


def call_torch_function(function: Any, args: Any, options: Any) -> Any:
    """Call the counterpart of PyTorch's function, or of the method of a tensor, for traced values."""
    name = getattr(function, "__name__", str(function)).strip("_")
    counterpart = _FUNCTIONS.get(name)
    if counterpart is None or options:
        raise InputError("flex.function_unsupported", f"mods do not support torch.{name}{_list_functions()}")
    return counterpart(*args)


def _list_functions() -> str:
    return ", as they compute one number from numbers. Use one of " + ", ".join(sorted(_FUNCTIONS)) + "."


t.LIBRARY_CALLS |= {"numpy": call_numpy_function, "torch": call_torch_function}
