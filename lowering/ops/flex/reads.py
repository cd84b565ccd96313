"""What expressions read of captured arrays lies inside them, and what they divide by is there, whatever the data say.

A negative index counts from the end. An index that sizes bound, such as a sum of positions, is checked once per call,
and is an error of the run if it can leave the array. Any other, such as one that is read from an array, is moved to the
nearest element where it is used; its arithmetic does not overflow, which compilers count on. Processors cannot divide
an integer by 0, nor the smallest by -1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from ...attention.expr.node import Expr, canonical, number, rewritten, terms
from ...importing import symbolic
from ...importing.node import Node
from ...importing.values import Size, Value
from ..asserted import required

_LARGEST_FACTOR = 2**20


class Reads:
    """The captured arrays by name, and what was found out about them.

    ends are the numbers of batches, heads, rows and keys, by the names of their indices; where one is 0 nothing is
    read.
    """

    def __init__(self, node: Node, arrays: Mapping[str, Value], ends: Mapping[str, Size]) -> None:
        self.node, self.arrays, self.ends = node, dict(arrays), ends
        self.sizes = {f"{name}.{axis}": size for name, x in arrays.items() for axis, size in enumerate(x.shape)}
        self._checked: set[tuple[str, int, Expr]] = set()

    def safe(self, expr: Expr) -> Expr:
        """The expression with indices that lie inside. The arrays are behind the checks that this takes.

        Raises NodeError for an index that is known to leave its array.
        """

        def harmless(part: Expr) -> Expr | None:
            if part.op == "load":
                at = tuple(self._inside(part.name, axis, index) for axis, index in enumerate(part.args))
                return replace(part, args=at)
            if part.op in ("floordiv", "floormod"):
                return _divided(part.op, *map(self.safe, part.args))
            return None

        return canonical(rewritten(expr, harmless))

    def _inside(self, name: str, axis: int, index: Expr) -> Expr:
        index = _saturated(canonical(_wide(self.safe(index))))
        size = Expr("scalar", "int64", value=f"{name}.{axis}")
        negative = _may_be_negative(index)
        wrapped = _select(_less(index, number(0, "int64")), Expr("sum", "int64", (index, size)), index)
        if _is_bounded(index):
            self._check(name, axis, index, negative)
            return wrapped if negative else index
        self._require(name, symbolic.less(0, self.sizes[size.name]), f"is empty along dimension {axis}, and is read.")
        last = Expr("sum", "int64", (size, number(-1, "int64")))
        nearest = Expr("min", "int64", (wrapped if negative else index, last))
        return Expr("max", "int64", (nearest, number(0, "int64")))

    def _check(self, name: str, axis: int, index: Expr, wraps: bool) -> None:
        if (name, axis, index) in self._checked:
            return
        self._checked.add((name, axis, index))
        low, high = self._bounds(index)
        size = self.sizes[f"{name}.{axis}"]
        least = symbolic.negative(size) if wraps else 0
        legal = symbolic.logical_and(symbolic.less_or_equal(least, low), symbolic.less(high, size))
        text = f"is read from {{}} to {{}} along dimension {axis}, which has size {{}}."
        self._require(name, legal, text, low, high, size)

    def _require(self, name: str, legal: Size, text: str, *numbers: Size) -> None:
        for end in self.ends.values():
            legal = symbolic.logical_or(symbolic.equal(end, 0), legal)
        text = f"the captured array '{name}' {text}"
        self.arrays[name] = required(self.node, self.arrays[name], legal, text, *numbers)

    def _bounds(self, index: Expr) -> tuple[Size, Size]:
        """The smallest and the largest value of an index over all pairs."""
        if index.op == "number":
            return int(index.number), int(index.number)
        if index.op == "scalar":
            return self.sizes[index.name], self.sizes[index.name]
        if index.op == "index":
            return 0, symbolic.subtract(self.ends[index.name], 1)
        if index.op == "sum":
            parts = [_scaled(self._bounds(term), factor) for factor, term in terms(index)]
            low, high = parts[0]
            for part in parts[1:]:
                low, high = symbolic.add(low, part[0]), symbolic.add(high, part[1])
            return low, high
        args = [self._bounds(arg) for arg in index.args]
        if index.op == "mul":
            at = next(k for k, arg in enumerate(index.args) if arg.op == "number")
            return _scaled(args[1 - at], args[at][0])
        if index.op == "floordiv":
            low, high = (symbolic.floor_divide(end, args[1][0]) for end in args[0])
            return low, high
        if index.op == "floormod":
            most = args[1][0] - 1
            return 0, most if _may_be_negative(index.args[0]) else symbolic.minimum(args[0][1], most)
        combine = {"min": symbolic.minimum, "max": symbolic.maximum}[index.op]
        return combine(args[0][0], args[1][0]), combine(args[0][1], args[1][1])


def _divided(op: str, a: Expr, b: Expr) -> Expr:
    """a // b or a % b of integers; a quotient by 0 is that by 1."""
    if b.op == "number" and b.number not in (0, -1):
        return Expr(op, a.dtype, (a, b))
    zero, one, minus_one = (number(n, b.dtype) for n in (0, 1, -1))
    by_minus_one = Expr("eq", "bool", (b, minus_one))
    divisor = _select(Expr("or", "bool", (by_minus_one, Expr("eq", "bool", (b, zero)))), one, b)
    result = Expr(op, a.dtype, (a, divisor))
    return result if op == "floormod" else _select(by_minus_one, Expr("sub", a.dtype, (zero, a)), result)


