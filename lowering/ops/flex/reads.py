"""Guards for expressions: reads of captured arrays stay in bounds, and integer divisions are defined, for any data.

A negative index counts from the end. An index whose bounds follow from sizes, such as a sum of positions, is checked
once per call; it is a run-time error if it can leave the array. Any other index, such as one that is read from an
array, is clamped to the nearest element where it is used. Its arithmetic does not overflow, since compilers assume
that. Processors cannot divide an integer by 0, nor the smallest integer by -1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from ...attention.expr.node import Expr, canonicalize, make_number, rewrite_expr, split_terms
from ...importing.node import Node
from ...importing.values import Size, Value
from ..helpers import symbolic
from ..helpers.assertions import require

_LARGEST_FACTOR = 2**20


class CapturedReads:
    """The captured arrays by name, with the checks that were added for them.

    extents are the numbers of batches, heads, rows and keys, by the names of their indices. If one of them is 0,
    nothing is read.
    """

    def __init__(self, node: Node, arrays: Mapping[str, Value], extents: Mapping[str, Size]) -> None:
        self.node, self.arrays, self.extents = node, dict(arrays), extents
        self.sizes = {f"{name}.{axis}": size for name, x in arrays.items() for axis, size in enumerate(x.shape)}
        self._checked_indices: set[tuple[str, int, Expr]] = set()

    def guard(self, expr: Expr) -> Expr:
        """Return the expression with indices that are in bounds.

        Each captured array is replaced in `arrays` by its checked value.

        Raises:
            NodeError: an index provably leaves its array.
        """

        def guard_subexpr(subexpr: Expr) -> Expr | None:
            if subexpr.op == "load":
                indices = tuple(self._guard_index(subexpr.name, axis, index) for axis, index in enumerate(subexpr.args))
                return replace(subexpr, args=indices)
            if subexpr.op in ("floordiv", "floormod"):
                return _guard_division(subexpr.op, *map(self.guard, subexpr.args))
            return None

        return canonicalize(rewrite_expr(expr, guard_subexpr))

    def _guard_index(self, name: str, axis: int, index: Expr) -> Expr:
        index = _saturate(canonicalize(_widen(self.guard(index))))
        size = Expr("scalar", "int64", value=f"{name}.{axis}")
        negative = _may_be_negative(index)
        wrapped = _select(_compare_less(index, make_number(0, "int64")), Expr("sum", "int64", (index, size)), index)
        if _is_bounded(index):
            self._check_bounds(name, axis, index, negative)
            return wrapped if negative else index
        self._require(
            name,
            symbolic.less(0, self.sizes[size.name]),
            "flex.captured_array_empty",
            f"is empty along dimension {axis}, and is read.",
        )
        last = Expr("sum", "int64", (size, make_number(-1, "int64")))
        nearest = Expr("min", "int64", (wrapped if negative else index, last))
        return Expr("max", "int64", (nearest, make_number(0, "int64")))

    def _check_bounds(self, name: str, axis: int, index: Expr, can_wrap: bool) -> None:
        if (name, axis, index) in self._checked_indices:
            return
        self._checked_indices.add((name, axis, index))
        low, high = self._find_bounds(index)
        size = self.sizes[f"{name}.{axis}"]
        minimum = symbolic.negative(size) if can_wrap else 0
        is_legal = symbolic.logical_and(symbolic.less_or_equal(minimum, low), symbolic.less(high, size))
        text = f"is read from {{}} to {{}} along dimension {axis}, which has size {{}}."
        self._require(name, is_legal, "flex.index_out_of_range", text, low, high, size)

    def _require(self, name: str, is_legal: Size, code: str, text: str, *numbers: Size) -> None:
        for end in self.extents.values():
            is_legal = symbolic.logical_or(symbolic.equal(end, 0), is_legal)
        text = f"the captured array '{name}' {text}"
        self.arrays[name] = require(self.node, self.arrays[name], is_legal, code, text, *numbers)

    def _find_bounds(self, index: Expr) -> tuple[Size, Size]:
        """Return the smallest and the largest value of an index over all pairs."""
        if index.op == "number":
            return int(index.number), int(index.number)
        if index.op == "scalar":
            return self.sizes[index.name], self.sizes[index.name]
        if index.op == "index":
            return 0, symbolic.subtract(self.extents[index.name], 1)
        if index.op == "sum":
            term_bounds = [_scale_bounds(self._find_bounds(term), factor) for factor, term in split_terms(index)]
            low, high = term_bounds[0]
            for bounds in term_bounds[1:]:
                low, high = symbolic.add(low, bounds[0]), symbolic.add(high, bounds[1])
            return low, high
        args = [self._find_bounds(arg) for arg in index.args]
        if index.op == "mul":
            constant = next(k for k, arg in enumerate(index.args) if arg.op == "number")
            return _scale_bounds(args[1 - constant], args[constant][0])
        if index.op == "floordiv":
            low, high = (symbolic.floor_divide(end, args[1][0]) for end in args[0])
            return low, high
        if index.op == "floormod":
            last = args[1][0] - 1
            return 0, last if _may_be_negative(index.args[0]) else symbolic.minimum(args[0][1], last)
        combine = {"min": symbolic.minimum, "max": symbolic.maximum}[index.op]
        return combine(args[0][0], args[1][0]), combine(args[0][1], args[1][1])


def _guard_division(op: str, a: Expr, b: Expr) -> Expr:
    """Return a // b or a % b of integers; division by 0 is replaced by division by 1."""
    if b.op == "number" and b.number not in (0, -1):
        return Expr(op, a.dtype, (a, b))
    zero, unit, minus_one = (make_number(n, b.dtype) for n in (0, 1, -1))
    by_minus_one = Expr("eq", "bool", (b, minus_one))
    divisor = _select(Expr("or", "bool", (by_minus_one, Expr("eq", "bool", (b, zero)))), unit, b)
    result = Expr(op, a.dtype, (a, divisor))
    return result if op == "floormod" else _select(by_minus_one, Expr("sub", a.dtype, (zero, a)), result)


