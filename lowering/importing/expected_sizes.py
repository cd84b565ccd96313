"""Which sizes of inputs follow from others, by what the nodes require when the model runs.

The nodes of a decoder ask that the `total` of a mask is `past + tokens`, for instance. Who makes up inputs then needs
only past and tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm import tirx
from tvm.ir import prim

from ..tensorir.expressions import walk
from .values import Shape, Size

Linear = dict[str, int]
"""A sum of sizes: the factor of each by its name, and the number that is added by ""."""


class ExpectedSizes:
    """The equalities of sizes that nodes require."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Size, Size]] = []

    def add(self, a: Size, b: Size) -> None:
        """Two sizes have to be equal, or one of them may be 1 in place of that."""
        self._pairs.append((a, b))

    def add_condition(self, condition: Size) -> None:
        """Some equalities are in a condition that has to hold."""
        if not isinstance(condition, (bool, int)):
            self._pairs += [(node.a, node.b) for node in walk(condition) if isinstance(node, prim.EQ)]

    def derived(self, inputs: Iterable[tuple[Shape, tuple[int | str, ...]]]) -> dict[str, Linear]:
        """Return, by name, the sizes of inputs that are sums of others.

        Of two names that are equal the later one is derived. inputs has the shape of each, and what the model calls its
        sizes.
        """
        names: dict[tirx.Var, str] = {}
        for shape, dims in inputs:
            names.update({size: str(dim) for size, dim in zip(shape, dims) if isinstance(size, tirx.Var)})
        order = list(names.values())
        derived: dict[str, Linear] = {}
        for a, b in self._pairs:
            for name, other in ((_name(a, names), _linear(b, names)), (_name(b, names), _linear(a, names))):
                if name is None or other is None or name in derived or name in other or not other.keys() - {""}:
                    continue
                alone = next(iter(other)) if list(other.values()) == [1] else None
                if alone is None or order.index(alone) < order.index(name):
                    derived[name] = other
        return derived


def _name(size: Size, names: dict[tirx.Var, str]) -> str | None:
    return names.get(size) if isinstance(size, tirx.Var) else None


def _linear(size: Size, names: dict[tirx.Var, str]) -> Linear | None:
    """Return the size as a sum of named sizes, None where it is not one."""
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
