"""What the operators of this package are made of: Relax operators, pointwise kernels and reductions.

Kernels, for operators that Relax lacks or gets wrong, are tensor expressions. Each stage is one te.compute of scalar
arithmetic, which TVM fuses with its neighbors. Half precision is widened to float32 where it is read, and rounded once
where a result is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, te, tirx

from .channels import in_their_order
from .node import Node
from .values import Size, Value, is_one, storage_dtype

Element = Any  # a scalar TensorIR expression
Extent = Any  # int or TensorIR expression

_HALF = ("float16", "bfloat16")


def require_numbers(node: Node, *values: Value) -> None:
    """Raises NodeError if a value's elements are stored as bit patterns or codes: those are moved, not computed."""
    for value in values:
        if storage_dtype(value.dtype) != value.dtype:
            raise node.error(
                f"does not compute with elements of type {value.dtype}.",
                "Cast to a wider type before the node, and back.",
            )


def widened(dtype: str) -> str:
    """The type that arithmetic on dtype happens in."""
    return "float32" if dtype in _HALF else dtype


def dtype_of(element: Element) -> str:
    return str(element.ty.dtype)


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def agreed(node: Node, what: str, *sizes: Size, **named: Size) -> Size:
    """The one size that all are, a number if one is; `what` names it in the error for numbers that differ, which also
    says which input has which where sizes are given by name."""
    numbers = {size for size in (*sizes, *named.values()) if isinstance(size, int)}
    if len(numbers) > 1 and named:
        known = (f"{name} has {size}" for name, size in named.items() if isinstance(size, int))
        raise node.error(f"{what} differs: {', '.join(known)}.")
    if len(numbers) > 1:
        raise node.error(f"{what} is {' and '.join(str(n) for n in sorted(numbers))} at once.")
    return numbers.pop() if numbers else (*sizes, *named.values())[0]


def number(node: Node, what: str, size: Size) -> int:
    """The size, which has to be known."""
    if not isinstance(size, int):
        raise node.error(f"{what} is the symbolic size {size}.", "Give the model a number there.")
    return size


def with_shape(node: Node, value: Value, shape: Sequence[Size]) -> Value:
    """The value as a tensor of that shape, asserted at run time where it is not provably so."""
    same = all(node.symbols.equal(a, b) for a, b in zip(value.shape, shape))
    return value if same else node.cast_shape(value, tuple(shape))


# -- Relax operators --------------------------------------------------------------------------------------------------


def relax_call(node: Node, operator: Callable[..., relax.Expr], *values: Value, dtype: str | None = None) -> Value:
    """A Relax operator over broadcast values of a number type; dtype is the result's (default: of the first value).

    For operators of one machine instruction: passes recognize them, and rounding half precision each time is right.
    """
    require_numbers(node, *values)
    values = node.unify(*values)
    dtype = dtype or values[0].dtype

    def call(*values: Value) -> Value:
        return node.emit(operator(*(node.tensor(_without_dims(v, values)) for v in values)), dtype)

    return in_their_order(node, call, values)


def _without_dims(value: Value, values: Sequence[Value]) -> Value:
    """A constant of one element, as a scalar if another value gives the result its rank: Relax inlines it then."""
    array = value.constant
    if array is None or array.size != 1 or not any(v.rank >= value.rank for v in values if v is not value):
        return value
    return Value(value.dtype, (), contents=array.reshape(()))


# -- pointwise --------------------------------------------------------------------------------------------------------