def as_table(node: Node, value: Value) -> Value:
    """Return a captured array as a kernel reads it: a scalar as a vector of one element."""
    return node.reshape_to(value, (1,)) if value.rank == 0 else value


def _is_bounded(index: Expr) -> bool:
    """Return whether sizes bound a canonical index.

    Such an index is a sum of positions and sizes with small factors, or a quotient, remainder, minimum or maximum of
    such indices.
    """
    if index.op in ("index", "scalar"):
        return True
    if index.op == "number":
        return abs(index.number) < 2**31
    if index.op in ("floordiv", "floormod"):
        divisor = index.args[1]
        return divisor.op == "number" and 0 < divisor.number < 2**31 and _is_bounded(index.args[0])
    if index.op == "mul":
        has_small_factor = any(arg.op == "number" and abs(arg.number) <= _LARGEST_FACTOR for arg in index.args)
        return has_small_factor and all(map(_is_bounded, index.args))
    return index.op in ("sum", "min", "max") and all(map(_is_bounded, index.args))


def _may_be_negative(index: Expr) -> bool:
    """Return whether the form of a canonical index does not exclude negative values."""
    if index.op == "number":
        return index.number < 0
    if index.op in ("index", "scalar"):
        return False
    if index.op in ("sum", "mul", "floordiv", "min"):
        return any(map(_may_be_negative, index.args))
    if index.op == "max":
        return all(map(_may_be_negative, index.args))
    if index.op == "floormod":
        return _may_be_negative(index.args[1])
    if index.op == "select":
        return any(map(_may_be_negative, index.args[1:]))
    if index.op == "cast":
        return index.args[0].dtype != "bool" and _may_be_negative(index.args[0])
    return not index.dtype.startswith("uint")


def _widen(index: Expr) -> Expr:
    """Return the index in int64, in which sums of positions do not wrap."""
    if index.dtype == "int64":
        return index
    if index.op == "load" or index.dtype != "int32":
        return Expr("cast", "int64", (index,))
    if index.op == "cast":
        return _widen(index.args[0]) if index.args[0].dtype == "int32" else replace(index, dtype="int64")
    return replace(index, dtype="int64", args=tuple(_widen(arg) if arg.dtype == "int32" else arg for arg in index.args))


def _saturate(index: Expr) -> Expr:
    """Return the index with sums and products that saturate at +-2^62."""
    if index.dtype != "int64":
        return index
    index = replace(index, args=tuple(map(_saturate, index.args)))
    if index.op not in ("sum", "mul") or _bound_bits(index) <= 62:
        return index

    def approximate(subexpr: Expr) -> Expr:
        if subexpr.op not in ("sum", "mul"):
            return Expr("cast", "float64", (subexpr,))
        op = {"sum": "add", "mul": "mul"}[subexpr.op]
        return functools.reduce(lambda a, b: Expr(op, "float64", (a, b)), map(approximate, subexpr.args))

    magnitude = approximate(index)
    for end in (2**62, -(2**62)):
        bound = make_number(float(end), "float64")
        outside = _compare_less(bound, magnitude) if end > 0 else _compare_less(magnitude, bound)
        index = _select(outside, make_number(end, "int64"), index)
    return index


def _bound_bits(index: Expr) -> int:
    """Return an upper bound of the number of bits of an integer expression's magnitude."""
    if index.op == "number":
        return abs(int(index.number)).bit_length()
    if index.op in ("index", "scalar"):
        return 40
    if index.op == "load":
        return {"bool": 1, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32}.get(
            index.dtype, 64
        )
    if index.op == "cast" and "float" not in index.args[0].dtype:
        return _bound_bits(index.args[0])
    if index.op == "sum":
        return max(map(_bound_bits, index.args)) + len(index.args).bit_length()
    if index.op == "mul":
        return sum(map(_bound_bits, index.args))
    if index.op in ("min", "max", "bit_and", "bit_or", "bit_xor"):
        return max(map(_bound_bits, index.args))
    if index.op == "select":
        return max(map(_bound_bits, index.args[1:]))
    if index.op in ("floordiv", "shift_right"):
        return _bound_bits(index.args[0])
    if index.op == "floormod":
        return _bound_bits(index.args[1])
    return 64


def _scale_bounds(bounds: tuple[Size, Size], factor: int) -> tuple[Size, Size]:
    low, high = (symbolic.multiply(end, factor) for end in bounds)
    return (low, high) if factor >= 0 else (high, low)


def _compare_less(a: Expr, b: Expr) -> Expr:
    return Expr("lt", "bool", (a, b))


def _select(condition: Expr, yes: Expr, no: Expr) -> Expr:
    return Expr("select", yes.dtype, (condition, yes, no))
