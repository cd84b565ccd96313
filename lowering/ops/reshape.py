"""Operators that keep the elements and their order: Reshape, Flatten, Squeeze, Unsqueeze."""

from __future__ import annotations

import functools
import math
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ..importing import symbolic
from ..importing.channels import as_computed
from ..importing.node import Node
from ..importing.values import Shape, Size, Value, empty, prod
from . import op
from .asserted import inside, required
from .contents import constant_ints, few, movable, moved, sizes, static_axis
from .run_time import bind, compute_sizes

# Elements that no tensor has.
_MOST = 2**48


def _int64(number: int) -> Any:
    return tirx.IntImm("int64", number)


def reshape_to(node: Node, data: Value, shape: Shape) -> Value:
    """The elements of data in row-major order, in another shape.

    A shape with another number of elements is an error: of NodeError's where it is known now, else at run time.
    """
    shape = tuple(map(node.simplify, shape))
    if len(shape) == data.rank and all(node.symbols.equal(a, b) for a, b in zip(shape, data.shape)):
        return data
    if movable(data) and few(shape):
        assert data.contents is not None
        return moved(node, data, data.contents.reshape(shape))
    have, want = prod(data.shape), prod(shape)
    if isinstance(have, int) and isinstance(want, int) and have != want:
        raise node.error(f"{list(data.shape)} has {have} elements and cannot be given the shape {list(shape)}.")
    if not node.symbols.equal(have, want):
        data = _of_as_many(node, data, shape)
        data = node.cast_shape(_reshape(node, data, (have,)), (want,))
    return _reshape(node, data, shape)


def _of_as_many(node: Node, data: Value, shape: Shape) -> Value:
    """The data, if it has as many elements. Products of sizes may wrap and be the right number, but not in float64."""
    have = prod(data.shape)
    legal = symbolic.equal(have, prod(shape))
    for size in shape:
        legal = symbolic.logical_and(legal, symbolic.less_or_equal(0, size))
    if sum(not isinstance(d, int) for d in shape) > 1:
        volume = math.prod(tirx.const(d, "float64") if isinstance(d, int) else d.astype("float64") for d in shape)
        legal = symbolic.logical_and(legal, volume < tirx.const(float(_MOST), "float64"))
    text = f"{node.name_of(data, False)} has {{}} elements and cannot be given the shape"
    return required(node, data, legal, f"{text} [{', '.join('{}' for _ in shape)}].", have, *shape)


def _reshape(node: Node, data: Value, shape: Shape) -> Value:
    if data.channels_last is not None and len(shape) > 2 and not empty(shape):
        (last,), _, back = as_computed(node, data)
        if all(map(node.symbols.equal, shape[:2], data.shape)):  # places are counted in another way
            return back(_reshape(node, last, (shape[0], *shape[2:], shape[1])))
    result = node.reshaped(data, shape)
    return Value(data.dtype, tuple(node.simplify(d) for d in shape), result.expr)


@op("Reshape", since=5)
def reshape(node: Node, data: Value, shape: Value) -> Value:
    allow_zero = bool(node.attr("allowzero", 0))
    wanted = sizes(shape)
    if wanted is not None:
        return reshape_to(node, data, _reshape_dims(node, data.shape, wanted, allow_zero))
    if not isinstance(shape.shape[0], int):
        raise node.error("input shape has a symbolic length, so the rank of the result is unknown.")

    def dims(entries: Any) -> list[Any]:
        return _run_time_dims(node.where, data.shape, [entries[k] for k in range(shape.shape[0])], allow_zero)

    wide = node.emit(relax.op.astype(node.tensor(shape), "int64"))
    total = compute_sizes(node, "reshape_dims", shape.shape[0], dims, [wide], data.shape)
    return reshape_to(node, data, tuple(bind(node, total, ((), data.dtype), of=shape)))


def _reshape_dims(node: Node, data: Shape, wanted: list[Size], allow_zero: bool) -> Shape:
    """The result's dimensions: 0 copies the input's (unless allow_zero), -1 is what remains."""
    dims: list[Size] = []
    for axis, size in enumerate(wanted):
        if isinstance(size, int) and size == 0 and not allow_zero:
            if axis >= len(data):
                raise node.error(f"0 at position {axis} of input shape stands for a dimension that the data lacks.")
            size = data[axis]
        dims.append(size)
    inferred = [axis for axis, size in enumerate(dims) if isinstance(size, int) and size == -1]
    if len(inferred) > 1:
        raise node.error("input shape holds -1 more than once.")
    if inferred:
        axis = inferred[0]
        dims[axis] = _quotient(node, data, [d for k, d in enumerate(dims) if k != axis])
        if not isinstance(dims[axis], int):
            # Sizes that were computed in two ways do not cancel; the number of elements is asserted.
            dims[axis] = node.declared_size(0, axis) or dims[axis]
    if any(isinstance(d, int) and d < 0 for d in dims):
        raise node.error(f"input shape is {dims}, which has a negative dimension.")
    return tuple(dims)


