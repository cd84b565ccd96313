"""Operators that preserve the elements and their order: Reshape, Flatten, Squeeze, Unsqueeze."""

from __future__ import annotations

import functools
import math
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Size, Value, is_empty, prod
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_in_bounds, require
from ..helpers.channels import unify_layouts
from ..helpers.contents import (
    can_fold_contents,
    fits_contents,
    fold_contents,
    normalize_axis,
    read_constant_ints,
    read_sizes,
)
from ..helpers.requirements import read_length
from ..helpers.run_time import bind_sizes, compute_sizes

# More elements than any tensor has.
_MAX_ELEMENTS = 2**48


def _int64(number: int) -> Any:
    return tirx.IntImm("int64", number)


def reshape_to(node: Node, data: Value, shape: Shape) -> Value:
    """Return the elements of data in row-major order, in another shape.

    A shape with another number of elements raises NodeError if that is static, else an error at run time.
    """
    shape = tuple(map(node.simplify, shape))
    if len(shape) == data.rank and all(node.symbols.equal(a, b) for a, b in zip(shape, data.shape)):
        return data
    if can_fold_contents(data) and fits_contents(shape):
        assert data.contents is not None
        return fold_contents(node, data, data.contents.reshape(shape))
    in_volume, out_volume = prod(data.shape), prod(shape)
    if isinstance(in_volume, int) and isinstance(out_volume, int) and in_volume != out_volume:
        raise node.error(
            "node.element_count_mismatch",
            f"the shape {list(data.shape)} has {in_volume} elements and cannot be reshaped to {list(shape)}.",
        )
    if not node.symbols.equal(in_volume, out_volume):
        data = _assert_same_count(node, data, shape)
        data = node.cast_shape(_reshape(node, data, (in_volume,)), (out_volume,))
    return _reshape(node, data, shape)


def _assert_same_count(node: Node, data: Value, shape: Shape) -> Value:
    """Return the data, asserted to have as many elements as the shape.

    A volume may wrap to the right number, but not in float64.
    """
    in_volume = prod(data.shape)
    legal = symbolic.equal(in_volume, prod(shape))
    for size in shape:
        legal = symbolic.logical_and(legal, symbolic.less_or_equal(0, size))
    if sum(not isinstance(d, int) for d in shape) > 1:
        volume = math.prod(tirx.const(d, "float64") if isinstance(d, int) else d.astype("float64") for d in shape)
        legal = symbolic.logical_and(legal, volume < tirx.const(float(_MAX_ELEMENTS), "float64"))
    text = f"{node.describe(data, False)} has {{}} elements and cannot be reshaped to"
    return require(
        node,
        data,
        legal,
        "node.element_count_mismatch",
        f"{text} [{', '.join('{}' for _ in shape)}].",
        in_volume,
        *shape,
    )


def _reshape(node: Node, data: Value, shape: Shape) -> Value:
    if data.channels_last is not None and len(shape) > 2 and not is_empty(shape):
        (last,), _, back = unify_layouts(node, data)
        if all(map(node.symbols.equal, shape[:2], data.shape)):  # only positions are reshaped
            return back(_reshape(node, last, (shape[0], *shape[2:], shape[1])))
    result = node.reshape_to(data, shape)
    return Value(data.dtype, tuple(node.simplify(d) for d in shape), result.expr)


@op("Reshape", since=5)
def reshape(node: Node, data: Value, shape: Value) -> Value:
    allow_zero = bool(node.attr("allowzero", 0))
    target = read_sizes(shape)
    if target is not None:
        return reshape_to(node, data, _infer_dims(node, data.shape, target, allow_zero))
    read_length(node, "shape", shape)

    def dims(entries: Any) -> list[Any]:
        return _infer_runtime_dims(node.where, data.shape, [entries[k] for k in range(shape.shape[0])], allow_zero)

    wide = node.emit(relax.op.astype(node.tensor(shape), "int64"))
    total = compute_sizes(node, "reshape_dims", shape.shape[0], dims, [wide], data.shape)
    return reshape_to(node, data, tuple(bind_sizes(node, total, ((), data.dtype), source=shape)))


