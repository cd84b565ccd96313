"""Control flow: If. Loop and Scan are refused by name."""

from __future__ import annotations

from tvm import relax

from ..importing.node import Node
from ..importing.values import Size, Value
from . import op
from .reshape import reshape_to


@op("If", since=1)
def if_(node: Node, condition: Value) -> tuple[Value, ...]:
    branches = "then_branch", "else_branch"
    if condition.constant is not None:
        return tuple(node.subgraph(branches[0] if condition.constant.all() else branches[1]))
    test = node.tensor(reshape_to(node, condition, ()))
    (then, then_values), (otherwise, else_values) = (node.importer.branch(node.attr(b)) for b in branches)
    for k, (a, b) in enumerate(zip(then_values, else_values)):
        if a.dtype != b.dtype or a.rank != b.rank:
            types = " and ".join(f"{v.dtype} of rank {v.rank}" for v in (a, b))
            raise node.error(f"the branches give different types for output {k}: {types}.")
    builder = node.importer.builder
    result = builder.emit(relax.If(test, then, otherwise))
    outputs = []
    for k, (a, b) in enumerate(zip(then_values, else_values)):
        part = node.emit(relax.TupleGetItem(result, k), a.dtype)
        outputs.append(
            node.cast_shape(part, tuple(_common(node, d, e, s) for d, e, s in zip(a.shape, b.shape, part.shape)))
        )
    return tuple(outputs)


def _common(node: Node, a: Size, b: Size, fresh: Size) -> Size:
    """The size in both branches, if it is one. Symbols bound inside a branch are never equal to any of the other."""
    return a if node.symbols.equal(a, b) else fresh


@op("Loop", since=1)
@op("Scan", since=8)
def refuse(node: Node, *inputs: Value | None) -> Value:
    raise node.error(
        "loops over a body graph are not supported.",
        "Unroll the loop in the exporter, or run it in the host program around the compiled body.",
    )
