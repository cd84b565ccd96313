"""What an operator requires of shapes, indices and sizes: refused where it is known to be broken, else asserted by the
run.

Every index that comes from data goes through `inside`, every size that does through `sizes_of` (run_time.py binds it to
a symbol). What is known to hold costs nothing: constants, sizes, and, once masks are folded, whatever the bounds of
its parts prove (passes/prove_indices.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm import relax

from ..importing import symbolic
from ..importing.checks import check_condition, check_indices, check_requests, check_sizes
from ..importing.node import Node
from ..importing.values import Shape, Size, Value, as_text, empty, numpy_dtype, storage_dtype


def asserted(node: Node, value: Value, shape: Shape, name: str = "") -> Value:
    """The value, which is known or asserted at run time to have this shape. name is what errors call it, where it is no
    input of the node.

    Raises NodeError for numbers that differ. A number of the value stays one: TVM takes a cast of a constant to symbols
    for what defines them, and checks nothing.
    """
    for axis, (size, wanted) in enumerate(zip(value.shape, shape, strict=True)):
        if isinstance(size, int):
            text = f"dimension {axis} of {name or node.name_of(value, False)} is {size}, and must be {{}}."
            checked = required(node, value, symbolic.equal(size, wanted), text, wanted)
            if checked is not value:
                value = node.checked(checked, node.tensor(checked), known=False)
    shape = tuple(size if isinstance(size, int) else wanted for size, wanted in zip(value.shape, shape))
    known = all(node.symbols.equal(a, b) for a, b in zip(value.shape, shape, strict=True))
    return value if known else node.cast_shape(value, shape, name)


def over_channels(node: Node, x: Value, *vectors: Value) -> tuple[Value, ...]:
    """x [N, C, D1, ...] and the vectors, which are known or asserted at run time to be [C].

    Raises NodeError for another rank, and for numbers that differ.
    """
    if x.rank < 2:
        raise node.error(f"X of rank {x.rank} has no channels.", "X is [N, C, D1, ...].")
    for vector in vectors:
        if vector.rank != 1:
            raise node.error(f"{node.name_of(vector, False)} has rank {vector.rank}.", "Make it [C].")
    sizes = [x.shape[1], *(vector.shape[0] for vector in vectors)]
    channels = next((size for size in sizes if isinstance(size, int)), sizes[0])
    x = asserted(node, x, (x.shape[0], channels, *x.shape[2:]))
    return x, *(asserted(node, vector, (channels,)) for vector in vectors)


def divisible(node: Node, value: Value, axis: int, groups: int, attribute: str) -> Value:
    """The value, whose dimension `axis` is known or asserted at run time to divide into groups; attribute names their
    number. Raises NodeError where it is known not to."""
    if groups < 1:
        raise node.error(f"attribute {attribute} is {groups}.", "Make it 1 or more.")
    size = value.shape[axis]
    text = (
        f"dimension {axis} of {node.name_of(value, False)} is {{}}, which does not divide into {attribute} = {groups}."
    )
    whole = symbolic.equal(symbolic.floor_mod(size, groups), 0)
    return required(node, value, whole, text, size)


def broadcast_to(node: Node, x: Value, *parameters: Value) -> tuple[Value, ...]:
    """x and the parameters, each dimension of which is known or asserted at run time to be 1 or that of x.

    Raises NodeError for numbers that would make the result larger than x.
    """
    for parameter in parameters:
        behind = x.shape[x.rank - parameter.rank :]
        stretched = any(
            isinstance(d, int) and d == 1 and isinstance(p, int) and p != 1 for d, p in zip(behind, parameter.shape)
        )
        if parameter.rank > x.rank or stretched:
            raise node.error(
                f"{node.name_of(parameter, False)} of shape {list(parameter.shape)} does not broadcast to "
                f"{node.name_of(x, False)} of shape {list(x.shape)}."
            )
    ones = [
        asserted(
            node,
            p,
            tuple(1 if isinstance(d, int) and d == 1 else s for d, s in zip(x.shape[x.rank - p.rank :], p.shape)),
        )
        for p in parameters
    ]
    return node.unify(x, *ones, may_differ=False)


def inside(node: Node, indices: Value, *bounds: Size, of: str | Sequence[str], from_the_back: bool = True) -> Value:
    """The integers, each of which is less than its bound and at least 0 or, if from_the_back, minus the bound.

    Of several bounds each belongs to one index along the last axis. of says what a bound is the size of. Raises
    NodeError for an index that is known to be outside; others are an error of the run.
    """
    names = [of] if isinstance(of, str) else list(of)
    if empty(indices.shape) or all(
        _are_inside(node, indices, known, bound, name, from_the_back)
        for known, bound, name in zip(_by_bound(indices, len(bounds)), bounds, names)
    ):
        return indices
    check = check_indices(node.tensor(indices), bounds, from_the_back, node.name_of(indices), names)
    return node.checked(indices, node.importer.builder.emit(check))


def _by_bound(indices: Value, count: int) -> list[list[Any] | None]:
    """For each bound the known indices that it bounds, of numbers the smallest and the largest; None for unknown."""
    known = indices.constant if indices.constant is not None else indices.contents
    if known is None:
        return [None] * count
    columns = [known.reshape(-1, count)[:, k] for k in range(count)]
    return [[int(c.min()), int(c.max())] if c.dtype != object else list(c) for c in columns]


def _are_inside(node: Node, indices: Value, known: list[Any] | None, bound: Size, of: str, from_the_back: bool) -> bool:
    """Whether that is proved. Raises NodeError if the contrary is."""
    low = -bound if from_the_back else 0
    for index in known or ():
        if isinstance(index, int) and isinstance(bound, int) and not low <= index < bound:
            legal = f"allows {low} to {bound - 1}" if bound > 0 else "is empty"
            raise node.error(f"{node.name_of(indices, False)} holds {index}, and {of} {legal}.")
    return known is not None and all(
        node.symbols.prove(condition) for index in known for condition in (index >= low, index < bound)
    )


def required(node: Node, value: Value, condition: Size, text: str, *numbers: Size) -> Value:
    """The value; `text`, with the numbers in place of each {}, is an error unless the condition on sizes holds."""
    condition = node.simplify(condition)
    if isinstance(condition, bool) and not condition:
        for number in numbers:
            text = text.replace("{}", as_text(node.simplify(number)), 1)
        raise node.error(text)
    if node.symbols.prove(condition):
        return value
    node.importer.expect(condition)
    last = value.channels_last
    check = check_condition(node.tensor(value) if last is None else last, condition, f"{node.where}: {text}", numbers)
    checked = node.importer.builder.emit(check)
    return node.checked(value, checked) if last is None else node.called(replace(value, channels_last=checked), value)


def legal_requests(node: Node, check: str, tables: Sequence[Value | None], sizes: Sequence[Size]) -> Value:
    """The first of the tables that say where the rows and keys of requests are, behind a check of the run that they fit
    each other and these sizes, by the function of that name (importing/checks.py).

    Who reads the tables, reads the result: then nothing is written before. Nodes that ask the same, as layers do, share
    a check, which names the first of them.
    """
    first = tables[0]
    assert first is not None
    if not node.importer.checks:
        return first
    exprs = [None if table is None else node.tensor(table) for table in tables]
    sizes = [node.simplify(size) for size in sizes]
    asked = (check, *exprs, *map(as_text, sizes))
    where = node.importer.first_to_check.setdefault(asked, node.where)
    call = check_requests(check, exprs, sizes, where)
    return node.checked(first, node.importer.builder.emit(call))


def no_negative(node: Node, value: Value, sizes: Sequence[Size], name: str) -> Value:
    """The value; an error where one of the sizes, which are made of others, is negative. name says whose they are."""
    legal: Size = True
    for size in sizes:
        legal = symbolic.logical_and(legal, symbolic.less_or_equal(0, size))
    text = f"{name} asks for the sizes [{', '.join('{}' for _ in sizes)}], one of which is negative."
    return required(node, value, legal, text, *sizes)


def sizes_of(node: Node, tensor: relax.Expr, beside: tuple[Shape, str] | None, name: str) -> relax.Expr:
    """The shape that the int64 elements of `tensor` are, none of which may be negative.

    beside: the further dimensions and the element type of a tensor with these dimensions, which must fit in memory.
    name says in errors whose sizes they are.
    """
    others, dtype = beside or ((), None)
    itemsize = 0 if dtype is None else numpy_dtype(storage_dtype(dtype)).itemsize
    shape = node.importer.builder.emit(relax.op.tensor_to_shape(tensor))
    return node.importer.builder.emit(check_sizes(shape, others, itemsize, name))