def _infer_dims(node: Node, data: Shape, target: list[Size], allow_zero: bool) -> Shape:
    """Return the result's dimensions: 0 copies the input's (unless allow_zero), -1 is the remainder."""
    dims: list[Size] = []
    for axis, size in enumerate(target):
        if isinstance(size, int) and size == 0 and not allow_zero:
            if axis >= len(data):
                raise node.error(
                    "reshape.dimension_missing",
                    f"0 at position {axis} of input shape copies a dimension that data of rank {len(data)} lacks.",
                )
            size = data[axis]
        dims.append(size)
    inferred = [axis for axis, size in enumerate(dims) if isinstance(size, int) and size == -1]
    if len(inferred) > 1:
        raise node.error("reshape.inferred_twice", "input shape holds -1 more than once.")
    if inferred:
        axis = inferred[0]
        dims[axis] = _divide_volumes(node, data, [d for k, d in enumerate(dims) if k != axis])
        if not isinstance(dims[axis], int):
            # Sizes computed in two ways do not cancel; the number of elements is asserted.
            dims[axis] = node.declared_size(0, axis) or dims[axis]
    if any(isinstance(d, int) and d < 0 for d in dims):
        raise node.error("node.negative_size", f"input shape is {dims}, which has a negative dimension.")
    return tuple(dims)


def _divide_volumes(node: Node, data: Shape, dims: list[Size]) -> Size:
    """Return prod(data) / prod(dims).

    Equal factors are canceled first, since the simplifier does not do it.
    """
    numerator_factors, divisor = _collect_factors(data), []
    for factor in _collect_factors(dims):
        match = next(
            (k for k, f in enumerate(numerator_factors) if not isinstance(f, int) and node.symbols.equal(f, factor)),
            None,
        )
        if match is None:
            divisor.append(factor)
        else:
            del numerator_factors[match]
    numerator, denominator = node.simplify(prod(numerator_factors)), node.simplify(prod(divisor))
    if isinstance(numerator, int) and isinstance(denominator, int):
        if denominator == 0 or numerator % denominator:
            raise node.error(
                "reshape.size_not_divisible",
                f"input shape does not divide the data of shape {list(data)} evenly, so -1 cannot be inferred.",
            )
        return numerator // denominator
    if isinstance(denominator, int):
        return node.simplify(tirx.floordiv(numerator, _int64(max(denominator, 1))))
    # A size may be 0 at run time, where the division would trap.
    return tirx.floordiv(
        _int64(numerator) if isinstance(numerator, int) else numerator, symbolic.maximum(denominator, 1)
    )


def _collect_factors(dims: Any) -> list[Size]:
    """Return the factors of prod(dims), of which at most one is a number."""
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


def _infer_runtime_dims(where: str, data: Shape, target: list[Any], allow_zero: bool) -> list[Any]:
    """Apply `_infer_dims` to expressions, for entries that are only available at run time."""
    unit = _int64(1)
    total = prod(data) * unit
    if not allow_zero:
        target = [tirx.Select(w == 0, data[k] * unit, w) if k < len(data) else w for k, w in enumerate(target)]
    inferred = _count_true(w == -1 for w in target)
    with T.Assert(
        inferred <= 1, f"[reshape.inferred_twice] {where}: input shape holds -1 more than once.", "ValueError"
    ):
        pass
    specified = prod(tirx.Select(w == -1, unit, w) for w in target) * unit
    return [tirx.if_then_else(w == -1, tirx.floordiv(total, tirx.max(specified, unit)), w) for w in target]


@op("Flatten", since=1)
def flatten(node: Node, data: Value) -> Value:
    axis = node.attr("axis", 1)
    if not -data.rank <= axis <= data.rank:
        raise node.error("node.axis_out_of_range", f"attribute axis is {axis} for data of rank {data.rank}.")
    axis += data.rank if axis < 0 else 0
    return reshape_to(node, data, (prod(data.shape[:axis]), prod(data.shape[axis:])))


@op("Squeeze", since=1)
def squeeze(node: Node, data: Value, axes: Value | None = None) -> Value:
    if axes is not None and axes.constant is None:
        return _squeeze_at_run_time(node, data, axes)
    axis_numbers = read_constant_ints(node, axes, "axes", "axes")
    if axis_numbers is None:
        data, axis_numbers = _find_unit_dims(node, data)
    chosen = {normalize_axis(node, a, data.rank, "axes entry") for a in axis_numbers}
    for axis in chosen:
        if isinstance(data.shape[axis], int) and data.shape[axis] != 1:
            raise node.error("squeeze.size_not_one", f"dimension {axis} is {data.shape[axis]} and cannot be squeezed.")
    return reshape_to(node, data, tuple(d for k, d in enumerate(data.shape) if k not in chosen))