def table(node: Node, value: Value) -> Value:
    """A captured array as a kernel reads it: a number as a vector of one."""
    return node.reshaped(value, (1,)) if value.rank == 0 else value


def _is_bounded(index: Expr) -> bool:
    """Whether sizes tell the bounds of a canonical index: it is a sum of positions and sizes with small factors, or
    what quotients, remainders, minima and maxima make of such."""
    if index.op in ("index", "scalar"):
        return True
    if index.op == "number":
        return abs(index.number) < 2**31
    if index.op in ("floordiv", "floormod"):
        by = index.args[1]
        return by.op == "number" and 0 < by.number < 2**31 and _is_bounded(index.args[0])
    if index.op == "mul":
        small = any(arg.op == "number" and abs(arg.number) <= _LARGEST_FACTOR for arg in index.args)
        return small and all(map(_is_bounded, index.args))
    return index.op in ("sum", "min", "max") and all(map(_is_bounded, index.args))


def _may_be_negative(index: Expr) -> bool:
    """Whether that cannot be excluded by the form of a canonical index."""
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


def _wide(index: Expr) -> Expr:
    """The index in int64, in which sums of positions do not wrap."""
    if index.dtype == "int64":
        return index
    if index.op == "load" or index.dtype != "int32":
        return Expr("cast", "int64", (index,))
    if index.op == "cast":
        return _wide(index.args[0]) if index.args[0].dtype == "int32" else replace(index, dtype="int64")
    return replace(index, dtype="int64", args=tuple(_wide(arg) if arg.dtype == "int32" else arg for arg in index.args))


def _saturated(index: Expr) -> Expr:
    """The index, whose sums and matmuls stop at 2^62."""
    if index.dtype != "int64":
        return index
    index = replace(index, args=tuple(map(_saturated, index.args)))
    if index.op not in ("sum", "mul") or _bits(index) <= 62:
        return index

    def approximate(part: Expr) -> Expr:
        if part.op not in ("sum", "mul"):
            return Expr("cast", "float64", (part,))
        op = {"sum": "add", "mul": "mul"}[part.op]
        return functools.reduce(lambda a, b: Expr(op, "float64", (a, b)), map(approximate, part.args))

    size = approximate(index)
    for end in (2**62, -(2**62)):
        bound = number(float(end), "float64")
        outside = _less(bound, size) if end > 0 else _less(size, bound)
        index = _select(outside, number(end, "int64"), index)
    return index


def _bits(index: Expr) -> int:
    """No number of so many bits is exceeded by the magnitude of an integer expression."""
    if index.op == "number":
        return abs(int(index.number)).bit_length()
    if index.op in ("index", "scalar"):
        return 40
    if index.op == "load":
        return {"bool": 1, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32}.get(
            index.dtype, 64
        )
    if index.op == "cast" and "float" not in index.args[0].dtype:
        return _bits(index.args[0])
    if index.op == "sum":
        return max(map(_bits, index.args)) + len(index.args).bit_length()
    if index.op == "mul":
        return sum(map(_bits, index.args))
    if index.op in ("min", "max", "bit_and", "bit_or", "bit_xor"):
        return max(map(_bits, index.args))
    if index.op == "select":
        return max(map(_bits, index.args[1:]))
    if index.op in ("floordiv", "shift_right"):
        return _bits(index.args[0])
    if index.op == "floormod":
        return _bits(index.args[1])
    return 64


def _scaled(bounds: tuple[Size, Size], factor: int) -> tuple[Size, Size]:
    low, high = (symbolic.multiply(end, factor) for end in bounds)
    return (low, high) if factor >= 0 else (high, low)


def _less(a: Expr, b: Expr) -> Expr:
    return Expr("lt", "bool", (a, b))


def _select(condition: Expr, yes: Expr, no: Expr) -> Expr:
    return Expr("select", yes.dtype, (condition, yes, no))
