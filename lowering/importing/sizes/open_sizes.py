"""Sizes with two names that broadcast against each other and may differ.

ONNX lets either of two unequal sizes be 1. Exporters use two names for sizes that are equal in every run, so two names
are assumed to be one size (`Node.unify`). A node whose result is declared with a third name says that its operands may
differ. A name and a formula (`tokens` and `past + tokens`) may differ, too. Then the sizes are compared at run time,
and operands are read with an index that stays at 0 where their size is 1. In bodies, such as score modifications of an
attention, two names stay one size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvm import te, tirx

from ..checks import check_condition
from ..values import Shape, Size, Symbols, Value, is_one, storage_shape

if TYPE_CHECKING:
    from ..node import Node


_ONE = tirx.IntImm("int64", 1)


class CommonSizes:
    """The common sizes to which sizes that inputs declare broadcast."""

    def __init__(self, symbols: Symbols) -> None:
        self._symbols = symbols
        self._members: dict[str, list[tirx.Var]] = {}  # of each common size, by its text

    def broadcast(self, a: Size, b: Size, result: str | None) -> Size | None:
        """Return the size to which two sizes broadcast at run time.

        Args:
            a: The first size.
            b: The second size.
            result: The model's name of the result's size.

        Returns:
            An expression. None if the sizes are assumed equal: one of them is not a size of inputs, or no declaration
            says that they differ.
        """
        a_members, b_members = self._find_members(a), self._find_members(b)
        if not a_members or not b_members or self._symbols.equal(a, b):
            return None
        if len(a_members) == len(b_members) == 1 and not self._differ(a_members[0], b_members[0], result):
            return None
        members = sorted({var.name: var for var in (*a_members, *b_members)}.values(), key=lambda var: var.name)
        common = functools.reduce(lambda size, var: tirx.Select(tirx.EQ(size, _ONE), var, size), members)
        self._members[str(common)] = members
        return common

    def _differ(self, a: tirx.Var, b: tirx.Var, result: str | None) -> bool:
        """Return whether the model says that sizes differ: the result has a third name, or one is a formula."""
        formulas = [any(sign in str(self._symbols.to_dim(size)) for sign in "+-*/") for size in (a, b)]
        return formulas[0] != formulas[1] or (result is not None and not self._symbols.is_declared(result))

    def _find_members(self, size: Size) -> list[tirx.Var]:
        return [size] if self._symbols.is_declared(size) else self._members.get(str(size), [])


def broadcast_open_sizes(node: Node, value: Value, shape: Shape) -> Value:
    """Return the value broadcast to a shape of its rank; a run fails if a size is neither 1 nor the target's."""
    is_same = [node.symbols.equal(have, want) or is_one(have) for have, want in zip(value.shape, shape)]
    if all(is_same):
        return value
    target = tuple(have if is_kept else want for have, want, is_kept in zip(value.shape, shape, is_same))
    tensor = node.tensor(value)
    for axis, (have, want, is_kept) in enumerate(zip(value.shape, shape, is_same)):
        if not is_kept:
            what = f"dimension {axis} of {node.describe(value, False)}"
            want = tirx.const(want, "int64") if isinstance(want, int) else want
            legal = tirx.Or(tirx.EQ(have, want), tirx.EQ(have, _ONE))
            text = f"{node.where}: {what} is {{}}, and does not broadcast to {{}}."
            for size in tirx.analysis.undefined_vars(want) or [want]:  # synthetic inputs take them for equal
                node.importer.expect(tirx.EQ(have, size))
            tensor = node.importer.builder.emit(check_condition(tensor, legal, "run.size_mismatch", text, [have, want]))

    def kernel(x: te.Tensor, extents: Sequence[Any]) -> te.Tensor:
        def element(*index: Any) -> Any:
            axes = zip(index, x.shape[: len(index)], [*is_same, True])
            return x(*(i if is_kept else tirx.min(i, n - 1) for i, n, is_kept in axes))

        return te.compute(list(extents), element, name="stretch")

    extents = node.shape_expr(storage_shape(value.dtype, target))
    return node.keep_name(node.emit_te(kernel, tensor, extents, primfunc_name_hint="stretch", dtype=value.dtype), value)