def pointwise(
    node: Node, function: Callable[..., Element], *values: Value, dtype: str | None = None, name: str | None = None
) -> Value:
    """function(*elements) at every index of the broadcast shape, cast to dtype (default: of the first value).

    The function gets and returns scalar TensorIR expressions; half precision reaches it as float32. Constants of one
    element reach it as immediates. name is the kernel's, by default the function's. The function must not use tirx.Let:
    TVM 0.27 does not legalize bfloat16 inside the value of a let.
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
            given = iter(tensors)
            elements = [read(next(given), index, shape) if i is None else i for i in immediates]
            return function(*elements).astype(storage_dtype(dtype))

        return te.compute(shape, element, name=name)

    def call(*values: Value) -> Value:
        tensors = [node.tensor(v) for v, i in zip(values, immediates) if i is None]
        return node.emit_te(compute, *tensors, dtype=dtype, primfunc_name_hint=name)

    return in_their_order(node, call, values)


def read(tensor: te.Tensor, index: Sequence[Element], shape: Sequence[Extent] | None = None) -> Element:
    """The element that right-aligned broadcasting puts at index, widened.

    shape, if given, is that of all indices: where it is 1 nothing is broadcast, which fusion reads off the index.
    """
    behind = len(index) - len(tensor.shape)
    stretched = [is_one(d) and not (shape and is_one(shape[behind + k])) for k, d in enumerate(tensor.shape)]
    element = tensor(*(tirx.const(0, "int64") if s else i for s, i in zip(stretched, index[behind:])))
    return element.astype(widened(dtype_of(element)))


def broadcast_shape(tensors: Sequence[te.Tensor], rank: int) -> list[Extent]:
    """The shape, of that rank, to which the tensors broadcast; sizes other than 1 are equal (Node.unify)."""
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
    dtype = widened(value.dtype)
    return tirx.const(array.astype(dtype).item(), dtype)


# Operands of one kernel. What handles its arguments takes time that grows faster than their number.
_WIDEST = 32


def in_groups(combine: Callable[[Sequence[Value]], Value], values: Sequence[Value]) -> Value:
    """combine(values), for an associative operator of any number of operands: few at a time, then their results."""
    while len(values) > _WIDEST:
        values = [combine(values[k : k + _WIDEST]) for k in range(0, len(values), _WIDEST)]
    return combine(values)


# -- reductions -------------------------------------------------------------------------------------------------------


def maximum(a: Element, b: Element) -> Element:
    """The larger; NaN if either is, which TensorIR's max may drop, and its simplifier behind comparisons alone."""
    return tirx.Select(a > b, a, tirx.Select(tirx.isnan(a), a, b)) if is_float(dtype_of(a)) else tirx.max(a, b)


def minimum(a: Element, b: Element) -> Element:
    """The smaller; NaN if either is, as for `maximum`."""
    return tirx.Select(a < b, a, tirx.Select(tirx.isnan(a), a, b)) if is_float(dtype_of(a)) else tirx.min(a, b)


def _number(value: float) -> Callable[[Any], Element]:
    return lambda dtype: tirx.const(value, dtype)


@dataclass(frozen=True)
class Reducer:
    """combine(expression, axis=...) reduces; identity(dtype) is what it makes of nothing."""

    combine: Callable[..., Element]
    identity: Callable[[Any], Element]


def _reducer(function: Callable[[Element, Element], Element], identity: Callable[[Any], Element]) -> Reducer:
    return Reducer(te.comm_reducer(function, identity), identity)


total = Reducer(te.sum, _number(0))
prod = _reducer(lambda a, b: a * b, _number(1))
largest = _reducer(maximum, lambda d: tirx.const(-math.inf, d) if is_float(str(d)) else tirx.min_value(d))
smallest = _reducer(minimum, lambda d: tirx.const(math.inf, d) if is_float(str(d)) else tirx.max_value(d))


def reduced(
    shape: Sequence[Extent],
    axes: Collection[int],
    reducer: Reducer,
    element: Callable[..., Element],
    name: str,
) -> te.Tensor:
    """element(*index) combined over the axes of an index space of that shape; they stay, with size 1.

    Where an axis is empty at run time the result is undefined: TVM initializes a reduction in its first step.
    """
    variables = {axis: te.reduce_axis((0, shape[axis]), f"k{axis}") for axis in sorted(axes)}

    def compute(*index: Element) -> Element:
        value = element(*(variables[axis].var if axis in variables else i for axis, i in enumerate(index)))
        return reducer.combine(value, axis=list(variables.values())) if variables else value

    return te.compute([1 if axis in variables else size for axis, size in enumerate(shape)], compute, name=name)