def _find_unit_dims(node: Node, data: Value) -> tuple[Value, list[int]]:
    """Return the data, after a check of them, and the dimensions that Squeeze without axes removes.

    The rank that the model declares decides on symbolic dimensions: all are removed, or none. None is also the default
    without a declared rank.
    """
    ones = [k for k, size in enumerate(data.shape) if size == 1]
    symbolic_ones = [k for k, size in enumerate(data.shape) if not isinstance(size, int)]
    rank, remaining_rank = node.declared_rank(0), data.rank - len(ones)
    if rank in (None, remaining_rank):
        removed = []
    elif rank == remaining_rank - len(symbolic_ones):
        removed = symbolic_ones
    else:
        raise node.error(
            "squeeze.axes_ambiguous",
            f"without axes all dimensions of size 1 are removed, and its output is declared with {rank} dimensions, "
            f"which does not determine which of the symbolic dimensions {symbolic_ones} are 1.",
            "Give the axes, or compile with --dim NAME=1 for those that are 1.",
        )
    for axis in symbolic_ones:
        is_one = symbolic.equal(data.shape[axis], 1)
        condition = is_one if removed else symbolic.logical_not(is_one)
        remedy = "" if removed else ", or compile with --dim NAME=1"
        text = (
            f"without axes all dimensions of size 1 are removed. Dimension {axis} is {{}}, and the model is compiled "
        )
        text += f"for {'1' if removed else 'other sizes'}. Give the axes{remedy}."
        data = require(node, data, condition, "squeeze.axes_changed", text, data.shape[axis])
    return data, ones + removed


def _squeeze_at_run_time(node: Node, data: Value, axes: Value) -> Value:
    count = read_length(node, "axes", axes)
    axes = assert_in_bounds(node, axes, data.rank, bound_name=f"the rank of {node.describe(data, False)}")

    def dims(entries: Any) -> list[Any]:
        removed = [_wrap_axis(entries[k], data.rank) for k in range(count)]
        remains = [tirx.Not(_any_of(g == axis for g in removed)) for axis in range(data.rank)]
        position = [axis - _count_true(g < axis for g in removed) for axis in range(data.rank)]
        return [
            _select_dim([tirx.And(remains[axis], position[axis] == k) for axis in range(data.rank)], data.shape)
            for k in range(data.rank - count)
        ]

    wide = node.emit(relax.op.astype(node.tensor(axes), "int64"))
    result = compute_sizes(node, "squeeze_dims", data.rank - count, dims, [wide], data.shape)
    return reshape_to(node, data, tuple(bind_sizes(node, result)))


@op("Unsqueeze", since=1)
def unsqueeze(node: Node, data: Value, axes: Value | None = None) -> Value:
    if axes is not None and axes.constant is None:
        return _unsqueeze_at_run_time(node, data, axes)
    axis_numbers = read_constant_ints(node, axes, "axes", "axes")
    if axis_numbers is None:
        raise node.error("unsqueeze.axes_missing", "axes are missing.", "Give them; the operator requires them.")
    rank = data.rank + len(axis_numbers)
    chosen = {normalize_axis(node, a, rank, "axes entry") for a in axis_numbers}
    if len(chosen) != len(axis_numbers):
        raise node.error("unsqueeze.axes_repeated", f"axes {axis_numbers} name a dimension twice.")
    rest = iter(data.shape)
    return reshape_to(node, data, tuple(1 if k in chosen else next(rest) for k in range(rank)))


def _unsqueeze_at_run_time(node: Node, data: Value, axes: Value) -> Value:
    count = read_length(node, "axes", axes)
    rank = data.rank + count
    axes = assert_in_bounds(node, axes, rank, bound_name="the rank of the result")

    def dims(entries: Any) -> list[Any]:
        new = [T.bind(_wrap_axis(entries[k], rank)) for k in range(count)]
        source = [T.bind(axis - _count_true(n < axis for n in new)) for axis in range(rank)]
        return [
            tirx.Select(
                _any_of(n == axis for n in new),
                _int64(1),
                _select_dim([source[axis] == k for k in range(data.rank)], data.shape),
            )
            for axis in range(rank)
        ]

    wide = node.emit(relax.op.astype(node.tensor(axes), "int64"))
    result = compute_sizes(node, "unsqueeze_dims", rank, dims, [wide], data.shape)
    return reshape_to(node, data, tuple(bind_sizes(node, result)))


def _wrap_axis(axis: Any, rank: int) -> Any:
    return tirx.Select(axis < 0, axis + rank, axis)


def _any_of(conditions: Any) -> Any:
    return functools.reduce(tirx.Or, conditions, tirx.const(False, "bool"))


def _count_true(conditions: Any) -> Any:
    return functools.reduce(lambda total, c: total + tirx.Select(c, _int64(1), _int64(0)), conditions, _int64(0))


def _select_dim(conditions: list[Any], dims: Shape) -> Any:
    """Return the dimension whose condition is true; at most one is."""
    result = _int64(0)
    for condition, size in zip(conditions, dims):
        result = tirx.Select(condition, size * _int64(1), result)
    return result
