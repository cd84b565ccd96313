"""Sizes of inputs that follow from other sizes, by the requirements of nodes at run time.

The nodes of a decoder require that the `total` of a mask is `past + tokens`, for instance. A generator of synthetic
inputs then needs past and tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm import tirx
from tvm.ir import prim

from ...tensorir.expressions import walk
from ..values import Shape, Size

Linear = dict[str, int]
"""A linear combination of sizes: the factor of each name, and the constant term under ""."""


class ExpectedSizes:
    """The equalities of sizes that nodes require at run time."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Size, Size]] = []

    def add(self, a: Size, b: Size) -> None:
        """Add two sizes that must be equal, unless one of them is 1 by broadcasting."""
        self._pairs.append((a, b))

    def add_condition(self, condition: Size) -> None:
        """Add the equalities in a condition that must hold."""
        if not isinstance(condition, (bool, int)):
            self._pairs += [(node.a, node.b) for node in walk(condition) if isinstance(node, prim.EQ)]

    def derive_sizes(self, inputs: Iterable[tuple[Shape, tuple[int | str, ...]]]) -> dict[str, Linear]:
        """Return the sizes of inputs that are linear combinations of other sizes, by name.

        If two names are equal, the later one is derived. inputs has the shape of each input, and the names of its sizes
        in the model.
        """
        names: dict[tirx.Var, str] = {}
        for shape, dims in inputs:
            names.update({size: str(dim) for size, dim in zip(shape, dims) if isinstance(size, tirx.Var)})
        order = list(names.values())
        derived: dict[str, Linear] = {}
        for a, b in self._pairs:
            for name, combination in ((_name(a, names), _linear(b, names)), (_name(b, names), _linear(a, names))):
                if (
                    name is None
                    or combination is None
                    or name in derived
                    or name in combination
                    or not combination.keys() - {""}
                ):
                    continue
                single_name = next(iter(combination)) if list(combination.values()) == [1] else None
                if single_name is None or order.index(single_name) < order.index(name):
                    derived[name] = combination
        return derived


def _name(size: Size, names: dict[tirx.Var, str]) -> str | None:
    return names.get(size) if isinstance(size, tirx.Var) else None


def _linear(size: Size, names: dict[tirx.Var, str]) -> Linear | None:
    """Return the size as a linear combination of named sizes, None if it is not one."""
    if isinstance(size, (int, tirx.IntImm)):
        return {"": int(size)} if int(size) else {}
    if isinstance(size, tirx.Var):
        return {names[size]: 1} if size in names else None
    if isinstance(size, prim.Cast):
        return _linear(size.value, names)
    if not isinstance(size, (prim.Add, prim.Sub, prim.Mul)):
        return None
    a, b = _linear(size.a, names), _linear(size.b, names)
    if a is None or b is None:
        return None
    if isinstance(size, prim.Mul):
        number, other = (a, b) if not a.keys() - {""} else (b, a)
        return None if number.keys() - {""} else _without_zeros({k: n * number.get("", 0) for k, n in other.items()})
    sign = 1 if isinstance(size, prim.Add) else -1
    return _without_zeros({k: a.get(k, 0) + sign * b.get(k, 0) for k in a | b})


def _without_zeros(terms: Linear) -> Linear:
    return {name: factor for name, factor in terms.items() if factor}