def _quotient(node: Node, data: Shape, others: list[Size]) -> Size:
    """prod(data) / prod(others): equal factors are canceled first, since the simplifier does not do it."""
    have, divisor = _factors(data), []
    for factor in _factors(others):
        match = next((k for k, f in enumerate(have) if not isinstance(f, int) and node.symbols.equal(f, factor)), None)
        if match is None:
            divisor.append(factor)
        else:
            del have[match]
    above, below = node.simplify(prod(have)), node.simplify(prod(divisor))
    if isinstance(above, int) and isinstance(below, int):
        if below == 0 or above % below:
            raise node.error(f"input shape does not divide the data of shape {list(data)} evenly, so -1 has no value.")
        return above // below
    if isinstance(below, int):
        return node.simplify(tirx.floordiv(above, _int64(max(below, 1))))
    # A size may be 0 at run time, where the division would trap.
    return tirx.floordiv(_int64(above) if isinstance(above, int) else above, symbolic.maximum(below, 1))


def _factors(dims: Any) -> list[Size]:
    """The product of dims as a list of factors, of which at most one is a number."""
    number, rest, queue = 1, [], list(dims)
    while queue:
        size = queue.pop(0)
        if isinstance(size, tirx.Mul):
            queue[:0] = [size.a, size.b]
        elif isinstance(size, (int, tirx.IntImm)):
            number *= int(size)
        else:
            rest.append(size)
    return [number, *rest]


def _run_time_dims(where: str, data: Shape, wanted: list[Any], allow_zero: bool) -> list[Any]:
    """`_reshape_dims` on expressions, for entries known at run time only."""
    one = _int64(1)
    total = prod(data) * one
    if not allow_zero:
        wanted = [tirx.Select(w == 0, data[k] * one, w) if k < len(data) else w for k, w in enumerate(wanted)]
    inferred = _count_true(w == -1 for w in wanted)
    with T.Assert(inferred <= 1, f"{where}: input shape holds -1 more than once.", "ValueError"):
        pass
    known = prod(tirx.Select(w == -1, one, w) for w in wanted) * one
    return [tirx.if_then_else(w == -1, tirx.floordiv(total, tirx.max(known, one)), w) for w in wanted]


@op("Flatten", since=1)
def flatten(node: Node, data: Value) -> Value:
    axis = node.attr("axis", 1)
    if not -data.rank <= axis <= data.rank:
        raise node.error(f"attribute axis is {axis} for data of rank {data.rank}.")
    axis += data.rank if axis < 0 else 0
    return reshape_to(node, data, (prod(data.shape[:axis]), prod(data.shape[axis:])))


@op("Squeeze", since=1)
def squeeze(node: Node, data: Value, axes: Value | None = None) -> Value:
    if axes is not None and axes.constant is None:
        return _squeeze_at_run_time(node, data, axes)
    given = constant_ints(node, axes, "axes", "axes")
    if given is None:
        data, given = _dimensions_of_one(node, data)
    chosen = {static_axis(node, a, data.rank, "axes entry") for a in given}
    for axis in chosen:
        if isinstance(data.shape[axis], int) and data.shape[axis] != 1:
            raise node.error(f"dimension {axis} is {data.shape[axis]} and cannot be squeezed.")
    return reshape_to(node, data, tuple(d for k, d in enumerate(data.shape) if k not in chosen))


