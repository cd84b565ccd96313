"""Building blocks of operator lowerings: Relax operators, pointwise kernels and reductions.

Kernels replace operators that Relax lacks or computes incorrectly, and are tensor expressions. Each stage is one
te.compute of scalar arithmetic, which TVM fuses with its neighbors. Half precision is widened to float32 where it is
read, and rounded once where a result is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, te, tirx

from ...importing.node import Node
from ...importing.values import Size, Value, is_one, storage_dtype
from .channels import call_in_common_layout

Element = Any  # a scalar TensorIR expression
Extent = Any  # int or TensorIR expression

_HALF = ("float16", "bfloat16")


def require_numbers(node: Node, *values: Value) -> None:
    """Raise NodeError for elements stored as bit patterns or quantized values: those are moved, not computed."""
    for value in values:
        if storage_dtype(value.dtype) != value.dtype:
            raise node.error(
                "node.dtype_unsupported",
                f"does not compute with elements of type {value.dtype}.",
                "Cast to a wider type before the node, and back.",
            )


def widen_dtype(dtype: str) -> str:
    """Return the type in which arithmetic on dtype is computed."""
    return "float32" if dtype in _HALF else dtype


def dtype_of(element: Element) -> str:
    return str(element.ty.dtype)


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def unify_sizes(node: Node, what: str, *sizes: Size, **named: Size) -> Size:
    """Return the size that all arguments must equal, a number if one of them is static.

    `what` names the size in the error for static sizes that differ. For sizes given by name, the error lists the size
    of each input.
    """
    numbers = {size for size in (*sizes, *named.values()) if isinstance(size, int)}
    if len(numbers) > 1 and named:
        named_sizes = (f"{name} has {size}" for name, size in named.items() if isinstance(size, int))
        raise node.error("node.size_mismatch", f"{what} differs: {', '.join(named_sizes)}.")
    if len(numbers) > 1:
        raise node.error(
            "node.size_mismatch", f"{what} differs between the inputs: {' and '.join(str(n) for n in sorted(numbers))}."
        )
    return numbers.pop() if numbers else (*sizes, *named.values())[0]


def number(node: Node, what: str, size: Size) -> int:
    """Return the size; raise NodeError unless it is static."""
    if not isinstance(size, int):
        raise node.error(
            "node.static_size_required",
            f"{what} is the symbolic size {size}.",
            "Set it to a number in the model, or with dims= (--dim).",
        )
    return size


# -- Relax operators --------------------------------------------------------------------------------------------------


def relax_call(node: Node, operator: Callable[..., relax.Expr], *values: Value, dtype: str | None = None) -> Value:
    """Emit a Relax operator over broadcast values of a number type.

    dtype is the result's, by default that of the first value. Use it for operators of one machine instruction: passes
    recognize them, and rounding half precision after each one is correct.
    """
    require_numbers(node, *values)
    values = node.unify(*values)
    dtype = dtype or values[0].dtype

    def call(*values: Value) -> Value:
        return node.emit(operator(*(node.tensor(_without_dims(v, values)) for v in values)), dtype)

    return call_in_common_layout(node, call, values)


def _without_dims(value: Value, values: Sequence[Value]) -> Value:
    """Return a constant of one element as a scalar if another value determines the rank: Relax then inlines it."""
    array = value.constant
    if array is None or array.size != 1 or not any(v.rank >= value.rank for v in values if v is not value):
        return value
    return Value(value.dtype, (), contents=array.reshape(()))


# -- pointwise --------------------------------------------------------------------------------------------------------


def pointwise(
    node: Node, function: Callable[..., Element], *values: Value, dtype: str | None = None, name: str | None = None
) -> Value:
    """Emit function(*elements) at every index of the broadcast shape, cast to dtype.

    dtype is that of the first value by default. The function takes and returns scalar TensorIR expressions; it gets
    half precision as float32. It gets constants of one element as immediates. `name` names the kernel, by default after
    the function. The function must not use tirx.Let: TVM 0.27 does not legalize bfloat16 inside the value of a let.
    """
    require_numbers(node, *values)
    values = node.unify(*values)
    dtype = dtype or values[0].dtype
    immediates = [_immediate(v) for v in values]
    if all(i is not None for i in immediates):
        immediates = [None] * len(values)
    name = name or function.__name__
    rank = max(v.rank for v in values)

    def compute(*tensors: te.Tensor) -> te.Tensor:
        shape = broadcast_shape(tensors, rank)

        def element(*index: Element) -> Element:
            remaining = iter(tensors)
            elements = [read_element(next(remaining), index, shape) if i is None else i for i in immediates]
            return function(*elements).astype(storage_dtype(dtype))

        return te.compute(shape, element, name=name)

    def call(*values: Value) -> Value:
        tensors = [node.tensor(v) for v, i in zip(values, immediates) if i is None]
        return node.emit_te(compute, *tensors, dtype=dtype, primfunc_name_hint=name)

    return call_in_common_layout(node, call, values)


def read_element(tensor: te.Tensor, index: Sequence[Element], shape: Sequence[Extent] | None = None) -> Element:
    """Return the element at index after right-aligned broadcasting, widened.

    shape is that of the index space, if present. Axes of size 1 in it are not broadcast, which fusion reads off the
    index.
    """
    leading = len(index) - len(tensor.shape)
    is_broadcast = [is_one(d) and not (shape and is_one(shape[leading + k])) for k, d in enumerate(tensor.shape)]
    element = tensor(*(tirx.const(0, "int64") if s else i for s, i in zip(is_broadcast, index[leading:])))
    return element.astype(widen_dtype(dtype_of(element)))


def broadcast_shape(tensors: Sequence[te.Tensor], rank: int) -> list[Extent]:
    """Return the shape of that rank to which the tensors broadcast; sizes other than 1 are equal (Node.unify)."""
    shape: list[Extent] = [1] * rank
    for tensor in tensors:
        for axis, size in enumerate(tensor.shape, start=rank - len(tensor.shape)):
            if not is_one(size):
                shape[axis] = size
    return shape


def _immediate(value: Value) -> Element | None:
    array = value.constant
    if array is None or array.size != 1:
        return None
    dtype = widen_dtype(value.dtype)
    return tirx.const(array.astype(dtype).item(), dtype)


# Operands of one kernel. The time to process arguments grows faster than their number.
_MAX_OPERANDS = 32


def combine_in_groups(combine: Callable[[Sequence[Value]], Value], values: Sequence[Value]) -> Value:
    """Return combine(values) for an associative variadic operator, applied to groups and then to their results."""
    while len(values) > _MAX_OPERANDS:
        values = [combine(values[k : k + _MAX_OPERANDS]) for k in range(0, len(values), _MAX_OPERANDS)]
    return combine(values)


# -- reductions -------------------------------------------------------------------------------------------------------


def maximum(a: Element, b: Element) -> Element:
    """Return the larger element, NaN if either is NaN.

    TensorIR's max may drop NaN. TensorIR's simplifier may drop it if it follows comparisons only.
    """
    return tirx.Select(a > b, a, tirx.Select(tirx.isnan(a), a, b)) if is_float(dtype_of(a)) else tirx.max(a, b)


def minimum(a: Element, b: Element) -> Element:
    """Return the smaller element, NaN if either is NaN, as in `maximum`."""
    return tirx.Select(a < b, a, tirx.Select(tirx.isnan(a), a, b)) if is_float(dtype_of(a)) else tirx.min(a, b)


def _number(value: float) -> Callable[[Any], Element]:
    return lambda dtype: tirx.const(value, dtype)


@dataclass(frozen=True)
class Reducer:
    """A reduction: combine(expression, axis=...) reduces; identity(dtype) is the result of an empty one."""

    combine: Callable[..., Element]
    identity: Callable[[Any], Element]


def _reducer(function: Callable[[Element, Element], Element], identity: Callable[[Any], Element]) -> Reducer:
    return Reducer(te.comm_reducer(function, identity), identity)


SUM = Reducer(te.sum, _number(0))
PRODUCT = _reducer(lambda a, b: a * b, _number(1))
MAXIMUM = _reducer(maximum, lambda d: tirx.const(-math.inf, d) if is_float(str(d)) else tirx.min_value(d))
MINIMUM = _reducer(minimum, lambda d: tirx.const(math.inf, d) if is_float(str(d)) else tirx.max_value(d))


def reduce_axes(
    shape: Sequence[Extent],
    axes: Collection[int],
    reducer: Reducer,
    element: Callable[..., Element],
    name: str,
) -> te.Tensor:
    """Reduce element(*index) over some axes of an index space of that shape; they stay as size 1.

    The result is undefined if an axis is empty at run time: TVM initializes a reduction in its first step.
    """
    variables = {axis: te.reduce_axis((0, shape[axis]), f"k{axis}") for axis in sorted(axes)}

    def compute(*index: Element) -> Element:
        value = element(*(variables[axis].var if axis in variables else i for axis, i in enumerate(index)))
        return reducer.combine(value, axis=list(variables.values())) if variables else value

    return te.compute([1 if axis in variables else size for axis, size in enumerate(shape)], compute, name=name)
