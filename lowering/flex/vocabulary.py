"""The functions of mods. Each takes traced values, Python's numbers or NumPy's arrays, so that one text is traced for a
kernel and evaluated on grids of indices.

NumPy's and PyTorch's own functions of the same meaning work on traced values, too: np.tanh, torch.where.
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
    """yes where the condition holds, else no: both are computed, and neither can fail."""
    return t.select(condition, yes, no) if _is_traced(condition, yes, no) else np.where(condition, yes, no)[()]


def minimum(a: Any, b: Any) -> Any:
    return t.arithmetic("min", a, b) if _is_traced(a, b) else np.minimum(a, b)


def maximum(a: Any, b: Any) -> Any:
    return t.arithmetic("max", a, b) if _is_traced(a, b) else np.maximum(a, b)


def clip(x: Any, low: Any = None, high: Any = None) -> Any:
    """x, but at least low and at most high, where those are given."""
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


def abs(x: Any) -> Any:
    return x.__abs__() if _is_traced(x) else np.abs(x)


def exp(x: Any) -> Any:
    return t.applied("exp", x) if _is_traced(x) else np.exp(x)


def exp2(x: Any) -> Any:
    return t.applied("exp2", x) if _is_traced(x) else np.exp2(x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    return t.applied("log", x) if _is_traced(x) else np.log(x)


def log2(x: Any) -> Any:
    return t.applied("log", x) * (1 / math.log(2)) if _is_traced(x) else np.log2(x)


def tanh(x: Any) -> Any:
    return t.applied("tanh", x) if _is_traced(x) else np.tanh(x)


def sqrt(x: Any) -> Any:
    return t.applied("sqrt", x) if _is_traced(x) else np.sqrt(x)


def sin(x: Any) -> Any:
    return t.applied("sin", x) if _is_traced(x) else np.sin(x)


def cos(x: Any) -> Any:
    return t.applied("cos", x) if _is_traced(x) else np.cos(x)


def tan(x: Any) -> Any:
    return sin(x) / cos(x) if _is_traced(x) else np.tan(x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + exp(-x))


def floor(x: Any) -> Any:
    if _is_traced(x):
        return t.applied("floor", x) if "float" in x.dtype else x
    return np.floor(x)


def ceil(x: Any) -> Any:
    return -floor(-x)


def cast(x: Any, dtype: Any) -> Any:
    """x in another type; integers are cut toward 0, truth values are 0 and 1."""
    return t.cast(x, dtype) if _is_traced(x) else np.asarray(x).astype(dtype)[()]


def logical_and(a: Any, b: Any) -> Any:
    return t.bitwise("and", t.cast(a, "bool"), t.cast(b, "bool")) if _is_traced(a, b) else np.logical_and(a, b)


def logical_or(a: Any, b: Any) -> Any:
    return t.bitwise("or", t.cast(a, "bool"), t.cast(b, "bool")) if _is_traced(a, b) else np.logical_or(a, b)


def logical_not(a: Any) -> Any:
    return ~t.cast(a, "bool") if _is_traced(a) else np.logical_not(a)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "where": where, "minimum": minimum, "maximum": maximum, "clip": clip, "clamp": clip, "absolute": abs, "abs": abs,
    "exp": exp, "exp2": exp2, "log": log, "log2": log2, "tanh": tanh, "sqrt": sqrt, "sin": sin, "cos": cos,
    "tan": tan, "sigmoid": sigmoid, "floor": floor, "ceil": ceil, "logical_and": logical_and, "logical_or": logical_or,
    "logical_not": logical_not, "square": lambda x: x * x, "negative": lambda x: -x, "neg": lambda x: -x,
    "positive": lambda x: x, "rsqrt": lambda x: 1 / sqrt(x), "reciprocal": lambda x: 1 / x,
    "zeros_like": lambda x: t.number_like(0, x), "ones_like": lambda x: t.number_like(1, x),
    "add": lambda a, b: t.arithmetic("add", a, b), "sub": lambda a, b: t.arithmetic("sub", a, b),
    "subtract": lambda a, b: t.arithmetic("sub", a, b), "mul": lambda a, b: t.arithmetic("mul", a, b),
    "multiply": lambda a, b: t.arithmetic("mul", a, b), "divide": t.divided, "true_divide": t.divided, "div": t.divided,
    "floor_divide": t.floor_divided, "remainder": t.remainder, "mod": t.remainder, "power": t.power, "pow": t.power,
    "less": lambda a, b: t.compared("lt", a, b), "lt": lambda a, b: t.compared("lt", a, b),
    "less_equal": lambda a, b: t.compared("le", a, b), "le": lambda a, b: t.compared("le", a, b),
    "greater": lambda a, b: t.compared("lt", b, a), "gt": lambda a, b: t.compared("lt", b, a),
    "greater_equal": lambda a, b: t.compared("le", b, a), "ge": lambda a, b: t.compared("le", b, a),
    "equal": lambda a, b: t.compared("eq", a, b), "eq": lambda a, b: t.compared("eq", a, b),
    "not_equal": lambda a, b: t.compared("ne", a, b), "ne": lambda a, b: t.compared("ne", a, b),
    "bitwise_and": lambda a, b: t.bitwise("and", a, b), "bitwise_or": lambda a, b: t.bitwise("or", a, b),
    "bitwise_xor": lambda a, b: t.bitwise("xor", a, b), "invert": lambda a: ~a, "bitwise_not": lambda a: ~a,
    "right_shift": lambda a, b: t.shifted("shift_right", a, b),
    "left_shift": lambda a, b: t.shifted("shift_left", a, b),
}  # fmt: skip
"""By the names that NumPy and PyTorch have for them."""


def for_numpy(function: Any, method: str, args: Any, options: Any) -> Any:
    """What NumPy's function means for traced values."""
    found = _FUNCTIONS.get(function.__name__)
    if found is None or method != "__call__" or options.keys() - {"a_min", "a_max", "min", "max"}:
        raise InputError(f"mods have no function numpy.{function.__name__}{_legal()}")
    # NumPy hands on its own numbers as arrays without dimensions.
    args = [x[()] if isinstance(x, np.ndarray) and not x.ndim else x for x in args]
    return found(*args, *options.values())


def for_torch(function: Any, args: Any, options: Any) -> Any:
    """What PyTorch's function, or the method of a tensor, means for traced values."""
    name = getattr(function, "__name__", str(function)).strip("_")
    found = _FUNCTIONS.get(name)
    if found is None or options:
        raise InputError(f"mods have no function torch.{name}{_legal()}")
    return found(*args)


def _legal() -> str:
    return ": they compute one number from numbers. There are " + ", ".join(sorted(_FUNCTIONS)) + "."