def _dimensions_of_one(node: Node, data: Value) -> tuple[Value, list[int]]:
    """The dimensions that Squeeze without axes removes, and the data behind a check of the run that these are they.

    The rank that the model declares decides on symbolic ones: all go, or none, which is also what is taken where it
    declares none.
    """
    ones = [k for k, size in enumerate(data.shape) if size == 1]
    symbolic_ones = [k for k, size in enumerate(data.shape) if not isinstance(size, int)]
    rank, kept = node.declared_rank(0), data.rank - len(ones)
    if rank in (None, kept):
        gone = []
    elif rank == kept - len(symbolic_ones):
        gone = symbolic_ones
    else:
        raise node.error(
            f"without axes it removes all dimensions of size 1, and its output is declared with {rank} dimensions, "
            f"which dimensions {symbolic_ones} of any size do not tell.",
            "Give the axes, or compile with --dim NAME=1 for those that are 1.",
        )
    for axis in symbolic_ones:
        is_one = symbolic.equal(data.shape[axis], 1)
        condition = is_one if gone else symbolic.logical_not(is_one)
        remedy = "" if gone else ", or compile with --dim NAME=1"
        text = f"without axes it removes all dimensions of size 1. Dimension {axis} is {{}}, and it was compiled for "
        text += f"{'1' if gone else 'others'}: give the axes{remedy}."
        data = required(node, data, condition, text, data.shape[axis])
    return data, ones + gone


def _squeeze_at_run_time(node: Node, data: Value, axes: Value) -> Value:
    count = _length(node, axes)
    axes = inside(node, axes, data.rank, of=f"the rank of {node.name_of(data, False)}")

    def dims(entries: Any) -> list[Any]:
        gone = [_wrapped(entries[k], data.rank) for k in range(count)]
        kept = [tirx.Not(_any(g == axis for g in gone)) for axis in range(data.rank)]
        place = [axis - _count_true(g < axis for g in gone) for axis in range(data.rank)]
        return [
            _pick([tirx.And(kept[axis], place[axis] == k) for axis in range(data.rank)], data.shape)
            for k in range(data.rank - count)
        ]

    wide = node.emit(relax.op.astype(node.tensor(axes), "int64"))
    result = compute_sizes(node, "squeeze_dims", data.rank - count, dims, [wide], data.shape)
    return reshape_to(node, data, tuple(bind(node, result)))


@op("Unsqueeze", since=1)
def unsqueeze(node: Node, data: Value, axes: Value | None = None) -> Value:
    if axes is not None and axes.constant is None:
        return _unsqueeze_at_run_time(node, data, axes)
    given = constant_ints(node, axes, "axes", "axes")
    if given is None:
        raise node.error("axes are missing.", "Give them; the operator requires them.")
    rank = data.rank + len(given)
    chosen = {static_axis(node, a, rank, "axes entry") for a in given}
    if len(chosen) != len(given):
        raise node.error(f"axes {given} name a dimension twice.")
    rest = iter(data.shape)
    return reshape_to(node, data, tuple(1 if k in chosen else next(rest) for k in range(rank)))


def _unsqueeze_at_run_time(node: Node, data: Value, axes: Value) -> Value:
    count = _length(node, axes)
    rank = data.rank + count
    axes = inside(node, axes, rank, of="the rank of the result")

    def dims(entries: Any) -> list[Any]:
        new = [T.bind(_wrapped(entries[k], rank)) for k in range(count)]
        source = [T.bind(axis - _count_true(n < axis for n in new)) for axis in range(rank)]
        return [
            tirx.Select(
                _any(n == axis for n in new),
                _int64(1),
                _pick([source[axis] == k for k in range(data.rank)], data.shape),
            )
            for axis in range(rank)
        ]

    wide = node.emit(relax.op.astype(node.tensor(axes), "int64"))
    result = compute_sizes(node, "unsqueeze_dims", rank, dims, [wide], data.shape)
    return reshape_to(node, data, tuple(bind(node, result)))


def _length(node: Node, axes: Value) -> int:
    if axes.rank != 1 or not isinstance(axes.shape[0], int):
        raise node.error("input axes has a symbolic length, so the rank of the result is unknown.")
    return axes.shape[0]


def _wrapped(axis: Any, rank: int) -> Any:
    return tirx.Select(axis < 0, axis + rank, axis)


def _any(conditions: Any) -> Any:
    return functools.reduce(tirx.Or, conditions, tirx.const(False, "bool"))


def _count_true(conditions: Any) -> Any:
    return functools.reduce(lambda total, c: total + tirx.Select(c, _int64(1), _int64(0)), conditions, _int64(0))


def _pick(conditions: list[Any], dims: Shape) -> Any:
    """The dimension whose condition holds; at most one does."""
    result = _int64(0)
    for condition, size in zip(conditions, dims):
        result = tirx.Select(condition, size * _int64(1), result)
    return result
