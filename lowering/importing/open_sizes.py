"""Sizes that meet under two names, and may differ.

ONNX lets either of two unequal sizes be 1. Exporters give two names to what is equal in every run, so that two names
alone are taken for one size (`Node.unify`). A node whose result is declared with a third name says that its operands
may differ, and so do a name and a formula (`tokens` and `past + tokens`): then the run decides, and operands are read
with an index that stays at 0 where their size is 1. In bodies, such as those that change the scores of an attention,
two names stay one size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvm import te, tirx

from .checks import check_condition
from .values import Shape, Size, Symbols, Value, is_one, storage_shape

if TYPE_CHECKING:
    from .node import Node


_ONE = tirx.IntImm("int64", 1)


class CommonSizes:
    """The sizes to which some sizes that inputs declare broadcast."""

    def __init__(self, symbols: Symbols) -> None:
        self._symbols = symbols
        self._members: dict[str, list[tirx.Var]] = {}  # of each common size, by its text

    def of(self, a: Size, b: Size, result: str | None) -> Size | None:
        """Return the size to which two broadcast when the model runs.

        Args:
            a: One size.
            b: The other.
            result: What the model calls the size of the result.

        Returns:
            An expression. None where the sizes are taken to be equal: either is no size of inputs, or nothing says
            that they differ.
        """
        ones, others = self._of(a), self._of(b)
        if not ones or not others or self._symbols.equal(a, b):
            return None
        if len(ones) == len(others) == 1 and not self._differ(ones[0], others[0], result):
            return None
        every = sorted({var.name: var for var in (*ones, *others)}.values(), key=lambda var: var.name)
        common = functools.reduce(lambda size, var: tirx.Select(tirx.EQ(size, _ONE), var, size), every)
        self._members[str(common)] = every
        return common

    def _differ(self, one: tirx.Var, other: tirx.Var, result: str | None) -> bool:
        """Whether the model says that two sizes are not one: the result has a third name, or one name is a formula."""
        formulas = [any(sign in str(self._symbols.as_dim(size)) for sign in "+-*/") for size in (one, other)]
        return formulas[0] != formulas[1] or (result is not None and not self._symbols.is_declared(result))

    def _of(self, size: Size) -> list[tirx.Var]:
        return [size] if self._symbols.is_declared(size) else self._members.get(str(size), [])


def stretched(node: Node, value: Value, shape: Shape) -> Value:
    """Return the value broadcast to a shape of its rank; an error of the run where a size is neither 1 nor that."""
    same = [node.symbols.equal(have, want) or is_one(have) for have, want in zip(value.shape, shape)]
    if all(same):
        return value
    target = tuple(have if kept else want for have, want, kept in zip(value.shape, shape, same))
    tensor = node.tensor(value)
    for axis, (have, want, kept) in enumerate(zip(value.shape, shape, same)):
        if not kept:
            what = f"dimension {axis} of {node.name_of(value, False)}"
            legal = tirx.Or(tirx.EQ(have, want), tirx.EQ(have, _ONE))
            text = f"{node.where}: {what} is {{}}, and does not broadcast to {{}}."
            for other in tirx.analysis.undefined_vars(want):  # who makes up inputs takes them for equal
                node.importer.expect(tirx.EQ(have, other))
            tensor = node.importer.builder.emit(check_condition(tensor, legal, text, [have, want]))

    def kernel(x: te.Tensor, extents: Sequence[Any]) -> te.Tensor:
        def element(*index: Any) -> Any:
            places = zip(index, x.shape[: len(index)], [*same, True])
            return x(*(i if kept else tirx.min(i, n - 1) for i, n, kept in places))

        return te.compute(list(extents), element, name="stretch")

    extents = node.shape_expr(storage_shape(value.dtype, target))
    return node.called(node.emit_te(kernel, tensor, extents, primfunc_name_hint="stretch", dtype=value.dtype), value)
