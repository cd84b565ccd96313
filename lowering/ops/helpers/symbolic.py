"""Arithmetic on contents: operators on sizes (Python ints, bools and int64 or bool TensorIR expressions).

`elementwise(node, function, *values)` maps one of the functions below (or any other) over values with contents, with
NumPy broadcasting; `reduce` folds one along axes. Both return None if a value has no contents: the lowering then emits
tensor code. Functions that depend on bounds of the symbols take them first (use functools.partial).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import prim

from ...importing.node import Node
from ...importing.values import Size, Symbols, Value
from ...tensorir.expressions import walk

# Contents are for shapes. A larger array is data, which a kernel computes faster.
MAX_CONTENTS = 4096

# TensorIR computes contents in int64: types that overflow for sizes of shapes stay tensors.
_DTYPES = ("int64", "int32", "bool")


def has_contents(value: Value) -> bool:
    """Return whether the value's contents are sizes or truth values, few enough to compute with."""
    return value.contents is not None and value.dtype in _DTYPES and value.contents.size <= MAX_CONTENTS


def elementwise(node: Node, function: Callable[..., Size], *values: Value, dtype: str | None = None) -> Value | None:
    """Return function(*elements) at every index of the broadcast shape, as contents of `dtype`.

    dtype is that of the first value by default. Return None if a value has no contents, or the result would be too
    large.
    """
    if not all(has_contents(v) for v in values):
        return None
    try:
        shape = np.broadcast_shapes(*(v.shape for v in values))
    except ValueError:
        shapes = " and ".join(str(tuple(v.shape)) for v in values)
        raise node.error("node.shapes_not_broadcastable", f"shapes {shapes} do not broadcast.") from None
    if math.prod(shape) > MAX_CONTENTS:
        return None
    result = np.empty(shape, dtype=object)
    for index, elements in zip(np.ndindex(shape), zip(*(_broadcast_elements(v, shape) for v in values))):
        result[index] = function(*elements)
    return node.sizes(result, dtype or values[0].dtype)


def reduce(
    node: Node, function: Callable[[Size, Size], Size], value: Value, axes: Collection[int], keepdims: bool
) -> Value | None:
    """Reduce the contents by function along the axes (each in [0, rank)); return None without contents or if empty."""
    if not has_contents(value) or 0 in value.shape:
        return None
    reduced_shape = tuple(1 if axis in axes else size for axis, size in enumerate(value.shape))
    result = np.full(reduced_shape, None, dtype=object)
    for index, element in zip(np.ndindex(value.shape), _broadcast_elements(value, value.shape)):
        target = tuple(0 if axis in axes else k for axis, k in enumerate(index))
        result[target] = element if result[target] is None else function(result[target], element)
    shape = reduced_shape if keepdims else tuple(size for axis, size in enumerate(value.shape) if axis not in axes)
    return node.sizes(result.reshape(shape), value.dtype)


def _broadcast_elements(value: Value, shape: tuple[int, ...]) -> list[Size]:
    """Return the contents, broadcast to shape, in row-major order."""
    contents = value.contents
    assert contents is not None
    flat = np.empty(contents.shape, dtype=object)
    plain = bool if value.dtype == "bool" else int
    for index in np.ndindex(contents.shape):
        element = contents[index]
        flat[index] = plain(element) if _is_number(element) else element
    return [a[()] if isinstance(a, np.ndarray) else a for a in np.broadcast_to(flat, shape).flat]


def _is_number(element: Any) -> bool:
    return isinstance(element, (bool, int, np.integer, np.bool_))


def _are_numbers(*elements: Size) -> bool:
    return all(isinstance(e, (bool, int)) for e in elements)


def _to_expr(element: Size) -> Any:
    """Return the element as a TensorIR expression: constructors of two expressions do not convert Python numbers."""
    if isinstance(element, bool):
        return tirx.const(element, "bool")
    return tirx.IntImm("int64", element) if isinstance(element, int) else element


