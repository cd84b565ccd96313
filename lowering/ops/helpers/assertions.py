"""Requirements of operators on shapes, indices and sizes: rejected at compile time or asserted at run time.

Every index that comes from data goes through `assert_in_bounds`. Every size that comes from data goes through
`emit_checked_shape` (run_time.py binds it to a symbol). A provable requirement costs nothing: constants, sizes and,
once masks are folded, everything that the bounds of its terms prove (passes/graph/prove_indices.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm import relax

from ...importing.checks import check_condition, check_indices, check_requests, check_sizes
from ...importing.node import Node
from ...importing.values import Shape, Size, Value, format_size, is_empty, numpy_dtype, storage_dtype
from . import symbolic


def assert_shape(node: Node, value: Value, shape: Shape, name: str = "") -> Value:
    """Return the value, with a shape that is proved or asserted at run time.

    A static dimension of the value stays static: TVM takes a cast of a constant to symbols for their definition, and
    checks nothing.

    Args:
        name: Name of the value in errors, where it is not an input of the node.

    Raises:
        NodeError: Static dimensions differ.
    """
    for axis, (size, required_size) in enumerate(zip(value.shape, shape, strict=True)):
        if isinstance(size, int):
            text = f"dimension {axis} of {name or node.describe(value, False)} is {size}, and must be {{}}."
            checked = require(
                node, value, symbolic.equal(size, required_size), "node.shape_mismatch", text, required_size
            )
            if checked is not value:
                value = node.keep_name_after_check(checked, node.tensor(checked), keep_contents=False)
    shape = tuple(size if isinstance(size, int) else required_size for size, required_size in zip(value.shape, shape))
    return node.cast_shape(value, shape, name)


def assert_channel_vectors(node: Node, x: Value, *vectors: Value) -> tuple[Value, ...]:
    """Return x [N, C, D1, ...] and the vectors, proved or asserted at run time to be [C].

    Raises:
        NodeError: A rank is wrong, or static dimensions differ.
    """
    if x.rank < 2:
        raise node.error(
            "node.rank_unsupported", f"X of rank {x.rank} has no channels.", "Give X the shape [N, C, D1, ...]."
        )
    for vector in vectors:
        if vector.rank != 1:
            raise node.error(
                "node.vector_required",
                f"{node.describe(vector, False)} has rank {vector.rank}.",
                "Give it the shape [C].",
            )
    sizes = [x.shape[1], *(vector.shape[0] for vector in vectors)]
    channels = next((size for size in sizes if isinstance(size, int)), sizes[0])
    x = assert_shape(node, x, (x.shape[0], channels, *x.shape[2:]))
    return x, *(assert_shape(node, vector, (channels,)) for vector in vectors)


def assert_divisible(node: Node, value: Value, axis: int, groups: int, attribute: str) -> Value:
    """Return the value, whose dimension `axis` is proved or asserted to divide into groups.

    Args:
        attribute: Name of the attribute that gives the number of groups.

    Raises:
        NodeError: The dimension provably does not divide.
    """
    if groups < 1:
        raise node.error("node.value_out_of_range", f"attribute {attribute} is {groups}.", "Use 1 or more.")
    size = value.shape[axis]
    text = (
        f"dimension {axis} of {node.describe(value, False)} is {{}}, which is not divisible by {attribute} = {groups}."
    )
    is_divisible = symbolic.equal(symbolic.floor_mod(size, groups), 0)
    return require(node, value, is_divisible, "node.size_not_divisible", text, size)


def assert_broadcastable(node: Node, x: Value, *parameters: Value) -> tuple[Value, ...]:
    """Return x and the parameters, proved or asserted to broadcast to x.

    Each dimension of a parameter must be 1 or equal to that of x.

    Raises:
        NodeError: Static dimensions would make the result larger than x.
    """
    for parameter in parameters:
        trailing = x.shape[x.rank - parameter.rank :]
        is_stretched = any(
            isinstance(d, int) and d == 1 and isinstance(p, int) and p != 1 for d, p in zip(trailing, parameter.shape)
        )
        if parameter.rank > x.rank or is_stretched:
            raise node.error(
                "node.shapes_not_broadcastable",
                f"{node.describe(parameter, False)} of shape {list(parameter.shape)} does not broadcast to "
                f"{node.describe(x, False)} of shape {list(x.shape)}.",
            )
    ones = [
        assert_shape(
            node,
            p,
            tuple(1 if isinstance(d, int) and d == 1 else s for d, s in zip(x.shape[x.rank - p.rank :], p.shape)),
        )
        for p in parameters
    ]
    return node.unify(x, *ones, may_differ=False)


def assert_in_bounds(
    node: Node, indices: Value, *bounds: Size, bound_name: str | Sequence[str], from_the_back: bool = True
) -> Value:
    """Return the integer indices, each proved or asserted to be within its bound.

    An index is less than its bound and at least 0 or, if from_the_back, at least minus the bound. With several bounds,
    each belongs to one index along the last axis.

    Args:
        bound_name: Description of each bound in errors.

    Raises:
        NodeError: An index is provably out of bounds. Other violations raise an error at run time.
    """
    names = [bound_name] if isinstance(bound_name, str) else list(bound_name)
    if is_empty(indices.shape) or all(
        _are_in_bounds(node, indices, static_indices, bound, name, from_the_back)
        for static_indices, bound, name in zip(_group_by_bound(indices, len(bounds)), bounds, names)
    ):
        return indices
    check = check_indices(node.tensor(indices), bounds, from_the_back, node.describe(indices), names)
    return node.keep_name_after_check(indices, node.importer.builder.emit(check))


def _group_by_bound(indices: Value, count: int) -> list[list[Any] | None]:
    """Return the static indices of each bound, or None where they are dynamic.

    For numbers, only the smallest and the largest are returned.
    """
    static_indices = indices.constant if indices.constant is not None else indices.contents
    if static_indices is None:
        return [None] * count
    columns = [static_indices.reshape(-1, count)[:, k] for k in range(count)]
    return [[int(c.min()), int(c.max())] if c.dtype != object else list(c) for c in columns]


def _are_in_bounds(
    node: Node, indices: Value, static_indices: list[Any] | None, bound: Size, bound_name: str, from_the_back: bool
) -> bool:
    """Return whether all indices are provably within the bound.

    Raises:
        NodeError: An index is provably out of bounds.
    """
    low = -bound if from_the_back else 0
    for index in static_indices or ():
        if isinstance(index, int) and isinstance(bound, int) and not low <= index < bound:
            legal = f"allows {low} to {bound - 1}" if bound > 0 else "is empty"
            raise node.error(
                "node.index_out_of_range", f"{node.describe(indices, False)} holds {index}, and {bound_name} {legal}."
            )
    return static_indices is not None and all(
        node.symbols.prove(condition) for index in static_indices for condition in (index >= low, index < bound)
    )


def require(node: Node, value: Value, condition: Size, code: str, text: str, *numbers: Size) -> Value:
    """Return the value; report `text` as an error with this code unless the condition on sizes is true.

    The numbers replace the placeholders {} in the text. A violation found at compile time raises NodeError, and any
    other raises an error at run time.
    """
    condition = node.simplify(condition)
    if isinstance(condition, bool) and not condition:
        for number in numbers:
            text = text.replace("{}", format_size(node.simplify(number)), 1)
        raise node.error(code, text)
    if node.symbols.prove(condition):
        return value
    node.importer.expect(condition)
    last = value.channels_last
    tensor = node.tensor(value) if last is None else last
    check = check_condition(tensor, condition, code, f"{node.where}: {text}", numbers)
    checked = node.importer.builder.emit(check)
    return (
        node.keep_name_after_check(value, checked)
        if last is None
        else node.keep_name(replace(value, channels_last=checked), value)
    )


def assert_requests(node: Node, check: str, tables: Sequence[Value | None], sizes: Sequence[Size]) -> Value:
    """Return the first of the request tables, after a run-time check of all of them.

    The tables give the offsets of the rows and keys of each request. The function named `check` (importing/checks.py)
    checks that they are consistent with each other and with these sizes. A kernel that reads the tables must read the
    result, so that it writes nothing before the check. Nodes with the same check, such as layers, share it; the check
    names the first of them.
    """
    first = tables[0]
    assert first is not None
    if not node.importer.checks:
        return first
    exprs = [None if table is None else node.tensor(table) for table in tables]
    sizes = [node.simplify(size) for size in sizes]
    signature = (check, *exprs, *map(format_size, sizes))
    where = node.importer.first_to_check.setdefault(signature, node.where)
    call = check_requests(check, exprs, sizes, where)
    return node.keep_name_after_check(first, node.importer.builder.emit(call))


def assert_nonnegative(node: Node, value: Value, sizes: Sequence[Size], name: str) -> Value:
    """Return the value; report an error where one of the sizes is negative.

    The sizes are computed from other sizes. name is the input in errors.
    """
    are_nonnegative: Size = True
    for size in sizes:
        are_nonnegative = symbolic.logical_and(are_nonnegative, symbolic.less_or_equal(0, size))
    text = f"{name} has the sizes [{', '.join('{}' for _ in sizes)}], one of which is negative."
    return require(node, value, are_nonnegative, "node.negative_size", text, *sizes)


def emit_checked_shape(node: Node, tensor: relax.Expr, other_dims: tuple[Shape, str] | None, name: str) -> relax.Expr:
    """Emit the shape whose dimensions are the int64 elements of `tensor`.

    None of them may be negative.

    Args:
        other_dims: The other dimensions and the element type of a tensor with these dimensions, which must fit in
            memory.
        name: The input in errors.
    """
    dims, dtype = other_dims or ((), None)
    itemsize = 0 if dtype is None else numpy_dtype(storage_dtype(dtype)).itemsize
    shape = node.importer.builder.emit(relax.op.tensor_to_shape(tensor))
    return node.importer.builder.emit(check_sizes(shape, dims, itemsize, name))
