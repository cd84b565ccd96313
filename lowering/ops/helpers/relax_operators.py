"""Registration of ONNX operators that are one Relax operator over broadcast values."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from ...importing.node import Node
from ...importing.values import Size, Value
from .. import Lowering, op
from . import symbolic
from .compute import relax_call


def register_relax_operator(
    name: str,
    since: int,
    operator: Callable[..., relax.Expr],
    fold: Callable[..., Size] | None = None,
    dtype: str | None = None,
) -> Lowering:
    """Register an operator that becomes a Relax operator, and return its lowering.

    `fold` is the same function on sizes, for values whose contents are computed at import. dtype is the result's, by
    default that of the first value.
    """

    @op(name, since=since)
    def lower(node: Node, *values: Value) -> Value:
        folded = None if fold is None else symbolic.elementwise(node, fold, *values, dtype=dtype)
        return folded or relax_call(node, operator, *values, dtype=dtype)

    return lower