def divides_by_zero(symbols: Symbols, value: Value) -> bool:
    """Return whether a divisor in the contents may be 0: to compute it as a size would crash the process."""
    divisors = [
        operation.b
        for element in _broadcast_elements(value, value.shape)
        if not _are_numbers(element)
        for operation in walk(symbols.simplify(element))
        if isinstance(operation, prim.FloorDiv | prim.FloorMod | prim.Div | prim.Mod)
    ]
    return not all(symbols.prove(divisor > 0) or symbols.prove(divisor < 0) for divisor in divisors)


# -- numbers ----------------------------------------------------------------------------------------------------------


def add(a: Size, b: Size) -> Size:
    return a + b


def subtract(a: Size, b: Size) -> Size:
    return a - b


def multiply(a: Size, b: Size) -> Size:
    return a * b


def negative(a: Size) -> Size:
    return -a


def absolute(a: Size) -> Size:
    return abs(a) if _are_numbers(a) else maximum(a, -a)


def divide(symbols: Symbols, a: Size, b: Size) -> Size:
    """Return a / b rounded toward zero, as ONNX and C divide integers; 0 for numbers whose divisor is 0.

    For provable signs it is the floor, which the simplifier handles better: hence `symbols`.
    """
    if _are_numbers(a, b):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0
    a, b = _to_expr(a), _to_expr(b)
    return tirx.floordiv(a, b) if symbols.prove(a >= 0) and symbols.prove(b > 0) else tirx.truncdiv(a, b)


def floor_divide(a: Size, b: int) -> Size:
    """Return a / b rounded down, for a positive number b."""
    return a // b if _are_numbers(a) else tirx.floordiv(_to_expr(a), _to_expr(b))


def floor_mod(a: Size, b: Size) -> Size:
    """Return the remainder with the sign of the divisor (ONNX Mod, fmod = 0); 0 for numbers whose divisor is 0."""
    if _are_numbers(a, b):
        return a % b if b else 0
    return tirx.floormod(_to_expr(a), _to_expr(b))


def trunc_mod(a: Size, b: Size) -> Size:
    """Return the remainder with the sign of the dividend (ONNX Mod, fmod = 1); 0 for numbers whose divisor is 0."""
    if _are_numbers(a, b):
        return abs(a) % abs(b) * (1 if a >= 0 else -1) if b else 0
    return tirx.truncmod(_to_expr(a), _to_expr(b))


def minimum(a: Size, b: Size) -> Size:
    return min(a, b) if _are_numbers(a, b) else tirx.min(_to_expr(a), _to_expr(b))


def maximum(a: Size, b: Size) -> Size:
    return max(a, b) if _are_numbers(a, b) else tirx.max(_to_expr(a), _to_expr(b))


# -- truth values -----------------------------------------------------------------------------------------------------


def equal(a: Size, b: Size) -> Size:
    return a == b if _are_numbers(a, b) else tirx.EQ(_to_expr(a), _to_expr(b))


def less(a: Size, b: Size) -> Size:
    return a < b if _are_numbers(a, b) else tirx.LT(_to_expr(a), _to_expr(b))


def less_or_equal(a: Size, b: Size) -> Size:
    return a <= b if _are_numbers(a, b) else tirx.LE(_to_expr(a), _to_expr(b))


def logical_and(a: Size, b: Size) -> Size:
    return a and b if _are_numbers(a, b) else tirx.And(_to_expr(a), _to_expr(b))


def logical_or(a: Size, b: Size) -> Size:
    return a or b if _are_numbers(a, b) else tirx.Or(_to_expr(a), _to_expr(b))


def logical_xor(a: Size, b: Size) -> Size:
    return logical_or(logical_and(a, logical_not(b)), logical_and(logical_not(a), b))


def logical_not(a: Size) -> Size:
    return not a if _are_numbers(a) else tirx.Not(_to_expr(a))


def where(condition: Size, a: Size, b: Size) -> Size:
    """Return a where the condition holds, else b."""
    if isinstance(condition, bool):
        return a if condition else b
    return tirx.Select(condition, _to_expr(a), _to_expr(b))
